"""The study's emulation of late forwards trains as the pipeline does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from benchmarks.convergence.emulated import Emulated, late_forwards
from examples.gpt import GPT, next_token_loss

BATCHES, STAGES, MICROBATCHES, CONTEXT = 5, 3, 6, 16

Make = Callable[[Sequence[nn.Parameter]], list[torch.optim.Optimizer]]


class StockAdamW(torch.optim.AdamW):
    """Which the pipeline does not fuse: torch's square roots may be a bit off the nearest."""


def adamw(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [StockAdamW(parameters, lr=0.01)]


def muon(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    inner = [p for p in parameters if p.shape[0] != 256 and p.dim() == 2 and min(p.shape) > 8]
    of_muon = set(map(id, inner))
    rest = [p for p in parameters if id(p) not in of_muon]
    return [torch.optim.Muon(inner, lr=0.01, adjust_lr_fn="match_rms_adamw"), *adamw(rest)]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (BATCHES, 2 * MICROBATCHES, CONTEXT + 1), generator=drawn)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def by_pipeline(
    model: nn.Module, schedule: str, make: Make, *, feedback: float, warmup: int = 0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    with pd2.PipelineModule(
        model,
        next_token_loss,
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        warmup_batches=warmup,
        example_args=batches()[0][:1],
    ) as pipe:
        staleness = pd2.ErrorFeedback(feedback) if feedback else ()
        opt = pd2.PipelineOptimizer(*make(list(pipe.parameters())), staleness=staleness)
        losses = []
        for tokens, target in batches():
            losses.append(pipe.train_step(tokens, target=target))
            opt.step()
        return [float(loss) for loss in losses], copy.deepcopy(pipe.state_dict())


def by_emulation(
    model: nn.Module,
    schedule: str,
    make: Make,
    *,
    feedback: float,
    warmup: int = 0,
    merged: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    example = batches()[0][0]
    late = late_forwards(
        copy.deepcopy(model), next_token_loss, example, schedule, STAGES, MICROBATCHES
    )
    emulated = Emulated(
        model,
        next_token_loss,
        late,
        MICROBATCHES,
        feedback=feedback,
        warmup_batches=warmup,
        merged=merged,
    )
    optimizers = make(list(model.parameters()))
    losses = []
    for tokens, target in batches():
        losses.append(float(emulated.train_step(tokens, target)))
        emulated.step(optimizers)
    return losses, model.state_dict()


@pytest.mark.parametrize("make", [adamw, muon])
@pytest.mark.parametrize(
    ("schedule", "feedback", "warmup"),
    [
        *(("1f1b", 0.0, 0), ("2bw", 0.0, 0), ("2bw", 1.0, 0), ("2bw_fresh", 0.0, 0)),
        *(("2bw_fresh", 1.0, 0), ("2bw_fresh", 0.5, 0), ("2bw", 1.5, 2), ("2bw_fresh", 0.0, 3)),
    ],
)
def test_microbatch_by_microbatch_to_the_bit(
    schedule: str, feedback: float, warmup: int, make: Make
) -> None:
    options: dict[str, Any] = {"feedback": feedback, "warmup": warmup}
    torch.manual_seed(0)
    model = GPT(num_layers=2, width=16, num_heads=2, context=CONTEXT)
    nn.init.normal_(model.position)  # not zeros, of which all versions are alike
    merged = by_emulation(copy.deepcopy(model), schedule, make, **options, merged=True)
    losses, state = by_emulation(copy.deepcopy(model), schedule, make, **options)
    want_losses, want = by_pipeline(model, schedule, make, **options)
    assert losses == want_losses
    for name, value in want.items():
        assert torch.equal(state[name], value), name
    assert merged[0] == pytest.approx(losses, rel=1e-5)
