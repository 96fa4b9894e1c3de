"""The search for the V-shaped schedule that is fastest with given costs and memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import pipedream2bw as pd2
from pipedream2bw.planner.fastest_v import first_of_fastest
from tests.runs.trajectory import assert_same, by_pipeline, expected, sgd
from tests.samples.models import TASKS

NAMED = ("2bw_v", "2bw_v_two_thirds", "2bw_v_half", "2bw_v_min")


def costs(input_grad: float, hop: float) -> dict[str, Any]:
    """Of a stage, the three parts 6 together on a rank; hops in shares of that."""
    return {"input_grad": input_grad, "weight_grad": 2 - input_grad, "latency": 6 * hop}


def most_held(schedule: pd2.Schedule) -> float:
    return max(pd2.simulate(schedule, activation_bytes=0.5, num_batches=6).peak_bytes)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("input_grad", [1.0, 1.2])
@pytest.mark.parametrize("hop", [0.0, 0.05, 0.1])
def test_no_named_v_that_fits_is_faster(ranks: int, input_grad: float, hop: float) -> None:
    sizes = {"num_stages": 2 * ranks, "num_microbatches": 2 * ranks}
    given = costs(input_grad, hop)
    named = {name: pd2.make_schedule(name, 2 * ranks, 2 * ranks, 2) for name in NAMED}
    held = {name: most_held(schedule) for name, schedule in named.items()}
    periods = {name: pd2.simulate(named[name], forward=1, **given).period for name in NAMED}
    before = float("inf")
    for in_flight in sorted(set(held.values())):
        found = pd2.fastest_v_schedule(**sizes, in_flight=in_flight, **given)
        assert most_held(found) <= in_flight
        period = pd2.simulate(found, forward=1, **given).period
        fitting = [name for name in NAMED if held[name] <= in_flight]
        assert period <= min(periods[name] for name in fitting) * 1.0011
        assert period <= before * 1.0011
        before = period
    assert before == pytest.approx(ranks * 2 * 6, rel=1e-3)  # no bubble with all of 2bw's memory


def test_of_equally_fast_ones_the_one_with_fewest_activations_is_taken() -> None:
    found = pd2.fastest_v_schedule(num_stages=16, num_microbatches=16, in_flight=8)
    assert most_held(found) == 4


# In the order of the memory that they need: which is to be taken.
@pytest.mark.parametrize(
    ("periods", "taken"),
    [
        ([1.0015, 1.0009, 1.0], 1),
        ([1.0018, 1.0011, 1.0003, 1.0], 2),
        ([1.0005, 1.0], 0),
        ([1.0, 1.0, 0.9], 2),
        ([1.0], 0),
    ],
)
def test_few_activations_are_worth_a_thousandth_of_the_shortest(
    periods: list[float], taken: int
) -> None:
    assert first_of_fastest(periods) == taken


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((7, 8, 8), "num_stages: 7: a V has two stages a rank"),
        ((16, 16, 3.5), "in_flight: 3.5, ranks: 8: a V needs in_flight >= 4"),
        ((16, 16, float("nan")), "in_flight: nan, ranks: 8: a V needs in_flight >= 4"),
        ((16, 3, 8), "num_microbatches: 3, ranks: 8: a V needs num_microbatches >= 5"),
        ((0, 3, 8), "num_stages: 0"),
    ],
)
def test_sizes_that_no_v_has_are_refused(sizes: tuple[int, int, float], text: str) -> None:
    names = ("num_stages", "num_microbatches", "in_flight")
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        pd2.fastest_v_schedule(**dict(zip(names, sizes, strict=True)))


@pytest.mark.parametrize(("d", "hop"), list(itertools.product((2, 4, 6), (0.0, 0.1, 0.25))))
def test_what_is_found_trains_exactly(d: int, hop: float) -> None:
    m = 2 * d
    task = TASKS["drawing"]
    schedule = pd2.fastest_v_schedule(
        num_stages=d, num_microbatches=m, in_flight=d / 2 + 1, **costs(1.4, hop)
    )
    want = expected(task, [2 * m] * 6, m, sgd, schedule="2bw")
    batches = task.batches([2 * m] * 6)
    got = by_pipeline(task, batches, d, m, schedule=schedule)
    assert_same(got, want)
