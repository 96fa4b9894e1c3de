"""A Checkpointer tries its folder when it is made, and notices another run that saves there."""

from __future__ import annotations

import logging
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


def test_another_run_in_the_folder_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (mine, opt), (other, other_opt) = made(), made()
    with mine, other:
        ckpt = pd2.Checkpointer(tmp_path, mine, opt, every=1, keep=2)
        train(mine, opt, ckpt)
        with pd2.Checkpointer(tmp_path, other, other_opt, every=1, keep=2) as others:
            others.resume()
            for _ in range(3):
                train(other, other_opt, others)
        assert "another run" not in caplog.text  # what was there when it was made is not another's
        with caplog.at_level(logging.WARNING, "pipedream2bw"), ckpt:
            for _ in range(5):
                train(mine, opt, ckpt)
        assert f"{tmp_path}: another run saves there, too" in caplog.text
