"""What notebooks show: small, well-formed, escaped, and as long as the amounts it stands for."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw import svg
from pipedream2bw.colours import MEMORY_COLOURS, TRAFFIC_COLOURS
from pipedream2bw.commands.checkpoint import listing
from pipedream2bw.commands.doctor import examine
from pipedream2bw.units import format_bytes
from tests.samples.plans import frozen_stage, plan_of, stage_plan

SVG = "{http://www.w3.org/2000/svg}"
BAD = "<script>alert('&')</script>"


def parsed(shown: object) -> ElementTree.Element:
    """What ``_repr_html_`` gives; as XML, so that every element ends and every text is escaped."""
    return ElementTree.fromstring(shown._repr_html_())  # type: ignore[attr-defined]


def text_of(element: ElementTree.Element) -> str:
    return " ".join(element.itertext())


def widths(picture: ElementTree.Element) -> dict[str, list[float]]:
    """Of every colour the widths of its boxes."""
    return {
        path.attrib["fill"]: [float(width) for width in re.findall(r"h([\d.]+)v", path.attrib["d"])]
        for path in picture.iter(f"{SVG}path")
        if "fill" in path.attrib
    }


def pipeline(**options: object) -> pd2.PipelineModule:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    return pd2.PipelineModule(  # type: ignore[arg-type]
        nn.Sequential(*layers),
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=4,
        example_args=(torch.ones(8, 8),),
        **options,
    )


def event(start: float, **fields: object) -> pd2.Event:
    given = {"stage": 0, "replica": 0, "kind": "F", "batch": 0, "microbatch": 0, "version": 0}
    return pd2.Event(**{**given, "start": start, "end": start + 1.0, **fields})  # type: ignore[arg-type]


def test_a_traffic_report_has_bars_as_long_as_a_batch_moves_bytes() -> None:
    with pipeline() as pipe:
        with pipe.timeline() as timeline:
            pipe.train_step(torch.ones(8, 8), target=torch.ones(8, 8))
        pipe.discard_batch()
        report = pd2.traffic_report(pipe, torch.ones(8, 8), events=timeline)
    batches = {index: stage.of_batch for index, stage in report.stages.items()}
    assert all(stage.forward.median_seconds for stage in report.stages.values())
    longest = max(
        sum(getattr(batch, kind) for kind in TRAFFIC_COLOURS) for batch in batches.values()
    )
    shown = widths(parsed(report))[TRAFFIC_COLOURS["activations"]]
    want = [500 * batch.activations / longest for batch in batches.values()]
    assert shown == pytest.approx(want, abs=0.06)
    assert f"{batches[1].intensity:.1f} FLOP/byte" in text_of(parsed(report))


def test_a_memory_report_has_bars_as_long_as_its_bytes() -> None:
    with pipeline() as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5))
        pipe.train_step(torch.ones(8, 8), target=torch.ones(8, 8))
        opt.step()
        pipe.flush()
        report = pipe.memory_report()
    assert dict(report) == report
    assert list(report) == [0, 1]
    for memory in report.values():
        assert sum(memory.kinds.values()) == memory.total
        assert memory.kinds.keys() == MEMORY_COLOURS.keys()
        rest = memory.padding + memory.message_buffers + memory.replica_sums + memory.host_copies
        assert memory.kinds["other"] == rest
    picture = parsed(report)
    longest = max(memory.total for memory in report.values())
    shown = widths(picture)[MEMORY_COLOURS["weights"]]
    bytes_of_weights = [memory.kinds["weights"] for memory in report.values()]
    assert shown == pytest.approx([500 * each / longest for each in bytes_of_weights], abs=0.06)
    assert "stage 1" in text_of(picture)
    assert format_bytes(report[1].total) in text_of(picture)


def test_a_pipeline_shows_its_stages_and_still_does_when_it_is_closed() -> None:
    class Odd(nn.Sequential):
        pass

    Odd.__name__ = BAD
    model = Odd(*[nn.Linear(8, 8) for _ in range(2)])
    pipe = pd2.PipelineModule(
        model,
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.ones(8, 8),),
    )
    with pipe:
        picture = parsed(pipe)
        assert BAD in text_of(picture)
        assert "num_stages=2" in text_of(picture)
        assert "1 layers (1)" in text_of(picture)
        assert list(picture.iter(f"{SVG}svg"))
    assert "num_stages=2" in text_of(parsed(pipe))


def test_a_notebook_shows_what_print_shows(tmp_path: Path) -> None:
    x = torch.ones(8, 8)
    with pipeline() as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pd2.Checkpointer(tmp_path, pipe, opt, every=1) as saving, pipe.timeline() as timeline:
            pipe.train_step(x, target=x)
            opt.step()
            saving.step()
        memory = pipe.memory_report()
    shown = {
        "plan": plan_of([stage_plan((0, 1), forward=4e-3, message=0.0)], num_microbatches=4),
        "memory": memory,
        "simulation": pd2.simulate("2bw", num_stages=2, num_microbatches=2),
        "doctor": examine(),
        "checkpoint ls": listing(str(tmp_path)),
    }
    for name, report in shown.items():
        text = text_of(parsed(report))
        assert [line for line in str(report).splitlines() if line not in text] == [], name
        assert max(map(len, str(report).splitlines()[1:])) <= 100, name
    assert "Timeline(" in str(timeline)
    assert str(timeline).split("(")[1].split(";")[0] in text_of(parsed(timeline))


def test_whatever_has_a_name_is_escaped() -> None:
    bar = svg.Bar(name=BAD, parts={BAD: 1.0}, text=BAD)
    shown = svg.html(BAD, svg.note(BAD), svg.bars([bar], {BAD: "#000000"}))
    assert text_of(ElementTree.fromstring(shown)).count(BAD) == 5
    boxes = svg.html("", svg.boxes_in_time([BAD], [], 1.0), svg.legend({BAD: "#000000"}))
    assert text_of(ElementTree.fromstring(boxes)).count(BAD) == 2


def test_bars_lie_behind_each_other() -> None:
    kinds = {"a": "#00000a", "b": "#00000b"}
    drawn = ElementTree.fromstring(
        svg.html("", svg.bars([svg.Bar(name="row", parts={"a": 1.0, "b": 3.0})], kinds))
    )
    starts = [path.attrib["d"].split()[0] for path in drawn.iter(f"{SVG}path")]
    assert starts == ["M0", "M125"]
    assert widths(drawn) == {"#00000a": [125.0], "#00000b": [375.0]}


def test_a_plan_shows_times_memory_limits_and_what_bounds_it() -> None:
    stages = [
        stage_plan((0, 3), forward=4e-3, message=0.5e-3),
        stage_plan((3, 4), devices=(1,), forward=9e-3, message=0.0, memory_limit=8 * 2.0**30),
    ]
    plan = plan_of(stages, num_microbatches=4, seconds_per_batch=0.06, bound_by=BAD)
    picture = parsed(plan)
    assert BAD in text_of(picture)
    for words in ("layers 0 to 2", "layer 3", "device 1", "of 8.00 GiB", plan.in_words):
        assert words in text_of(picture)
    forwards = widths(picture)["#9ecae1"]
    assert forwards[1] / forwards[0] == pytest.approx(9 / 4, rel=0.01)
    (marks,) = (path for path in picture.iter(f"{SVG}path") if "fill" not in path.attrib)
    assert marks.attrib["d"].count("M") == 2


def test_a_plan_of_many_stages_stays_small() -> None:
    stages = [frozen_stage((i, i + 1), 2.0**30, devices=(i,)) for i in range(300)]
    plan = plan_of(stages)
    assert len(plan._repr_html_()) < 100_000
    assert "and 236 more" in text_of(parsed(plan))


def test_a_timeline_shows_each_action_on_its_row() -> None:
    with pipeline() as pipe, pipe.timeline() as timeline:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(2):
            pipe.train_step(torch.ones(8, 8), target=torch.ones(8, 8))
            opt.step()
    picture = parsed(timeline)
    assert sum(map(len, widths(picture).values())) == len(timeline.rows)
    assert "stage 0" in text_of(picture)
    assert "stage 1" in text_of(picture)


def test_a_simulation_draws_its_events_to_scale() -> None:
    simulation = pd2.simulate("1f1b", num_stages=2, num_microbatches=2, num_batches=1, forward=2.0)
    picture = parsed(simulation)
    assert f"{simulation.period:.4g}" in text_of(picture)
    span = max(e.end for e in simulation.events) - min(e.start for e in simulation.events)
    assert widths(picture)["#9ecae1"] == pytest.approx([500 * 2 / span] * 4, abs=0.06)


def test_a_timeline_of_nothing_says_so() -> None:
    with pipeline() as pipe, pipe.timeline() as timeline:
        pass
    assert "no actions" in text_of(parsed(timeline))


def test_a_long_timeline_shows_its_end_and_stays_small() -> None:
    events = [event(float(i), batch=i, version=i) for i in range(20_000)]
    simulation = pd2.Simulation(
        events=events,
        makespan=1.0,
        period=1.0,
        bubbles=[0.0],
        peak_bytes=[0.0],
        most_in_flight=[1],
    )
    assert len(simulation._repr_html_()) < 100_000
    assert "the first 17000 actions are left out" in text_of(parsed(simulation))


def test_light_and_dark_pages_can_be_read() -> None:
    """No text has a colour of its own, and nothing is drawn behind it."""
    picture = parsed(pd2.simulate("2bw", num_stages=2, num_microbatches=2))
    for image in picture.iter(f"{SVG}svg"):
        assert image.attrib["fill"] == "currentColor"
        assert not list(image.iter(f"{SVG}rect"))
        for text in image.iter(f"{SVG}text"):
            assert "fill" not in text.attrib
            assert "style" not in text.attrib
