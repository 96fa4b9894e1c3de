"""In one process: what fails on a stage says where and why, and what it ends says so after."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.timed import at_most_three_times

X = torch.randn(6, 4)
Y = torch.randn(6, 4)


class FailingAt(nn.Module):
    """Passes its input on; fails at the n-th forward of a run (or in the backward of it)."""

    def __init__(self, call: int, error: BaseException, in_backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call, self.error, self.in_backward = call, error, in_backward
        self.calls = [0]  # shared with the pipeline's copies of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_captured = threading.current_thread() is threading.main_thread()
        fails = self.calls[0] == self.call and not is_captured
        self.calls[0] += not is_captured
        if fails and not self.in_backward:
            raise self.error
        x = self.linear(x)
        if fails:
            x = BackwardRaises.apply(x, self.error)  # type: ignore[no-untyped-call]
        return x


class BackwardRaises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        raise ctx.error


class FailingStep(torch.optim.SGD):
    """Fails in every step: what has no batch to blame ends the pipeline."""

    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("in step")


def build(stages: list[nn.Module], loss_fn: Any = mse_loss, **changes: Any) -> pd2.PipelineModule:
    settings: dict[str, Any] = {"num_microbatches": 3, "example_args": (X[:1],)} | changes
    return pd2.PipelineModule(stages, loss_fn, **settings)


def failing_stages(num_stages: int, stage: int, batch: int, **changes: Any) -> list[nn.Module]:
    stages: list[nn.Module] = [nn.Linear(4, 4) for _ in range(num_stages)]
    stages[stage] = FailingAt(3 * batch + 1, ZeroDivisionError("on purpose"), **changes)
    return stages


def train(pipe: pd2.PipelineModule, batches: int = 6) -> None:
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    for _ in range(batches):
        pipe.train_step(X, target=Y)
        optimizer.step()
    pipe.flush()


def calls_of(pipe: pd2.PipelineModule) -> list[Callable[[], Any]]:
    return [
        lambda: pipe.train_step(X, target=Y),
        pipe.flush,
        pipe.state_dict,
        pipe.full_state_dict,
        pipe.unsplit,
        lambda: pipe.load_state_dict({}),
        lambda: pipe.eval()(X),
        lambda: pipe.timeline().__enter__(),
    ]


def assert_data(error: pd2.errors.StageError, **data: Any) -> None:
    """All attributes are these, and what was not named is that of one process and replica."""
    want = {"rank": 0, "replica": 0, "discarded": None} | data
    assert {name: getattr(error, name) for name in pd2.errors.StageError.__annotations__} == want


def shown(error: BaseException) -> str:
    """What Python prints of an error."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_a_forward_names_stage_microbatch_action_and_cause(
    schedule: str, stage: int
) -> None:
    pipe = build(failing_stages(3, stage, batch=2), schedule=schedule)
    with pytest.raises(pd2.errors.StageError) as raised:
        train(pipe)
    cause = "ZeroDivisionError: on purpose"
    text = f"stage {stage}, batch 2, microbatch 1, forward: {cause}. train_step"
    assert str(raised.value).startswith(text)
    discarded = raised.value.discarded
    assert_data(
        raised.value,
        stage=stage,
        batch=2,
        microbatch=1,
        action="forward",
        cause=cause,
        discarded=discarded,
    )
    assert discarded == tuple(range(2, 2 + len(discarded or ())))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "in forward" in shown(raised.value)
    assert "raise self.error" in shown(raised.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_in_a_backward_names_stage_microbatch_action_and_cause(stage: int) -> None:
    pipe = build(failing_stages(2, stage, batch=1, in_backward=True))
    with pytest.raises(pd2.errors.StageError) as raised:
        train(pipe)
    cause = "ZeroDivisionError: on purpose"
    text = f"stage {stage}, batch 1, microbatch 1, backward: {cause}. train_step"
    assert str(raised.value).startswith(text)
    discarded = raised.value.discarded
    assert_data(
        raised.value,
        stage=stage,
        batch=1,
        microbatch=1,
        action="backward",
        cause=cause,
        discarded=discarded,
    )
    assert discarded == tuple(range(1, 1 + len(discarded or ())))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "raise ctx.error" in shown(raised.value)


def test_an_error_of_the_engines_own_names_the_action_and_has_a_traceback_if_torch_gives_one() -> (
    None
):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: Any) -> Any:
            return torch.zeros(7)

    class WrongGradient(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Odd.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]

    pipe = build([WrongGradient(4, 4), nn.Linear(4, 4)])
    with pytest.raises(pd2.errors.StageError, match="invalid gradient") as raised:
        train(pipe)
    assert (raised.value.stage, raised.value.action) == (0, "backward")
    assert "invalid gradient" in (raised.value.cause or "")


