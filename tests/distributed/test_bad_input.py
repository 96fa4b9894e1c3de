"""Under processes: every rank refuses what one of them got wrong, none waits, and work goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.errors import WrongLossError, WrongLossTypeError
from tests.runs.launch import RankResult, run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt

X = torch.arange(32.0).reshape(8, 4).sin()
Y = torch.arange(32.0).reshape(8, 4).cos()


def stack(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 4))


def build(model: nn.Module | None = None, loss_fn: Any = mse_loss, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_stages": 2,
        "num_microbatches": 2,
        "example_args": (X[:1],),
        "timeout": 60.0,
    }
    return pd2.PipelineModule(model or stack(), loss_fn, **settings | changes)


def sgd(parameters: Any) -> Any:
    return pd2.PipelineOptimizer(torch.optim.SGD(parameters, lr=0.1))


CONSTRUCTIONS: dict[str, Any] = {
    # name: settings of rank 0, of rank 1, what both raise, and what the text says
    "stages": ({}, {"num_stages": 1}, "ValueError", ["num_stages must", "0: 2", "1: 1"]),
    "microbatches": ({}, {"num_microbatches": 4}, "ValueError", ["num_microbatches", "2", "4"]),
    "too few": ({}, {"num_microbatches": 1}, "ValueError", ["num_microbatches", "2", "1"]),
    "numbers": (
        {"num_microbatches": [2]},
        {"num_microbatches": [3]},
        "ValueError",
        ["num_microbatches must be the same on every rank", "0: (2,)", "1: (3,)"],
    ),
    "a number and numbers": ({}, {"num_microbatches": [2]}, "ValueError", ["0: 2", "1: (2,)"]),
    "too many numbers": (
        {"num_microbatches": [2, 2]},
        {"num_microbatches": [2, 2]},
        "ValueError",
        ["num_microbatches: [2, 2], width: 1: give a number for each replica"],
    ),
    "a wrong one on one rank": (
        {"width": 2, "num_microbatches": [2, 0]},
        {"width": 2, "num_microbatches": [2, 2]},
        "ValueError",
        ["num_microbatches[1]: 0, it must be at least 1"],
    ),
    "half a microbatch": (
        {"num_microbatches": [2.5]},
        {"num_microbatches": [2.5]},
        "TypeError",
        ["num_microbatches[0]: 2.5 given, it must be an int"],
    ),
    "too few of one replica": (
        {"width": 2, "num_microbatches": [2, 1]},
        {"width": 2, "num_microbatches": [2, 1]},
        "ValueError",
        ["replica 1: num_microbatches: 1, num_stages: 2: 2bw needs num_microbatches >= "],
    ),
    "numbers and a schedule of one's own": (
        {"width": 2, "num_microbatches": [2, 3], "schedule": pd2.make_schedule("2bw", 2, 2)},
        {"width": 2, "num_microbatches": [2, 3], "schedule": pd2.make_schedule("2bw", 2, 2)},
        "ValueError",
        ["replica 1: num_microbatches: 3, of the given schedule: 2"],
    ),
    "numbers and auto": (
        {"num_stages": "auto", "num_microbatches": [2], "example_target": Y},
        {"num_stages": "auto", "num_microbatches": [2], "example_target": Y},
        "ValueError",
        ["num_microbatches: [2], num_stages: 'auto'", "give one number"],
    ),
    "schedule": ({"schedule": "gpipe"}, {}, "ValueError", ["schedule", "0: gpipe", "1: 2bw"]),
    "unknown schedule": ({}, {"schedule": "no"}, "ValueError", ["schedule", "0: 2bw", "1: no"]),
    "width": ({"width": 2}, {}, "ValueError", ["width", "0: 2", "1: 1"]),
    "split": ({"split": ["1"]}, {"split": ["2"]}, "ValueError", ["split", "['1']", "['2']"]),
    "reduction": ({}, {"loss_reduction": "sum"}, "ValueError", ["loss_reduction", "mean", "sum"]),
    "replicated": ({}, {"replicated": ("x",)}, "ValueError", ["replicated", "()", "('x',)"]),
    "timeout": ({}, {"timeout": 30.0}, "ValueError", ["timeout", "0: 60.0", "1: 30.0"]),
    "precision": ({}, {"precision": "bf16"}, "ValueError", ["precision", "0: None", "1: bf16"]),
    "unknown": (
        {"precision": "bf"},
        {"precision": "bf"},
        "ValueError",
        ["precision: 'bf', known: 'bf16'"],
    ),
    "master": (
        {"precision": "bf16"},
        {"precision": "bf16", "split_master": True},
        "ValueError",
        ["split_master", "0: False", "1: True"],
    ),
    "gradients": (
        {"precision": "bf16"},
        {"precision": "bf16", "gradient_dtype": torch.bfloat16},
        "ValueError",
        ["gradient_dtype", "0: None", "1: torch.bfloat16"],
    ),
    "gradients of float32": (
        {"gradient_dtype": torch.bfloat16},
        {"gradient_dtype": torch.bfloat16},
        "ValueError",
        ["gradient_dtype: torch.bfloat16", "precision: None"],
    ),
    "autocast": ({}, {"autocast": torch.half}, "ValueError", ["autocast", "None", "float16"]),
    "no number": ({"num_stages": "2"}, {"num_stages": "2"}, "TypeError", ["num_stages: '2'"]),
    "not called": ({}, {"loss_fn": 3}, "TypeError", ["loss_fn: 3 given, it must be callable"]),
    "world": ({"num_stages": 1}, {"num_stages": 1}, "ValueError", ["world size: 2", "1 * 1 = 1"]),
    "devices": ({}, {"devices": ["cpu"] * 2}, "ValueError", ["devices", "processes: 2"]),
    "refused": ({}, {"example_args": (X[:1, :3],)}, "ValueError", ["refuses the example"]),
    "model": ({}, {"model": stack(5)}, "ValueError", ["parameters must be the same", "[5, 4]"]),
    "mode": ({}, {"model": stack().eval()}, "ValueError", ["mode of", "0: train", "1: eval"]),
    "example": (
        {},
        {"example_args": (X[:1].double(),), "model": stack().double()},
        "ValueError",
        ["must be the same on every rank", "float32", "float64"],
    ),
    "synchronized": (
        {"model": nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 4))},
        {"model": nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 4))},
        "ValueError",
        ["module '1': SyncBatchNorm over all processes", "Leave it a BatchNorm"],
    ),
    "no module": ({}, {"model": 3}, "TypeError", ["must be an nn.Module"]),
}


def wrong_settings(rank: int, world: int) -> dict[str, Outcome]:
    outcomes = {
        name: attempt(lambda: build(**case[rank]))  # noqa: B023
        for name, case in CONSTRUCTIONS.items()
    }
    pipe = build()  # nothing of all that stands in the way of a right one
    sgd(pipe.parameters())
    outcomes["right"] = attempt(lambda: float(pipe.train_step(X, target=Y)))
    pipe.close()
    return outcomes


@pytest.mark.slow
def test_wrong_or_differing_settings_are_refused_on_every_rank() -> None:
    values = [result.value for result in run_ranks(wrong_settings, 2, timeout=150)]
    assert_raised(
        values, {name: (kind, words) for name, (*_, kind, words) in CONSTRUCTIONS.items()}
    )
    assert [value["right"] for value in values] == [("", "")] * 2


# ---------------------------------------------------------------- batches and calls


def wrong_batches(rank: int, world: int, mistakes: bool) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}

    def mistake(name: str, call: Callable[[], Any]) -> None:
        if mistakes:
            outcomes[name] = attempt(call)

    pipe = build()
    own = list(pipe.parameters())
    mistake("foreign", lambda: sgd(own if rank == 0 else stack().parameters()))
    mistake("missing", lambda: sgd(own[1:] if rank == 0 else own))
    mistake(
        "optimizers",
        lambda: pd2.PipelineOptimizer((torch.optim.SGD, torch.optim.Adam)[rank](own, lr=0.1)),
    )
    optimizer = sgd(own)
    losses = []
    for _ in range(3):
        mistake("no rows", lambda: pipe.train_step(X[: 0 if rank == 0 else 8], target=Y))
        mistake("rows", lambda: pipe.train_step(X, target=Y[: 8 if rank == 0 else 6]))
        mistake("form", lambda: pipe.train_step([X] if rank == 0 else X, target=Y))
        mistake("no arguments", lambda: pipe.train_step(target=Y))
        mistake("target", lambda: pipe.train_step(X, target=[Y, Y[:2]] if rank == 1 else Y))
        if mistakes and rank == 1:
            pipe.eval()
        mistake("modes", lambda: pipe.train_step(X, target=Y))
        with torch.no_grad():
            mistake("modes in evaluation", lambda: pipe(X))
        if mistakes and rank == 1:
            pipe.train()
        losses.append(pipe.train_step(X if rank == 0 else None, target=Y if rank == 1 else None))
        if mistakes and rank == 1:
            optimizer.step()
        mistake("no step", lambda: pipe.train_step(X, target=Y))
        if not mistakes or rank == 0:
            optimizer.step()
    state = dict(pipe.full_state_dict())
    mistake("load", lambda: pipe.load_state_dict({} if rank == 1 else state))
    outcomes["losses"] = [float(loss) for loss in reversed(losses)]
    outcomes["state"] = {name: value.tolist() for name, value in state.items()}
    pipe.close()
    return outcomes


BATCHES: Expected = {
    "foreign": ("ValueError", ["belong to 0 open pipelines"]),
    "missing": ("ValueError", ["trainable parameters", "missing in the optimizer: 1"]),
    "optimizers": ("ValueError", ["optimizer must be the same", "0: SGD", "1: Adam"]),
    "no rows": ("ValueError", ["rows of the batch: 0, at least 1 needed"]),
    "rows": ("ValueError", ["rows of the arguments: 8, rows of the target: 6"]),
    "form": ("TypeError", ["list given, a tensor in the example call"]),
    "no arguments": ("ValueError", ["arguments do not fit"]),
    "target": ("ValueError", ["target[1]: 2 rows in dimension 0, target[0]: 8"]),
    "modes": ("ValueError", ["train() or eval() must be the same", "0: train", "1: eval"]),
    "modes in evaluation": ("ValueError", ["train() or eval()", "0: train", "1: eval"]),
    "no step": ("ValueError", ["opt.step(): ", "train_steps"]),
    "load": ("RuntimeError", ["missing keys"]),
}


def different_calls(rank: int, world: int) -> dict[str, list[Outcome]]:
    calls: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "flush|train_step": (lambda p: p.flush(), lambda p: p.train_step(X, target=Y)),
        "full_state_dict|state_dict": (lambda p: p.full_state_dict(), lambda p: p.state_dict()),
        "evaluation|load_state_dict": (lambda p: p(X), lambda p: p.load_state_dict({})),
        "close|new_optimizer": (lambda p: p.close(), lambda p: sgd(p.parameters())),
    }
    outcomes = {}
    for name, pair in calls.items():
        pipe = build()
        with torch.no_grad():
            outcomes[name] = [attempt(lambda: pair[rank](pipe)), attempt(pipe.flush)]  # noqa: B023
    return outcomes


def two_numbers(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean(1)[:2]


def wrong_losses(rank: int, world: int) -> dict[str, Outcome]:
    """What only the ranks that compute it can see; the others have the right one."""
    last = {"loss_fn": two_numbers} if rank == 1 else {}
    ways: dict[str, dict[str, Any]] = {
        "of the last stage": last,
        "of one replica": {"num_stages": 1, "num_microbatches": 1, "width": 2, **last},
        "no tensor": {"loss_fn": lambda output, target: None} if rank == 1 else {},
        "metrics": {"metrics": {"error": two_numbers if rank == 1 else mse_loss}},
    }
    outcomes = {}
    for name, settings in ways.items():
        pipe = build(**settings)

        def use(pipe: Any = pipe, is_mine: bool = name == "of one replica" and rank == 0) -> None:
            optimizer = sgd(pipe.parameters())
            loss = pipe.train_step(X, target=Y)
            float(loss)  # raises nowhere
            optimizer.step()
            try:
                pipe.flush()
            finally:
                # Replica 0's is right, unless the batch was discarded before it was there.
                right = mse_loss(stack()(X), Y).item()
                assert math.isnan(loss.item()) or (is_mine and loss.item() == right)

        outcomes[name] = attempt(use)
    return outcomes


LOSSES: Expected = {
    "of the last stage": ("WrongLossError", ["stage 1", "loss_fn returned shape [2]", "one"]),
    "of one replica": ("WrongLossError", ["stage 0 of replica 1", "returned shape [2]", "one"]),
    "no tensor": ("WrongLossTypeError", ["loss_fn returned NoneType, it must return a tensor"]),
    "metrics": ("WrongLossError", ["metrics['error'] returned shape [2]", "one real number"]),
}


def wrong_runs(rank: int, world: int) -> list[dict[str, Any]]:
    return [
        wrong_batches(rank, world, mistakes=True),
        wrong_batches(rank, world, mistakes=False),
        different_calls(rank, world),
        wrong_losses(rank, world),
    ]


@pytest.fixture(scope="module")
def runs() -> list[RankResult]:
    return run_ranks(wrong_runs, 2, timeout=150)


@pytest.mark.slow
def test_wrong_batches_are_refused_on_every_rank(runs: list[RankResult]) -> None:
    assert_raised((result.value[0] for result in runs), BATCHES)


@pytest.mark.slow
def test_refused_batches_leave_no_trace(runs: list[RankResult]) -> None:
    for result in runs:
        with_mistakes, without, *_ = result.value
        assert with_mistakes["losses"] == without["losses"]
        assert with_mistakes["state"] == without["state"]


@pytest.mark.slow
def test_losses_that_are_no_number_are_refused_on_every_rank(runs: list[RankResult]) -> None:
    assert issubclass(WrongLossError, ValueError)
    assert issubclass(WrongLossTypeError, TypeError)
    assert_raised((result.value[3] for result in runs), LOSSES)


@pytest.mark.slow
def test_different_calls_are_named_on_every_rank(runs: list[RankResult]) -> None:
    for result in runs:
        for name, outcomes in result.value[2].items():
            for kind, text in outcomes:
                assert kind == "StageError", (name, result.rank, text)
                assert "the same calls in the same order" in text
                for rank, called in enumerate(name.split("|")):
                    assert f"rank {rank}: {called}" in text
