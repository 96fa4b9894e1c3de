"""A pipeline that ends while a save waits for its copies frees what it held, however it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.snapshot import HostMemory, Snapshot

X = torch.randn(8, 4)


class Trainer:
    """Which the pipeline refers to, and which refers to the pipeline."""

    def __init__(self) -> None:
        self.fails = False
        layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.pipe = pd2.PipelineModule(
            layers, self.loss, num_microbatches=2, example_args=(X[:2],), timeout=20.0
        )
        layers[0].__dict__["trainer"] = self
        self.opt = pd2.PipelineOptimizer(torch.optim.AdamW(self.pipe.parameters(), lr=0.1))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target)

    def train(self) -> None:
        self.pipe.train_step(X, target=X)
        self.opt.step()


def held(kind: type) -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is kind]


@pytest.mark.parametrize("end", ["close", "abort", "failure", "drop"])
@pytest.mark.parametrize("by_checkpointer", [False, True])
def test_a_pipeline_that_ends_while_a_save_waits_frees_what_it_held(
    end: str, by_checkpointer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    gc.freeze()
    deadline = time.monotonic() + 40
    trainer = Trainer()
    session, fault = weakref.ref(trainer.pipe.session), trainer.pipe.session.control.fault
    trainer.train()
    if by_checkpointer:
        ckpt = pd2.Checkpointer(tmp_path, trainer.pipe, trainer.opt, every=1, preempt=())
        ckpt.step()
        (saving,) = ckpt.under_way
        del ckpt
    else:
        saving = pd2.save(tmp_path, trainer.pipe, trainer.opt)
    if end == "drop":
        del trainer
        while not saving.done.done() and time.monotonic() < deadline:
            gc.collect()  # again: a stage may still call the loss, which is the trainer's
            time.sleep(0.01)
    elif end == "failure":
        fault.raise_(pd2.errors.StageError("on purpose", cause="on purpose"))
        with pytest.raises(pd2.errors.StageError, match="on purpose"):
            trainer.train()
    else:
        getattr(trainer.pipe, end)()
    with pytest.raises(RuntimeError, match="ended before batch 1 was copied"):
        saving.done.result(20)
    for thread in threading.enumerate():
        if thread.name == "pipedream2bw: checkpoint 1":
            thread.join(20)
    del saving
    assert by_checkpointer or held(Snapshot) == held(HostMemory) == []
    if end != "drop":
        del trainer
    while session() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert session() is None
    assert held(Snapshot) == held(HostMemory) == []
