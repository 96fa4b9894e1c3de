"""What the caller does around the calls: streams, memory and devices of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.device import checked
from tests.device.on_device import moved
from tests.runs.trajectory import make_pipeline, sgd
from tests.samples.models import TASKS, Task

HOME = "checked:0"
M = 4


def inputs(number: int) -> torch.Tensor:
    return torch.full([2 * M, 8], 0.1) * torch.arange(2 * M * 8).view(2 * M, 8).sin() + number


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return moved(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), HOME)


def pipeline(**options: Any) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        mlp(),
        options.pop("loss_fn", nn.MSELoss()),
        num_stages=2,
        num_microbatches=M,
        example_args=(inputs(0).to(HOME),),
        devices=options.pop("devices", [HOME, HOME]),
        **options,
    )


def train(*, pinned: bool = False, rewrites: bool = False) -> list[float]:
    """The losses of some batches, whose inputs' memory may be written to after each call."""
    memory = torch.empty(2 * M, 8, pin_memory=pinned)
    with pipeline() as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for number in range(5):
            x = inputs(number)
            if rewrites:
                x = memory.copy_(x)
            losses.append(pipe.train_step(x, target=x))
            opt.step()
        return [loss.item() for loss in losses]


def test_the_caller_may_write_to_its_inputs_when_the_call_has_returned() -> None:
    want = train()
    assert train(rewrites=True) == want
    assert train(rewrites=True, pinned=True) == want


def test_all_may_be_used_on_another_stream() -> None:
    want = train()
    with torch.Stream(torch.device(HOME)):
        assert train(rewrites=True) == want
    with pipeline() as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        before = [parameter.cpu() for parameter in pipe.parameters()]
        for number in range(3):
            with torch.Stream(torch.device(HOME)):  # another one each time
                x = inputs(number).to(HOME)
                pipe.train_step(x, target=x)
                del x
            opt.step()
        with torch.Stream(torch.device(HOME)):
            state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
            with torch.no_grad():
                output = pipe(inputs(1)) * 2
        torch.accelerator.synchronize(HOME)  # this stream knows nothing of the last one
        after = [parameter.cpu() for parameter in pipe.parameters()]
        assert all(torch.isfinite(tensor.cpu()).all() for tensor in state.values())
        assert torch.isfinite(output.cpu()).all()
        assert not any(map(torch.equal, before, after))


def test_a_stage_runs_with_its_device_and_the_callers_default_device() -> None:
    seen = set()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            seen.add((torch.accelerator.current_device_index(), str(torch.empty(0).device)))
        return nn.functional.mse_loss(output, target)

    torch.set_default_device("checked:1")
    try:
        with pipeline(devices=["checked:2", "checked:3"], loss_fn=loss) as pipe:
            x = inputs(0)
            pipe.train_step(x, target=x).item()
            pd2.PipelineOptimizer(sgd(pipe.parameters())).step()
    finally:
        torch.set_default_device(None)
    assert seen == {(3, "checked:1")}


@pytest.fixture
def fast_clock() -> Iterator[float]:
    """The device's clock runs faster than the host's."""
    rate = 1000.0
    checked.set_clock_rate(rate)
    yield rate
    checked.set_clock_rate(1.0)


def test_a_timeline_has_the_times_of_the_device(fast_clock: float) -> None:
    began = time.perf_counter()
    with pipeline() as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pipe.timeline() as timeline:
            for number in range(3):
                x = inputs(number)
                pipe.train_step(x, target=x)
                opt.step()
        rows = timeline.rows
        kinds = [row.kind for row in rows]
        assert {kinds.count("F"), kinds.count("B")} == {3 * M * 2}
        assert kinds.count("U") == 6
        assert all(row.end >= row.start > 0 for row in rows)
        of_device = max(row.end for row in rows) - min(row.start for row in rows)
        assert of_device > 10 * (time.perf_counter() - began)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "pipedream"])
def test_synchronizing_anywhere_changes_nothing(schedule: str) -> None:
    task: Task = TASKS["mlp"]
    m = 1 if schedule == "pipedream" else 4

    def losses(*, synchronizes: bool) -> list[float]:
        batches = task.batches([2 * m] * 5)
        options: dict[str, Any] = {"devices": [HOME] * 3, "schedule": schedule}
        found = []
        example = batches[0]._replace(
            args=tuple(x.to(HOME) for x in batches[0].args), target=batches[0].target.to(HOME)
        )
        model = moved(task.model(), HOME)
        with make_pipeline(task, 3, m, example, model=model, **options) as pipe:
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            for batch in batches:
                found.append(pipe.train_step(*batch.args, target=batch.target))
                if synchronizes:
                    torch.accelerator.synchronize()
                opt.step()
                if synchronizes:
                    torch.accelerator.synchronize()
        return [loss.item() for loss in found]

    assert losses(synchronizes=True) == losses(synchronizes=False)


def test_a_model_that_is_on_several_devices_is_evaluated_between_batches() -> None:
    """It is captured in its second mode when its stages are there."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    with pd2.PipelineModule(
        moved(model, HOME),
        nn.MSELoss(),
        num_stages=2,
        num_microbatches=2,
        example_args=(inputs(0).to(HOME),),
        devices=["checked:1", "checked:2"],
    ) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for number in range(4):
            pipe.train_step(inputs(number), target=inputs(number))
            opt.step()
            if number == 1:
                output = pipe.eval()(inputs(5)).cpu()
                state = {name: value.cpu() for name, value in pipe.state_dict().items()}
                pipe.train()
    whole = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    whole.load_state_dict(state)
    # By microbatches, too: products of other numbers of rows may differ in the last bit.
    parts = inputs(5).chunk(2)
    assert torch.equal(output, torch.cat([whole.eval()(part) for part in parts]))


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device: checked:9, .*sees: 4: there is none"):
        pipeline(devices=[HOME, "checked:9"])
