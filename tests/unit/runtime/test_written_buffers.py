"""Buffers can be set back to what they were before a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipedream2bw.runtime.written_buffers import Holder, WrittenBuffers
from tests.runs.trajectory import copy_of


class Counting(nn.Module):
    """Has a buffer that it writes to, one that it replaces and one that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.table
        self.last = x.mean(0)
        return x


def watched(model: nn.Module) -> WrittenBuffers:
    return WrittenBuffers(lambda: [Holder(module._buffers, None) for module in model.modules()])


INSTANCE_NORM = nn.InstanceNorm1d(3, track_running_stats=True)


@pytest.mark.parametrize("layer", [Counting(), nn.BatchNorm1d(3), INSTANCE_NORM])
def test_what_forwards_wrote_is_taken_back(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    buffers = watched(model)
    x = torch.randn(4, 3, 2) if isinstance(layer, nn.InstanceNorm1d) else torch.randn(4, 3)
    states = []
    for run in range(5):
        states.append(copy_of(model.state_dict()))
        buffers.begin(run)
        model(x + run)
        model(x - run)
        if run == 1:
            buffers.forget(0)
    for run in (4, 2):
        buffers.restore(run)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, states[run][name]), name
    buffers.restore(3)  # not begun any more
    assert torch.equal(next(iter(model.state_dict().values())), next(iter(states[2].values())))


def test_only_what_is_written_to_is_copied() -> None:
    model = nn.Sequential(Counting())
    buffers = watched(model)
    for run in range(2):
        buffers.begin(run)
        model(torch.randn(4, 3))
    copies = {kept.leaf: kept.copy for kept in buffers._kept[1]}
    assert copies["table"] is None
    assert torch.equal(copies["count"], torch.arange(3.0))


def test_a_first_write_that_nobody_foresaw_is_an_error() -> None:
    model = nn.Sequential(Counting())
    buffers = watched(model)
    for run in range(2):
        buffers.begin(run)
        model(torch.randn(4, 3))
    model[0].table.add_(1)
    with pytest.raises(RuntimeError, match=r"buffer 'table'.*first time"):
        buffers.restore(1)
