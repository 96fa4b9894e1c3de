"""The drawing of a timeline, read back from the SVG that it writes."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2
from pipedream2bw import Event

SECONDS = 0.02


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


def shapes(svg: Path) -> tuple[list[tuple[str, float, float]], list[str]]:
    """(colour, left edge, right edge) of the boxes, and the texts, that the drawing has."""
    content = svg.read_text(encoding="utf-8")
    boxes = []
    for points, style in re.findall(r'<path d="([^"]+)"[^>]*style="([^"]+)"', content, re.S):
        fill = re.search(r"fill: (#\w+)", style)
        if fill and points.count("L") == 3:
            xs = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", points)]
            boxes.append((fill.group(1), min(xs), max(xs)))
    return boxes, re.findall(r"<!-- (.*?) -->", content)


def drawn(events: Any, path: Path) -> tuple[list[tuple[str, float, float]], list[str]]:
    pytest.importorskip("matplotlib")
    pd2.draw_timeline(events, path)
    return shapes(path)


def test_every_action_is_a_box_whose_colour_tells_kind_and_version(tmp_path: Path) -> None:
    events = of_two_stages(0, 0, 5.0) + of_two_stages(1, 1, 5.2)
    boxes, _ = drawn(events, tmp_path / "timeline.svg")
    counts = Counter(colour for colour, _, _ in boxes)
    colours = [colour for colour, count in counts.items() if count >= 4]
    # Two versions, forward and backward of each, and the updates' black; the legend repeats some.
    assert len(colours) == 5
    assert sum(counts[colour] for colour in colours) == len(events) + 3


def test_boxes_are_as_long_as_their_actions_and_white_is_left_between(tmp_path: Path) -> None:
    events = [
        Event(0, 0, "F", 0, 0, 0, 1.0, 1.1),
        Event(0, 0, "B", 0, 0, 0, 1.3, 1.5),
    ]
    boxes, _ = drawn(events, tmp_path / "timeline.svg")
    # The legend's boxes are short, the background is white.
    actions = [box for box in boxes if box[2] - box[1] > 60 and box[0] != "#ffffff"]
    forward, backward = sorted(actions, key=lambda box: box[1])
    scale = forward[2] - forward[1]  # of 0.1 seconds
    assert backward[2] - backward[1] == pytest.approx(2 * scale, rel=1e-3)
    assert backward[1] - forward[2] == pytest.approx(2 * scale, rel=1e-3)


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
    assert not [text for text in texts if text == "F 8.1"]


def test_several_lists_are_drawn_under_one_another_from_their_own_beginning(tmp_path: Path) -> None:
    panels = {"first": of_two_stages(0, 0, 0.0), "second": of_two_stages(3, 3, 900.0)}
    boxes, texts = drawn(panels, tmp_path / "timeline.svg")
    assert {"first", "second"} <= set(texts)
    assert texts.count("stage 1") == 2
    lefts = Counter(round(left, 2) for colour, left, _ in boxes if colour != "#ffffff")
    assert lefts.total() == 2 * len(panels["first"]) + 3  # and the legend
    # Each place is that of an action of the first panel and of its like in the second.
    assert sum(count % 2 for count in lefts.values()) <= 3


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pd2.draw_timeline(of_two_stages(0, 0, 0.0), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


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

    monkeypatch.setattr(importlib, "import_module", no_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        pd2.draw_timeline(of_two_stages(0, 0, 0.0), tmp_path / "timeline.png")
