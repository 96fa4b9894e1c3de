"""What is loaded while a save is under way does not get into its checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.snapshot import HostMemory
from tests.unit.checkpoint.conftest import Hangs
from tests.unit.checkpoint.trained_run import Trained, make_model, sgd


def trained(parameters: Any) -> list[torch.optim.Optimizer]:
    return sgd([p for p in parameters if p.requires_grad])


@pytest.fixture
def run(start_trained: Callable[..., Trained]) -> Trained:
    """Whose first layer is frozen."""
    model = make_model()
    model[0].requires_grad_(False)
    run = start_trained(model=model, make=trained)
    run.train(0, 2)
    run.pipe.flush()
    return run


def state(run: Trained) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.pipe.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("way", ["load_state_dict", "load_checkpoint", "load"])
def test_a_load_waits_for_a_save_that_reads_frozen_weights(
    way: str, run: Trained, hang: Hangs, tmp_path: Path
) -> None:
    before = state(run)
    others = {name: value + 1 for name, value in before.items()}
    run.pipe.load_state_dict(others)
    torch.save(others, tmp_path / "others.pt")
    pd2.save(tmp_path / "others", run.pipe, run.opt).wait()
    run.pipe.load_state_dict(before)

    answers = hang("make")
    saving = pd2.save(tmp_path / "run", run.pipe, run.opt)
    timer = threading.Timer(0.5, answers.set)
    timer.start()
    if way == "load_state_dict":
        run.pipe.load_state_dict(others)
    elif way == "load_checkpoint":
        run.pipe.load_checkpoint(tmp_path / "others.pt")
    else:
        pd2.load(tmp_path / "others", run.pipe, run.opt)
    timer.join()
    saving.wait()
    assert same(state(run), others)
    pd2.load(tmp_path / "run", run.pipe, run.opt)
    assert same(state(run), before)


def test_a_load_gives_up_where_the_save_hangs_and_changes_nothing(
    run: Trained, hang: Hangs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(run)
    answers = hang("make")
    saving = pd2.save(tmp_path, run.pipe, run.opt)
    monkeypatch.setattr(run.pipe.session.control, "timeout", 1.0)
    with pytest.raises(TimeoutError, match=r"a save under way has not ended within 0.5 s"):
        run.pipe.load_state_dict({name: value + 1 for name, value in before.items()})
    assert same(state(run), before)
    answers.set()
    saving.wait(20)
    pd2.load(tmp_path, run.pipe, run.opt)
    assert same(state(run), before)
    run.train(2, 3)


def test_a_load_waits_for_copies_alone_without_frozen_weights(
    start_trained: Callable[..., Trained],
    hang: Hangs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = HostMemory.copy

    def slowly(self: HostMemory, *args: Any) -> Any:
        time.sleep(0.2)
        return copy(self, *args)

    monkeypatch.setattr(HostMemory, "copy", slowly)
    run = start_trained()
    run.train(0, 2)
    run.pipe.flush()
    before = state(run)
    answers = hang("make")
    saving = pd2.save(tmp_path, run.pipe, run.opt)
    run.pipe.load_state_dict({name: value + 1 for name, value in before.items()})
    assert not saving.done.done()
    answers.set()
    saving.wait(20)
    pd2.load(tmp_path, run.pipe, run.opt)
    assert same(state(run), before)
