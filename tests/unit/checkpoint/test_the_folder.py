"""A Checkpointer tries its folder when it is made, and notices another run that saves there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pipedream2bw as pd2

X = torch.randn(4, 8)


def made() -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loss = nn.functional.mse_loss
    pipe = pd2.PipelineModule(model, loss, num_stages=2, num_microbatches=2, example_args=(X,))
    return pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


def train(pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, ckpt: pd2.Checkpointer) -> None:
    pipe.train_step(X, target=X)
    opt.step()
    ckpt.step()


def wait(ckpt: pd2.Checkpointer) -> None:
    for saving in ckpt.under_way:
        saving.wait()


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    pipe, opt = made()
    with pipe:
        for place in ("file", "file/run"):
            with pytest.raises(OSError, match=f"{place}: no checkpoint can be written there"):
                pd2.Checkpointer(tmp_path / place, pipe, opt)
        with pd2.Checkpointer(tmp_path / "new" / "run", pipe, opt):
            assert list((tmp_path / "new" / "run").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr("pipedream2bw.checkpoint.folder.Folder.write", refuse)
    pipe, opt = made()
    with (
        pipe,
        pytest.warns(UserWarning, match="no checkpoint can be written there now: read-only"),
        pd2.Checkpointer(tmp_path, pipe, opt) as ckpt,
    ):
        assert ckpt.resume() == 0


def run_names(folder: Path) -> set[str]:
    return {path.name.split("-")[2][:8] for path in folder.iterdir()}


def test_a_run_that_finds_another_in_its_folder_stops(tmp_path: Path) -> None:
    """The other one has gone on from this one, and goes on."""
    (mine, opt), (other, other_opt) = made(), made()
    with mine, other:
        ckpt = pd2.Checkpointer(tmp_path, mine, opt, every=1, keep=2)
        train(mine, opt, ckpt)
        wait(ckpt)
        with pd2.Checkpointer(tmp_path, other, other_opt, every=1, keep=9) as others:
            assert others.resume() == 1
            for _ in range(2):
                train(other, other_opt, others)
            train(mine, opt, ckpt)  # which replaces nothing of the other one's
            wait(ckpt)
            assert len(list(tmp_path.glob("step-00000002-*"))) == 2
            with pytest.raises(OSError, match=f"{tmp_path}: another run saves there, too"):
                train(mine, opt, ckpt)
            for _ in range(2):
                train(other, other_opt, others)
            wait(others)
            pd2.save(tmp_path, other, other_opt).wait()  # is of the same run
            train(other, other_opt, others)
        ckpt.close()
        assert len(run_names(tmp_path)) == 2


def test_two_runs_that_begin_in_one_folder_stop(tmp_path: Path) -> None:
    runs = [(*each, pd2.Checkpointer(tmp_path, *each, every=1)) for each in (made(), made())]
    for _, _, ckpt in runs:
        ckpt.resume()
    told = 0
    for _ in range(3):
        for run in runs:
            try:
                train(*run)
                wait(run[2])
            except OSError:
                told += 1
    assert told >= 3
    for pipe, _, ckpt in runs:
        ckpt.close()
        pipe.close()


def test_a_run_that_goes_on_from_the_other_one_saves_again(tmp_path: Path) -> None:
    (mine, opt), (other, other_opt) = made(), made()
    with mine, other, pd2.Checkpointer(tmp_path, mine, opt, every=1) as ckpt:
        train(mine, opt, ckpt)
        wait(ckpt)
        pd2.save(tmp_path, other, other_opt).wait()
        train(mine, opt, ckpt)
        wait(ckpt)
        with pytest.raises(OSError, match="another run"):
            train(mine, opt, ckpt)
        assert ckpt.resume() == 2
        train(mine, opt, ckpt)
