"""Training draws random numbers as a function of seed, train_step, microbatch and draw alone."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.runs.trajectory import (
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    check_task,
    copy_of,
    make_pipeline,
    sgd,
)
from tests.samples.flow_models import random_batch
from tests.samples.models import TASKS, WIDTH, Task

DRAWING = TASKS["drawing"]


def dropouts() -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(3):
        parts.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Dropout(0.1)))
    return nn.Sequential(*parts)


# Taken as it is up to three stages, traced into nine layers for more.
SEQUENTIAL = Task(dropouts, random_batch)


@pytest.mark.parametrize("num_stages", [1, 3, 5])
def test_the_way_of_capture_changes_no_number(num_stages: int) -> None:
    check_task(SEQUENTIAL, num_stages, 6, [12] * 4)


def test_a_pipeline_lets_checkpoints_find_its_numbers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (torch, torch.random):
        for name in ("get_rng_state", "set_rng_state"):
            function = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))
    batches = DRAWING.batches([8] * 3)
    got = by_pipeline(DRAWING, batches, 2, 4)
    assert_same(got, by_oracle(DRAWING, batches, 4))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"warmup_batches": 2}])
def test_draws_of_train_steps_that_make_one_batch_and_of_a_warm_up(options: Any) -> None:
    check_task(DRAWING, 3, 4, [8] * 4, **options)


@pytest.mark.parametrize("schedule", ["2bw", "zero_bubble"])
@pytest.mark.parametrize("recompute", [["layers.1", "saving"], ["attention", "layers.4"]])
def test_blocks_draw_the_numbers_of_their_first_forward(schedule: str, recompute: Any) -> None:
    check_task(DRAWING, 3, 4, [8] * 4, schedule=schedule, recompute=recompute)


def test_the_default_generators_are_left_alone() -> None:
    batches = DRAWING.batches([8] * 3)
    with make_pipeline(DRAWING, 3, 4, batches[0]) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        before = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            optimizer.step()
        pipe.flush()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert repr(numpy.random.get_state()) == before[2]


def test_whoever_draws_beside_the_pipeline_changes_nothing() -> None:
    batches = DRAWING.batches([12] * 4)
    want = by_pipeline(DRAWING, batches, 3, 4)
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            torch.rand(3)

    beside = threading.Thread(target=draw)

    def begin(batch: int, *_: Any) -> None:  # not while the model is captured
        if batch == 0:
            beside.start()

    try:
        assert_same(by_pipeline(DRAWING, batches, 3, 4, sgd, begin), want)
    finally:
        done.set()
        beside.join()


def test_the_seed_is_the_default_generators_and_sets_the_numbers() -> None:
    def made(seed: int) -> pd2.PipelineModule:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        return pd2.PipelineModule(
            model, F.mse_loss, num_stages=1, num_microbatches=2, example_args=(x,)
        )

    x = torch.ones(4, WIDTH)
    losses = []
    for seed in (3, 3, 4):
        with made(seed) as pipe:
            losses.append((pipe.random_seed, float(pipe.train_step(x, target=x))))
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_goes_on_from_a_seed_and_a_train_step(schedule: str) -> None:
    batches = DRAWING.batches([8] * 6)
    with make_pipeline(DRAWING, 3, 4, batches[0], schedule=schedule) as pipe:
        whole = trained(pipe, batches[:3])
        state, seed = copy_of(pipe.full_state_dict()), pipe.random_seed
        whole += trained(pipe, batches[3:])
        want = copy_of(pipe.full_state_dict())
    model = DRAWING.model(seed=9)
    with make_pipeline(DRAWING, 2, 4, batches[0], schedule=schedule, model=model) as pipe:
        pipe.load_state_dict(state)
        pipe.session.random_seed, pipe.session.num_train_steps = seed, 3
        assert trained(pipe, batches[3:]) == whole[3:]
        assert_same_state(copy_of(pipe.full_state_dict()), want)


def trained(pipe: pd2.PipelineModule, batches: Any) -> list[float]:
    optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    losses = []
    for batch in batches:
        losses.append(pipe.train_step(*batch.args, target=batch.target))
        optimizer.step()
    return [float(loss) for loss in losses]


class Unknown(nn.Module):
    """Fake tensors cannot run it, and how often it draws depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x.sum().item() > 0)):
            x = F.dropout(x, 0.3, self.training)
        return x


