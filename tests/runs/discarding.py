"""Training in which the user's code fails in some batches, and the same without these batches."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.references.oracle import Batch, Oracle
from tests.runs.trajectory import copy_of

WIDTH = 4


@dataclasses.dataclass(frozen=True)
class Failure:
    """What fails: the ``call``-th call of a layer's code of that kind, from 0.

    Attributes:
        kind: "forward", "backward", "hook" or "memory".
    """

    layer: int
    kind: str
    call: int


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Callable[[], None]) -> torch.Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.look()
        return gradients[0], None


class Layer(nn.Module):
    """A linear layer that fails where ``failures`` say so, and counts its calls in a buffer."""

    def __init__(self, number: int, failures: Sequence[Failure], *, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.number, self.failures = number, failures
        self.calls: dict[str, int] = {}  # shared with the pipeline's copies of this module
        self.register_buffer("num_calls", torch.zeros(()))

    def _look(self, kind: str) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the capture, or the oracle
        call = self.calls[kind] = self.calls.get(kind, -1) + 1
        if Failure(self.number, kind, call) in self.failures:
            raise (torch.OutOfMemoryError if kind == "memory" else ZeroDivisionError)("on purpose")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._look("forward")
        self._look("memory")
        self.num_calls += 1
        x = _Raises.apply(self.norm(self.linear(x)), lambda: self._look("backward"))
        if x.requires_grad:
            x.register_hook(lambda gradient: self._look("hook"))
        return x.tanh()


def make_model(failures: Sequence[Failure], num_layers: int, *, norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(i, failures, norm=norm) for i in range(num_layers)))


def batches(count: int, rows: int) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(rows, WIDTH, generator=random)  # noqa: E731
    return [Batch((draw(),), draw()) for _ in range(count)]


@dataclasses.dataclass
class Outcome:
    """What came out.

    Attributes:
        kept: the positions, in the given batches, of those that were not discarded.
        restarts: after which of these the delay begins anew.
    """

    losses: list[float]
    state: dict[str, torch.Tensor]
    kept: list[int]
    restarts: list[int]
    errors: list[pd2.errors.StageError]


def train(
    given: Sequence[Batch],
    failures: Sequence[Failure],
    *,
    num_stages: int,
    norm: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    optimizer_options: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    restarts: Sequence[int] = (),
    **options: Any,
) -> Outcome:
    """Trains on all batches, going on after each error.

    Args:
        restarts: before which batches the delay begins anew.
    """
    m = options["num_microbatches"]
    made = make_model(failures, num_stages, norm=norm) if model is None else model
    pipe = pd2.PipelineModule(
        list(made),
        mse_loss,
        example_args=(given[0].args[0][:2],),
        timeout=60.0,
        **options,
    )
    with pipe:
        lr = {"lr": 0.1}
        opt = pd2.PipelineOptimizer(optimizer(pipe.parameters(), **lr), **(optimizer_options or {}))
        outcome = Outcome([], {}, [], [], [])
        losses: list[tuple[int, pd2.Loss]] = []

        def survive(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except pd2.errors.StageError as error:
                if error.discarded is None:
                    raise
                outcome.errors.append(error)
                del losses[pipe.session.num_train_steps :]
                if error.discarded:  # else an evaluation
                    outcome.restarts.append(len(losses))
                return None

        for position, batch in enumerate(given):
            if position in restarts:
                restart_delay(pipe)
            step = functools.partial(pipe.train_step, *batch.args, target=batch.target)
            loss = survive(step)
            if loss is not None:
                losses.append((position, loss))
                if pipe.session.num_train_steps % options.get("accumulate", 1) == 0:
                    opt.step()
        survive(pipe.flush)
        outcome.kept = [position for position, _ in losses]
        outcome.losses = [loss.item() for _, loss in losses]
        outcome.state = copy_of(pipe.state_dict())
    assert pipe.num_microbatches == (m if isinstance(m, int) else m[pipe.replica])
    return outcome


def restart_delay(pipe: pd2.PipelineModule) -> None:
    """The next batch reads the newest weights, as after a discarded batch."""
    pipe.flush()
    for stage in pipe.session.stages:
        stage.weights.engine.restart_delay()


def by_oracle(
    given: Sequence[Batch],
    outcome: Outcome,
    *,
    num_stages: int,
    num_microbatches: int,
    delay: int | Sequence[int],
    norm: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    max_grad_norm: float | None = None,
    num_pipelines: int = 1,
    late: Sequence[int] | None = None,
) -> Outcome:
    """Trains the unsplit model on the batches that were not discarded.

    Args:
        late: forwards that read the older version, of each parameter; None: all.
    """
    model = make_model((), num_stages, norm=norm)
    opt = optimizer(model.parameters(), lr=0.1)
    if max_grad_norm is not None:
        limit = max_grad_norm
        opt.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), limit) and None
        )
    oracle = Oracle(
        model, opt, num_microbatches, mse_loss, delay, num_pipelines=num_pipelines, late=late
    )
    losses = []
    for number, position in enumerate(outcome.kept):
        if number in outcome.restarts:
            oracle.restart_delay()
        losses.append(oracle.train_step(given[position]))
    return Outcome(losses, copy_of(model.state_dict()), outcome.kept, outcome.restarts, [])
