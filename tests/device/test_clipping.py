"""Where no host reads the norm, gradients are clipped to the bits of the CPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.device.on_device import batch_on, on, places
from tests.device.test_host_optimizer import OPTIMIZERS, PRECISIONS, MakeOptimizer
from tests.references.oracle import Batch
from tests.runs.trajectory import Trajectory, assert_same, copy_of, make_pipeline
from tests.samples.models import TASKS, Task
from tests.unit.optimizer.test_clipping import OwnSGD
from tests.unit.training.test_precision import SKIPS

HOME, BOUND, NUM_BATCHES = "checked:0", 0.1, 6
MAKE: dict[str, MakeOptimizer] = {**OPTIMIZERS, "own": lambda ps: OwnSGD(ps, lr=0.3, momentum=0.5)}


def train(
    task: Task,
    num_stages: int,
    optimizer: str = "adam",
    *,
    num_devices: int,
    opt_options: dict[str, Any] | None = None,
    num_batches: int = NUM_BATCHES,
    **options: Any,
) -> tuple[Trajectory, list[float]]:
    """Trains and gives the norms, each read one batch late; on the CPU if there is no device."""
    device = HOME if num_devices else "cpu"
    batches = [batch_on(batch, device) for batch in task.batches([6] * num_batches)]
    if num_devices:
        task, options["devices"] = on(task, HOME), places(num_stages, num_devices)
    with make_pipeline(task, num_stages, 3, batches[0], **options) as pipe:
        opt_options = {"max_grad_norm": BOUND, **(opt_options or {})}
        opt = pd2.PipelineOptimizer(MAKE[optimizer](pipe.parameters()), **opt_options)
        losses, norms, numbers = list[pd2.Loss](), list[Any](), list[float]()
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            numbers += [float(norm) for norm in norms[len(numbers) :]]
            opt.step()
            norms.append(opt.grad_norm)
        state = copy_of(pipe.state_dict())
        numbers += [float(norm) for norm in norms[len(numbers) :]]
        return Trajectory([loss.item() for loss in losses], state).on_host(), numbers


def check(task: Task, num_stages: int, optimizer: str, num_devices: int, **options: Any) -> None:
    want, norms = train(task, num_stages, optimizer, num_devices=0, **options)
    assert max(norms) > BOUND
    got, got_norms = train(task, num_stages, optimizer, num_devices=num_devices, **options)
    assert got_norms == norms
    assert_same(got, want)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("optimizer", ["adam", "own"])
def test_every_depth(optimizer: str, schedule: str, num_stages: int, num_devices: int) -> None:
    check(SKIPS, num_stages, optimizer, num_devices, schedule=schedule)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_every_norm(norm_type: float, precision: str) -> None:
    check(SKIPS, 2, "adam", 2, opt_options={"norm_type": norm_type}, **PRECISIONS[precision])


@pytest.mark.parametrize("precision", ["float32", "bf16", "split", "narrow"])
@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("feeds_back", [False, True])
def test_every_step(feeds_back: bool, optimizer: str, precision: str) -> None:
    if (optimizer, precision) == ("own", "split"):
        pytest.skip("an optimizer's own step needs whole masters")
    opt_options = {"staleness": pd2.ErrorFeedback(0.8)} if feeds_back else {}
    check(SKIPS, 3, optimizer, 2, opt_options=opt_options, **PRECISIONS[precision])


def test_gradients_of_two_dtypes() -> None:
    """BatchNorm's stay float32. A stage's norms come from one pass for each."""
    check(TASKS["batch norm"], 2, "adam", 2, **PRECISIONS["narrow"])


@pytest.mark.parametrize(("factor", "norm"), [(1e25, math.inf), (math.nan, math.nan)])
def test_a_norm_that_is_not_finite(factor: float, norm: float) -> None:
    """Gradients become 0 or NaN, and nobody notices but who reads the norm."""
    large = dataclasses.replace(SKIPS, draw=lambda rows: _times(factor, SKIPS.draw(rows)))
    options: dict[str, Any] = {"schedule": "1f1b", "num_batches": 1}
    want, norms = train(large, 2, num_devices=0, **options)
    got, got_norms = train(large, 2, num_devices=2, **options)
    same: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close([norms, got_norms], [[norm]] * 2, **same)
    torch.testing.assert_close(got.state, want.state, **same)


def _times(factor: float, batch: Batch) -> Batch:
    return Batch(batch.args, batch.target * factor)
