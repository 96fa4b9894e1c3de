"""What other threads do with a stage's device while its executor records a graph there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2

DEVICE = "checked:0"
SECONDS = 30.0


class LongRecording(nn.Module):
    """A layer whose first recorded forward lasts until :meth:`end`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        begun, over = threading.Event(), threading.Event()
        self.wait, self.end = begun.wait, over.set

        def last() -> None:
            if not begun.is_set() and is_recorded_here():
                begun.set()
                if not over.wait(SECONDS):
                    raise TimeoutError("end() was not called")

        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.last()
        return y


def is_recorded_here() -> bool:
    """Whether this thread's work is recorded, where it may not wait for the device."""
    try:
        torch.accelerator.synchronize(DEVICE)
    except RuntimeError:
        return True
    return False


Pipeline = tuple[Any, LongRecording]


def make(*, graphs: bool) -> Pipeline:
    torch.manual_seed(1)
    long = LongRecording()
    pipe = pd2.PipelineModule(
        [nn.Linear(8, 8).to(DEVICE), long.to(DEVICE)],
        F.mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.zeros(4, 8, device=DEVICE),),
        graphs=graphs,
        timeout=60.0,
    )
    return pipe, long


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    pipe, long = make(graphs=True)
    with pipe:
        try:
            yield pipe, long
        finally:
            long.end()


def train(pipe: Any, opt: Any, batches: range) -> None:
    for number in batches:
        own = torch.Generator().manual_seed(number)
        x, target = torch.randn(2, 4, 8, generator=own)
        pipe.train_step(x.to(DEVICE), target=target.to(DEVICE))
        opt.step()


def test_a_timeline_begins(pipeline: Pipeline) -> None:
    pipe, long = pipeline
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    train(pipe, opt, range(2))  # the third microbatch is recorded
    assert long.wait(SECONDS)
    with pipe.timeline() as timeline:
        long.end()
        train(pipe, opt, range(2, 4))
    assert {row.batch for row in timeline.rows} >= {2, 3}
    assert all(row.end >= row.start > 0 for row in timeline.rows)
    assert pipe.graph_report()[1].forwards > 0


class Waiting(torch.optim.SGD):
    """Waits for something before each step of a stage.

    ``save()`` tries a step of its own in the thread that calls it, which has nothing to wait for.
    """

    until: Callable[[], object] = bool

    def step(self, closure: Any = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.until()
        super().step()


def test_a_version_is_made_and_copied(pipeline: Pipeline, tmp_path: Path) -> None:
    pipe, long = pipeline
    own = Waiting(pipe.parameters(), lr=0.1)
    own.until = lambda: long.wait(SECONDS)
    opt = pd2.PipelineOptimizer(own)
    train(pipe, opt, range(1))
    saving = pd2.save(tmp_path, pipe, opt)
    train(pipe, opt, range(1, 2))
    assert long.wait(SECONDS)
    saving.snapshot.result(SECONDS)  # while a forward of the next batch is being recorded
    long.end()
    saving.wait()
    assert pipe.graph_report()[1].forwards > 0

    states = []
    for path in (tmp_path, None):
        other, _ = make(graphs=False)
        with other:
            opt = pd2.PipelineOptimizer(Waiting(other.parameters(), lr=0.1))
            if path is None:
                train(other, opt, range(1))
            else:
                pd2.load(path, other, opt)
            other.flush()
            states.append({name: tensor.cpu() for name, tensor in other.state_dict().items()})
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
