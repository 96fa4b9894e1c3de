"""What several layers keep, and parameters that several use, count on each of their stages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import pipedream2bw as pd2


class Residual(nn.Module):
    """ReLU keeps what it gives, and so do the layers that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = (x + second(first(x).relu())).relu()
        return x


def test_stages_keep_what_others_keep_too() -> None:
    """A plan's bytes are the pipeline's, wherever the model is cut."""
    x, target = torch.randn(16, 32), torch.randn(16, 32)
    torch.manual_seed(1)
    model = Residual()
    profile = pd2.profile(
        model,
        nn.functional.mse_loss,
        example_args=(x[:4],),
        target=target[:4],
        microbatch_rows=(4,),
        seconds=0.01,
    )
    sums = 0
    for cut in (i + 1 for i, layer in enumerate(profile.layers) if layer.can_cut_after):
        # All work is in the layers around the cut, which puts it there.
        work = tuple(1.0 if i in (cut - 1, cut) else 0.0 for i in range(len(profile.layers)))
        (found,) = profile.microbatches
        there = dataclasses.replace(
            profile, microbatches=(dataclasses.replace(found, forward=work, input_grad=work),)
        )
        plan = pd2.plan(
            there,
            devices=2,
            memory="1GiB",
            batch=16,
            schedules=["2bw"],
            recompute=["none"],
            optimizer="sgd",
            num_stages=2,
            width=1,
        )
        assert plan.stages[1].layers[0] == cut
        pipe = pd2.PipelineModule(
            model, nn.functional.mse_loss, plan=plan, example_args=(x[:4],), timeout=60.0
        )
        with pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            for _ in range(3):
                pipe.train_step(x, target=target)
                optimizer.step()
            pipe.flush()
            report = pipe.memory_report()
        for stage, memory in report.items():
            assert plan.stages[stage].peak_bytes == memory.total - memory.padding, (cut, stage)
        sums += any(held[0] < cut <= held[-1] for _, held in found.kept)
    assert sums > 3


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.inner = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.embedding(x)).tanh())
        return logits


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_stage_has_one_copy_of_a_tied_weight(num_stages: int, frozen: bool) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    torch.manual_seed(1)
    model = TiedEnds()
    model.embedding.weight.requires_grad_(not frozen)
    x = torch.randint(64, (16, 8))
    profile = pd2.profile(
        model, loss_fn, example_args=(x[:4],), target=x[:4], microbatch_rows=(4,), seconds=0.01
    )
    (shared,) = profile.shared_parameters
    tied = 64 * 32 * 4
    assert (shared.parameter_bytes, shared.trained_bytes) == (tied, 0 if frozen else tied)
    assert shared.layers[0] == 0
    once = sum(layer.parameter_bytes for layer in profile.layers)
    assert once == sum(parameter.nbytes for parameter in model.parameters())
    plan = pd2.plan(
        profile,
        devices=num_stages,
        memory="1GiB",
        batch=16,
        schedules=["2bw"],
        recompute=["none"],
        optimizer="sgd",
        num_stages=num_stages,
        width=1,
    )
    with pd2.PipelineModule(model, loss_fn, plan=plan, example_args=(x[:4],), timeout=60.0) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(3):
            pipe.train_step(x, target=x)
            optimizer.step()
        pipe.flush()
        for stage, memory in pipe.memory_report().items():
            # In one process stages share what is frozen.
            elsewhere = tied if frozen and stage == 1 else 0
            assert plan.stages[stage].peak_bytes == memory.total - memory.padding + elsewhere, stage
