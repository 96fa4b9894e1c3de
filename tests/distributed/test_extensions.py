"""Extensions on several ranks: all have the same ones, and what one refuses all raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks

X = torch.arange(32.0).reshape(8, 4).sin()


class Named(pd2.Extension):
    def __init__(self, name: str, saved: dict[str, Any] | None = None, refuses: str = "") -> None:
        self.name = name
        self._saved = saved
        self._refuses = refuses

    def saved(self) -> dict[str, Any] | None:
        return self._saved

    def check(self, session: Any, options: Any) -> None:
        if self._refuses:
            raise ValueError(self._refuses)


def make_optimizers(rank: int, world: int) -> list[str]:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=4, example_args=(X,), timeout=20.0
    )
    told = []
    for extensions in (
        [Named("one")] if rank else [],
        [Named(f"of_{rank}")],
        [Named("one", {} if rank else None)],
        [Named("one", refuses="not here" if rank else "")],
    ):
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
        try:
            pd2.PipelineOptimizer(sgd, extensions=extensions)
        except ValueError as error:
            told.append(str(error))
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    pipe.train_step(X, target=X)  # the pipeline is open
    opt.step()
    pipe.close()
    return told


def test_ranks_that_differ_are_told() -> None:
    for result in run_ranks(make_optimizers, 2, timeout=90):
        missing, names, saves, refused = result.value
        for text in (missing, names, saves):
            assert text.startswith("extensions must be the same on every rank, got rank 0: ")
        assert "'of_0'" in names
        assert "'of_1'" in names
        assert refused.endswith("not here")
