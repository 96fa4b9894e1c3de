"""The drawing of a timeline, read back from the SVG that it writes."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pipedream2bw as pd2
from pipedream2bw import Event
from tests.exhaustive import exhaustive

SECONDS = 0.02
BLACK = "#111111"


def of_two_stages(batch: int, version: int, origin: float) -> list[Event]:
    """A batch of two microbatches, as two stages would run it one after the other."""
    events = []
    for stage in range(2):
        at = origin + stage * SECONDS
        for kind in "FB":
            for microbatch in range(2):
                events.append(Event(stage, 0, kind, batch, microbatch, version, at, at + SECONDS))
                at += SECONDS
        events.append(Event(stage, 0, "U", batch, 1, version + 1, at, at + SECONDS / 50))
    return events


class Box(NamedTuple):
    colour: str
    left: float
    right: float
    top: float
    bottom: float
    is_clipped: bool


def shapes(svg: Path) -> tuple[list[Box], list[str]]:
    """The actions' boxes, and all texts, that the drawing has."""
    content = svg.read_text(encoding="utf-8")
    boxes = []
    for points, clip, style in re.findall(
        r'<path d="([^"]+)"([^>]*)style="([^"]+)"', content, re.S
    ):
        fill = re.search(r"fill: (#\w+)", style)
        if not fill or points.count("L") != 3 or fill.group(1) == "#ffffff":
            continue
        xs, ys = zip(*re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", points), strict=True)
        box = Box(
            fill.group(1),
            *(min(map(float, xs)), max(map(float, xs)), min(map(float, ys)), max(map(float, ys))),
            "clip-path" in clip,
        )
        if box.bottom - box.top > 10:  # the legend's are flat
            boxes.append(box)
    return boxes, re.findall(r"<!-- (.*?) -->", content)


def drawn(events: Any, path: Path, **options: Any) -> tuple[list[Box], list[str]]:
    pytest.importorskip("matplotlib")
    pd2.draw_timeline(events, path, **options)
    return shapes(path)


def test_every_action_is_a_box_whose_colour_tells_kind_and_version(tmp_path: Path) -> None:
    events = of_two_stages(0, 0, 5.0) + of_two_stages(1, 1, 5.2)
    boxes, _ = drawn(events, tmp_path / "timeline.svg")
    counts = Counter(box.colour for box in boxes)
    # Two versions, forward and backward of each, and the updates' black.
    assert sorted(counts.values()) == [4, 4, 4, 4, 4]
    assert counts[BLACK] == 4


def lightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("version", range(6))
def test_the_kinds_of_a_version_are_told_apart_in_greyscale(version: int, tmp_path: Path) -> None:
    events = [Event(0, 0, kind, 0, 0, version, i, i + 1.0) for i, kind in enumerate("FIBW")]
    boxes, _ = drawn(events, tmp_path / "timeline.svg")
    shades = [lightness(box.colour) for box in sorted(boxes, key=lambda box: box.left)]
    for lighter, darker in itertools.pairwise(shades):
        assert lighter - darker > 0.09
    forward, input_grad, _, weight_grad = shades
    assert forward - input_grad > 0.15
    assert input_grad - weight_grad > 0.2


def test_boxes_are_as_long_as_their_actions_and_white_is_left_between(tmp_path: Path) -> None:
    events = [
        Event(0, 0, "F", 0, 0, 0, 1.0, 1.1),
        Event(0, 0, "B", 0, 0, 0, 1.3, 1.5),
    ]
    boxes, _ = drawn(events, tmp_path / "timeline.svg")
    forward, backward = sorted(boxes, key=lambda box: box.left)
    scale = forward.right - forward.left  # of 0.1 seconds
    assert backward.right - backward.left == pytest.approx(2 * scale, rel=1e-3)
    assert backward.left - forward.right == pytest.approx(2 * scale, rel=1e-3)


def test_rows_are_named_after_stage_and_replica(tmp_path: Path) -> None:
    events = of_two_stages(0, 0, 0.0)
    _, texts = drawn(events, tmp_path / "one.svg")
    assert {"stage 0", "stage 1"} <= set(texts)
    second_replica = [dataclasses.replace(event, replica=1) for event in events]
    _, texts = drawn(events + second_replica, tmp_path / "two.svg")
    assert {f"replica {r}, stage {s}" for r in range(2) for s in range(2)} <= set(texts)


def test_a_box_too_short_for_its_label_has_none(tmp_path: Path) -> None:
    long, short = (
        Event(0, 0, "F", 7, 0, 7, 0.0, 1.0),
        Event(0, 0, "F", 8, 1, 8, 1.0, 1.001),
    )
    _, texts = drawn([long, short], tmp_path / "timeline.svg")
    assert "F 7.0" in texts
    assert "F 8.1" not in texts
    assert texts.count("1") == 0


def test_a_recomputed_forward_is_hatched_and_a_forward_is_not(tmp_path: Path) -> None:
    events = pd2.simulate("2bw", num_stages=2, num_microbatches=2, recompute=1.0).events
    assert {"R", "F"} < {event.kind for event in events}
    for kinds, expected in (("FBU", False), ("FBUR", True)):
        path = tmp_path / f"{kinds}.svg"
        _, texts = drawn([event for event in events if event.kind in kinds], path)
        assert ("R: recomputed forward" in texts) == expected
        assert ("<pattern" in path.read_text(encoding="utf-8")) == expected


# Those with several stages a rank, numbers of two digits, batches of one microbatch, and I and W.
SHAPES = [
    ("2bw", 8, 16, 1),
    ("zero_bubble", 4, 12, 1),
    ("interleaved_2bw", 12, 8, 3),
    ("pipedream", 4, 1, 1),
    ("2bw_v_half", 8, 4, 2),
]
# The same kinds of boxes, in other orders.
ALIKE = [("interleaved", 8, 4, 2), ("interleaved_zero_bubble", 8, 8, 2), ("v_min", 8, 8, 2)]


@pytest.mark.parametrize(
    ("schedule", "d", "m", "v", "width"),
    [
        *((*shape, None) for shape in SHAPES[1::2]),
        *((*shape, 6.0) for shape in SHAPES[::4]),
        *exhaustive(*((*shape, None) for shape in SHAPES[::2])),
        *exhaustive(*((*shape, 6.0) for shape in SHAPES if shape not in SHAPES[::4])),
        *exhaustive(*((*shape, width) for shape in ALIKE for width in (None, 6.0))),
    ],
)
def test_numbers_lie_in_their_boxes_and_no_update_lies_on_them(
    schedule: str, d: int, m: int, v: int, width: float | None
) -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    run = pd2.simulate(
        schedule, num_stages=d, num_microbatches=m, stages_per_rank=v, num_batches=12 // m + 2
    )
    figure = pd2.draw_timeline(run.events, width=width).figure
    agg.FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    edges = np.array([patch.get_window_extent().extents for patch in axes.patches]).T
    is_dark = np.array([max(patch.get_facecolor()[:3]) <= 0.1 for patch in axes.patches])
    labels = [text for text in axes.texts if text.get_text()]
    assert labels or width is not None
    for text in labels:
        left, bottom, right, top = text.get_window_extent().extents
        touched = (
            (edges[0] <= right) & (edges[2] >= left) & (edges[1] <= top) & (edges[3] >= bottom)
        )
        assert is_dark[touched].tolist() == [False]
    if width is None:
        small = len(axes.texts) // 2 if v > 1 else 0
        assert len(labels) - small == sum(event.kind != "U" for event in run.events)


def test_updates_without_length_are_lines_that_the_edge_does_not_cut(tmp_path: Path) -> None:
    events = pd2.simulate("2bw", num_stages=3, num_microbatches=3, num_batches=2).events
    boxes, _ = drawn(events, tmp_path / "timeline.svg")
    updates = [box for box in boxes if box.colour == BLACK]
    assert len(updates) == 6
    assert not any(box.is_clipped for box in updates)
    assert all(box.right - box.left < 0.01 for box in updates)
    size = re.search(r'<svg[^>]* width="([\d.]+)pt"', (tmp_path / "timeline.svg").read_text())
    assert size
    assert max(box.right for box in updates) + 2 < float(size.group(1))
    # Their boxes are where the last backwards end.
    assert max(box.right for box in updates) == max(box.right for box in boxes)


def test_batches_of_one_microbatch_are_told_apart_by_their_number(tmp_path: Path) -> None:
    run = pd2.simulate("pipedream", num_stages=3, num_microbatches=1, num_batches=5)
    _, texts = drawn(run.events, tmp_path / "timeline.svg")
    numbers = Counter(text for text in texts if re.fullmatch(r"[FB] \d", text))
    assert numbers == {f"{kind} {batch}": 3 for kind in "FB" for batch in range(5)}


@pytest.mark.parametrize("v", [2, 3])
def test_a_rank_of_several_stages_is_one_row_with_its_stages_lower_and_lower(
    v: int, tmp_path: Path
) -> None:
    p, m = 2, 4
    run = pd2.simulate(
        "interleaved", num_stages=p * v, num_microbatches=m, stages_per_rank=v, num_batches=1
    )
    boxes, texts = drawn(run.events, tmp_path / "timeline.svg", width=30)
    for rank in range(p):
        # A name of two lines is two texts.
        assert f"rank {rank}" in " ".join(texts)
        assert f"stages {', '.join(str(rank + p * i) for i in range(v))}" in " ".join(texts)
    # A row's boxes have a height in common, with no box of the other row.
    tops = sorted({round(box.top, 3) for box in boxes})
    bottoms = sorted({round(box.bottom, 3) for box in boxes})
    assert len(tops) == len(bottoms) == p * v
    assert tops[v - 1] < bottoms[0] < tops[v]
    assert bottoms[v - 1] < tops[v]
    for stage in range(p * v):
        lane = [box for box in boxes if round(box.top, 3) == tops[stage % p * v + stage // p]]
        assert len(lane) == 2 * m + 1
        actions = [event for event in run.events if event.stage == stage and event.kind != "U"]
        lefts = sorted(box.left for box in lane if box.colour != BLACK)
        scale = max(box.right for box in boxes) - min(box.left for box in boxes)
        expected = [event.start / run.makespan * scale for event in actions]
        assert [left - min(box.left for box in boxes) for left in lefts] == pytest.approx(
            expected, abs=0.01
        )
    # Where the rank does anything no other box lies: time is never shared.
    for row in (0, 1):
        spans = sorted(
            (box.left, box.right)
            for box in boxes
            if box.colour != BLACK and tops[row * v] <= round(box.top, 3) <= tops[row * v + v - 1]
        )
        assert all(a[1] <= b[0] + 0.01 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("times", "unit", "expected"),
    [
        (1.0, "seconds", "seconds"),
        (0.01, "seconds", "milliseconds"),
        (1e-5, "seconds", "microseconds"),
        (1e-5, "forwards", "forwards"),
    ],
)
def test_the_axis_names_the_unit_of_its_numbers(
    times: float, unit: str, expected: str, tmp_path: Path
) -> None:
    events = [Event(0, 0, "F", 0, 0, 0, 7.0, 7.0 + 40 * times)]
    _, texts = drawn(events, tmp_path / "timeline.svg", unit=unit)
    assert set(texts) & {"seconds", "milliseconds", "microseconds", "forwards"} == {expected}
    ticks = [float(text) for text in texts if re.fullmatch(r"[\d.]+", text)]
    scale = {"seconds": 1, "milliseconds": 1e3, "microseconds": 1e6, "forwards": 1}[expected]
    assert max(ticks) == pytest.approx(40 * times * scale, rel=0.15)


def test_several_lists_are_drawn_under_one_another_from_their_own_beginning(tmp_path: Path) -> None:
    panels = {"first": of_two_stages(0, 0, 0.0), "second": of_two_stages(3, 3, 900.0)}
    boxes, texts = drawn(panels, tmp_path / "timeline.svg")
    assert {"first", "second"} <= set(texts)
    assert texts.count("stage 1") == 2
    # Each place is that of an action of the first panel and of its like in the second.
    lefts = Counter(round(box.left, 2) for box in boxes)
    assert lefts.total() == 2 * len(panels["first"])
    assert all(count % 2 == 0 for count in lefts.values())


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pd2.draw_timeline(of_two_stages(0, 0, 0.0), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_notebook_gets_what_a_file_gets(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = pd2.draw_timeline(of_two_stages(0, 0, 0.0))
    picture.save(tmp_path / "timeline.png")
    shown, written = picture._repr_png_(), (tmp_path / "timeline.png").read_bytes()
    size = slice(16, 24)  # in a PNG
    assert shown[:4] == written[:4] == b"\x89PNG"
    assert shown[size] == written[size]


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_a_width_that_is_none_is_refused(width: float) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=rf"width: {width}, it must be > 0"):
        pd2.draw_timeline(of_two_stages(0, 0, 0.0), width=width)


@pytest.mark.parametrize("events", [[], {}, {"2bw": []}])
def test_nothing_to_draw_is_refused(events: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none to draw"):
        pd2.draw_timeline(events, tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return importlib.__import__(name, *rest)

    draw_timeline = pd2.draw_timeline  # imports what it is in
    monkeypatch.setattr(importlib, "import_module", no_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_timeline(of_two_stages(0, 0, 0.0), tmp_path / "timeline.png")
