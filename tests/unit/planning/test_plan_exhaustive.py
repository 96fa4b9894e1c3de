"""Plans against enumeration in Python, which shares nothing with the planner but simulate()."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import pipedream2bw as pd2
from pipedream2bw.errors import DoesNotFit
from tests.exhaustive import exhaustive
from tests.references.plan_oracle import (
    ROUNDING,
    VS,
    Candidate,
    Problem,
    bytes_of_ranks,
    fits,
    seconds,
    stages,
)
from tests.references.plan_search import Search
from tests.samples.plan_problems import problems

ALL = ("2bw", "1f1b", "interleaved", "zero_bubble", "chimera", "gpipe", "2bw_eager")
STASHED = "pipedream"
IN_A_V = ("2bw_v_half", "2bw_v_min", "zero_bubble_v")


def on_random_problems(
    check: Callable[[Problem], object], num_examples: int, **options: Any
) -> list[Any]:
    """What the check gives for each problem."""
    results = []

    # A seed has nothing to shrink to.
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(problem=problems(**options))
    def check_all(problem: Problem) -> None:
        results.append(check(problem))

    check_all()
    return results


def planned(problem: Problem) -> pd2.Plan | None:
    """None: nothing fits the memory, or no sizes make such a batch."""
    try:
        return problem.plan()
    except DoesNotFit:
        return None
    except ValueError as error:
        refusals = ("no width, microbatch size and schedule", "pieces")
        if not any(text in str(error) for text in refusals):
            raise
        return None


def candidate_of(problem: Problem, plan: pd2.Plan) -> Candidate:
    recomputed = plan.stages[0].recomputed
    way = "blocks" if isinstance(recomputed, tuple) else "stages" if recomputed else "none"
    return Candidate(
        plan.schedule,
        plan.width,
        plan.num_stages // plan.stages_per_rank,
        plan.stages_per_rank,
        plan.num_microbatches,
        [item.rows for item in problem.profile.microbatches].index(plan.microbatch_rows),
        way,
    )


def block(problem: Problem, name: str) -> tuple[int, int]:
    """Its first layer, and the one after its last."""
    held = [i for i, x in enumerate(problem.profile.layers) if x.name.startswith(f"{name}.")]
    return held[0], held[-1] + 1


def check_predictions(problem: Problem) -> pd2.Plan | None:
    """Of the plan's own cuts and devices: what stages take and hold, and that they fit."""
    plan = planned(problem)
    if plan is None:
        return None
    candidate = candidate_of(problem, plan)
    firsts = [stage.layers[0] for stage in plan.stages]
    grid = [list(plan.stages[rank].devices) for rank in range(candidate.ranks)]
    blocks = [
        {name: block(problem, name) for name in stage.recomputed}
        if isinstance(stage.recomputed, tuple)
        else {}
        for stage in plan.stages
    ]
    made = stages(problem, candidate, firsts, grid, blocks)
    for predicted, own in zip(plan.stages, made, strict=True):
        for name in own.keys() - {"again", "held", "kept", "of_microbatch"}:
            assert getattr(predicted, name) == pytest.approx(own[name], rel=1e-9, abs=1e-12), name
    assert plan.peak_bytes == pytest.approx(max(bytes_of_ranks(candidate, made)), rel=1e-9)
    assert fits(problem, candidate, made, grid)
    taken = seconds(problem, candidate, firsts, made, grid)
    assert plan.seconds_per_batch == pytest.approx(taken, rel=1e-9)
    assert plan.batch == plan.width * plan.num_microbatches * plan.microbatch_rows
    assert problem.batch <= plan.batch <= problem.largest_batch
    devices = list(itertools.chain(*grid))
    assert len(set(devices)) == len(devices) <= problem.cluster.num_devices
    return plan


@pytest.mark.parametrize("is_chain", [False, *exhaustive(True)])
@pytest.mark.parametrize("schedules", [*[(name,) for name in (*ALL, *IN_A_V, STASHED)], ALL])
def test_stages_take_and_hold_what_the_profile_says(
    schedules: tuple[str, ...], is_chain: bool
) -> None:
    plans = on_random_problems(
        check_predictions,
        60,
        schedules=schedules,
        is_chain=is_chain,
        updates=(0.0, 1e-10, 1e-9),
        kinds=("cpu", "cuda"),
    )
    assert sum(plan is not None and plan.num_stages > 1 for plan in plans) >= 8


def test_replicas_hold_and_step_their_share_of_the_state() -> None:
    plans = on_random_problems(
        check_predictions, 60, schedules=ALL[:4], updates=(1e-10, 1e-9), shard_state=True
    )
    found = [plan for plan in plans if plan is not None and plan.width > 1]
    assert sum(any(stage.state_bytes for stage in plan.stages) for plan in found) >= 8