def test_a_target_of_the_wrong_shape_shows_the_loss_functions_error() -> None:
    def strict_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.shape != target.shape:
            raise ValueError(f"output {list(output.shape)}, target {list(target.shape)}")
        return mse_loss(output, target)

    pipe = build([nn.Linear(4, 4), nn.Linear(4, 4)], strict_loss)
    with pytest.raises(pd2.errors.StageError) as raised:
        float(pipe.train_step(X, target=torch.randn(6, 3)))
    assert isinstance(raised.value.__cause__, ValueError)
    assert "stage 1, batch 0, microbatch 0, forward: " in str(raised.value)
    assert "ValueError: output [2, 4], target [2, 3]" in str(raised.value)


def test_an_error_of_an_optimizer_names_the_update() -> None:
    pipe = build([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = pd2.PipelineOptimizer(FailingStep(pipe.parameters(), lr=0.1))
    with pytest.raises(pd2.errors.StageError, match=r"stage \d, batch 0.*update: ") as raised:
        for _ in range(3):
            pipe.train_step(X, target=Y)
            optimizer.step()
        pipe.flush()
    assert_data(
        raised.value,
        stage=raised.value.stage,
        batch=0,
        microbatch=2,
        action="update",
        cause="ZeroDivisionError: in step",
    )
    assert raised.value.stage in (0, 1)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_an_error_in_an_evaluation_names_it() -> None:
    pipe = build([nn.Linear(4, 4), FailingAt(1, ZeroDivisionError("on purpose"))])
    match = r"stage 1, evaluation, microbatch 1, forward: "
    with pytest.raises(pd2.errors.StageError, match=match) as raised:
        pipe.eval()(X)
    cause = "ZeroDivisionError: on purpose"
    assert_data(
        raised.value,
        stage=1,
        batch=None,
        microbatch=1,
        action="forward",
        cause=cause,
        discarded=(),
    )


@pytest.mark.parametrize(
    ("returned", "kind", "base"),
    [
        (torch.ones(2), pd2.errors.WrongLossError, ValueError),
        (3.0, pd2.errors.WrongLossTypeError, TypeError),
    ],
)
@pytest.mark.parametrize("where", ["loss_fn", "metrics"])
def test_a_loss_that_is_no_number_is_a_wrong_loss_by_type(
    returned: object, kind: type[pd2.errors.StageError], base: type[Exception], where: str
) -> None:
    returned = [] if where == "metrics" and kind.__name__.endswith("TypeError") else returned
    metrics = {"it": lambda output, target: returned}
    loss_fn = mse_loss if where == "metrics" else metrics["it"]
    pipe = build(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        loss_fn,
        metrics=metrics if where == "metrics" else None,
    )
    for _ in range(2):
        with pytest.raises(base, match="returned") as raised:
            float(pipe.train_step(X, target=Y))
        assert type(raised.value) is kind
        assert_data(
            raised.value,
            stage=1,
            batch=0,
            microbatch=0,
            action="forward",
            cause=raised.value.cause,
            discarded=(0,),
        )


def test_texts_alone_make_no_type() -> None:
    def look_alike(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("loss_fn returned shape [2] and dtype torch.float32")

    pipe = build([nn.Linear(4, 4), nn.Linear(4, 4)], look_alike)  # a loss does not keep it alive
    with pytest.raises(pd2.errors.StageError) as raised:
        float(pipe.train_step(X, target=Y))
    assert type(raised.value) is pd2.errors.StageError


def test_after_an_error_of_an_update_every_call_raises_it_but_what_was_made_can_be_read() -> None:
    pipe = build([nn.Linear(4, 4), nn.Linear(4, 4)])
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    optimizer = pd2.PipelineOptimizer(FailingStep(pipe.parameters(), lr=0.1))
    pipe.train_step(X, target=Y)
    optimizer.step()
    for call in [pipe.flush, optimizer.step, *calls_of(pipe)]:
        if call in (pipe.state_dict, pipe.unsplit):
            continue
        with pytest.raises(pd2.errors.StageError, match=r"batch 0.*update: Zero") as raised:
            call()
        assert raised.value.action == "update"
        assert raised.value.discarded is None
        assert "in step" in shown(raised.value)
    state = pipe.state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)
    optimizer.state_dict()
    pipe.unsplit()
    pipe.close()  # ends nothing any more, and is no error


def test_after_an_error_in_a_batch_every_call_works() -> None:
    pipe = build(failing_stages(2, 1, batch=0))
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    with pytest.raises(pd2.errors.StageError, match="stage 1, batch 0, microbatch 1, forward: "):
        pipe.train_step(X, target=Y).item()
    assert pipe.session.num_train_steps == 0
    loss = pipe.train_step(X, target=Y)
    optimizer.step()
    assert torch.tensor(float(loss)).isfinite()
    optimizer.state_dict()
    for call in (pipe.flush, pipe.state_dict, pipe.full_state_dict, lambda: pipe.eval()(X)):
        call()
    pipe.unsplit()


def test_after_close_every_call_says_so() -> None:
    pipe = build([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    pipe.close()
    pipe.close()
    for call in [optimizer.step, *calls_of(pipe)]:
        if call in (pipe.state_dict, pipe.full_state_dict, pipe.unsplit):
            continue
        with pytest.raises(RuntimeError, match=r"the pipeline is closed: close\(\) was called"):
            call()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_a_closed_pipeline_still_gives_what_it_holds(schedule: str, precision: str | None) -> None:
    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with build(model, schedule=schedule, precision=precision) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5))
        for _ in range(3):
            pipe.train_step(X, target=Y)
            optimizer.step()
        weights = {name: value.clone() for name, value in pipe.state_dict().items()}
        moments = copy.deepcopy(optimizer.state_dict())
    assert moments["state"]
    for read in (pipe.state_dict, pipe.full_state_dict, lambda: dict(pipe.named_parameters())):
        found = read()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert str(optimizer.state_dict()) == str(moments)
    assert pipe.unsplit() is model
    assert all(
        torch.equal(p, weights[f"{i}.{n}"]) for i in (0, 1) for n, p in model[i].named_parameters()
    )
    with torch.no_grad():
        model[0].weight.add_(1)  # which no second unsplit() may undo
    for again in (pipe.state_dict, pipe.full_state_dict, pipe.unsplit, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"is closed: unsplit\(\) was called, whose result"):
            again()


def test_an_exception_that_leaves_the_block_is_kept() -> None:
    pipe = build([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(KeyError), pipe:
        pipe.train_step(X, target=Y)
        raise KeyError("the user's own")
    with pytest.raises(RuntimeError, match=r"an exception left the with block: KeyError"):
        pipe.flush()


def test_an_error_of_a_stage_leaves_the_block() -> None:
    pipe = build(failing_stages(2, 0, batch=0))
    with pytest.raises(RuntimeError, match=r"stage 0, batch 0, microbatch 1, forward: "), pipe:
        pipe.train_step(X, target=Y)


def test_numbers_that_are_no_numbers_are_no_error() -> None:
    class MakesNan(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float("nan")

    with build([MakesNan(4, 4), nn.Linear(4, 4)]) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters()))
        losses = []
        for _ in range(4):
            losses.append(pipe.train_step(X, target=Y))
            optimizer.step()
        pipe.flush()
        assert all(torch.tensor(float(loss)).isnan() for loss in losses)


@pytest.mark.parametrize("waits_in", ["flush", "loss"])
@at_most_three_times
def test_keyboard_interrupt_ends_a_wait_and_the_batch_can_be_discarded(waits_in: str) -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.4)
            return super().forward(x)

    pipe = build([Slow(4, 4), nn.Linear(4, 4)], num_microbatches=6)
    loss = pipe.train_step(X, target=Y)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pipe.flush() if waits_in == "flush" else loss.item()
    assert time.monotonic() - start < 2.0  # and not the 2.4 that the batch takes
    assert pipe.discard_batch() == (0,)
    assert pipe.session.num_train_steps == 0
    pipe.close()
