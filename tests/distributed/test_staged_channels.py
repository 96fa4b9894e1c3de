"""Messages by way of the host's memory give the oracle's bits, as all others do."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw import _C
from pipedream2bw.errors import StageError
from pipedream2bw.ranks.channels import Channels
from pipedream2bw.runtime import local_stages
from tests.distributed.test_exactness import check
from tests.runs.launch import run_ranks
from tests.runs.trajectory import make_pipeline
from tests.samples.models import TASKS

CPU = torch.device("cpu")


class Staged(Channels):
    """All of whose messages are staged, as if the hosts' tensors were a device's."""

    def _make(self, source: int, destination: int) -> None:
        super()._make(source, destination)
        edge = (source, destination)
        if self._grid.share_a_rank(source, destination):
            return
        if edge in self.senders:
            self.senders[edge] = _C.StagedSender(
                hosts=self.senders[edge], device=CPU, fault=self._deadline.fault
            )
        if edge in self.receivers:
            self.receivers[edge] = _C.StagedReceiver(hosts=self.receivers[edge], device=CPU)


def train(rank: int, world: int) -> None:
    with mock.patch.object(local_stages, "Channels", Staged):
        for schedule in ("2bw", "1f1b", "chimera"):
            check(TASKS["mlp"], world, 2 * world, [4 * world] * 5, schedule=schedule)
        for name in ("skips", "gpt"):
            check(TASKS[name], world, world, [2 * world] * 4, exact=TASKS[name].exact)


def test_staged_messages_keep_every_bit() -> None:
    run_ranks(train, 2, timeout=120)


def fail(rank: int, world: int) -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([4])
    with (
        mock.patch.object(local_stages, "Channels", Staged),
        make_pipeline(task, world, 4, batch, schedule="1f1b") as pipe,
    ):
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
        pipe.flush()
        if rank == 1:
            pipe.abort()
            return
        with pytest.raises(StageError):
            for _ in range(3):
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            pipe.flush()


def test_a_lost_peer_ends_staged_channels() -> None:
    run_ranks(fail, 2, timeout=60)
