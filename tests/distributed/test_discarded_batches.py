"""Under processes, too, a batch in which the user's code fails costs that batch alone."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.discarding import Failure, Layer, Outcome, batches, by_oracle, make_model, train
from tests.runs.launch import run_ranks
from tests.runs.trajectory import assert_same_state
from tests.runs.transports import OF_TWO_RANKS, SHARED_MEMORY, over

M, ROWS, COUNT = 4, 8, 8
Case = tuple[str, str, int, int]
CASES: list[Case] = [
    ("2bw", "forward", 0, 0),
    ("2bw", "forward", 1, 3 * M + 1),
    ("2bw", "backward", 0, 2 * M + 3),
    ("2bw", "hook", 1, 5 * M),
    ("1f1b", "backward", 0, 3 * M + 2),
    ("1f1b", "forward", 1, 7 * M + 3),
]
PIPEDREAM: list[Case] = [("pipedream", "forward", 1, 4), ("pipedream", "backward", 0, 4)]
"""Updates have to wait, but for the first one's where ranks share memory: else a stage may make its
update before it knows."""


def cases_over(transport: str) -> list[tuple[Case, bool]]:
    """With whether updates are made to wait."""
    cases = [(case, False) for case in CASES]
    cases += [(case, True) for case in PIPEDREAM]
    return [*cases, (PIPEDREAM[0], False)] if transport == SHARED_MEMORY else cases


def two_ranks(rank: int, world: int, transport: str) -> list[Outcome]:
    given = batches(COUNT, ROWS)
    return [
        train(
            given,
            [Failure(layer, kind, call)],
            num_stages=2,
            num_microbatches=1 if schedule == "pipedream" else M,
            schedule=schedule,
            norm=schedule != "pipedream",
            optimizer_options={"max_grad_norm": math.inf if waits else None},
        )
        for (schedule, kind, layer, call), waits in cases_over(transport)
    ]


def two_replicas(rank: int, world: int) -> list[tuple[Outcome, Outcome]]:
    given = batches(COUNT, ROWS)
    result = []
    for kind, options in (
        ("forward", {"schedule": "2bw"}),
        ("backward", {"schedule": "2bw", "optimizer_options": {"max_grad_norm": 0.05}}),
        ("forward", {"schedule": "2bw", "num_microbatches": [M - 1, M]}),
        ("hook", {"schedule": "1f1b", "accumulate": 2}),
        ("forward", {"schedule": "2bw", "optimizer_options": {"shard_state": True}}),
        ("hook", {"schedule": "1f1b", "optimizer_options": {"shard_state": True}}),
    ):
        settings: dict[str, Any] = {"num_stages": 1, "num_microbatches": M, "width": 2, **options}
        failures = [Failure(0, kind, 3 * M + 2)] if rank == 1 else []
        got = train(given, failures, **settings)
        kept = [given[position] for position in got.kept]
        result.append((got, train(kept, [], restarts=got.restarts, **settings)))
    return result


def between_step_and_update(rank: int, world: int) -> list[tuple[list[str], torch.Tensor]]:
    """Batches that are discarded when they are complete and no step has come."""
    x, y = batches(1, ROWS)[0].args[0], batches(1, ROWS)[0].target
    results = []
    for optimizer, fails, shard_state in (
        (torch.optim.RMSprop, True, False),
        (torch.optim.SGD, False, False),
        (torch.optim.RMSprop, True, True),
        (torch.optim.SGD, False, True),
    ):
        failures = [Failure(0, "forward", 3 * M - 1)] if fails and rank == 0 else []
        torch.manual_seed(0)
        pipe = pd2.PipelineModule(
            [torch.nn.Sequential(*(Layer(0, failures if i == 0 else []) for i in range(3)))],
            mse_loss,
            num_microbatches=M,
            width=2,
            bucket_cap_mb=1e-5,  # sums begin early
            example_args=(x[:2],),
            timeout=20.0,
        )
        seen = []
        with pipe:
            stock = optimizer(pipe.parameters(), lr=0.1)
            opt = pd2.PipelineOptimizer(stock, shard_state=shard_state)
            for number in range(6):
                try:
                    pipe.train_step(x, target=y)
                    pipe.flush()
                    if number == 2 and not fails:
                        seen.append(str(pipe.discard_batch()))
                        continue
                    opt.step()
                except pd2.errors.StageError as error:
                    seen.append(str(error.discarded))
            state = torch.cat([value.flatten() for value in pipe.state_dict().values()])
        results.append((seen, state))
    return results


@pytest.mark.slow
def test_replicas_discard_a_complete_batch_whose_step_has_not_come() -> None:
    results = [result.value for result in run_ranks(between_step_and_update, 2, timeout=100)]
    for of_one, of_other in zip(*results, strict=True):
        assert of_one[0] == of_other[0] == ["(2,)"]
        assert torch.equal(of_one[1], of_other[1])


@pytest.mark.slow
def test_a_replica_that_fails_discards_the_batch_of_all() -> None:
    results = [result.value for result in run_ranks(two_replicas, 2, timeout=150)]
    for of_one, of_other in zip(*results, strict=True):
        assert of_one[0].kept == of_other[0].kept
        for got, want in (of_one, of_other):
            assert len(got.errors) == 1
            assert got.losses == want.losses
            assert_same_state(got.state, want.state)


def two_copies(rank: int, world: int) -> int:
    """Reads each loss, and so makes no step for a batch that failed."""
    given = batches(COUNT, ROWS)
    # Both ranks run this layer. What one has failed in, the other may not compute.
    model = make_model([Failure(1, "forward", M)] * (rank == 1), 2, norm=False)
    with pd2.PipelineModule(
        list(model),
        mse_loss,
        schedule="chimera",
        num_microbatches=M,
        example_args=(given[0].args[0][:2],),
        timeout=15.0,
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for batch in given:
            with contextlib.suppress(pd2.errors.StageError):
                if not math.isnan(pipe.train_step(*batch.args, target=batch.target).item()):
                    opt.step()
        pipe.flush()
        return pipe.session.accumulation.num_updates


def test_copies_of_a_stage_end_without_the_step_of_a_discarded_batch() -> None:
    results = run_ranks(two_copies, 2, timeout=60)
    assert [result.value for result in results] == [COUNT - 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", OF_TWO_RANKS)
def test_a_batch_that_fails_is_as_if_it_had_not_been(transport: str) -> None:
    given = batches(COUNT, ROWS)
    results = run_ranks(over, 2, args=(transport, two_ranks, transport), timeout=150)
    for number, ((schedule, *_), _) in enumerate(cases_over(transport)):
        outcomes: list[Any] = [result.value[number] for result in results]
        first, second = outcomes
        assert first.kept == second.kept
        assert [e.discarded for e in first.errors] == [e.discarded for e in second.errors] != []
        assert first.restarts == second.restarts != []
        state: dict[str, torch.Tensor] = {**first.state, **second.state}
        want = by_oracle(
            given,
            first,
            num_stages=2,
            num_microbatches=1 if schedule == "pipedream" else M,
            delay=[1, 1, 0, 0] if schedule == "pipedream" else int(schedule == "2bw"),
            norm=schedule != "pipedream",
        )
        for outcome in outcomes:
            assert outcome.losses == want.losses, (schedule, number)
        assert_same_state(state, want.state)


def closes_without_a_flush(rank: int, world: int, transport: str) -> list[float]:
    """Its last forwards wait for updates that only later batches, or a drain, let begin."""
    given = batches(3, 2)
    losses = []
    for limit in (math.inf, 0.1):
        pipe = pd2.PipelineModule(
            list(make_model((), world, norm=False)),
            mse_loss,
            schedule="pipedream",
            num_microbatches=1,
            example_args=given[0].args,
            timeout=20.0,
        )
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
        opt = pd2.PipelineOptimizer(sgd, max_grad_norm=limit)
        lazy = []
        for batch in given:
            lazy.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        pipe.close()
        losses += [loss.item() for loss in lazy]
    return losses


@pytest.mark.parametrize("transport", OF_TWO_RANKS)
def test_processes_whose_forwards_wait_for_later_batches_close(transport: str) -> None:
    args = (transport, closes_without_a_flush, transport)
    first, *others = [result.value for result in run_ranks(over, 3, args=args, timeout=60)]
    assert all(each == first for each in others)
