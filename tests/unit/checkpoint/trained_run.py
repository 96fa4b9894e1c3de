"""A run of layers with BatchNorm and dropout, which is saved and loaded between its batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2

WIDTH = 6


def make_model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(4):
        dropped = nn.Sequential(nn.Tanh(), nn.Dropout(0.1))
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), dropped]
    return nn.Sequential(*layers)


BATCHES = [
    (torch.randn(12, WIDTH, generator=g), torch.randn(12, WIDTH, generator=g))
    for g in [torch.Generator().manual_seed(s) for s in range(9)]
]

Make = Callable[[Any], list[torch.optim.Optimizer]]


def sgd(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]


def adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)]


@dataclasses.dataclass
class Trained:
    pipe: pd2.PipelineModule
    opt: pd2.PipelineOptimizer
    losses: list[Any] = dataclasses.field(default_factory=list)

    def train(self, begin: int, end: int) -> None:
        for x, y in BATCHES[begin:end]:
            self.losses.append(self.pipe.train_step(x, target=y))
            self.opt.step()

    def finish(self) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        self.pipe.flush()
        state = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        self.opt.state_dict()
        names = {id(p): name for name, p in self.pipe.named_parameters()}
        moments = {
            f"{names[id(p)]}/{key}": value.clone() if torch.is_tensor(value) else value
            for p, of_one in self.opt.state.items()
            for key, value in of_one.items()
        }
        losses = [float(loss) for loss in self.losses]
        self.pipe.close()
        return losses, state, moments


@contextlib.contextmanager
def runs() -> Iterator[Callable[..., Trained]]:
    made: list[pd2.PipelineModule] = []

    def begin(make: Make = sgd, seed: int = 1, staleness: Any = (), **options: Any) -> Trained:
        given: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "schedule": "2bw"}
        example = (torch.zeros(3, WIDTH),)
        model = options.pop("model", None) or make_model(seed)
        scale = options.pop("loss_scale", None)
        pipe = pd2.PipelineModule(
            model, mse_loss, example_args=example, timeout=20.0, **{**given, **options}
        )
        made.append(pipe)
        opt = pd2.PipelineOptimizer(*make(pipe.parameters()), staleness=staleness, loss_scale=scale)
        return Trained(pipe, opt)

    yield begin
    for pipe in made:
        pipe.session.ending.abort("the test is over")


class Keeper:
    """Has a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
