"""Evaluations of microbatches that the caller has made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipedream2bw as pd2


class Centred(nn.Module):
    """Each row's output depends on its microbatch: a batch may not be split or joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).tanh()
        y = self.second(hidden - hidden.mean(dim=(0, 1)))
        return {"y": y, "spread": y.square().sum()}


@pytest.mark.parametrize("schedule", ["2bw", "chimera"])
def test_each_microbatch_gives_what_the_unsplit_model_gives(schedule: str) -> None:
    torch.manual_seed(0)
    model = Centred()
    inputs = [torch.randn(rows, length, 3) for rows, length in ((4, 2), (1, 5), (3, 1))]
    with torch.no_grad():
        want = [model(x) for x in inputs]
    with pd2.PipelineModule(
        model,
        lambda output, target: output["spread"],
        num_stages=2,
        num_microbatches=4,
        schedule=schedule,
        example_args=(inputs[0],),
    ) as pipe:
        pipe.eval()
        for some, expected in ((inputs, want), (inputs[1:2], want[1:2])):
            got = pipe(microbatches=[pd2.Microbatch(x) for x in some])
            assert len(got) == len(expected)
            for here, there in zip(got, expected, strict=True):
                assert all(torch.equal(here[name], there[name]) for name in there)
        with pytest.raises(ValueError, match="microbatches: 5, num_microbatches: 4"):
            pipe(microbatches=[pd2.Microbatch(x) for x in inputs + inputs[:2]])
        with pytest.raises(ValueError, match="microbatches: 0, at least 1"):
            pipe(microbatches=[])
        with pytest.raises(ValueError, match="a batch and microbatches= given"):
            pipe(inputs[0], microbatches=[pd2.Microbatch(inputs[0])])
