"""Targets and outputs that are no tensors: split and joined by rows, or refused by name."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2

ROWS = 7
X = torch.randn(ROWS, 4)
Y = torch.randn(ROWS, 2)
NAMES = tuple(f"row {number}" for number in range(ROWS))


@dataclasses.dataclass(frozen=True)
class Labels:
    y: torch.Tensor
    names: list[str]
    scale: float = 1.0


class Slotless:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


def of_list(target: Any) -> torch.Tensor:
    return torch.tensor(target)


KINDS: dict[str, tuple[Any, Callable[[Any], torch.Tensor]]] = {
    "list": (Y.tolist(), of_list),
    "array": (Y.numpy(), of_list),
    "dictionary of both": ({"y": Y.numpy(), "n": 3}, lambda target: torch.tensor(target["y"])),
    "dataclass": (Labels(Y, list(NAMES)), lambda target: target.y),
    "UserDict": (collections.UserDict(y=Y, n="n"), lambda target: target["y"]),
    "namespace": (types.SimpleNamespace(y=Y.tolist()), lambda target: torch.tensor(target.y)),
    "texts": ((Y, NAMES), lambda target: target[0]),
    "list of dictionaries": (
        [{"y": row} for row in Y.tolist()],
        lambda target: torch.tensor([each["y"] for each in target]),
    ),
    "tuple with a number": ((Y, 0.5), lambda target: target[0]),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def made(loss_fn: Any, module: nn.Module | None = None, **options: Any) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        model() if module is None else module,
        loss_fn,
        num_stages=2,
        num_microbatches=3,
        schedule="1f1b",
        example_args=(X,),
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_is_split_by_rows(kind: str) -> None:
    target, read = KINDS[kind]
    seen = []

    def loss_fn(output: torch.Tensor, given: Any) -> torch.Tensor:
        seen.append(given)
        return nn.functional.mse_loss(output, read(given))

    with made(loss_fn) as pipe, made(nn.functional.mse_loss) as wanted:
        for pipeline in (pipe, wanted):
            pipeline.eval()
        assert float(pipe.eval_step(X, target=target)) == float(wanted.eval_step(X, target=Y))
        pipe.train()
        pipe.train_step(X, target=target)
        pipe.flush()
        pipe.discard_batch()
    got = torch.cat([read(each) for each in seen[3:]])
    assert torch.equal(got, Y)
    assert all(type(each) is type(target) for each in seen)
    if kind == "texts":
        assert [given[1] for given in seen[3:]] == [NAMES[:3], NAMES[3:5], NAMES[5:]]
    if kind == "dataclass":
        assert [given.names for given in seen[3:]] == [
            list(part) for part in (NAMES[:3], NAMES[3:5], NAMES[5:])
        ]
        assert target.y is Y


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ([0.5, 0.25], ValueError, r"rows of the arguments: 7, rows of the target: 2.*replicated"),
        ({"y": Y, "weights": [0.5, 0.25]}, ValueError, r"target\['weights'\]: 2 rows.*replicated"),
        (Slotless(Y), TypeError, r"target: Slotless with tensors in it.*dictionary"),
        (Y.numpy()[:5], ValueError, "rows of the target: 5"),
        (Labels(Y.clone().requires_grad_(), []), ValueError, r"target\.y: requires_grad"),
    ],
)
def test_what_cannot_be_split_is_refused(target: Any, error: type, words: str) -> None:
    with made(nn.functional.mse_loss) as pipe:
        with pytest.raises(error, match=words):
            pipe.train_step(X, target=target)
        assert float(pipe.train_step(X, target=Y)) > 0
        pipe.discard_batch()


def test_a_list_named_in_replicated_stays_whole() -> None:
    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        assert target["weights"] == [0.5, 0.25]
        return nn.functional.mse_loss(output, target["y"])

    with made(loss_fn, replicated=["weights"]) as pipe:
        assert float(pipe.train_step(X, target={"y": Y, "weights": [0.5, 0.25]})) > 0
        pipe.discard_batch()


class Returning(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = model()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.layers(x), x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    more: dict[str, torch.Tensor]
    number: int = 3


def as_output(y: torch.Tensor, x: torch.Tensor) -> Output:
    return Output(y, {"x": x})


def as_dictionary(y: torch.Tensor, x: torch.Tensor) -> Any:
    return collections.UserDict(logits=y, more={"x": x}, number=3)


@pytest.mark.parametrize("wrap", [as_output, as_dictionary])
def test_an_output_that_pytree_does_not_know_is_joined(wrap: Callable[..., Any]) -> None:
    def read(output: Any, name: str) -> Any:
        return output[name] if isinstance(output, collections.UserDict) else getattr(output, name)

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(read(output, "logits"), target)

    with made(loss_fn, Returning(wrap)) as pipe, made(nn.functional.mse_loss) as wanted:
        assert float(pipe.train_step(X, target=Y)) == float(wanted.train_step(X, target=Y))
        pipe.discard_batch()
        wanted.discard_batch()
        pipe.eval()
        wanted.eval()
        output = pipe(X)
        assert type(output) is type(wrap(Y, X))
        assert torch.equal(read(output, "logits"), wanted(X))
        assert torch.equal(read(output, "more")["x"], X)
        assert read(output, "number") == 3


def test_a_number_of_rows_among_the_outputs_is_refused_in_an_evaluation() -> None:
    module = Returning(lambda y, x: {"y": y, "rows": x.shape[0]})
    with made(lambda output, y: nn.functional.mse_loss(output["y"], y), module) as pipe:
        pipe.eval()
        with pytest.raises(ValueError, match=r"ints for microbatches .*cannot be joined"):
            pipe(X)
        assert pipe(microbatches=[pd2.Microbatch(X)])[0]["rows"] == ROWS
