"""Every option gives the same bits on devices as on the CPU."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.errors import StageError
from tests.device.on_device import batch_on, on, places
from tests.device.test_host_optimizer import OPTIMIZERS, PRECISIONS, train
from tests.exhaustive import exhaustive
from tests.references.oracle import Batch, ReadyMade
from tests.runs.discarding import restart_delay
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    by_pipeline,
    copy_of,
    go_on,
    make_pipeline,
)
from tests.samples.models import Task
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import SKIPS, float_token_loss

HOME = "checked:0"
DEVICES = [HOME, "cpu"]


def check(task: Task, num_stages: int, m: int, optimizer: str, **options: Any) -> None:
    got, want = (
        train(task, m, OPTIMIZERS[optimizer], num_stages=num_stages, device=device, **options)
        for device in DEVICES
    )
    assert_same(got, want)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["2bw", "chimera", *exhaustive("1f1b", "pipedream")])
def test_optimizers_and_precisions(schedule: str, optimizer: str, precision: str) -> None:
    m = 1 if schedule == "pipedream" else 4
    check(SKIPS, 4, m, optimizer, schedule=schedule, **PRECISIONS[precision])


@pytest.mark.parametrize("precision", ["float32", "split", "narrow"])
@pytest.mark.parametrize(
    "options",
    [
        {"opt_options": {"max_grad_norm": 0.1}},
        {"opt_options": {"max_grad_norm": 0.1}, "schedule": "1f1b"},
        {"opt_options": {"max_grad_norm": 0.1}, "schedule": "chimera"},
        {"opt_options": {"clip_grad_value": 0.01}, "flush_after": [2]},
        {"opt_options": {"loss_scale": pd2.LossScale(2.0**20, growth_interval=2)}},
        {"opt_options": {"staleness": pd2.LearningRateDiscount(3)}},
        {"opt_options": {"staleness": pd2.ErrorFeedback(0.8)}},
        {"recompute": True},
        {"warmup_batches": 2},
    ],
    ids=str,
)
def test_every_option(options: dict[str, Any], precision: str) -> None:
    m = 4 if options.get("schedule") == "chimera" else 5
    check(SKIPS, 4, m, "adam", **PRECISIONS[precision], **options)


REMEDIES = [pd2.ErrorFeedback(0.8), pd2.NesterovCorrection(0.7)]


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: type(remedy).__name__)
def test_a_correction_is_loaded_while_the_caller_takes_memory(remedy: Any) -> None:
    """What it keeps is made by the caller, and read and dropped by an update."""
    batches = SKIPS.batches([6] * 7)

    def trained(device: str, task: Task) -> Trajectory:
        there = [batch_on(batch, device) for batch in batches]
        options: dict[str, Any] = {"devices": places(2, 2)} if device != "cpu" else {}
        with make_pipeline(task, 2, 3, there[0], **options) as pipe:
            optimizer = OPTIMIZERS["adam"](pipe.parameters())
            opt = pd2.PipelineOptimizer(optimizer, staleness=remedy)
            go_on(pipe, opt, there[:3])
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            losses = []
            for batch in there[3:]:
                # By the third one's loss the first one's update has been given to the device.
                losses.append(pipe.train_step(*batch.args, target=batch.target).item())
                opt.step()
                taken = [torch.zeros(64, device=each) for each in set(options.get("devices", ()))]
                del taken
            state = copy_of(pipe.state_dict())
            return Trajectory(losses, state).on_host()

    assert_same(trained(HOME, on(SKIPS, HOME)), trained("cpu", SKIPS))


@pytest.mark.parametrize("options", [{}, {"optimizer_device": "cpu"}], ids=str)
def test_an_evaluation_between_batches_computes_by_the_masters(options: dict[str, Any]) -> None:
    """Their roundings are written, and what is ahead of them put back, in the caller's stream."""
    batches = SKIPS.batches([6] * 6)

    def trained(device: str, task: Task) -> tuple[torch.Tensor, Trajectory]:
        there = [batch_on(batch, device) for batch in batches]
        devices: dict[str, Any] = {"devices": places(2, 2)} if device != "cpu" else {}
        with make_pipeline(task, 2, 3, there[0], precision="bf16", **options, **devices) as pipe:
            adam = OPTIMIZERS["adam"](pipe.parameters())
            opt = pd2.PipelineOptimizer(adam, staleness=REMEDIES[0])
            go_on(pipe, opt, there[:3])
            with torch.no_grad():
                outputs = [pipe(*there[0].args).cpu() for _ in range(2)]
            assert torch.equal(*outputs)
            return outputs[0], go_on(pipe, opt, there[3:]).on_host()

    output, got = trained(HOME, on(SKIPS, HOME))
    expected, want = trained("cpu", SKIPS)
    assert torch.equal(output, expected)
    assert_same(got, want)


@pytest.mark.parametrize(
    "options",
    [
        *({"opt_options": {"staleness": remedy}} for remedy in REMEDIES),
        {"loss_reduction": "sum", "normalizer": torch.numel},
        *exhaustive({"compile": {"backend": "eager"}}),  # seconds of dynamo's
    ],
    ids=lambda options: ",".join(options),  # an address would differ between pytest's workers
)
def test_options_of_float32(options: dict[str, Any]) -> None:
    check(SKIPS, 3, 4, "adam", **options)


