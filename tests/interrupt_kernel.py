"""Interrupts a Jupyter kernel that trains, at random moments; the next cell must train on.

    python -m tests.interrupt_kernel --interrupts 100 --seed 0

Needs ``ipykernel`` and ``jupyter_client``, which the extra ``test`` installs.

A cell trains, evaluates, flushes and reads losses in an endless loop until the interrupt, which may
come in a batch whose ``opt.step()`` is missing: the next train_step discards that. In the end the
weights must be those of the unsplit model on the batches whose train_step counted, whose delay
begins anew after each discarded batch, bit for bit, and the kernel must have as many threads as
after the first tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CELL_SECONDS = 15.0
"""After which a cell hangs."""

BEGIN = """
import faulthandler, json, os, signal, sys, time, warnings
import torch
from torch import nn
from torch.nn.functional import mse_loss
import pipedream2bw as pd2
from pipedream2bw.runtime.extension import Extension
from tests.references.oracle import Batch, Oracle
from tests.runs.trajectory import copy_of

faulthandler.register(signal.SIGUSR1, file=open({stacks!r}, "w"), all_threads=True)
said = open({said!r}, "a", buffering=1)
torch.set_num_threads(1)
warned = []
warnings.showwarning = lambda message, *rest: warned.append(str(message))
warnings.simplefilter("always")

def batch(number):
    draws = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 8, 16, generator=draws)
    return Batch((x,), y)

def make_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh())
              for _ in range(3)]
    return nn.Sequential(*layers)

pipe = pd2.PipelineModule(list(make_model()), mse_loss, num_microbatches=4,
                          schedule={schedule!r}, example_args=batch(0).args)
opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.5))
class Restarts(Extension):
    def __init__(self):
        self.before = set()  # train_steps

    def taken_back(self, taken):
        self.before.add(taken.train_step)

restarts = Restarts()
pipe.session.extensions.add(restarts)
number, counted = 0, {{}}  # counted: the batches' numbers by train_step; one that counts anew wins

def train_one():
    global number
    number += 1
    given = batch(number)
    loss = pipe.train_step(*given.args, target=given.target)
    counted[loss.train_step] = number
    time.sleep({pause!r})
    opt.step()
    return loss
"""

TRAIN = """
pipe.train()
train_one()
print("trains", file=said)
while True:
    loss = train_one()
    if number % 3 == 0:
        float(loss)
    if number % 7 == 0:
        pipe.flush()
    if number % 11 == 0:
        pipe.eval()
        with torch.no_grad():
            pipe(*batch(0).args)
        pipe.train()
    if number % 13 == 0:
        pipe.state_dict(), opt.state_dict()
"""

COUNT = """
counts = [len(os.listdir("/proc/self/task")), len(counted), len(warned)]
print(json.dumps(counts), file=said)
"""

END = """
torch.set_grad_enabled(True)  # an interrupt in no_grad's own lines leaves it off
pipe.train()
train_one()
pipe.flush()
model = make_model()
oracle = Oracle(
    model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), 4, mse_loss,
    int("2bw" in {schedule!r}),
    drawing=lambda step, j: pd2.reference_random(
        seed=pipe.random_seed, train_step=step, microbatch=j),
)
assert sorted(counted) == list(range(len(counted))), sorted(counted)
for step in sorted(counted):
    if step in restarts.before:
        oracle.restart_delay()
    oracle.train_step(batch(counted[step]))
got, want = pipe.state_dict(), model.state_dict()
differing = [name for name in want if not torch.equal(got[name], want[name])]
print(json.dumps(differing), file=said)
pipe.close()
"""


class Kernel:
    """A real kernel, whose cells run in a process of its own.

    They say in a file what they find: an interrupt may come where ``print`` has noted that it will
    send its text, and has not, and nothing that is printed later arrives.
    """

    def __init__(self, folder: Path) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        self.stacks, said = folder / "stacks", folder / "said"
        said.touch()
        self.said = said.open()
        root = Path(__file__).resolve().parents[1]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.manager = KernelManager()
        self.manager._kernel_spec = KernelSpec(  # of this Python
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            interrupt_mode="signal",
        )
        self.manager.start_kernel(cwd=str(root), env=env)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_SECONDS)

    def run(self, code: str, interrupt_after: float | None = None) -> tuple[str, str, str]:
        """Gives what a cell said, and the kind and text of its error; "ok" without one.

        Args:
            interrupt_after: seconds after it has said something.
        """
        sent = self.client.execute(code)
        end = time.monotonic() + CELL_SECONDS
        said = ""
        due: float | None = None
        while True:
            now = time.monotonic()
            if now > end:
                self.show_stacks()
                raise TimeoutError(f"the cell hangs; it has said {said!r}")
            said += self.said.read()
            if said and interrupt_after is not None:
                due, interrupt_after = now + interrupt_after, None
            if due is not None and now >= due:
                self.manager.interrupt_kernel()
                due = None
            try:
                wait = min(0.02, end - now) if due is None else max(due - now, 0)
                message = self.client.get_iopub_msg(timeout=wait)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        reply = self.client.get_shell_msg(timeout=CELL_SECONDS)
        while reply["parent_header"].get("msg_id") != sent:
            reply = self.client.get_shell_msg(timeout=CELL_SECONDS)
        content = reply["content"]
        text = "\n".join(content.get("traceback", []))
        said += self.said.read()
        return said, content.get("ename", content["status"]), text

    def value(self, code: str) -> Any:
        """What a cell says as JSON."""
        said, kind, text = self.run(code)
        if kind != "ok":
            raise RuntimeError(text)
        return json.loads(said) if said else None

    def show_stacks(self) -> None:
        os.kill(self.manager.provisioner.process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        print(self.stacks.read_text(), flush=True)

    def end(self) -> None:
        self.said.close()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def interrupt(
    kernel: Kernel, schedule: str, count: int, chance: random.Random, pause: float
) -> str:
    """What is wrong after so many interrupts, "" if nothing is."""
    kernel.value(
        BEGIN.format(
            stacks=str(kernel.stacks), said=kernel.said.name, schedule=schedule, pause=pause
        )
    )
    first: list[int] | None = None
    for number in range(count):
        _, kind, text = kernel.run(TRAIN, interrupt_after=chance.uniform(0, 0.15))
        if kind != "KeyboardInterrupt":
            return f"interrupt {number}: the cell ended with {kind}\n{text}"
        if first is None and number >= count // 10:
            first = kernel.value(COUNT)
    assert first is not None
    last = kernel.value(COUNT)
    print(f"{schedule}: {count} interrupts, {last[1]} train_steps, {last[2]} warnings of discarded "
          f"ones, threads: {first[0]} -> {last[0]}")  # fmt: skip
    differing = kernel.value(END.format(schedule=schedule))
    if differing:
        return f"not the unsplit model's: {differing}"
    return f"threads: {first[0]} -> {last[0]}" if last[0] > first[0] else ""


def run(schedule: str, count: int, chance: random.Random, *, pause: float = 0.0) -> str:
    """What is wrong after so many interrupts of a new kernel, "" if nothing is.

    Args:
        pause: seconds from a train_step to its ``opt.step()``, in which an interrupt costs it.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        kernel = Kernel(Path(folder))
        try:
            return interrupt(kernel, schedule, count, chance, pause)
        finally:
            kernel.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--schedules", nargs="+", default=["2bw", "1f1b"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    wrong = False
    for schedule in options.schedules:
        found = run(schedule, options.interrupts // len(options.schedules), chance)
        print(found or "as if the discarded batches had not been")
        wrong |= bool(found)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
