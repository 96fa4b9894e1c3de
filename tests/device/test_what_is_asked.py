"""Who waits for a device in the steady state, and on which streams work is done."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pipedream2bw as pd2
from tests.device import checked
from tests.device.checked import Asked, AskedKind
from tests.device.on_device import batch_on, on, places
from tests.device.test_host_optimizer import OPTIMIZERS
from tests.runs.trajectory import copy_of, go_on, make_pipeline
from tests.samples.models import TASKS, Task
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import SKIPS, float_token_loss

HOME = "checked:0"
M, WARM_UP, STEADY = 4, 3, 6
TIED_TASK = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)


def ask(task: Task, num_stages: int, opt_options: dict[str, Any], **options: Any) -> list[Asked]:
    """What some batches ask of the devices. Inputs are the host's.

    The caller reads one loss after the flush. A thread brings losses when it has time, and each
    wait for them must be counted with its own batch.
    """
    batches = task.batches([2 * M] * (WARM_UP + STEADY))
    options = {"devices": places(num_stages, 2), **options}
    example = batch_on(batches[0], HOME)
    with make_pipeline(on(task, HOME), num_stages, M, example, **options) as pipe:
        opt = pd2.PipelineOptimizer(OPTIMIZERS["adam"](pipe.parameters()), **opt_options)

        def train(some: Iterable[Any]) -> None:
            for batch in some:
                loss = pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            pipe.flush()
            float(loss)

        train(batches[:WARM_UP])
        with checked.log() as asked:
            train(batches[WARM_UP:])
    return asked


def thread_of(asked: Asked) -> str:
    """Its name; "caller" for the one that trains."""
    name = re.sub(r" \d+$", "", asked.thread)
    return name if name.startswith(("pd2", "pt_")) else "caller"


def waits(asked: Iterable[Asked]) -> Counter[str]:
    """How often each kind of thread waits, and for what."""
    return Counter(
        f"{thread_of(each)}: {each.name}" for each in asked if each.kind == AskedKind.HOST_WAIT
    )


RUN_AHEAD = "pd2 stage: the host waits"
OF_LOSSES, OF_UPDATES = (f"pd2 {each}: the host waits for a copy" for each in ("losses", "update"))
TRAININGS: dict[str, dict[str, Any]] = {
    "tied": {
        "task": TIED_TASK,
        "num_stages": 2,
        "opt_options": {"max_grad_norm": 0.1, "loss_scale": pd2.LossScale(2.0**10)},
        "split": ["blocks.2"],
        "metrics": {"rows": lambda output, target: len(output)},
    },
    "skips": {"task": SKIPS, "num_stages": 3, "opt_options": {"max_grad_norm": 0.1}},
}


@pytest.fixture(scope="module", params=TRAININGS)
def asked(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[Asked]]:
    """A training, and what it asks."""
    training = TRAININGS[request.param]
    return training, ask(**training)


def test_nobody_waits_but_for_losses_norms_and_so_as_not_to_run_ahead(
    asked: tuple[dict[str, Any], list[Asked]],
) -> None:
    """The caller never does. Inputs are the host's, and a metric is a number of Python's.

    Clipping needs no norm on the host, a loss scale needs each stage's.
    """
    training, found = asked
    assert waits(found) == Counter(
        {
            RUN_AHEAD: STEADY * M * training["num_stages"],
            OF_LOSSES: STEADY,
            OF_UPDATES: STEADY * training["num_stages"] * ("loss_scale" in training["opt_options"]),
        }
    )


def test_to_close_waits_until_the_devices_have_done_what_they_were_given() -> None:
    task, num_stages = TASKS["mlp"], 2
    (batch,) = task.batches([2 * M])
    devices = places(num_stages, 2)
    pipe = make_pipeline(on(task, HOME), num_stages, M, batch_on(batch, HOME), devices=devices)
    opt = pd2.PipelineOptimizer(OPTIMIZERS["sgd"](pipe.parameters()))
    pipe.train_step(*batch.args, target=batch.target)
    opt.step()
    pipe.flush()
    with checked.log() as asked:
        pipe.close()
    assert waits(asked)["caller: the host waits"] == 2 * num_stages  # forwards, and updates


def test_the_current_device_is_the_one_of_its_number() -> None:
    found = ask(SKIPS, 2, {}, devices=["checked", HOME])
    assert not [each for each in found if "between devices" in each.name]


def test_messages_come_before_the_stages_own_work() -> None:
    """A device's other streams have the lowest of its two priorities."""
    found = ask(SKIPS, 2, {})
    between = {each.stream for each in found if "between devices" in each.name}
    others = {each.stream for each in found if each.stream is not None} - between
    assert between
    assert {checked.priority_of(stream) for stream in between if stream is not None} == {-1}
    assert {checked.priority_of(stream) for stream in others if stream is not None} == {0}


def test_only_forwards_and_backwards_are_on_their_streams(
    asked: tuple[dict[str, Any], list[Asked]],
) -> None:
    training, found = asked
    compute = {each.stream for each in found if each.name == "aten::addmm"}
    assert len(compute) == training["num_stages"]
    backwards = {each.stream for each in found if each.name == "aten::tanh_backward"}
    assert backwards <= compute

    def streams(*names: str, thread: str) -> set[int | None]:
        of_these = {
            each.stream for each in found if each.name in names and thread_of(each) == thread
        }
        assert of_these, (names, thread)
        return of_these

    away = streams("optimizer step", thread="pd2 update")
    away |= streams("aten::linalg_vector_norm", thread="pd2 update")
    assert len(away) == training["num_stages"]
    away |= streams("copy from the host", thread="caller")
    away |= streams("copy to the host", thread="pd2 losses")
    away |= streams("copy between devices", thread="pd2 stage")
    assert not away & compute
    assert {each.name for each in found if thread_of(each) == "caller"} == {"copy from the host"}


def test_a_save_keeps_no_stage_waiting(tmp_path: Path) -> None:
    """Buffers are copied before the next batch changes them, weights beside it."""
    task, num_stages = TASKS["batch norm"], 2
    batches = task.batches([2 * M] * 6)
    example = batch_on(batches[0], HOME)
    options = {"devices": places(num_stages, 2)}
    with make_pipeline(on(task, HOME), num_stages, M, example, **options) as pipe:
        opt = pd2.PipelineOptimizer(OPTIMIZERS["adam"](pipe.parameters()))
        go_on(pipe, opt, batches[:3])
        want = copy_of(pipe.state_dict())
        with checked.log() as asked:
            saving = pd2.save(tmp_path, pipe, opt)
            for batch in batches[3:]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            pipe.flush()
            saving.wait()
    # A layer of the model reads how many batches it has seen.
    allowed = {RUN_AHEAD, "pd2 stage: the host waits for aten::_local_scalar_dense"}
    assert {each for each in waits(asked) if each.startswith("pd2 stage")} <= allowed
    (file,) = tmp_path.rglob("model-*.safetensors")
    saved = load_file(file)
    assert saved.keys() == want.keys()
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in want.items())
