"""Batches of fewer rows than microbatches, and microbatches that the caller has made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipedream2bw as pd2
from tests.references.oracle import Batch, ReadyMade
from tests.runs.microbatches import DROPOUT
from tests.runs.trajectory import (
    assert_same,
    by_oracle,
    by_pipeline,
    check_task,
    make_pipeline,
    sgd,
)
from tests.samples.models import TASKS, VOCABULARY, WIDTH

ROWS = [16, 5, 8, 2, 19, 3, 16]
DEPTHS = {"interleaved_2bw": 4, "interleaved": 4, "2bw_v": 4, "2bw_v_half": 8, "2bw_v_min": 8}
SCHEDULES = (
    *("2bw", "2bw_eager", "2bw_split", "1f1b", "gpipe", "zero_bubble", "zero_bubble_2p"),
    *("chimera", "chimera_doubled", *DEPTHS),
)


class Ragged(nn.Module):
    """A mean over positions whose number each microbatch chooses; causal attention in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, tokens: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x)[0]
        for layer in self.layers:
            x = layer(x).tanh()
        return x.mean(1) if bounds is None else x[:, bounds].mean(1)


RAGGED = dataclasses.replace(TASKS["mlp"], build=Ragged)


def options_of(schedule: str) -> dict[str, Any]:
    return {"stages_per_rank": 2} if schedule in DEPTHS else {}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_rows_make_few_microbatches(schedule: str) -> None:
    d = DEPTHS.get(schedule, 2)
    check_task(TASKS["mlp"], d, 8, ROWS, schedule=schedule, **options_of(schedule))


@pytest.mark.parametrize("task", ["drawing", "skips", "masked", "frozen"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_what_a_missing_microbatch_draws_and_counts_is_nothing(task: str, options: Any) -> None:
    check_task(TASKS[task], 2, 8, ROWS, **options)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_statistics_are_those_of_the_microbatches_that_there_are(schedule: str) -> None:
    task = TASKS["batch norm"]
    batches = [ReadyMade(task.batches([3] * number)) for number in (4, 2, 1, 3, 4)]
    got = by_pipeline(task, batches, 2, 4, schedule=schedule)
    assert_same(got, by_oracle(task, batches, 4, schedule=schedule))


def ready_made(sizes: list[int], seed: int) -> ReadyMade:
    return ReadyMade(DROPOUT.batches(sizes, seed))


@given(
    schedule=st.sampled_from(SCHEDULES),
    lists=st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=8), min_size=2, max_size=5),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_ready_made_microbatches_of_any_rows(
    schedule: str, lists: list[list[int]], seed: int
) -> None:
    batches = [ready_made(sizes, seed + t) for t, sizes in enumerate(lists)]
    d = DEPTHS.get(schedule, 2)
    got = by_pipeline(DROPOUT, batches, d, 8, schedule=schedule, **options_of(schedule))
    assert_same(got, by_oracle(DROPOUT, batches, 8, schedule=schedule))


def ragged(lengths: list[int], *, with_bounds: bool = False) -> ReadyMade:
    batches = []
    for length in lengths:
        tokens = torch.randint(VOCABULARY, (2, length))
        kwargs = {"bounds": torch.arange(0, length, 2)} if with_bounds else {}
        batches.append(Batch((tokens,), torch.randn(2, WIDTH), kwargs))
    return ReadyMade(batches)


@pytest.mark.parametrize("with_bounds", [False, True])
@pytest.mark.parametrize("recompute", [None, True])
def test_lengths_may_differ(with_bounds: bool, recompute: bool | None) -> None:
    torch.manual_seed(3)
    lengths = [[5, 3, 9, 2], [3, 3], [7, 5, 3], [1, 12, 4, 4], [5, 3, 9, 2]]
    batches = [ragged(each, with_bounds=with_bounds) for each in lengths]
    replicated = ("bounds",) if with_bounds else ()
    got = by_pipeline(RAGGED, batches, 3, 4, replicated=replicated, recompute=recompute)
    assert_same(got, by_oracle(RAGGED, batches, 4, replicated=replicated))


def test_sums_and_accumulated_train_steps() -> None:
    lists = [[2, 2, 1], [3], [1, 1, 1, 1], [4, 2]]
    batches = [ready_made(sizes, seed) for seed, sizes in enumerate(lists)]
    for options in ({"accumulate": 2}, {"loss_reduction": "sum"}):
        got = by_pipeline(DROPOUT, batches, 2, 4, **options)
        assert_same(got, by_oracle(DROPOUT, batches, 4, **options))


def test_a_normalizer_is_counted_over_all_microbatches() -> None:
    task = dataclasses.replace(
        TASKS["mlp"], loss_fn=lambda output, target: ((output - target) ** 2).sum()
    )
    batches = [ready_made(sizes, seed) for seed, sizes in enumerate([[1, 3], [4, 4], [2, 2]])]
    got = by_pipeline(task, batches, 2, 2, loss_reduction="sum", normalizer=torch.numel)
    halved = dataclasses.replace(
        task, loss_fn=lambda output, target: ((output - target) ** 2).mean()
    )
    want = by_oracle(halved, batches, 2)
    assert got.losses == pytest.approx(want.losses)


def test_metrics_and_evaluation_beside_them() -> None:
    pipe = make_pipeline(TASKS["mlp"], 2, 4, TASKS["mlp"].batches([2])[0], metrics={"mean": mean})
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        rows = [torch.full((size, WIDTH), float(size)) for size in (1, 3)]
        zeros = [torch.zeros(size, WIDTH) for size in (1, 3)]
        loss = pipe.train_step(
            microbatches=[pd2.Microbatch(x, target=y) for x, y in zip(rows, zeros, strict=True)]
        )
        opt.step()
        model = TASKS["mlp"].model()
        want = sum(mean(model(x), y).item() * len(x) / 4 for x, y in zip(rows, zeros, strict=True))
        assert loss.metrics["mean"] == pytest.approx(want)
        with torch.no_grad():
            assert pipe(rows[0]).shape == (1, WIDTH)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).mean()


