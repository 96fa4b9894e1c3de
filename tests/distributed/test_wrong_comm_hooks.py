"""Gradient hooks that give no mean, and calls that cannot be obeyed, are named on every rank."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

import pipedream2bw as pd2
from tests.distributed.test_comm_hooks import SIZE, build, data, layers, sgd, train
from tests.runs.launch import RankResult, in_turn, run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt
from tests.runs.timed import at_most_three_times


def of_one_rank(group: Any, bucket: dist.GradBucket) -> Any:
    """Rank 0 waits for the other, which never comes."""
    if dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    return allreduce_hook(group, bucket)


def another_shape_on_one_rank(group: Any, bucket: dist.GradBucket) -> Any:
    if dist.get_rank() == 0:
        return allreduce_hook(group, bucket)
    return given(bucket.buffer()[:3])


def given(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def raises_later(group: Any, bucket: dist.GradBucket) -> Any:
    def fail(future: Any) -> None:
        raise ZeroDivisionError("on purpose")

    return allreduce_hook(group, bucket).then(fail)


WRONG: dict[str, tuple[Any, str, list[str]]] = {
    "shape": (
        another_shape_on_one_rank,
        "WrongHookError",
        ["stage 0 of replica 1", "shape [3]", f"shape [{SIZE * (SIZE + 1)}]", "another_shape"],
    ),
    "dtype": (
        lambda group, bucket: given(bucket.buffer().double()),
        "WrongHookError",
        ["torch.float64", "torch.float32"],
    ),
    "tensor": (lambda group, bucket: bucket.buffer(), "WrongHookTypeError", ["Tensor", "Future"]),
    "list": (
        lambda group, bucket: given([bucket.buffer()]),
        "WrongHookTypeError",
        ["Future of list", "tensor"],
    ),
    "raises": (of_one_rank, "StageError", ["replica 1", "ZeroDivisionError", "on purpose"]),
    "raises later": (raises_later, "StageError", ["ZeroDivisionError", "on purpose"]),
}


def wrong_hooks(rank: int, world: int) -> dict[str, Outcome]:
    outcomes = {}
    for name, (hook, _, _) in WRONG.items():
        pipe = build(layers()[1:])
        pipe.register_comm_hook(None, hook)
        begin = time.monotonic()
        outcomes[name] = attempt(lambda p=pipe: train(p, sgd(p.parameters())))  # type: ignore[misc]
        assert time.monotonic() - begin < 10
    return outcomes


def wrong_calls(rank: int, world: int) -> dict[str, Outcome]:
    one = layers()[1:]
    alone = dist.new_group([rank], use_local_synchronization=True)
    ways: dict[str, tuple[dict[str, Any], Any, Any]] = {
        "one replica": ({"model": layers(), "width": 1}, None, allreduce_hook),
        "no function": ({}, None, 3 if rank == 1 else allreduce_hook),
        "one argument": ({}, None, lambda bucket: None),
        "on the host": ({"optimizer_device": "cpu"}, None, allreduce_hook),
        "group of all": ({}, SimpleNamespace(process_group=None), allreduce_hook),
        "other group": ({}, alone, allreduce_hook),
        "two hooks": ({}, None, fp16_compress_hook if rank == 1 else allreduce_hook),
        "stages": (
            {"model": layers(), "schedule": "interleaved_2bw", "stages_per_rank": 2},
            SimpleNamespace(),
            allreduce_hook,
        ),
    }
    outcomes = {}
    for name, (changes, state, hook) in ways.items():
        with build(**{"model": one, **changes}) as pipe:
            outcomes[name] = attempt(lambda p=pipe, s=state, h=hook: p.register_comm_hook(s, h))  # type: ignore[misc]
    with build(one) as pipe:
        opt = sgd(pipe.parameters())
        x, y = data(0)[0]
        pipe.train_step(x, target=y)
        outcomes["in a batch"] = attempt(lambda: pipe.register_comm_hook(None, allreduce_hook))
        opt.step()
        pipe.register_comm_hook(None, allreduce_hook)
        outcomes["twice"] = attempt(lambda: pipe.register_comm_hook(None, allreduce_hook))
    with build(one, precision="bf16") as pipe:
        pipe.register_comm_hook(None, allreduce_hook)
        adagrad = torch.optim.Adagrad(pipe.parameters())
        outcomes["optimizer after"] = attempt(lambda: pd2.PipelineOptimizer(adagrad))
    with build(one, precision="bf16") as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.Adagrad(pipe.parameters()))
        outcomes["optimizer before"] = attempt(
            lambda: pipe.register_comm_hook(None, allreduce_hook)
        )
        del optimizer
    with build(one) as pipe:
        pipe.register_comm_hook(None, allreduce_hook)
        outcomes["shares after"] = attempt(lambda: sgd(pipe.parameters(), shard_state=True))
    with build(one) as pipe:
        optimizer = sgd(pipe.parameters(), shard_state=True)
        outcomes["shares before"] = attempt(lambda: pipe.register_comm_hook(None, allreduce_hook))
        del optimizer
    return outcomes


CALLS: Expected = {
    "one replica": ("ValueError", ["register_comm_hook: ", "width: 1", "several replicas"]),
    "no function": ("TypeError", ["hook: 3 given", "must be callable"]),
    "one argument": ("TypeError", ["must take (state, bucket)"]),
    "on the host": ("ValueError", ["optimizer_device: 'cpu'", "need None"]),
    "group of all": ("ValueError", ["process_group", "all processes", "ranks [0, 1]"]),
    "other group": ("ValueError", ["process_group", "ranks [0, 1]", "pipe.replica_group()"]),
    "two hooks": ("ValueError", ["hook must be the same", "allreduce_hook", "fp16_compress_hook"]),
    "stages": ("ValueError", ["one SimpleNamespace", "stages of this process: 2"]),
    "in a batch": ("ValueError", ["a batch waits for its opt.step()"]),
    "twice": ("ValueError", ["called twice"]),
    "optimizer after": ("ValueError", ["before all stages are through", "'2bw'"]),
    "optimizer before": ("ValueError", ["before all stages are through", "'2bw'"]),
    "shares after": ("ValueError", ["shard_state: True", "allreduce_hook"]),
    "shares before": ("ValueError", ["allreduce_hook", "shard_state: True", "one of the two"]),
}


@pytest.fixture(scope="module")
@at_most_three_times
def refused() -> list[RankResult]:
    return run_ranks(in_turn, 2, args=(wrong_hooks, wrong_calls), timeout=150)


@pytest.mark.slow
def test_wrong_hooks_are_named_on_every_rank(refused: list[RankResult]) -> None:
    expected = {name: (kind, words) for name, (_, kind, words) in WRONG.items()}
    assert_raised((result.value[0] for result in refused), expected)


@pytest.mark.slow
def test_what_hooks_do_not_go_with_is_refused_on_every_rank(refused: list[RankResult]) -> None:
    assert_raised((result.value[1] for result in refused), CALLS)
