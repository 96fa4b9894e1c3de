"""What cannot be combined with sites that average seldom is refused with both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.nn.functional import mse_loss

import pipedream2bw as pd2

X = torch.ones(4, 3)
SGD, ADAM = torch.optim.SGD, torch.optim.Adam


def pipe_of(**options: Any) -> pd2.PipelineModule:
    given: dict[str, Any] = {"num_microbatches": 2, "example_args": (X,), "timeout": 5.0}
    model = [nn.Linear(3, 3), nn.Linear(3, 3)]
    return pd2.PipelineModule(model, mse_loss, **{**given, **options})


def sync_of(every: Any = 4, **options: Any) -> pd2.ReplicaSync:
    given: dict[str, Any] = {"store": HashStore(), "site": 0, "num_sites": 2}
    return pd2.ReplicaSync(every, **{**given, **options})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"every": 0}, ValueError, "replica_sync: every: 0, it must be at least 1"),
        ({"every": "auto"}, TypeError, "replica_sync: every: 'auto' given, it must be an int"),
        ({"num_sites": 1}, ValueError, "replica_sync: num_sites: 1, it must be at least 2"),
        ({"site": 2}, ValueError, "replica_sync: site: 2, it must be at most 1"),
        ({"store": "tcp://host"}, TypeError, "replica_sync: store: 'tcp://host' given"),
        ({"outer": lambda tensors: 1}, TypeError, "replica_sync: what outer makes: 1 given"),
    ],
)
def test_wrong_arguments_are_named(options: Any, kind: type[Exception], message: str) -> None:
    with pipe_of() as pipe, pytest.raises(kind, match=message):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=sync_of(**options))


@pytest.mark.parametrize(
    ("of_pipe", "of_optimizer", "message"),
    [
        ({}, {"shard_state": True}, "every: 4, shard_state: True"),
        ({}, {"staleness": pd2.ErrorFeedback()}, "every: 4, staleness: ErrorFeedback"),
        ({"precision": "fp16"}, {"loss_scale": pd2.LossScale()}, "every: 4, loss_scale: LossScale"),
        ({"precision": "bf16", "split_master": True}, {}, "every: 4, split_master: True"),
        (
            {"precision": "bf16", "optimizer_device": "cpu"},
            {},
            "every: 4, optimizer_device: 'cpu'",
        ),
        ({"schedule": "chimera"}, {}, "every: 4, schedule: 'chimera' .pipelines: 2"),
    ],
)
def test_what_does_not_go_together_is_refused(
    of_pipe: Any, of_optimizer: Any, message: str
) -> None:
    with pipe_of(**of_pipe) as pipe:
        for sync in (sync_of(), sync_of(pd2.SkewScout([4, 8]))):
            with pytest.raises(ValueError, match=message):
                pd2.PipelineOptimizer(
                    ADAM(pipe.parameters(), lr=0.1), replica_sync=sync, **of_optimizer
                )
        pd2.PipelineOptimizer(ADAM(pipe.parameters(), lr=0.1))


def test_something_else_is_no_replica_sync() -> None:
    with pipe_of() as pipe, pytest.raises(TypeError, match="replica_sync: 4 given"):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=4)  # type: ignore[arg-type]


def test_a_site_that_does_not_come_ends_the_pipeline_in_time() -> None:
    pipe = pipe_of(timeout=2.0)
    with pytest.raises(pd2.errors.StageError, match="site 1 did not come within"):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=sync_of())


def test_a_replica_sync_without_an_optimizer_says_so() -> None:
    with pytest.raises(ValueError, match="given to 0 open PipelineOptimizers"):
        sync_of().anchors()
