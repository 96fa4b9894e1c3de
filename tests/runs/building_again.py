"""Pipelines that end in every way, one after the other in one process, and what they leave."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.ranks import groups
from tests.runs.resources import Resources, resources

X = torch.arange(32.0).reshape(8, 4).sin()


class OnPurposeError(Exception):
    pass


class Failing(nn.Linear):
    """A layer that can be told to fail."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.fails = [False]  # shared with the pipeline's copies of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return fail_if(x, self.fails)


def fail_if(x: torch.Tensor, fails: list[bool]) -> torch.Tensor:
    if fails[0]:
        raise OnPurposeError
    return x


torch.fx.wrap("fail_if")


class FailingStep(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if FailingStep.fails:
            raise OnPurposeError
        return super().step(closure)


class Pipeline:
    """Two stages, of which ``rank`` may do something else than the others."""

    def __init__(
        self, rank: int, step: type[torch.optim.SGD] = torch.optim.SGD, timeout: float = 30.0
    ) -> None:
        self.rank = rank
        self.layers = [Failing(), Failing()]
        self.pipe = pd2.PipelineModule(
            list(self.layers),
            mse_loss,
            num_microbatches=4,
            example_args=(X[:1],),
            timeout=timeout,
        )
        self.optimizer = pd2.PipelineOptimizer(
            step(self.pipe.parameters(), lr=0.1), max_grad_norm=1.0
        )

    def train(self, batches: int = 3) -> None:
        for _ in range(batches):
            self.pipe.train_step(X, target=X)
            self.optimizer.step()

    def begin_save(self) -> Any:
        """Begins a save that ends with the next batch, in the folder that all ranks run in."""
        return pd2.save("run", self.pipe, self.optimizer)


def closes(rank: int) -> None:
    one = Pipeline(rank)
    one.train()
    one.pipe.close()


def evaluates_and_leaves_a_block(rank: int) -> None:
    one = Pipeline(rank)
    with one.pipe:
        one.train()
        one.pipe.eval()
        one.pipe(X)


def is_dropped(rank: int) -> None:
    with contextlib.suppress(pd2.errors.PeerLost):  # where the other drops it first
        Pipeline(rank).train(1)


def a_forward_fails(rank: int) -> None:
    one = Pipeline(rank)
    one.train()
    one.layers[0].fails[0] = rank == 0
    with contextlib.suppress(RuntimeError):
        one.train(20)
        one.pipe.flush()
    one.pipe.abort()


def an_update_fails(rank: int) -> None:
    FailingStep.fails = rank == 0
    one = Pipeline(rank, FailingStep)
    with contextlib.suppress(RuntimeError):
        one.train(20)
        one.pipe.flush()


def the_last_rank_aborts(rank: int) -> None:
    one = Pipeline(rank)
    with contextlib.suppress(RuntimeError):  # others may be at their first batches still
        one.train()
        if not dist.is_initialized() or rank == dist.get_world_size() - 1:
            one.pipe.abort()
        one.train(20)
        one.pipe.flush()


def an_exception_leaves_a_block(rank: int) -> None:
    one = Pipeline(rank)
    with contextlib.suppress(OnPurposeError, RuntimeError), one.pipe:
        one.train()
        if rank == 0:
            raise OnPurposeError
        one.train(20)


def closes_while_a_save_waits(rank: int) -> None:
    one = Pipeline(rank)
    one.train()
    saving = one.begin_save()
    one.pipe.close()
    saving.done.exception(20)  # the thread's end comes with it


def is_dropped_while_a_save_waits(rank: int) -> None:
    saving = None
    with contextlib.suppress(pd2.errors.PeerLost):  # where the other drops it first
        one = Pipeline(rank)
        one.train(1)
        saving = one.begin_save()
    del one
    gc.collect()
    if saving is not None:
        saving.done.exception(20)


def the_last_rank_aborts_while_a_save_waits(rank: int) -> None:
    one = Pipeline(rank)
    one.train()
    saving = one.begin_save()
    if not dist.is_initialized() or rank == dist.get_world_size() - 1:
        one.pipe.abort()
    with contextlib.suppress(RuntimeError):
        one.train(20)
    saving.done.exception(20)


def the_constructor_fails(rank: int) -> None:
    """In the check, and once all groups of replicas are made, in the capture."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for wrong in ({"num_microbatches": 1 if rank == 0 else 4}, {"split": ["no such layer"]}):
        options: dict[str, Any] = {"num_microbatches": 4, **wrong}
        with contextlib.suppress(ValueError, TypeError):
            pd2.PipelineModule(
                nn.Sequential(*layers),
                mse_loss,
                num_stages=2,
                example_args=(X[:1],),
                timeout=30.0,
                **options,
            ).close()
            raise AssertionError(f"no error for {wrong}")


ENDS: tuple[Callable[[int], None], ...] = (
    closes,
    evaluates_and_leaves_a_block,
    is_dropped,
    a_forward_fails,
    an_update_fails,
    the_last_rank_aborts,
    an_exception_leaves_a_block,
    closes_while_a_save_waits,
    is_dropped_while_a_save_waits,
    the_last_rank_aborts_while_a_save_waits,
    the_constructor_fails,
)


def after_each_round(rank: int, world: int, rounds: int) -> list[Resources]:
    """What the process holds each time that pipelines have ended in all ways."""
    return list(each_round(rank, rounds))


def each_round(rank: int, rounds: int) -> Iterator[Resources]:
    for _ in range(rounds):
        for end in ENDS:
            end(rank)
        yield resources()


def is_flat(seen: list[Resources]) -> bool:
    """Whether counts do not grow after the first round, in which torch itself makes some."""
    first, *others = (each.counts() for each in seen[1:])
    return all(now <= then for each in others for now, then in zip(each, first, strict=True))


def making_a_group_fails(rank: int) -> None:
    """On one rank alone, which then has made fewer groups than the other.

    That one is left with a call that waits until the timeout, and keeps others from the store.
    """
    join_members, made = groups.join_members, 0

    def fail_at_the_third(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3 and rank == 0:
            raise OnPurposeError
        return join_members(*args, **options)

    with (
        mock.patch.object(groups, "join_members", fail_at_the_third),
        contextlib.suppress(pd2.errors.StageError, OnPurposeError),
    ):
        Pipeline(rank, timeout=3.0)
        raise AssertionError("no error")


def fails_making_groups_and_trains(rank: int, world: int) -> float:
    """Seconds that it takes."""
    start = time.monotonic()
    making_a_group_fails(rank)
    closes(rank)
    return time.monotonic() - start
