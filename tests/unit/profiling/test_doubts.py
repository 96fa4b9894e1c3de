"""Times that cannot be true are measured again, and told where that does not help."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.planner.profiling import profiler
from pipedream2bw.planner.profiling.doubts import measured_twice_if_doubtful
from pipedream2bw.planner.profiling.group_timing import GroupTimes, Measured, measure_groups

ROWS = (1, 2, 4)
TRUE = [GroupTimes(rows * 1e-3, rows * 1e-3, rows * 1e-3, 0.1) for rows in ROWS]
OTHERS = [GroupTimes(1e-4, 1e-4, 0.0, 0.0)] * len(ROWS)


class Clock:
    """Gives made-up times of group 3 for each number of rows, and others when asked again."""

    def __init__(self, *times: Sequence[GroupTimes]) -> None:
        self.times = list(times)
        self.asked: list[list[int]] = []

    def measure(self, sizes: Sequence[int]) -> list[Measured]:
        times = self.times[len(self.asked)]
        self.asked.append(list(sizes))
        return [Measured({0: OTHERS[size], 3: times[size]}, [8], []) for size in sizes]

    def measured(self) -> list[GroupTimes]:
        found = measured_twice_if_doubtful(self.measure, ROWS, {0: "a", 3: "b to c"}.__getitem__)
        assert [each.times[0] for each in found] == OTHERS
        return [each.times[3] for each in found]


def changed(size: int, **times: float) -> list[GroupTimes]:
    return [*TRUE[:size], dataclasses.replace(TRUE[size], **times), *TRUE[size + 1 :]]


DOUBTFUL: dict[str, tuple[int, dict[str, float], str]] = {
    "forward": (
        0,
        {"forward": 7e-3},
        "forward of b to c: 7 ms with microbatch_rows: 1, 2 ms with 2",
    ),
    "backward": (
        1,
        {"input_grad": 9e-3, "weight_grad": 5e-3},
        "backward of b to c: 14 ms with microbatch_rows: 2, 8 ms with 4",
    ),
    "spread": (
        2,
        {"spread": 0.8},
        "forward and backward of b to c: microbatch_rows: 4, quartiles 80 % of the median apart",
    ),
}


def test_plausible_times_are_measured_once() -> None:
    # Few rows may take a little longer than more rows do, and repetitions differ.
    times = changed(0, forward=2.9e-3, spread=0.5)
    clock = Clock(times)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clock.measured() == times
    assert clock.asked == [[0, 1, 2]]


@pytest.mark.parametrize("case", DOUBTFUL)
def test_doubtful_times_are_measured_again(case: str) -> None:
    size, times, _ = DOUBTFUL[case]
    clock = Clock(changed(size, **times), TRUE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clock.measured() == TRUE
    assert clock.asked == [[0, 1, 2], [size]]


def test_the_shorter_medians_count() -> None:
    first = changed(0, forward=9e-3, input_grad=5e-4)
    again = changed(0, weight_grad=8e-4, spread=0.2)
    # Of the backward the parts of one measurement: 1.5 ms, not 1.8.
    assert Clock(first, again).measured() == changed(0, input_grad=5e-4)


@pytest.mark.parametrize("case", DOUBTFUL)
def test_what_stays_doubtful_is_told_once_with_the_threads(case: str) -> None:
    size, times, said = DOUBTFUL[case]
    doubtful = changed(size, **times)
    with pytest.warns(UserWarning, match="profile: ") as told:
        assert Clock(doubtful, doubtful).measured() == doubtful
    (warning,) = told
    assert str(warning.message) == (
        f"profile: {said}, measured twice, threads: {torch.get_num_threads()}. Measure on a quiet "
        "machine, with OMP_NUM_THREADS=1 for each process, or with more seconds="
    )


def test_a_profile_has_what_was_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    measure = measure_groups

    def made_up(graph: Any, *args: Any, **options: Any) -> Measured:
        asked.append(graph.rows)
        seconds = 5.0 if asked == [1] else float(graph.rows)
        found = measure(graph, *args, **options)
        times = {like: GroupTimes(seconds, seconds, 0.0, 0.0) for like in found.times}
        return dataclasses.replace(found, times=times)

    monkeypatch.setattr(profiler, "measure_groups", made_up)
    x = torch.randn(2, 4)
    profile = pd2.profile(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        nn.functional.mse_loss,
        example_args=(x,),
        target=x,
        microbatch_rows=(1, 2),
        seconds=0.001,
    )
    assert asked == [1, 2, 1]
    groups = sum(layer.can_cut_after for layer in profile.layers) + 1
    assert [sum(each.forward) for each in profile.microbatches] == pytest.approx(
        [groups * 1.0, groups * 2.0]
    )
