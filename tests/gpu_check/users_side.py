"""What the caller does beside the calls changes no bit, on whatever stream it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.runs.trajectory import Trajectory, copy_of, make_pipeline
from tests.samples.models import TASKS

from .device import Device
from .jitter import Jitter
from .section import Pace, Rows
from .training import Case, by_threads, distance, repeatable, sgd_of, task_on

CASE = Case(num_stages=3, num_microbatches=4)
NUM_BATCHES = 7
SEEDS = (0, 1, 2)  # the first one for everything, the others while time is left
KEPT_BATCHES = 3
"""A batch may be written again once two more have been given to train_step."""


def run(device: Device, rows: Rows) -> None:
    pace = Pace(rows)
    with repeatable():
        task = task_on(TASKS["mlp"], device)
        batches = task.batches([2 * CASE.num_microbatches] * NUM_BATCHES)
        trained_so = by_threads(device, task, batches, CASE)
        read = read_here(device, batches)
        read_last = Trajectory([], trained_so.state)
        device.synchronize()
        asked = (
            ("batches made on another stream", under_another_stream, trained_so),
            ("synchronize() and empty_cache() at every place", waiting_everywhere, trained_so),
            ("batches of pinned memory, written again", written_again, trained_so),
            ("outputs and weights read on another stream", read_on_another_stream, read),
            ("the module given back, read on another stream", given_back, read_last),
        )
        seeds = SEEDS if device.is_gpu else SEEDS[:1]
        for seed, (name, train, want) in itertools.product(seeds, asked):
            what = f"{name}, jitter {seed}"
            if not pace.has_time(what):
                continue
            with rows.guarded(what):
                got = train(device, batches, seed)
                device.synchronize()
                apart = distance(got, want)
                rows.check(what, apart == 0, f"{apart:.1e}")


def under_another_stream(device: Device, batches: list[Batch], seed: int) -> Trajectory:
    """The caller's stream is late, and makes a batch only then."""
    task = task_on(TASKS["mlp"], device)
    with Jitter(device, seed) as jitter, device.on(device.new_stream()):
        pipe = make_pipeline(task, CASE.num_stages, CASE.num_microbatches, batches[0])
        with pipe:
            opt = pd2.PipelineOptimizer(sgd_of(device, pipe.parameters()))
            losses = []
            for batch in batches:
                device.sleep(2e-3)
                jitter.here()
                made = pytree.tree_map_only(torch.Tensor, lambda t: (t + 1 - 1).copy_(t), batch)
                losses.append(pipe.train_step(*made.args, target=made.target))
                del made
                opt.step()
            return Trajectory([loss.item() for loss in losses], copy_of(pipe.state_dict()))


def waiting_everywhere(device: Device, batches: list[Batch], seed: int) -> Trajectory:
    task = task_on(TASKS["mlp"], device)

    def wait() -> None:
        device.synchronize()
        device.module.empty_cache()

    with Jitter(device, seed) as jitter:
        return by_threads(device, task, batches, CASE, jitter=jitter, at_every_place=wait)


def written_again(device: Device, batches: list[Batch], seed: int) -> Trajectory:
    """The batches are copied into a few buffers of the host, in turn."""
    task = task_on(TASKS["mlp"], device)
    on_host = [pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), batch) for batch in batches]
    buffers = [
        pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t).pin_memory(), on_host[0])
        for _ in range(KEPT_BATCHES)
    ]
    with Jitter(device, seed) as jitter:
        model = jitter.into(task.model())
        with make_pipeline(
            task, CASE.num_stages, CASE.num_microbatches, batches[0], model=model
        ) as pipe:
            opt = pd2.PipelineOptimizer(sgd_of(device, pipe.parameters()))
            losses = []
            for number, batch in enumerate(on_host):
                buffer = buffers[number % KEPT_BATCHES]
                for to, of in zip(*map(pytree.tree_leaves, (buffer, batch)), strict=True):
                    to.copy_(of)
                losses.append(pipe.train_step(*buffer.args, target=buffer.target))
                opt.step()
            return Trajectory([loss.item() for loss in losses], copy_of(pipe.state_dict()))


def read_here(
    device: Device, batches: list[Batch], at_every_place: Callable[[], object] = lambda: None
) -> Trajectory:
    """Trains, evaluates, and reads output and weights at once, on the current stream."""
    task = task_on(TASKS["mlp"], device)
    pipe = make_pipeline(task, CASE.num_stages, CASE.num_microbatches, batches[0])
    with pipe:
        opt = pd2.PipelineOptimizer(sgd_of(device, pipe.parameters()))
        for batch in batches:
            at_every_place()
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        weights = copy_of(pipe.state_dict())
        pipe.eval()
        at_every_place()
        output = pipe(*batches[0].args)
        return Trajectory([], {**weights, "output": output * 1})


def given_back(device: Device, batches: list[Batch], seed: int) -> Trajectory:
    """The last update is still under way when the pipeline is closed."""
    task = task_on(TASKS["mlp"], device)
    with Jitter(device, seed), device.on(device.new_stream()):
        pipe = make_pipeline(task, CASE.num_stages, CASE.num_microbatches, batches[0])
        opt = pd2.PipelineOptimizer(sgd_of(device, pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        model = pipe.unsplit()
        assert isinstance(model, torch.nn.Module)
        return Trajectory([], copy_of(model.state_dict()))


def read_on_another_stream(device: Device, batches: list[Batch], seed: int) -> Trajectory:
    with Jitter(device, seed) as jitter, device.on(device.new_stream()):
        return read_here(device, batches, jitter.here)
