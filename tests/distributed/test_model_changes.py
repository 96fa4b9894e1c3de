"""What scripts change of a model and an optimizer in processes: alike on all ranks, or refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.samples.changed_models import CHANGES, batches, model_of, unsplit_losses

M, NUM_BATCHES, AT = 2, 4, 2
KINDS = ("number of the model", "number", "config", "hook", "model in eval mode", "statistics")
HOW: dict[str, Any] = {"opaque": [False, True, False, True], "is_traced": True}


def train(kind: str, ranks: tuple[int, ...], rank: int, **options: Any) -> list[float] | str:
    """Losses, or the error's text; ``ranks`` are those that make the change."""
    model, data = model_of(**HOW), batches(NUM_BATCHES)
    with pd2.PipelineModule(
        model,
        mse_loss,
        num_stages=2,
        num_microbatches=M,
        example_args=data[0][:1],
        timeout=60.0,
        **options,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        losses = []
        try:
            for t, (x, y) in enumerate(data):
                if t == AT:
                    pipe.flush()
                    for part in model.parts if rank in ranks else ():
                        CHANGES[kind](part, model)
                losses.append(pipe.train_step(x, target=y))
                optimizer.step()
        except ValueError as error:
            return str(error)
        return [float(loss) for loss in losses]


def read_elsewhere(rank: int) -> dict[str, str]:
    """What is said of parameters of a stage that another process has."""
    model, data = model_of(**HOW), batches(1)
    said = {}

    def make() -> pd2.PipelineModule:
        return pd2.PipelineModule(
            model, mse_loss, num_stages=2, num_microbatches=M, example_args=data[0][:1]
        )

    with make() as pipe:
        own = {name for name, _ in pipe.named_parameters()}
        for name, parameter in model.named_parameters():
            if name not in own:
                assert parameter.numel() == parameter.shape.numel()
                with pytest.raises(RuntimeError) as caught:
                    parameter.sum()
                said["a value"] = str(caught.value)
    with pytest.raises(ValueError, match="make the model anew") as again:
        make()
    return {**said, "again": str(again.value)}


class Fails(nn.Linear):
    """Rank 1 fails where the other one waits for it, as in a collective of the model's own."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and dist.get_rank() == 1:
            raise ArithmeticError("a bad row")
        if self.fails:
            time.sleep(3.0)
        return super().forward(x)


def capture_fails(rank: int) -> str:
    """What each rank is told where a change has the model captured, and one rank fails in it."""
    model = nn.Sequential(Fails(4, 4), Fails(4, 4))
    x = torch.ones(2, 4)
    pipe = pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=M, example_args=(x,), timeout=1.0
    )
    for part in model:
        part.fails = True
    with pytest.raises(pd2.errors.StageError) as caught:
        pipe.train_step(x, target=x)
    return str(caught.value)


def work(rank: int, world_size: int) -> dict[str, Any]:
    return {
        **{kind: train(kind, (0, 1), rank) for kind in KINDS},
        "on one rank": train("number", (1,), rank),
        "elsewhere": read_elsewhere(rank),
        "capture fails": capture_fails(rank),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [result.value for result in run_ranks(work, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_on_all_ranks_is_followed(results: list[dict[str, Any]], kind: str) -> None:
    model = model_of(**HOW)

    def change(t: int) -> None:
        for part in model.parts if t == AT else ():
            CHANGES[kind](part, model)

    want = unsplit_losses(model, batches(NUM_BATCHES), change, m=M, has_delay=True)
    for result in results:
        assert result[kind] == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_change_on_one_rank_is_refused_on_all(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "the model on rank 1 has other attributes" in result["on one rank"]


@pytest.mark.slow
def test_parameters_elsewhere_tell_that_they_have_no_values(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert "whose values are not here" in result["elsewhere"]["a value"]
        assert "a pipeline had it in another process" in result["elsewhere"]["again"]


@pytest.mark.slow
def test_a_rank_that_fails_alone_where_the_model_is_captured_says_why(
    results: list[dict[str, Any]],
) -> None:
    waiting, failing = (result["capture fails"] for result in results)
    assert "a rank was lost while agreeing" in waiting
    assert "This rank had failed before" in failing
    assert "ArithmeticError: a bad row" in failing
