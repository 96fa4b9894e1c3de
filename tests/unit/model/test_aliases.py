"""Whatever shares memory with a parameter would keep its first value: it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.runs.trajectory import check_task, make_pipeline
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.parameter_kinds import draw

Hold = Callable[[nn.Module, nn.Parameter], Any]


class Holds(nn.Module):
    """Computes with what ``hold`` has made of its weight."""

    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.held = hold(self, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.held if isinstance(self.held, torch.Tensor) else self.weight
        return F.linear(x, held.to(x.dtype), self.bias).tanh()


class Opaque(Holds):
    """Called as a whole: nobody looks into its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().float().sum()) > 1e9:
            return x
        return super().forward(x)


VIEWS: dict[str, tuple[Hold, str]] = {
    "data": (lambda module, weight: weight.data, "attribute 0.held"),
    "turned": (lambda module, weight: weight.detach().t(), "attribute 0.held"),
    "with history": (lambda module, weight: weight.t(), "attribute 0.held"),
    "a part": (lambda module, weight: weight.data[2:4], "attribute 0.held"),
    "in a list": (lambda module, weight: [1, (weight.data,)], "attribute 0.held"),
    "in a dict": (lambda module, weight: {"weight": weight.detach()}, "attribute 0.held"),
    "buffer": (
        lambda module, weight: module.register_buffer("kept", weight.data),
        "buffer 0.kept",
    ),
}


@pytest.mark.parametrize("precision", [None, "bf16", "fp32"])
@pytest.mark.parametrize("kind", [Holds, Opaque])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_parameter_is_refused(name: str, kind: type[Holds], precision: Any) -> None:
    hold, where = VIEWS[name]
    task = Task(lambda: nn.Sequential(kind(hold), nn.Linear(WIDTH, WIDTH)), draw)
    with pytest.raises(ValueError, match=f"{where} is a view of the memory of parameter 0.weight"):
        make_pipeline(task, 2, 2, draw(2), precision=precision)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_view_that_a_closure_holds_is_refused(precision: Any) -> None:
    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
            held = self.layers[0].weight.detach()
            self.scaled = lambda x: x * held[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers[1](self.scaled(self.layers[0](x)).to(x.dtype))
            return result

    with pytest.raises(ValueError, match=r"parameter layers.0.weight would be a constant"):
        make_pipeline(Task(Closed, draw), 2, 2, draw(2), precision=precision)


def test_neighbours_in_one_memory_and_copies_are_none() -> None:
    def halves(module: nn.Module, weight: nn.Parameter) -> list[torch.Tensor]:
        both = torch.randn(2, WIDTH, WIDTH)
        weight.data = both[0]
        return [both[1], both[0].clone()]

    check_task(Task(lambda: nn.Sequential(Holds(halves), nn.Linear(WIDTH, WIDTH)), draw), 2, 2, [4])


def test_parameters_in_plain_lists_are_none() -> None:
    def itself(module: nn.Module, weight: nn.Parameter) -> list[nn.Parameter]:
        return [weight]

    for task in (Task(lambda: nn.Sequential(Holds(itself), nn.Tanh()), draw), TASKS["lstm"]):
        check_task(task, 2, 2, [4, 4])
