"""Where devices have several speeds, replicas have microbatches by their speed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw.__main__ import main
from tests.unit.planning.test_planner import made_profile


def planned(counts: list[int], speeds: list[float], *, layers: int = 4, **options: Any) -> pd2.Plan:
    """On devices of these speeds, without links."""
    types = [
        pd2.DeviceType(f"of speed {speed}", count, throughput=speed)
        for count, speed in zip(counts, speeds, strict=True)
    ]
    given: dict[str, Any] = {"memory": "10GB", "batch": 24, "schedules": "2bw"}
    return pd2.plan(made_profile([1e-3] * layers), devices=types, **given | options)


def simulated(
    plan: pd2.Plan, counts: list[int], speeds: list[float]
) -> Callable[[int, int], float]:
    """Seconds of a batch on a replica that has so many microbatches."""
    speed_of = [s for count, s in zip(counts, speeds, strict=True) for _ in range(count)]
    # Of equal layers, as they are profiled.
    work = [1e-3 * plan.microbatch_rows * (s.layers[1] - s.layers[0]) for s in plan.stages]

    @functools.cache
    def seconds(replica: int, m: int) -> float:
        each = [w / speed_of[s.devices[replica]] for w, s in zip(work, plan.stages, strict=True)]
        return pd2.simulate(
            plan.schedule,
            num_stages=plan.num_stages,
            num_microbatches=m,
            stages_per_rank=plan.stages_per_rank,
            forward=each,
            input_grad=each,
            weight_grad=each,
        ).period

    return seconds


def divisions(total: int, width: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each of the replicas some."""
    for cuts in itertools.combinations(range(1, total), width - 1):
        yield tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))


def test_two_slow_devices_make_a_replica_of_fewer_microbatches() -> None:
    sizes = {"width": 2, "num_stages": 2}
    counts, speeds = [2, 2], [1.0, 0.5]
    plan = planned(counts, speeds, **sizes)
    assert plan.num_microbatches in ((16, 8), (8, 4))
    assert plan.batch == plan.microbatch_rows * sum(plan.num_microbatches) == 24
    equal = planned(counts, speeds, **sizes, unequal_replicas=False)
    assert isinstance(equal.num_microbatches, int)
    # All four work all the time: 24 rows of 4 layers, 3 ms each, at a speed of 3 devices.
    assert plan.seconds_per_batch == pytest.approx(24 * 4 * 3e-3 / 3)
    # Equal ones have a stage of three layers on fast devices and one on slow ones.
    assert equal.seconds_per_batch == pytest.approx(12 * 3 * 3e-3)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["2bw", "2bw_eager", "1f1b", "gpipe"]),
    st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 2)]),
    st.lists(st.sampled_from([0.3, 0.5, 0.8, 1.0, 1.7, 2.5]), min_size=3, max_size=3, unique=True),
    st.integers(12, 20),
)
def test_no_other_numbers_of_microbatches_are_faster(
    schedule: str, shape: tuple[int, int], speeds: list[float], batch: int
) -> None:
    """Of the plan's stages on its devices: by simulating every division of its microbatches."""
    width, ranks = shape
    counts, speeds = [ranks] * width, speeds[:width]
    plan = planned(
        counts, speeds, width=width, num_stages=ranks, batch=batch, largest_batch=2 * batch,
        schedules=schedule, recompute="none",
    )  # fmt: skip
    numbers = plan.num_microbatches
    if isinstance(numbers, int):  # some stages are on fast devices, others on slow ones
        assert ranks > 1
        return
    seconds = simulated(plan, counts, speeds)
    taken = max(itertools.starmap(seconds, enumerate(numbers)))
    assert plan.seconds_per_batch == pytest.approx(taken, rel=1e-6)
    replicas = zip(*(stage.devices for stage in plan.stages), strict=True)
    if any(len({device // ranks for device in devices}) > 1 for devices in replicas):
        return  # of devices of several speeds, the slowest of which was taken for all
    best = min(
        max(itertools.starmap(seconds, enumerate(other)))
        for other in divisions(sum(numbers), width)
        if min(other) >= _least(schedule, ranks)
    )
    assert taken <= best * (1 + 1e-9)


def _least(schedule: str, num_stages: int) -> int:
    return {"2bw": num_stages, "2bw_eager": 2 * num_stages - 1}.get(schedule, 1)


def test_devices_of_one_speed_and_two_pipelines_have_equal_replicas() -> None:
    assert isinstance(planned([2, 2], [1.0, 1.0], width=2).num_microbatches, int)
    sizes = {"width": 2, "num_stages": 2, "schedules": "chimera"}
    assert isinstance(planned([2, 2], [1.0, 0.5], **sizes).num_microbatches, int)
    with pytest.raises(TypeError, match="unequal_replicas: 1 given, it must be a bool"):
        planned([2], [1.0], unequal_replicas=1)


def test_a_plan_of_unequal_replicas_is_saved_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned([2, 2], [1.0, 0.5], width=2, num_stages=2)
    plan.save(tmp_path / "plan.json")
    assert pd2.Plan.load(tmp_path / "plan.json") == plan
    main(["show", str(tmp_path / "plan.json")])
    first, second = plan.num_microbatches if isinstance(plan.num_microbatches, tuple) else (0, 0)
    assert (
        f"{first}, {second} microbatches of {plan.microbatch_rows} row" in capsys.readouterr().out
    )
