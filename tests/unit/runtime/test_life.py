"""What happens to a pipeline beside training: forks, threads, exits, and nobody who closes it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.runs.rank_process import ROOT

X, Y = torch.randn(8, 4), torch.randn(8, 4)

PIPELINE = """
    import gc, os, random, signal, sys, threading, time
    import torch, pipedream2bw as pd2
    from torch import nn
    gc.freeze()  # or each fork, when it ends, takes half a second to look at torch's objects
    torch.set_num_threads(1)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = pd2.PipelineModule(
        model, nn.functional.mse_loss, num_stages=2, num_microbatches=4, example_args=(x,)
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    def step():
        loss = pipe.train_step(x, target=y)
        opt.step()
        return loss
    loss = step()
"""


def run(script: str) -> str:
    """What the script prints after making and training a pipeline."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PIPELINE) + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_process_is_told_and_ends_and_the_parent_goes_on() -> None:
    printed = run("""
        calls = [
            step, opt.step, lambda: float(loss), pipe.state_dict, pipe.full_state_dict, pipe.flush,
            lambda: pipe.eval()(x), opt.state_dict, pipe.unsplit, pipe.discard_batch,
        ]
        for call in [*calls, pipe.close]:
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends it if it hangs
                try:
                    call()
                except RuntimeError as error:
                    print("told" if "was forked from" in str(error) else error, flush=True)
                del pipe, opt, calls, call, step
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0, call
        float(step())
        pipe.close()
    """)
    assert printed.split() == ["told"] * 10  # close() has nothing to do there


def test_workers_of_a_loader_that_know_the_pipeline_end() -> None:
    printed = run("""
        class Data(torch.utils.data.Dataset):
            def __init__(self, pipe):
                self.pipe = pipe
            def __len__(self):
                return 16
            def __getitem__(self, i):
                return x[i % 8], y[i % 8]
        for epoch in range(2):
            for a, b in torch.utils.data.DataLoader(Data(pipe), 8, num_workers=2):
                loss = pipe.train_step(a, target=b)
                opt.step()
        print(float(loss) > 0)
    """)
    assert printed.split() == ["True"]


@pytest.mark.parametrize("closes", [True, *exhaustive(False)])
def test_threads_that_call_at_once_are_told_one_at_a_time(closes: bool) -> None:
    printed = run(f"""
        def evaluate():
            with torch.no_grad():
                pipe(x)
        calls = [
            step, step, opt.step, evaluate, pipe.state_dict, opt.state_dict, pipe.flush,
            pipe.discard_batch, lambda: pipe.load_state_dict(pipe.state_dict()), pipe.memory_report,
        ]
        end, told = time.time() + 3, set()
        def work(seed):
            draw = random.Random(seed)
            while time.time() < end:
                try:
                    draw.choice(calls)()
                except (RuntimeError, ValueError) as error:
                    told.add(str(error))
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        [thread.start() for thread in threads]
        while {closes} and pipe.session.ending.is_open:
            time.sleep(0.01)
            if time.time() > end - 1:
                try:
                    pipe.close()
                except RuntimeError as error:
                    told.add(str(error))
        [thread.join() for thread in threads]
        print(any("use one thread at a time" in each for each in told))
    """)
    assert printed.split() == ["True"]


def dropped(end: Callable[[pd2.PipelineModule], Any]) -> list[str]:
    def train() -> None:
        pipe = pd2.PipelineModule(
            [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=4, example_args=(X,)
        )
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(3):
            pipe.train_step(X, target=Y)
            opt.step()
        end(pipe)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
        gc.collect()
    return [str(each.message) for each in caught]


def test_a_pipeline_that_is_dropped_unfinished_warns() -> None:
    (told,) = dropped(lambda pipe: None)
    assert "the model lacks their updates. Call flush() or close()" in told


@pytest.mark.parametrize(
    "end",
    [lambda p: p.flush(), lambda p: p.close(), lambda p: p.unsplit(), lambda p: p.state_dict()],
)
def test_a_pipeline_that_is_dropped_finished_does_not(
    end: Callable[[pd2.PipelineModule], Any],
) -> None:
    assert dropped(end) == []


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "pipedream", "2bw_fresh"])
@pytest.mark.parametrize("wait", ["snapshot.result", "done.result", "done.exception"])
@pytest.mark.parametrize("later", [0, 1])
def test_who_saves_and_waits_for_the_future_gets_it(
    later: int, wait: str, schedule: str, tmp_path: Path
) -> None:
    with pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        mse_loss,
        schedule=schedule,
        num_microbatches=1 if schedule == "pipedream" else 4,
        example_args=(X,),
        timeout=20,
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(2):
            pipe.train_step(X, target=Y)
            opt.step()
        saving = pd2.save(tmp_path, pipe, opt)
        for _ in range(later):
            pipe.train_step(X, target=Y)
            opt.step()
        part, call = wait.split(".")
        assert getattr(getattr(saving, part), call)() is None
        saving.wait()
        assert len(list(tmp_path.glob("step-*"))) == 1


def test_another_thread_waits_for_the_next_batch(tmp_path: Path) -> None:
    with pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=4, example_args=(X,)
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(X, target=Y)
        opt.step()
        saving = pd2.save(tmp_path, pipe, opt)
        waiting = threading.Thread(target=saving.done.result)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()  # nothing was drained
        pipe.train_step(X, target=Y)
        opt.step()
        waiting.join(20)
        assert not waiting.is_alive()