def of_rows(rows: int, of_target: int | None = None) -> pd2.Microbatch:
    target = torch.zeros(rows if of_target is None else of_target, WIDTH)
    return pd2.Microbatch(torch.zeros(rows, WIDTH), target=target)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "error", "text"),
    [
        ("2bw", [], ValueError, "microbatches: 0, at least 1"),
        ("2bw", [of_rows(1)] * 5, ValueError, "microbatches: 5, num_microbatches: 4"),
        ("2bw", [of_rows(1), of_rows(0)], ValueError, "microbatch 1: rows: 0, at least 1"),
        ("2bw", [of_rows(1), of_rows(2, 3)], ValueError, "microbatch 1: rows of the arguments: 2"),
        ("2bw", [of_rows(1), 3], TypeError, r"microbatches\[1\]: 3 given, it must be a Microbatch"),
        ("2bw", 3, TypeError, "microbatches: 3 given, it must be a list of Microbatch"),
        ("chimera", [of_rows(1)], ValueError, "microbatches: 1, at least 2"),
    ],
)
def test_microbatches_that_are_refused(
    schedule: str, microbatches: Any, error: type[Exception], text: str
) -> None:
    example = TASKS["mlp"].batches([2])[0]
    with make_pipeline(TASKS["mlp"], 2, 4, example, schedule=schedule) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pytest.raises(error, match=text):
            pipe.train_step(microbatches=microbatches)
        with pytest.raises(ValueError, match="a batch and microbatches= given"):
            pipe.train_step(*example.args, microbatches=microbatches)
        with pytest.raises(ValueError, match="rows of the batch: 0, at least"):
            pipe.train_step(torch.zeros(0, WIDTH), target=torch.zeros(0, WIDTH))
        pipe.train_step(microbatches=[of_rows(2), of_rows(1)])
        opt.step()
