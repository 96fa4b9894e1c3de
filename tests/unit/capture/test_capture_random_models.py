"""Random graphs of layers, cut at random places, still compute what they compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import nn

from pipedream2bw.capture.capture import capture
from pipedream2bw.stages.cut import split_into_stages
from tests.runs.staged_run import assert_same, check_wiring, run_staged, run_whole, sum_of_squares

WIDTH = 6


@dataclasses.dataclass(frozen=True)
class Step:
    kind: str
    sources: tuple[int, ...]  # earlier values; 0 and 1 are the model's inputs


class RandomModel(nn.Module):
    """Runs a list of steps; ``untraceable`` makes symbolic tracing fail, so that it is exported."""

    def __init__(self, steps: list[Step], outputs: list[int], untraceable: bool) -> None:
        super().__init__()
        self.steps = steps
        self.outputs = outputs
        self.untraceable = untraceable
        self.layers = nn.ModuleDict()
        for index, step in enumerate(steps):
            if step.kind == "linear":
                self.layers[str(index)] = nn.Linear(WIDTH, WIDTH)
            elif step.kind == "norm":
                self.layers[str(index)] = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.untraceable and x.shape[-1] != WIDTH:
            raise ValueError("width")
        values: list[Any] = [x, y]
        for index, step in enumerate(self.steps):
            taken = [values[source] for source in step.sources]
            values.append(self._step(index, step.kind, *taken))
        return {str(i): values[i] for i in self.outputs}

    def _step(self, index: int, kind: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if kind in ("linear", "norm"):
            return self.layers[str(index)](a)
        if kind == "add":
            return a + b
        if kind == "mul":
            return torch.tanh(a) * b
        if kind == "dropout":
            return nn.functional.dropout(a, 0.3, self.training)
        if kind == "mean":
            return a - b.mean(0, keepdim=True)
        if kind == "in place":
            return torch.relu_(a * 1.5) + b
        left, right = torch.cat([a, b], -1).chunk(2, -1)
        return left.reshape(a.shape[0], -1) - right

    def extra_repr(self) -> str:
        return f"{self.steps}, outputs={self.outputs}"


KINDS = ["linear", "linear", "norm", "add", "mul", "dropout", "mean", "in place", "chunk"]


@st.composite
def models(draw: st.DrawFn) -> RandomModel:
    steps = [Step("linear", (0, 1))]
    for index in range(1, draw(st.integers(2, 9))):
        # Mostly recent values, sometimes far ones: chains with skips.
        near = st.integers(max(0, index - 1), index + 1)
        source = st.one_of(near, st.integers(0, index + 1))
        steps.append(Step(draw(st.sampled_from(KINDS)), (draw(source), draw(source))))
    last = len(steps) + 1
    # The first layer's value is always given, so that there is something to differentiate.
    outputs = sorted({2, last, draw(st.integers(2, last))})
    untraceable = draw(st.sampled_from([False, False, False, True]))
    return RandomModel(steps, outputs, untraceable)


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(data=st.data(), training=st.booleans())
def test_random_models_cut_at_random_places(data: st.DataObject, training: bool) -> None:
    model = data.draw(models()).train(training)
    args = (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    captured = capture(model, num_stages=1, example_args=args)
    num_layers = len(captured.layers)
    cuts = st.lists(st.integers(1, max(1, num_layers - 1)), max_size=4, unique=True)
    boundaries = [0, *sorted(cut for cut in data.draw(cuts) if cut < num_layers)]
    programs = split_into_stages(captured, boundaries)
    check_wiring(captured, programs)
    torch.manual_seed(3)
    want = run_whole(model, args, loss=sum_of_squares)
    torch.manual_seed(3)
    got = run_staged(model, captured, programs, args, loss=sum_of_squares)
    torch.testing.assert_close(got.output, want.output, rtol=0, atol=0)
    # Gradients of a value with three or more consumers may add up in another order.
    assert_same(got, want, exact=False)
