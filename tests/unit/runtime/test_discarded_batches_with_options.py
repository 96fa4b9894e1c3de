"""A discarded batch leaves nothing behind, whatever the pipeline is made with.

What the same pipeline without that batch gives is the measure; that this is what the unsplit model
gives is tested for each option elsewhere.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.runs.discarding import Failure, Layer, batches, restart_delay, train
from tests.runs.trajectory import assert_same_state, copy_of

M, ROWS, COUNT = 4, 8, 8


def tied_model(failures: list[Failure]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Layer(number, failures) for number in range(2)]
    layers[1].linear.weight = layers[0].linear.weight
    return nn.Sequential(*layers)


CASES: dict[str, dict[str, Any]] = {
    "loss scale": {"optimizer_options": {"loss_scale": pd2.LossScale(growth_interval=2)}},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": True},
    "adamw": {"optimizer": torch.optim.AdamW},
    "interleaved": {"schedule": "1f1b"},
    "warm-up": {"warmup_batches": 3},
}


def compare(given: list[Batch], failures: list[Failure], **options: Any) -> None:
    settings = {"num_stages": 2, "num_microbatches": M, "schedule": "2bw", **options}
    make = settings.pop("make", lambda failures: None)
    got = train(given, failures, model=make(failures), **settings)
    assert len(got.errors) == 1
    kept = [given[position] for position in got.kept]
    want = train(kept, [], model=make([]), restarts=got.restarts, **settings)
    assert not want.errors
    assert got.losses == want.losses
    assert_same_state(got.state, want.state)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_discarded_batch_leaves_nothing_behind(name: str, layer: int) -> None:
    compare(batches(COUNT, ROWS), [Failure(layer, "forward", 3 * M + 1)], **CASES[name])


@pytest.mark.parametrize("layer", [0, 1])
def test_copies_of_tied_weights_stay_alike(layer: int) -> None:
    compare(batches(COUNT, ROWS), [Failure(layer, "forward", 3 * M + 1)], make=tied_model)


@pytest.mark.parametrize(
    "bad",
    [torch.randn(ROWS, 7), torch.randn(ROWS, 4, dtype=torch.float64), torch.ones(ROWS, 4).long()],
    ids=["width", "float64", "int64"],
)
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_inputs_of_a_wrong_width_or_dtype_cost_their_batch_alone(
    bad: torch.Tensor, schedule: str
) -> None:
    given = batches(COUNT, ROWS)
    given[3] = Batch((bad,), given[3].target)
    compare(given, [], schedule=schedule)


class Mixed(nn.Module):
    """Has parameters of both stages, and a buffer that the first one writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.eye(4) * k) for k in (0.5, 0.7))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        x = self.a(x @ self.w1).tanh()
        result: torch.Tensor = self.b(x) @ self.w2
        return result


