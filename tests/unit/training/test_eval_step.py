"""``eval_step``: a train_step's loss and metrics, without the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.errors import StageError
from tests.runs.evaluating import check


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe", "2bw_fresh"])
def test_it_gives_a_train_steps_numbers_and_changes_nothing(schedule: str) -> None:
    check(schedule, num_stages=2)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"loss_fn": total, "loss_reduction": "sum"}),
        ("1f1b", {"loss_fn": total, "loss_reduction": "sum", "normalizer": True}),
        ("1f1b", {"loss_fn": total, "loss_reduction": "sum", "normalizer": len}),
        ("1f1b", {"precision": "bf16"}),
        ("1f1b", {"autocast": torch.bfloat16}),
        ("2bw", {"num_microbatches": 8, "num_stages": 3, "recompute": True}),
        ("pipedream", {"num_microbatches": 1}),
        ("interleaved", {"num_stages": 4, "stages_per_rank": 2}),
    ],
)
def test_options_mean_the_same(schedule: str, options: dict[str, Any]) -> None:
    check(schedule, **{"num_stages": 2, **options})


def test_two_pipelines_evaluate_on_the_first() -> None:
    check("chimera", rows=(8, 7, 3), num_stages=2)


X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = pd2.add_loss(self.norm(self.drop(self.first(x))), x.square().mean())
        return y


def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled() and target.sum() == 0:
        raise ZeroDivisionError("on purpose")
    return nn.functional.mse_loss(output, target)


def made(model: nn.Module, loss_fn: Any = failing, **options: Any) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        model, loss_fn, num_stages=2, num_microbatches=4, example_args=(X,), **options
    )


def test_it_is_the_loss_of_the_model_in_its_mode() -> None:
    torch.manual_seed(0)
    model = Noisy()
    with torch.no_grad():
        model.eval()
        parts = zip(X.chunk(4), Y.chunk(4), strict=True)
        wanted = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in parts]).mean().item()
        model.train()
    with made(model) as pipe:
        with pytest.raises(RuntimeError, match=r"eval_step\(\) computes no gradients"):
            pipe.eval_step(X, target=Y)
        pipe.eval()
        assert float(pipe.eval_step(X, target=Y)) == pytest.approx(wanted, rel=1e-6)
        tracked = pipe.state_dict()["norm.running_mean"].clone()
        pipe.eval_step(X, target=Y)
        assert torch.equal(pipe.state_dict()["norm.running_mean"], tracked)
        pipe.train()
        with torch.no_grad():
            pipe.eval_step(X, target=Y)  # as calling the pipeline does
        assert not torch.equal(pipe.state_dict()["norm.running_mean"], tracked)


def test_microbatches_and_mistakes() -> None:
    with made(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) as pipe:
        pipe.eval()
        ready = [pd2.Microbatch(X[:2], target=Y[:2]), pd2.Microbatch(X[2:], target=Y[2:])]
        number = pipe.eval_step(microbatches=ready)
        with torch.no_grad():
            assert float(number) == pytest.approx(float(nn.functional.mse_loss(pipe(X), Y)))
        with pytest.raises(ValueError, match=r"rows of the arguments: 8, rows of the target: 7"):
            pipe.eval_step(X, target=Y[:7])
        with pytest.raises(ValueError, match="rows of the batch: 0, at least 1"):
            pipe.eval_step(X[:0], target=Y[:0])
        with pytest.raises(ValueError, match="normalizer: 3 given"):
            pipe.eval_step(X, target=Y, normalizer=3)
        with pytest.raises(StageError, match=r"on purpose.* evaluation was discarded"):
            pipe.eval_step(X, target=Y * 0)
        with pytest.raises(StageError, match="loss_fn with target None"):
            pipe.eval_step(X)
        assert float(pipe.eval_step(microbatches=ready)) == float(number)
