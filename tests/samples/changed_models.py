"""Models of random parts, and what a script may change of them between two batches.

Every part computes with something of Python: an attribute, an object, a global, a closure's
variable. A change is done to the model of a pipeline and to its copy that is trained unsplit.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations

WIDTH = 4
FACTOR = 1.0
SETTINGS = types.SimpleNamespace(factor=1.0)


class Part(nn.Module):
    """A linear layer between numbers; one that ``is_opaque`` is called as a whole by stages."""

    of_class = 1.0

    def __init__(self, *, is_opaque: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.is_opaque = is_opaque
        self.number = 1.0
        self.is_on = True
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))
        self.items = {"factor": 1.0}
        self.sequence = [1.0, 1.0]
        self.skipped = {"nothing"}
        self.function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.plain = torch.ones(WIDTH)
        self.unread = 0
        self.closure, self.change_closure = _closure()

    def factor(self) -> float:
        return self.number * self.of_class

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_opaque and float(x.detach().sum()) > 1e9:
            return x
        self.calls.add_(1)
        x = self.norm(self.layer(x)) * self.factor() + self.offset
        if self.is_on and "tanh" not in self.skipped:
            x = self.function(x)
        x = x * self.config.inner.factor * self.items["factor"] * self.sequence[1]
        if self.training:
            x = x * 1.5
        result: torch.Tensor = x * self.plain * self.closure() * FACTOR * SETTINGS.factor
        return result


def _closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    value = 1.0

    def change(new: float) -> None:
        nonlocal value
        value = new

    return lambda: value, change


class Traced(nn.Module):
    """Parts that the model's own forward calls, with a number of its own."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.number = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x) * self.number
        return x


def model_of(opaque: list[bool], *, is_traced: bool, seed: int = 0) -> nn.Module:
    """A model of some parts; the global numbers are what they were."""
    global FACTOR
    FACTOR, SETTINGS.factor, Part.of_class = 1.0, 1.0, 1.0
    torch.manual_seed(seed)
    parts = [Part(is_opaque=each) for each in opaque]
    return Traced(parts) if is_traced else nn.Sequential(*parts)


def _assign(name: str, value: Any) -> Callable[[Part, nn.Module], None]:
    return lambda part, model: setattr(part, name, value)


def _call(change: Callable[[Part, nn.Module], Any]) -> Callable[[Part, nn.Module], None]:
    def do(part: Part, model: nn.Module) -> None:
        change(part, model)

    return do


def _global(part: Part, model: nn.Module) -> None:
    global FACTOR
    FACTOR = 0.5


@torch.no_grad()
def _values(part: Part, model: nn.Module) -> None:
    part.layer.weight.mul_(0.5)


def _hook(part: Part, model: nn.Module) -> None:
    part.norm.register_forward_hook(lambda module, args, output: output * 0.5)


def _last_part(part: Part, model: nn.Module) -> None:
    model.extra = nn.Linear(WIDTH, WIDTH)


def _forward(part: Part, model: nn.Module) -> None:
    part.forward = types.MethodType(lambda self, x: torch.sin(self.layer(x)), part)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Part, nn.Module], None]] = {
    "nothing": lambda part, model: None,
    "number": _assign("number", 0.5),
    "number of the model": lambda part, model: setattr(model, "number", 0.5),
    "switch": _assign("is_on", False),
    "function": _assign("function", torch.relu),
    "plain tensor": _assign("plain", torch.full((WIDTH,), 0.5)),
    "written plain tensor": _call(lambda part, model: part.plain.fill_(0.5)),
    "unread": _assign("unread", 1),
    "config": lambda part, model: setattr(part.config.inner, "factor", 0.5),
    "another config": _assign(
        "config", types.SimpleNamespace(inner=types.SimpleNamespace(factor=0.5))
    ),
    "item": lambda part, model: part.items.update(factor=0.5),
    "element": lambda part, model: part.sequence.__setitem__(1, 0.5),
    "set": lambda part, model: part.skipped.add("tanh"),
    "closure": lambda part, model: part.change_closure(0.5),
    "global": _global,
    "settings": lambda part, model: setattr(SETTINGS, "factor", 0.5),
    "class": lambda part, model: setattr(Part, "of_class", 0.5),
    "momentum": lambda part, model: setattr(part.norm, "momentum", 0.5),
    "part in eval mode": _call(lambda part, model: part.eval()),
    "norm in eval mode": _call(lambda part, model: part.norm.eval()),
    "model in eval mode": _call(lambda part, model: model.eval()),
    "buffer": _assign("offset", torch.ones(WIDTH)),
    "written buffer": _call(lambda part, model: part.offset.fill_(0.5)),
    "statistics": _call(lambda part, model: part.norm.running_var.fill_(2.0)),
    "replaced module": _assign("norm", nn.Identity()),
    "new module": _last_part,
    "parameter": lambda part, model: setattr(part.layer, "weight", nn.Parameter(torch.eye(WIDTH))),
    "data of a parameter": lambda part, model: setattr(part.layer.weight, "data", torch.eye(WIDTH)),
    "values of a parameter": _values,
    "frozen": _call(lambda part, model: part.layer.requires_grad_(False)),
    "parametrized": _call(lambda part, model: parametrizations.weight_norm(part.layer)),
    "hook": _hook,
    "forward": _forward,
}


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Arguments and targets, six rows each, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator))
        for _ in range(number)
    ]


def unsplit_losses(
    model: nn.Module, batches: list[Any], change: Callable[[int], None], *, m: int, has_delay: bool
) -> list[float]:
    """Losses of the unsplit model; gradients are at W(t), with a delay at W(max(t-1, 0))."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    older: dict[str, torch.Tensor] | None = None
    losses = []
    for t, (x, y) in enumerate(batches):
        change(t)
        newest = {name: p.detach().clone() for name, p in model.named_parameters()}
        if has_delay and older is not None:
            _put(model, older)
        optimizer.zero_grad()
        total = 0.0
        for a, b in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            part = mse_loss(model(a), b) / m
            part.backward()
            total += part.item()
        _put(model, newest)
        optimizer.step()
        older = newest
        losses.append(total)
    return losses


@torch.no_grad()
def _put(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