class Under(nn.Module):
    """The model under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        with torch.autocast("checked", dtype=torch.bfloat16, cache_enabled=False):
            return self.model(*args)


def test_autocast_is_the_unsplit_models_on_the_device() -> None:
    """Which operators it lets run in which precision differs between types of devices."""
    task = on(SKIPS, HOME)
    batches = [batch_on(batch, HOME) for batch in SKIPS.batches([8] * 5)]
    wanted = by_oracle(task, batches, 4, model=Under(task.model()))
    state = {name.removeprefix("model."): value for name, value in wanted.state.items()}
    options: dict[str, Any] = {"autocast": torch.bfloat16, "devices": [HOME] * 3}
    got = by_pipeline(task, batches, 3, 4, **options)
    assert_same(got, Trajectory(wanted.losses, state))
    plain = by_pipeline(task, batches, 3, 4, devices=[HOME] * 3)
    assert got.losses != plain.losses


def ready_made(batch: Batch) -> ReadyMade:
    """Microbatches of 1, 2, 3 ... rows, as many as there are rows for."""
    (x,), rows = batch.args, itertools.count(1)
    found = []
    while len(x) > 0 and len(found) < 3:
        n = next(rows)
        target = batch.target[-len(x) :]
        found.append(Batch((x[:n],), target[:n]))
        x = x[n:]
    return ReadyMade(found)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "chimera"])
def test_microbatches_that_are_absent_or_made_by_the_caller(schedule: str) -> None:
    m = 4
    batches: list[Any] = SKIPS.batches([8, 3, 8, 2, 6, 5])
    batches[2], batches[4] = ready_made(batches[2]), ready_made(batches[4])
    options: dict[str, Any] = {"schedule": schedule, "example": batches[0]}
    want = by_pipeline(SKIPS, batches, 2, m, **options)
    there = [
        ReadyMade([batch_on(each, HOME) for each in batch.microbatches])
        if isinstance(batch, ReadyMade)
        else batch_on(batch, HOME)
        for batch in batches
    ]
    options |= {"example": there[0], "devices": places(2, 2)}
    assert_same(by_pipeline(on(SKIPS, HOME), there, 2, m, **options).on_host(), want)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "chimera"])
def test_a_batch_that_is_discarded_leaves_nothing(schedule: str) -> None:
    batches = SKIPS.batches([8] * 4)

    def trained(device: str, *, fails: bool) -> Trajectory:
        there = [batch_on(batch, device) for batch in batches]
        options: dict[str, Any] = {"schedule": schedule}
        if device != "cpu":
            options["devices"] = places(2, 2)
        task = SKIPS if device == "cpu" else on(SKIPS, device)
        losses = []
        with make_pipeline(task, 2, 4, there[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(OPTIMIZERS["adam"](pipe.parameters()), max_grad_norm=0.1)
            for number, batch in enumerate(there):
                if fails and number == 2:
                    wrong = batch.target[:, :3]  # which the last stage's loss cannot take

                    def bad(x: torch.Tensor = batch.args[0], y: torch.Tensor = wrong) -> None:
                        pipe.train_step(x, target=y)
                        opt.step()
                        pipe.flush()

                    with pytest.raises(StageError, match="discarded"):
                        bad()
                elif number == 2:
                    restart_delay(pipe)
                losses.append(pipe.train_step(*batch.args, target=batch.target))
                opt.step()
            state = copy_of(pipe.state_dict())
            return Trajectory([loss.item() for loss in losses], state).on_host()

    # The delay begins anew on both.
    assert_same(trained(HOME, fails=True), trained("cpu", fails=True))


@pytest.mark.parametrize("schedule", ["2bw", "chimera", "1f1b"])
def test_tied_gradients_are_summed(schedule: str) -> None:
    task = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)
    check(task, 2, 4, "adam", schedule=schedule, split=["blocks.2"])


@pytest.mark.parametrize(("device", "num_kept"), [("checked:0", 1), ("cpu", 0)])
@pytest.mark.parametrize(("precision", "num_lifted"), [("float32", 0), ("bf16", 2), ("narrow", 0)])
def test_gradients_that_wait_to_be_added_are_reported(
    device: str, num_kept: int, precision: str, num_lifted: int
) -> None:
    """All of a backward's; those of 16 bits become float32 before they are added to such."""
    batches = [batch_on(batch, device) for batch in SKIPS.batches([4] * 2)]
    task = SKIPS if device == "cpu" else on(SKIPS, device)
    with make_pipeline(task, 2, 2, batches[0], **PRECISIONS[precision]) as pipe:
        go_on(pipe, pd2.PipelineOptimizer(OPTIMIZERS["sgd"](pipe.parameters())), batches)
        pipe.flush()
        for each in pipe.memory_report().values():
            assert each.weights > 0
            want = num_kept * (1 + num_lifted) * each.weights // 2
            # What is float32 for a moment begins on a boundary for each parameter.
            assert want <= each.kept_gradients <= want + (512 * 8 if want and num_lifted else 0)
