"""A context around a call is as in torch, or refused by name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import pipedream2bw as pd2
from pipedream2bw.errors import StageError
from tests.runs.timed import at_most_three_times

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def made(**options: Any) -> pd2.PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, **options}
    return pd2.PipelineModule(model, nn.functional.mse_loss, example_args=(X,), **given)


@pytest.fixture(scope="module")
def pipe() -> Iterator[pd2.PipelineModule]:
    with made() as pipeline:
        yield pipeline


def call(pipe: pd2.PipelineModule, name: str) -> Any:
    if name == "train_step":
        pipe.train()
        return pipe.train_step(X, target=Y)
    pipe.eval()
    return pipe(X) if name == "pipe" else pipe.eval_step(X, target=Y)


class Mode(TorchFunctionMode):
    pass


@contextlib.contextmanager
def set_for_all(
    read: Callable[[], Any], change: Callable[[Any], Any], value: Any
) -> Iterator[None]:
    before = read()
    change(value)
    try:
        yield
    finally:
        change(before)


EVERYWHERE: dict[str, Any] = {
    "autocast= ?torch.bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast= ?torch.float16": lambda: torch.autocast("cpu", torch.float16),
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "Mode around": Mode,
    "default device meta": lambda: torch.device("meta"),
    "set_default_dtype: torch.float64": lambda: set_for_all(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "use_deterministic_algorithms: True": lambda: set_for_all(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
}
IN_TRAINING: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    r"save_on_cpu.*recompute=": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("name", ["train_step", "pipe", "eval_step"])
@pytest.mark.parametrize("words", EVERYWHERE)
def test_what_stages_would_not_see_is_refused(
    pipe: pd2.PipelineModule, words: str, name: str
) -> None:
    with pytest.raises(ValueError, match=words), EVERYWHERE[words]():
        call(pipe, name)


@pytest.mark.parametrize("words", IN_TRAINING)
def test_what_only_gradients_need_is_refused_in_training_alone(
    pipe: pd2.PipelineModule, words: str
) -> None:
    with pytest.raises(ValueError, match=words), IN_TRAINING[words]():
        call(pipe, "train_step")
    with IN_TRAINING[words]():
        assert isinstance(call(pipe, "pipe"), torch.Tensor)


def test_transforms_of_torch_func_are_refused(pipe: pd2.PipelineModule) -> None:
    pipe.eval()
    for transformed in (torch.func.vmap(pipe), torch.func.grad(lambda x: pipe(x).sum())):
        with pytest.raises(ValueError, match=r"torch\.func"):
            transformed(X)


def test_the_pipelines_own_dtype_may_surround_it() -> None:
    for options in ({"autocast": torch.bfloat16}, {"precision": "bf16"}):
        with made(**options) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            alone = float(call(pipe, "eval_step"))
            with torch.autocast("cpu", torch.bfloat16):
                assert float(call(pipe, "train_step")) == alone
                opt.step()
                assert call(pipe, "pipe").dtype == torch.bfloat16
            with pytest.raises(ValueError, match="autocast"), torch.autocast("cpu", torch.float16):
                call(pipe, "pipe")


def test_the_setting_with_which_it_was_made_is_the_right_one() -> None:
    with set_for_all(torch.get_default_dtype, torch.set_default_dtype, torch.float64):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = X.double()
        with pd2.PipelineModule(
            model, nn.functional.mse_loss, num_stages=2, num_microbatches=4, example_args=(x,)
        ) as pipe:
            pipe.eval()
            assert pipe(x).dtype == torch.float64


def test_a_setting_that_changes_while_stages_compute_discards_the_batch() -> None:
    goes_on = threading.Event()

    def waits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        goes_on.wait(10)
        return nn.functional.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pd2.PipelineModule(
        model, waits, num_stages=2, num_microbatches=4, example_args=(X,)
    ) as pipe:
        loss = pipe.train_step(X, target=Y)
        with set_for_all(torch.get_default_dtype, torch.set_default_dtype, torch.float64):
            goes_on.set()
            with pytest.raises(StageError, match=r"set_default_dtype: torch.float64"):
                float(loss)


@at_most_three_times
def test_looking_takes_microseconds(pipe: pd2.PipelineModule) -> None:
    look = pipe.session._contexts.check
    begin = time.perf_counter()
    for _ in range(1000):
        look(training=True)
    assert (time.perf_counter() - begin) / 1000 < 1e-4
