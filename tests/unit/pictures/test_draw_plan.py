"""A picture of a plan: as long as the times and bytes that it stands for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2
from tests.samples.plans import frozen_stage, plan_of, stage_plan

pytest.importorskip("matplotlib")
GIB = 2.0**30


def bars(axes: Any) -> dict[int, float]:
    """Where the bars of each row end."""
    ends: dict[int, float] = {}
    for bar in axes.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        ends[row] = max(ends.get(row, 0.0), bar.get_x() + bar.get_width())
    return ends


def limits(axes: Any) -> list[float]:
    return [line.get_xdata()[0] for line in axes.lines]


def test_bars_are_as_long_as_times_and_bytes(tmp_path: Path) -> None:
    stages = [
        stage_plan((0, 3), forward=4e-3, recompute=3e-3, message=0.5e-3, recomputed=True),
        stage_plan((3, 4), devices=(1,), forward=9e-3, message=0.0, memory_limit=8 * GIB),
    ]
    plan = plan_of(stages, num_microbatches=4, seconds_per_batch=0.06)
    picture = pd2.draw_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    times, memory = picture.figure.axes
    assert bars(times) == pytest.approx({0: 4 + 3 + 1 + 0.5 + 2 * 0.5, 1: 9 + 1 + 0.5})
    assert limits(times) == pytest.approx([15.0])  # a batch / its microbatches
    assert bars(memory) == pytest.approx({i: s.peak_bytes / GIB for i, s in enumerate(plan.stages)})
    assert limits(memory) == pytest.approx([16.0, 8.0])
    assert [label.get_text() for label in times.get_yticklabels()] == [
        "stage 0: layers 0 to 2",
        "stage 1: layer 3",
    ]


@pytest.mark.parametrize("schedule", ["interleaved", "chimera"])
def test_a_rank_of_several_stages_holds_all_of_them(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    stages = [
        frozen_stage((i, i + 1), (5 + i) * GIB, devices=(i % 2 if chunks == 2 else i,))
        for i in range(4)
    ]
    plan = plan_of(stages, schedule=schedule, stages_per_rank=chunks, num_microbatches=4)
    times, memory = pd2.draw_plan(plan).figure.axes
    held = {0: 12.0, 1: 14.0} if chunks == 2 else dict.fromkeys(range(4), 13.0)
    assert bars(memory) == pytest.approx(held)
    assert limits(times) == []  # no stage has all of its rank's time
    assert len(bars(times)) == 4


def test_memory_without_a_limit_has_no_mark() -> None:
    stages = [stage_plan((0, 1), memory_limit=sys.float_info.max)]
    _, memory = pd2.draw_plan(plan_of(stages)).figure.axes
    assert limits(memory) == []
    assert memory.get_xlim()[1] < 7


def test_many_stages_still_fit_on_a_picture() -> None:
    stages = [frozen_stage((i, i + 1), GIB, devices=(i,)) for i in range(300)]
    figure = pd2.draw_plan(plan_of(stages)).figure
    assert figure.get_size_inches()[1] < 45
    times, _ = figure.axes
    assert len(times.get_yticks()) <= 300
    assert bars(times).keys() == set(range(300))
