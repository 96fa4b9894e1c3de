"""Models whose forward takes keywords that it does not name, or registers hooks at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.runs.staged_run import assert_same, cut, run_staged, run_whole


class Divided(nn.Module):
    """As a language model is: branches on values keep torch.fx out, the rest goes to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == 3  # a branch, which torch.fx refuses
        hidden = self.first(x).tanh()
        return self.second(hidden).square().sum() / self.count(hidden, **kwargs)

    def count(self, hidden: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return number * 2


class Hooked(Divided):
    """Its first forward registers the hook that all need, as models of transformers do."""

    def count(self, hidden: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if not self.second._forward_hooks:
            self.second.register_forward_hook(lambda module, args, output: None)
        return number * 2


@pytest.mark.parametrize("build", [Divided, Hooked])
@pytest.mark.parametrize("dynamic_shapes", [False, True])
def test_keywords_that_no_signature_names_and_numbers_are_captured(
    build: type[Divided], dynamic_shapes: bool
) -> None:
    torch.manual_seed(0)
    model = build()

    def arguments(rows: int, number: int) -> dict[str, Any]:
        return {"x": torch.randn(rows, 3), "number": torch.tensor(number)}

    options: dict[str, Any] = {"replicated": ("number",), "dynamic_shapes": dynamic_shapes}
    captured, programs = cut(model, 2, kwargs=arguments(2, 3), prefer="export", **options)
    assert captured.how == "export"
    assert not model.second._forward_hooks, "tracing left its hooks in the caller's model"
    for rows, number in ((1, 7), (4, 5)):
        kwargs = arguments(rows, number)
        got = run_staged(model, captured, programs, kwargs=kwargs, loss=lambda output: output)
        assert_same(got, run_whole(model, kwargs=kwargs, loss=lambda output: output), exact=True)
