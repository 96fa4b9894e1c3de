"""Lengths that change from one microbatch to the next, where torch.export captures the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.references.oracle import Batch, ReadyMade
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, make_pipeline, sgd
from tests.samples.models import TASKS, VOCABULARY, WIDTH

LONGEST = 32


class Windowed(nn.Module):
    """Looks at lengths, which torch.fx cannot trace; positions and a mask follow from them."""

    def __init__(self, window: int = 1) -> None:
        super().__init__()
        self.window = window
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length % self.window:
            tokens = F.pad(tokens, (0, self.window - length % self.window))
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x).tanh()
            x = x - x.view(x.shape[0], -1, self.window, WIDTH).mean((1, 2))[:, None]
        x = x[:, :length] * mask[:, :, None]
        return x.sum(1) / mask.sum(1, keepdim=True)


def batch_of(rows: int, length: int) -> Batch:
    mask = torch.ones(rows, length)
    mask[0, length // 2 + 1 :] = 0
    return Batch((torch.randint(VOCABULARY, (rows, length)), mask), torch.randn(rows, WIDTH))


@pytest.mark.parametrize("window", [1, 4])
def test_lengths_that_the_model_leaves_open_may_change(window: int) -> None:
    task = dataclasses.replace(TASKS["mlp"], build=lambda: Windowed(window))
    torch.manual_seed(3)
    lists = [[8, 8], [12, 8, 16], [28], [8, 24, 20, 12], [16, 16]]
    batches: list[Any] = [ReadyMade([batch_of(2, length) for length in each]) for each in lists]
    batches += [batch_of(8, 8), batch_of(3, 12), batch_of(4, 24)]
    got = by_pipeline(task, batches, 2, 4, example=batch_of(3, 8), dynamic_shapes=True)
    assert_same(got, by_oracle(task, batches, 4))


@pytest.mark.parametrize(
    ("window", "dynamic_shapes", "length", "text"),
    [
        (1, False, 12, "tokens: 12 in dimension 1, when captured: 8: torch.export has captured"),
        (4, True, 7, r"shapes \[\[2, 7\], \[2, 7\]\] of the arguments: valid only if .*Mod"),
    ],
)
def test_lengths_for_which_the_model_was_not_captured_are_refused(
    window: int, dynamic_shapes: bool, length: int, text: str
) -> None:
    task = dataclasses.replace(TASKS["mlp"], build=lambda: Windowed(window))
    options: dict[str, Any] = {"dynamic_shapes": dynamic_shapes}
    with make_pipeline(task, 2, 4, batch_of(8, 8), **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        wrong = batch_of(8, length)
        with pytest.raises(ValueError, match=text):
            pipe.train_step(*wrong.args, target=wrong.target)
        with pytest.raises(ValueError, match=text), torch.no_grad():
            pipe(*wrong.args)
        right = batch_of(8, 8)
        assert float(pipe.train_step(*right.args, target=right.target)) > 0
        opt.step()


class Comparing(Windowed):
    """Asks whether rows and length are the same, as code that guesses at layouts does."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if tokens.shape[0] == tokens.shape[1]:
            tokens = tokens.clone()
        return super().forward(tokens, mask)


def test_as_many_rows_as_another_size_are_not_refused() -> None:
    task = dataclasses.replace(TASKS["mlp"], build=Comparing)
    batches = [batch_of(32, 8), batch_of(8, 8), batch_of(9, 8)]
    got = by_pipeline(task, batches, 2, 4, example=batch_of(3, 8))
    assert_same(got, by_oracle(task, batches, 4))


def test_a_mask_of_another_length_is_refused() -> None:
    task = dataclasses.replace(TASKS["mlp"], build=Windowed)
    with make_pipeline(task, 2, 4, batch_of(8, 8), dynamic_shapes=True) as pipe:
        (tokens, _), target, _ = batch_of(8, 8)
        (_, mask), _, _ = batch_of(8, 4)
        with pytest.raises(ValueError, match=r"mask: 4 in dimension 1, another one .*equal: 8"):
            pipe.train_step(tokens, mask, target=target)


def test_it_is_a_bool() -> None:
    with pytest.raises(ValueError, match="dynamic_shapes: 'auto', known: True, False"):
        make_pipeline(TASKS["mlp"], 2, 4, batch_of(8, 8), dynamic_shapes="auto")
