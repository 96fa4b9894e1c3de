"""Stages that begin where blocks do, and are shown by the model's modules."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pipedream2bw import _C, PipelineModule
from pipedream2bw.capture.capture import capture
from pipedream2bw.stages.boundaries import block_around, choose_boundaries, crossing_values
from tests.unit.stages.test_stage_boundaries import Block


class Doubling(Block):
    """Begins with a layer of almost no cost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2)


class Towers(nn.Module):
    """The last layer's little cost makes the fastest split cut off a block's first layer."""

    def __init__(self, depth: int = 4, *, traceable: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Doubling(512) for _ in range(depth)])
        self.last = nn.GELU()
        self.traceable = traceable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.traceable and x.shape[-1] != 512:
            raise ValueError("width")
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("how", ["fx", "export"])
def test_stages_begin_where_blocks_do_if_that_is_hardly_slower(how: str) -> None:
    model = Towers(traceable=how == "fx")
    program = capture(model, num_stages=2, example_args=(torch.randn(256, 512),))
    assert program.how == how
    _, first = choose_boundaries(program, 2)
    layers = [
        _C.LayerCost(forward=layer.forward_cost, input_grad=layer.backward_cost)
        for layer in program.layers
    ]
    anywhere = [True] * (len(layers) - 1)
    fastest = _C.split_stages(layers, 2, anywhere, crossing_values(program))
    assert fastest[1] > first
    assert (block_around(program, first - 1), block_around(program, first)) == (
        "blocks.1",
        "blocks.2",
    )
    assert choose_boundaries(program, 2, ["blocks.2"])[1] == first


def test_a_block_is_cut_where_whole_ones_would_be_slower() -> None:
    program = capture(Towers(3), num_stages=2, example_args=(torch.randn(256, 512),))
    _, first = choose_boundaries(program, 2)
    assert block_around(program, first - 1) == block_around(program, first) == "blocks.1"


def test_stages_of_an_exported_model_are_shown_by_its_modules() -> None:
    with PipelineModule(
        Towers(),
        nn.functional.mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.randn(256, 512),),
    ) as pipe:
        text = repr(pipe)
    assert re.search(r"stage 0: \d+ layers \(blocks.0 ... blocks.1\)", text)
    assert re.search(r"stage 1: \d+ layers \(blocks.2 ... last\)", text)
