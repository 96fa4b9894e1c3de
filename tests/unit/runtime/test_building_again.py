"""Pipelines of threads that end in any way leave nothing behind, and abort() is one of the ways."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw import _C
from tests.runs.building_again import after_each_round, is_flat
from tests.runs.launch import run_ranks


@pytest.mark.skipif(sys.platform != "linux", reason="has no /proc")
def test_pipelines_that_ended_leave_no_thread_or_file_behind() -> None:
    """Three rounds of eleven ends each, in a process of their own."""
    (result,) = run_ranks(after_each_round, 1, args=(3,), rendezvous="none", timeout=100)
    assert is_flat(result.value), list(map(str, result.value))


def test_abort_ends_the_pipeline_and_every_later_call_names_it() -> None:
    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=2, example_args=(x[:1],)
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    first = pipe.train_step(x, target=x)
    opt.step()
    float(first)
    pipe.abort()
    pipe.abort()
    for call in (pipe.flush, pipe.full_state_dict, lambda: pipe.train_step(x, target=x)):
        with pytest.raises(pd2.errors.PeerLost, match=r"abort\(\) was called") as raised:
            call()
        assert raised.value.rank == 0
    pipe.close()
    with pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=2, example_args=(x[:1],)
    ) as again:
        float(again.train_step(x, target=x))


def test_weights_that_were_made_of_nothing_cannot_be_read() -> None:
    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=2, example_args=(x[:1],)
    )
    # Only what a device was waiting for can have been lost: here it has none.
    with mock.patch.object(_C.Executor, "is_spoilt", lambda self, stage, **_: stage == 1):
        pipe.abort()
    with pytest.raises(pd2.errors.PeerLost, match=r"of stages \[1\] cannot be read: .*checkpoint"):
        pipe.state_dict()