def test_a_module_of_two_stages_has_its_buffers_set_back_by_the_one_that_writes_to_them() -> None:
    calls = 0

    def late_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if threading.current_thread() is not threading.main_thread():
            calls += 1
            time.sleep(0.03)  # the first stage is ahead
            if calls == 2 * M + 2:
                raise ZeroDivisionError("on purpose")
        return mse_loss(output, target)

    given = batches(4, ROWS)
    torch.manual_seed(0)
    x = given[0].args[0][:2]
    with pd2.PipelineModule(
        Mixed(), late_loss, num_stages=2, num_microbatches=M, example_args=(x,)
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        good = 0
        for batch in given:
            try:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
                pipe.flush()
                good += 1
            except pd2.errors.StageError as error:
                assert error.discarded  # noqa: PT017
        assert good == 3
        assert pipe.state_dict()["seen"] == good * M


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_discarded_batch_leaves_no_learning_rate_to_the_next(kind: Any) -> None:
    """Steps that were registered and discarded had changed it; what is set last counts."""

    def run(
        layers_fail_at: list[Failure], rates: dict[int, float], restart: int | None = None
    ) -> tuple[dict[str, torch.Tensor], list[int]]:
        """What is trained, and by which batches: when the failure is noticed depends on threads."""
        trained: list[int] = []
        pipe = pd2.PipelineModule(
            [Layer(i, layers_fail_at) for i in range(2)],
            mse_loss,
            num_microbatches=M,
            example_args=(given[0].args[0][:2],),
        )
        with pipe:
            optimizer = kind(pipe.parameters(), lr=0.01)
            opt = pd2.PipelineOptimizer(optimizer)
            for number, rate in rates.items():
                optimizer.param_groups[0]["lr"] = rate
                if len(trained) == restart:
                    restart_delay(pipe)
                try:
                    pipe.train_step(*given[number].args, target=given[number].target)
                    trained.append(number)
                    opt.step()
                except pd2.errors.StageError as error:
                    assert error.discarded is not None  # noqa: PT017
                    del trained[error.discarded[0] :]
            pipe.flush()
            return copy_of(pipe.state_dict()), trained

    given = batches(8, ROWS)
    rates = {number: 0.01 * (number + 1) for number in range(8)}
    torch.manual_seed(0)
    got, trained = run([Failure(1, "forward", 2 * M + 3)], rates)
    assert trained[:2] == [0, 1]
    assert 2 not in trained
    assert trained[-1] == 7
    torch.manual_seed(0)
    want, _ = run([], {number: rates[number] for number in trained}, restart=2)
    assert_same_state(got, want)


def test_after_an_interrupt_at_any_moment_the_next_train_step_trains() -> None:
    """And the batches that were trained give the bits of a run of these alone."""
    draw = random.Random(0)
    x, y = batches(1, ROWS)[0].args[0], batches(1, ROWS)[0].target

    def made() -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        torch.manual_seed(0)
        pipe = pd2.PipelineModule(
            [nn.Linear(4, 4), nn.BatchNorm1d(4)],
            mse_loss,
            num_microbatches=2,
            example_args=(x[:2],),
        )
        return pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))

    pipe, opt = made()
    restarts = set()
    for _ in range(20):
        timer = threading.Timer(draw.uniform(0.0, 0.03), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            end = time.monotonic() + 5
            while time.monotonic() < end:
                pipe.train_step(x, target=y)
                opt.step()
        except KeyboardInterrupt:
            pass
        timer.join()
        if pipe.discard_batch():
            restarts.add(pipe.session.num_train_steps)
        float(pipe.train_step(x, target=y))
        opt.step()
    pipe.flush()
    updates = pipe.session.accumulation.num_updates
    assert updates == pipe.session.num_train_steps >= 20
    want, want_opt = made()
    for number in range(updates):  # an interrupt drains the pipeline, which changes no bit
        if number in restarts:
            restart_delay(want)
        want.train_step(x, target=y)
        want_opt.step()
    assert_same_state(pipe.state_dict(), want.state_dict())
    pipe.close()
    want.close()


def test_a_batch_that_was_left_is_discarded_whatever_failed_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt ends a cell between train_step and step; then another cell fails, too."""
    x, y = batches(1, ROWS)[0].args[0], batches(1, ROWS)[0].target
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pd2.PipelineModule(layers, mse_loss, num_microbatches=2, example_args=(x[:2],)) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(x, target=y)
        monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
        monkeypatch.setattr(sys, "last_value", NameError("typed wrong"))
        with pytest.warns(UserWarning, match=r"train_steps 0, left by NameError before their"):
            loss = pipe.train_step(x, target=y)
        opt.step()
        assert float(loss) > 0
        pipe.train_step(x, target=y)
        with pytest.raises(ValueError, match=r"opt\.step\(\): 1 calls for 2 train_steps"):
            pipe.train_step(x, target=y)  # nothing came since


class InterruptedAfterTheFirst(list[Any]):
    """Its members are gone through with an interrupt between two of them."""

    def __iter__(self) -> Any:
        for position, member in enumerate(list.__iter__(self)):
            if position == 1:
                signal.raise_signal(signal.SIGINT)
            yield member


@pytest.mark.parametrize("waiting", ["flush", "evaluation"])
def test_an_interrupt_reaches_all_stages_or_none(waiting: str) -> None:
    x = torch.randn(ROWS, 4)
    with pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], mse_loss, num_microbatches=2, example_args=(x,)
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(x, target=x)
        opt.step()
        if waiting == "evaluation":
            pipe.flush()
        stages = pipe.session.stages
        executors = stages.executors
        stages.executors = InterruptedAfterTheFirst(executors)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            pipe(x) if waiting == "evaluation" else pipe.flush()
        stages.executors = executors
        for _ in range(3):
            float(pipe.train_step(x, target=x))
            opt.step()
