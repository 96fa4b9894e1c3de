"""Leaves them out of one of two processes that train together, in turn of either.

It is found if one of the two finds it: an error, or other bits than the CPUs'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import pipedream2bw as pd2
from pipedream2bw.ranks import channels
from tests.device import checked
from tests.device.on_device import batch_on, on
from tests.device.prove.outcomes import (
    FOUND,
    KINDS,
    NUM_BATCHES,
    Outcome,
    count,
    train,
    without,
)
from tests.runs.launch import run_ranks
from tests.runs.trajectory import Trajectory, assert_same, make_pipeline
from tests.samples.models import Task
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import SKIPS, float_token_loss

NUM_RANKS = 2


@dataclasses.dataclass(frozen=True)
class Training:
    """What two processes train, a device each.

    Attributes:
        rings: whether messages go through memory that both share; else over the group.
        staged: whether they go by way of the hosts' memory.
        width: replicas; 2: each process has all stages of one.
        optimizer: options of PipelineOptimizer.
        options: of PipelineModule.
    """

    task: Task = SKIPS
    m: int = 3
    rings: bool = False
    staged: bool = False
    width: int = 1
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, device: str, judged: Callable[[], None] = lambda: None) -> Trajectory:
        """Trains this process's part there; the state is the host's."""
        replica = dist.get_rank() if self.width > 1 else 0
        batches = self.task.batches([2 * self.m] * NUM_BATCHES, seed=2 + replica)
        batches = [batch_on(each, device) for each in batches]
        task = self.task if device == "cpu" else on(self.task, device)
        options = {**self.options, "width": self.width, "bucket_cap_mb": 1e-4}
        with make_pipeline(task, NUM_RANKS // self.width, self.m, batches[0], **options) as pipe:
            return train(pipe, batches, judged, **self.optimizer)


_LANGUAGE_MODEL = TIED["language model"]
_CLIPS = {"max_grad_norm": 0.1}

TRAININGS = {
    "two processes, clipping": Training(optimizer=_CLIPS),
    "two processes, rings": Training(rings=True),
    "two processes, staged": Training(staged=True),
    "two processes, loss scale": Training(
        optimizer={**_CLIPS, "loss_scale": pd2.LossScale(2.0**10)}, options={"precision": "bf16"}
    ),
    "two processes, tied": Training(
        Task(_LANGUAGE_MODEL.build, _LANGUAGE_MODEL.draw, float_token_loss),
        options={"split": ["blocks.2"]},
    ),
    "two replicas, clipping": Training(width=2, optimizer=_CLIPS),
    "two replicas, shared state": Training(
        width=2, optimizer={**_CLIPS, "shard_state": True}, options={"precision": "bf16"}
    ),
    "two replicas, all-reduce": Training(width=2, options={"replica_sums": "all_reduce"}),
}


def prove(name: str, every: int, timeout: float) -> list[Outcome]:
    """What became of each that was left out; one of ``every``."""
    results = run_ranks(
        _prove, NUM_RANKS, args=[name, every], rendezvous="environment", timeout=timeout
    )
    outcomes: list[Outcome] = results[0].value
    return outcomes


def _prove(rank: int, world: int, name: str, every: int) -> list[Outcome]:
    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,checked:checked")
    checked.set_timeout(20.0)
    training = TRAININGS[name]
    with contextlib.ExitStack() as patches:
        if not training.rings:
            none = mock.patch.object(channels, "make_device_ring", return_value=None)
            patches.enter_context(none)
        if training.staged:
            by_hosts = mock.patch.object(channels, "go_over_hosts", return_value=True)
            patches.enter_context(by_hosts)
        return list(_outcomes(rank, world, training, every))


def _outcomes(rank: int, world: int, training: Training, every: int) -> Iterator[Outcome]:
    run = functools.partial(training.run, f"checked:{rank}")
    want = training.run("cpu")
    assert_same(run(), want)  # first uses
    for kind in KINDS:
        for leaves_out, most in enumerate(_gathered(count(run, want, kind))):
            for n in range(1, most + 1, every):
                mine = n if rank == leaves_out else 0
                words = _gathered(without(run, want, kind, mine, meet=lambda: _gathered(None)))
                yield kind, n, FOUND if FOUND in words else words[leaves_out]


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