def check_blocks(problem: Problem) -> bool:
    """That no other blocks of a rank would do in less time; whether any are recomputed."""
    plan = check_predictions(problem)
    if plan is None or not any(isinstance(stage.recomputed, tuple) for stage in plan.stages):
        return False
    candidate = candidate_of(problem, plan)
    firsts = [stage.layers[0] for stage in plan.stages]
    grid = [list(plan.stages[rank].devices) for rank in range(candidate.ranks)]
    forward = problem.profile.microbatches[candidate.size].forward
    names = sorted({layer.name.rpartition(".")[0] for layer in problem.profile.layers})
    for rank in range(candidate.ranks):
        within = [
            (k, name, block(problem, name))
            for k in candidate.stages_on(rank)
            for name in names
            if plan.stages[k].layers[0] <= block(problem, name)[0]
            and block(problem, name)[1] <= plan.stages[k].layers[1]
        ]
        limit = min(map(problem.memory_of, grid[rank]))
        least = math.inf
        for count in range(len(within) + 1):
            for chosen in itertools.combinations(within, count):
                blocks: list[dict[str, tuple[int, int]]] = [{} for _ in plan.stages]
                for k, name, held in chosen:
                    blocks[k][name] = held
                made = stages(problem, candidate, firsts, grid, blocks)
                if bytes_of_ranks(candidate, made)[rank] <= limit * ROUNDING:
                    least = min(least, sum(sum(forward[slice(*held)]) for _, _, held in chosen))
        chosen_names = [
            name
            for k in candidate.stages_on(rank)
            if isinstance(names_of_stage := plan.stages[k].recomputed, tuple)
            for name in names_of_stage
        ]
        taken = math.fsum(sum(forward[slice(*block(problem, name))]) for name in chosen_names)
        assert taken == pytest.approx(least, rel=1e-9, abs=1e-12)
    return True


@pytest.mark.parametrize("schedule", [name for name in ALL if name != "chimera"])
def test_blocks_that_run_again_are_those_that_take_the_least_time(schedule: str) -> None:
    found = on_random_problems(
        check_blocks, 40, schedules=(schedule,), recompute=("blocks",), kinds=("cpu", "cuda")
    )
    assert sum(found) >= 5


def above_the_best(problem: Problem) -> tuple[Problem, float] | None:
    """By how much the plan is slower than the best of all sets of cuts of all candidates.

    It is at least as fast as the splits whose slowest stage takes the least time, to one percent:
    periods are measured so exactly where messages are exposed. Where ranks have several stages it
    began at another split, and may have found no way to these.
    """
    plan = planned(problem)
    search = Search(problem)
    if plan is None:
        # Ranks of two stages are filled from both ends of the model, which misses splits that fit.
        is_folded = any(name in problem.schedules for name in ("chimera", *VS))
        assert is_folded or not search.fits_somewhere()
        return None
    taken = 1 / plan.rows_per_second
    best = search.fastest()
    assert taken >= best / ROUNDING
    if taken > best * ROUNDING:
        has_chunks = any(name in problem.schedules for name in ("interleaved", *VS))
        assert taken <= search.by_slowest_stage() * (1.05 if has_chunks else 1.01)
    return problem, taken / best - 1


WAYS = ("none", "stages")
LARGE: dict[str, Any] = {"layers": (2, 12), "devices": (1, 16), "recompute": WAYS}
SMALL: dict[str, Any] = {"layers": (3, 9), "devices": (1, 6), "recompute": WAYS}
BEST_OF: dict[tuple[str, ...], tuple[float, dict[str, Any]]] = {
    ("2bw",): (0.02, LARGE),
    ("2bw_eager",): (0.01, LARGE),
    ("gpipe",): (0.01, SMALL),
    ("1f1b",): (0.01, SMALL),
    ("zero_bubble",): (0.01, SMALL),
    ("interleaved",): (0.05, SMALL),
    ("chimera",): (0.1, SMALL),
    (STASHED,): (0.01, SMALL),
    ("2bw_v_half",): (0.05, SMALL),
    ALL[:5]: (0.05, SMALL),
    ALL[:2]: (0.02, {**LARGE, "shard_state": True}),
}
"""By how much a plan may be slower than the best at most, and the sizes of the problems."""


@pytest.mark.parametrize(
    ("schedules", "largest_message"),
    [
        *((schedules, 4000) for schedules in BEST_OF if schedules != ALL[:2]),
        *exhaustive((ALL[:2], 4000), *((schedules, 0) for schedules in BEST_OF)),
    ],
)
def test_plans_are_near_the_best_of_all_and_refused_only_if_nothing_fits(
    schedules: tuple[str, ...], largest_message: int
) -> None:
    most, options = BEST_OF[schedules]
    found = on_random_problems(
        above_the_best, 60, schedules=schedules, largest_message=largest_message, **options
    )
    planned = [each for each in found if each is not None]
    assert 15 <= len(planned) < len(found)
    above = [ratio for _, ratio in planned]
    assert max(above) <= most
    assert sum(above) / len(above) <= 0.003
    if schedules in (("2bw",), ("2bw_eager",)):
        # The best, but that a period is measured to a thousandth or so where messages are exposed.
        alone = [ratio for problem, ratio in planned if problem.width == 1]
        assert len(alone) >= 5
        assert max(alone) <= 2e-3


@pytest.mark.parametrize("schedules", [("1f1b",), ("gpipe",), ("interleaved",)])
def test_small_messages_that_a_gpu_has_not_read_cost_no_good_split(
    schedules: tuple[str, ...],
) -> None:
    most, options = BEST_OF[schedules]
    found = on_random_problems(
        above_the_best, 60, schedules=schedules, largest_message=400, kinds=("cuda",), **options
    )
    assert max(each[1] for each in found if each is not None) <= most