def test_layers_whose_draws_are_not_known_draw_the_same_at_every_depth() -> None:
    def build() -> Any:
        return nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH), Unknown(), nn.Dropout(0.3), Unknown()),
            *(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
        )

    task = Task(build, random_batch)
    batches = task.batches([8] * 4)
    want = by_pipeline(task, batches, 1, 4)
    for d, schedule, recompute in ((2, "2bw", False), (4, "2bw_split", True), (6, "2bw", False)):
        m = 4 if d < 6 else 8
        if m != 4:
            batches = task.batches([16] * 4)
            want = by_pipeline(task, batches, 1, m)
        assert_same(by_pipeline(task, batches, d, m, schedule=schedule, recompute=recompute), want)


def test_the_first_layer_whose_draws_are_not_known_draws_as_the_unsplit_model() -> None:
    def build() -> Any:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), Unknown(), nn.Linear(WIDTH, WIDTH)
        )

    for num_stages in (1, 2, 4):
        check_task(Task(build, random_batch), num_stages, 4, [8] * 4)


class StraightThrough(torch.autograd.Function):
    """A backward that draws."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


class DrawsBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = StraightThrough.apply(x)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_backward_draws_is_the_same_in_every_run(recompute: bool) -> None:
    task = Task(lambda: [nn.Linear(WIDTH, WIDTH), DrawsBackward()], random_batch)
    batches = task.batches([8] * 3)
    want = by_pipeline(task, batches, 2, 4)
    assert_same(by_pipeline(task, batches, 2, 4, recompute=recompute, schedule="2bw"), want)


def test_a_generator_of_the_models_own_is_drawn_from() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(), nn.Dropout(0.5))

    task = Task(build, random_batch)
    check_task(task, 1, 4, [8] * 3, schedule="1f1b")
    with pytest.raises(RuntimeError, match=r"draws from a torch.Generator of the model's own"):
        by_pipeline(task, task.batches([8]), 1, 4, schedule="1f1b", recompute=True)


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        return x * torch.bernoulli(torch.full_like(x, 0.5), generator=generator)


def test_the_state_of_another_generator_is_refused_inside_a_stage() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.state = torch.get_rng_state()

        def forward(self, x: torch.Tensor) -> Any:
            if x.device.type == "cpu" and type(x) is torch.Tensor and x.requires_grad:
                torch.set_rng_state(self.state)
            return self.linear(x)

    task = Task(lambda: [nn.Linear(WIDTH, WIDTH), Sets()], random_batch)
    with pytest.raises(RuntimeError, match="set_rng_state: a state of 5056 bytes"):
        by_pipeline(task, task.batches([8]), 2, 4)


def test_torchs_own_stream_by_option() -> None:
    task = dataclasses.replace(SEQUENTIAL, depths=())
    batches = task.batches([8] * 3)

    def seeded(train: Callable[[], Any]) -> Any:
        def between(batch: int, *_: Any) -> None:
            if batch == 0:
                torch.manual_seed(5)

        return train(between)  # type: ignore[call-arg]

    # One stage forwards the microbatches in their order, as the unsplit model does.
    options: Any = {"schedule": "gpipe"}
    got = seeded(
        lambda between: by_pipeline(task, batches, 1, 1, sgd, between, random="torch", **options)
    )
    plain = seeded(
        lambda between: by_oracle(
            task, batches, 1, sgd, between, drawing=lambda *_: torch.enable_grad(), **options
        )
    )
    assert_same(got, plain)
    with make_pipeline(task, 1, 2, batches[0], random="torch") as pipe:
        assert pipe.random_seed is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random": "numpy"}, r"random: 'numpy', known: 'keyed', 'torch'"),
        (
            {"random": "torch", "recompute": True},
            r"random: 'torch', recompute: True: .*choose random='keyed'",
        ),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options: Any, message: str) -> None:
    (batch,) = SEQUENTIAL.batches([4])
    with pytest.raises(ValueError, match=message):
        make_pipeline(SEQUENTIAL, 2, 2, batch, **options)
