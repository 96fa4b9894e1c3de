"""What modules give as ``get_extra_state`` is of the moment between two batches that is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.saved import saved
from tests.unit.checkpoint.trained_run import WIDTH, Trained, make_model


class Counts(nn.Linear):
    """Scales by how often it has run in training, as quantizers and routers count."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept: dict[str, Any] = {"calls": 0, "sum": torch.zeros(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.kept["calls"] += 1
            self.kept["sum"] += 0.5
            time.sleep(0.02)  # so that batches are under way when they are saved
        return super().forward(x) * (1 + 0.01 * self.kept["calls"] + self.kept["sum"][0])

    def get_extra_state(self) -> dict[str, Any]:
        return self.kept

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept["calls"] = state["calls"]
        self.kept["sum"].copy_(state["sum"])


def counting(seed: int) -> nn.Sequential:
    model = make_model(seed)
    assert isinstance(model, nn.Sequential)
    return model.append(Counts()).insert(0, Counts())


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("is_drained", [False, True])
def test_a_state_that_forwards_change_is_that_of_the_batch(
    schedule: str, is_drained: bool, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    model = counting(1)
    run = start_trained(model=model, schedule=schedule)
    captured = [model[number].kept["calls"] for number in (0, -1)]
    run.train(0, 3)
    if is_drained:
        run.pipe.flush()
    saving = pd2.save(tmp_path, run.pipe, run.opt)
    run.train(3, 6)
    run.pipe.flush()
    saving.done.result(20)
    other = counting(5)
    resumed = start_trained(model=other, schedule=schedule, num_stages=3)
    pd2.load(tmp_path, resumed.pipe, resumed.opt)
    for number, before in zip((0, -1), captured, strict=True):
        assert other[number].kept["calls"] == before + 3 * 4
        assert other[number].kept["sum"].tolist() == [0.5 * (before + 3 * 4)] * 2
    resumed.train(3, 6)
    assert [float(loss) for loss in resumed.losses] == [float(loss) for loss in run.losses[3:]]
    resumed.pipe.flush()
    for want, got in zip(run.pipe.parameters(), resumed.pipe.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_state_that_cannot_be_saved_is_refused_at_once_or_fails_the_save(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    model = counting(1)
    run = start_trained(model=model)
    model[-1].kept["bad"] = {1}
    refused = r"get_extra_state of the module\.13\.bad: builtins.set given"
    with pytest.raises(TypeError, match=refused):
        pd2.Checkpointer(tmp_path, run.pipe, run.opt, preempt=())
    del model[-1].kept["bad"]
    ckpt = pd2.Checkpointer(tmp_path, run.pipe, run.opt, every=1, preempt=())
    model[-1].kept["bad"] = {1}
    run.train(0, 1)
    ckpt.step()
    with pytest.warns(UserWarning, match=r"checkpoint 1 was not saved.*model_state\.13\.bad"):
        ckpt.close()
    del model[-1].kept["bad"]
    run.train(1, 2)
    ckpt.step()
    ckpt.close()
    assert list(tmp_path.iterdir()) == [saved(tmp_path, 2)]
