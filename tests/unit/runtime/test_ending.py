"""Threads and connections end with the pipeline, however it ends, and the interpreter exits."""

from __future__ import annotations

import gc
import os
import textwrap
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import RankResult, run_ranks

X = torch.randn(4, 4)
Y = torch.randn(4, 4)

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads and files in /proc"
)


@pytest.fixture(autouse=True)
def _collect_only_what_a_test_makes() -> None:
    """Looking at all that torch and the other tests' modules hold takes most of a second."""
    gc.collect()
    gc.freeze()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def build(loss_fn: Any = mse_loss, stages: list[nn.Module] | None = None) -> pd2.PipelineModule:
    stages = stages or [nn.Linear(4, 4) for _ in range(3)]
    return pd2.PipelineModule(stages, loss_fn, num_microbatches=3, example_args=(X[:1],))


def sgd(pipe: pd2.PipelineModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


class OwnStep(torch.optim.SGD):
    """Of another type than SGD, so that it runs by its own step."""


def ends(pipeline: weakref.ref[Any], threads: int, within: float = 5.0) -> bool:
    """Whether the pipeline is collected and its threads end."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        gc.collect()
        if pipeline() is None and num_threads() <= threads:
            return True
        time.sleep(0.01)
    return False


# ---------------------------------------------------------------- dropped without close()


def untrained() -> Any:
    return build()


def trained_without_flush() -> Any:
    pipe = build()
    optimizer = pd2.PipelineOptimizer(sgd(pipe))
    for _ in range(3):
        pipe.train_step(X, target=Y)
        optimizer.step()
    return pipe


def with_an_update_pending() -> Any:
    pipe = build()
    optimizer = pd2.PipelineOptimizer(OwnStep(pipe.parameters(), lr=0.1))
    pipe.train_step(X, target=Y)
    optimizer.step()
    return pipe


def with_work_pending() -> Any:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return super().forward(x)

    pipe = build(stages=[Slow(4, 4), nn.Linear(4, 4)])
    pipe.train_step(X, target=Y)
    return pipe


def known_to_its_loss_function() -> Any:
    class Trainer:
        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return mse_loss(output, target)

    trainer = Trainer()
    trainer.pipe = build(trainer.loss)  # type: ignore[attr-defined]
    trainer.pipe.train_step(X, target=Y)  # type: ignore[attr-defined]
    return trainer.pipe  # type: ignore[attr-defined]


def known_to_its_model() -> Any:
    stages: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
    pipe = build(stages=stages)
    stages[0].__dict__["pipe"] = pipe
    pipe.train_step(X, target=Y)
    return pipe


def that_failed() -> Any:
    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    pipe = build(failing)
    with pytest.raises(RuntimeError):
        float(pipe.train_step(X, target=Y))
    return pipe


def that_failed_while_nobody_looked() -> Any:
    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        trainer.pipe  # the traceback's frame refers to the pipeline  # noqa: B018
        raise ZeroDivisionError

    class Trainer:
        pipe: Any

    trainer = Trainer()
    trainer.pipe = build(failing)
    trainer.pipe.train_step(X, target=Y)
    while trainer.pipe.session.control.discards.first is None:
        time.sleep(0.01)
    return trainer.pipe


@needs_proc
@pytest.mark.parametrize(
    "make",
    [
        untrained,
        trained_without_flush,
        with_an_update_pending,
        with_work_pending,
        known_to_its_loss_function,
        known_to_its_model,
        that_failed,
        that_failed_while_nobody_looked,
    ],
    ids=lambda make: make.__name__,
)
def test_a_pipeline_that_is_dropped_is_collected_with_its_threads(
    make: Callable[[], Any],
) -> None:
    build().close()  # threads that torch starts once and keeps
    gc.collect()
    threads = num_threads()
    dropped = weakref.ref(make())  # not inside assert, which would keep the pipeline
    assert ends(dropped, threads)


@needs_proc
def test_a_pipeline_that_a_stage_of_its_own_collects_ends() -> None:
    """The garbage collector runs in any thread, so also in one that it has to end."""

    class Collects(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)  # so that the main thread has dropped the pipeline
            gc.collect()
            return super().forward(x)

    build().close()
    gc.collect()
    threads = num_threads()
    gc.disable()
    try:
        pipe = build(stages=[Collects(4, 4), nn.Linear(4, 4)])
        pipe.__dict__["itself"] = pipe
        pipe.train_step(X, target=Y)
        dropped = weakref.ref(pipe)
        del pipe
        time.sleep(0.5)
        assert dropped() is None, "no stage collected it"
        assert ends(dropped, threads)
    finally:
        gc.enable()


def test_a_loss_of_a_dropped_pipeline_raises_instead_of_waiting() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return super().forward(x)

    pipe = build(stages=[Slow(4, 4), nn.Linear(4, 4)])
    loss = pipe.train_step(X, target=Y)
    del pipe
    gc.collect()
    with pytest.raises(RuntimeError, match="the pipeline was closed"):
        loss.item()


@needs_proc
def test_pipelines_made_in_a_loop_leak_no_threads_files_or_memory() -> None:
    counts = []
    for i in range(24):
        pipe = build()
        optimizer = pd2.PipelineOptimizer(sgd(pipe))
        pipe.train_step(X, target=Y)
        optimizer.step()
        if i % 3 == 0:
            pipe.close()
        elif i % 3 == 1:
            pipe.unsplit()
        del pipe, optimizer
        gc.collect()
        tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
        counts.append((num_threads(), num_files(), tensors))
    assert counts[-1] == counts[5]


# ---------------------------------------------------------------- the end of the interpreter

PREAMBLE = """
import gc, sys, threading, time
import torch, pipedream2bw as pd2
from torch import nn
torch.manual_seed(0)
X, Y = torch.randn(4, 4), torch.randn(4, 4)
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)
pipe = pd2.PipelineModule([Slow(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss,
                          num_microbatches=2, example_args=(X[:1],))
opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
def train(n=2):
    for _ in range(n):
        loss = pipe.train_step(X, target=Y)
        opt.step()
    return loss
"""


def run(folder: Path, script: str, *, fails: bool = False) -> RankResult:
    path = folder / "script.py"
    path.write_text(PREAMBLE + textwrap.dedent(script), encoding="utf-8")
    (result,) = run_ranks(path, 1, rendezvous="none", timeout=60, expect_failure=fails)
    return result


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("train()", id="without-flush"),
        pytest.param("pipe.train_step(X, target=Y)", id="without-step"),
        pytest.param(
            """
            pipe = pd2.PipelineModule(
                [nn.Linear(4, 4) for _ in range(3)], nn.functional.mse_loss, num_microbatches=1,
                schedule="pipedream", example_args=(X,),
            )
            sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
            opt = pd2.PipelineOptimizer(sgd, max_grad_norm=0.1)
            train(3)
            """,
            id="forwards-wait-for-later-batches",
        ),
        pytest.param(
            """
            cell = {'pipe': pipe, 'opt': opt, 'X': X, 'Y': Y}
            del pipe, opt, train
            exec(compile('loss = pipe.train_step(X, target=Y); opt.step()', 'cell', 'exec'), cell)
            second = 'float(loss); loss2 = pipe.train_step(X, target=Y)'
            exec(compile(second, 'cell2', 'exec'), cell)
            """,
            id="in-cells",
        ),
        pytest.param(
            "t = threading.Thread(target=train); t.start(); t.join()", id="from-another-thread"
        ),
    ],
)
def test_the_interpreter_exits_silently(script: str, tmp_path: Path) -> None:
    assert run(tmp_path, script).stderr == ""


def test_a_pipeline_dropped_with_work_left_warns_once_and_its_kept_loss_ends(
    tmp_path: Path,
) -> None:
    said = run(tmp_path, "loss = train(); del pipe, opt, train").stderr
    assert said.count("dropped before its last train_steps were finished") == 1
    assert "Traceback" not in said


INTERRUPTED = -2
"""As ``python script.py`` ends. ``python -m``, of which ranks are forked, gives 1 at times: it goes
by the last ``exec`` that some import has run."""


@pytest.mark.parametrize(
    ("script", "code", "last_line"),
    [
        ("train(); raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("train(); sys.exit(3)", 3, ""),
        (
            "pipe.train_step(X, target=Y[:, :3]); pipe.flush()",
            1,
            # Broadcasting [2, 4] and [2, 3] fails in the loss function.
            "pipedream2bw.errors.StageError: stage 1, batch 0, microbatch 0, forward: "
            "RuntimeError: The size of tensor a (4) must match the size of tensor b (3) at "
            "non-singleton dimension 1. train_step 0 was discarded and changed nothing: the "
            "weights are version 0. Go on with the next batch",
        ),
        (
            "train(1); import os, signal; os.kill(os.getpid(), signal.SIGINT)",
            INTERRUPTED,
            "KeyboardInterrupt",
        ),
    ],
    ids=["exception", "exit-code", "stage-failed", "interrupt"],
)
def test_the_interpreter_exits_with_the_programs_own_error(
    script: str, code: int, last_line: str, tmp_path: Path
) -> None:
    start = time.monotonic()
    result = run(tmp_path, script, fails=True)
    assert result.exit_code in ((-2, 1) if code == INTERRUPTED else (code,)), result.stderr
    lines = result.stderr.strip().splitlines() or [""]
    assert lines[-1] == last_line
    assert time.monotonic() - start < 40
