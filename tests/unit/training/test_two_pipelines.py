"""Two pipelines in opposite directions, in threads of one process: every stage exists twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.references.oracle import Batch, Oracle
from tests.runs.timed import at_most_three_times
from tests.runs.trajectory import (
    assert_close,
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    check_task,
    copy_of,
    make_pipeline,
    sgd,
)
from tests.samples.models import TASKS

SCHEDULES = ("chimera", "chimera_doubled")
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5)


def assert_copies_equal(pipe: pd2.PipelineModule) -> None:
    pipe.flush()
    d = pipe.num_stages
    states = [stage.weights for stage in pipe.session.stages]
    assert len(states) == 2 * d
    for i in range(d):
        one, other = (states[k].engine for k in (i, i + d))
        assert one.newest_version == other.newest_version
        for mine, theirs in zip(
            one.slot_buffers(one.newest_slot), other.slot_buffers(other.newest_slot), strict=True
        ):
            assert mine.data_ptr() != theirs.data_ptr()
            assert torch.equal(mine, theirs), i


# Bitwise: the definition adds the gradients of each pipeline's microbatches, then the two sums.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("d", "m"), [(2, 2), (2, 6), (4, 2), (4, 4), (4, 6), (4, 16), (6, 6)])
def test_two_pipelines_equal_the_definition(schedule: str, d: int, m: int) -> None:
    check_task(TASKS["mlp"], d, m, rows=[2 * m] * 4, schedule=schedule)


@pytest.mark.parametrize("name", ["skips", "fan", "gpt", "masked", "dropout in eval", "lstm"])
def test_every_kind_of_model(name: str) -> None:
    check_task(TASKS[name], 2, 4, rows=[8] * 4, schedule="chimera")


def test_uneven_microbatches_are_weighted_by_the_whole_batchs_rows() -> None:
    check_task(TASKS["skips"], 2, 4, rows=[9, 10, 11, 14, 4, 8], schedule="chimera")


def test_losses_that_are_sums_are_added_unweighted() -> None:
    def gentle(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    rows = [8, 9, 10]
    options: dict[str, Any] = {"loss_reduction": "sum", "schedule": "chimera"}
    check_task(TASKS["mlp"], 2, 4, rows, gentle, **options)


def test_it_trains_as_plain_accumulation_up_to_the_order_of_additions() -> None:
    task, m = TASKS["skips"], 8
    batches = task.batches([2 * m] * 6)
    want = by_oracle(task, batches, m, schedule="1f1b")
    assert_same(by_pipeline(task, batches, 4, m, schedule="chimera"), want, exact=False)


@pytest.mark.parametrize("make", [adamw, rmsprop])
def test_copies_stay_bitwise_equal(make: Make) -> None:
    task, d, m = TASKS["skips"], 4, 8
    batches = task.batches([2 * m] * 40)
    want = by_oracle(task, batches, m, make, schedule="chimera")
    with make_pipeline(task, d, m, batches[0], schedule="chimera") as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        for number, batch in enumerate(batches):
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            if number in (0, 3, 17):
                assert_copies_equal(pipe)
        assert_copies_equal(pipe)
        for name, value in pipe.state_dict().items():
            assert_close(name, value, want.state[name])


def test_a_schedule_of_ones_own_may_have_two_pipelines() -> None:
    """The second pipeline after the first one, which is legal and slow."""
    text = (
        "name: one after the other\npipelines: 2\nstages: 4\nmicrobatches: 1\ndelay: 0\n"
        "placement: 0,1,1,0\nversions: 1,1,1,1\n"
        "[prologue]\n0F0,0B0,3F0,3B0,3U0,0U0\n1F0,1B0,2F0,2B0,1U0,2U0\n"
        "[steady]\n0F0,0B0,3F0,3B0,3U0,0U0\n1F0,1B0,2F0,2B0,1U0,2U0\n"
        "[epilogue]\n-\n-\n"
    )
    task = TASKS["mlp"]
    batches = task.batches([4] * 3)
    want = by_oracle(task, batches, 2, schedule="chimera")
    assert_same(by_pipeline(task, batches, 2, 2, schedule=text), want)


class Sometimes(nn.Module):
    """Uses its second weight only where the microbatch's first input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.always(x)
        # Cannot be traced: taken as one layer.
        return self.sometimes(x) if float(x.detach()[0, 0]) > 0 else x


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_gradient_that_one_copy_lacks_counts_as_zero(make: Make) -> None:
    torch.manual_seed(0)
    model = [Sometimes(), nn.Linear(4, 4)]
    model[0].always.weight.data = torch.eye(4)
    reference = nn.Sequential(Sometimes(), nn.Linear(4, 4))
    reference.load_state_dict(nn.Sequential(*model).state_dict())
    oracle = Oracle(reference, make(reference.parameters()), 2, mse_loss, 0, num_pipelines=2)
    batches = []
    for signs in ((9.0, -9.0), (-9.0, -9.0), (-9.0, 9.0), (9.0, 9.0)):
        x = torch.randn(2, 4)
        x[:, 0] = torch.tensor(signs)
        batches.append(Batch((x,), torch.randn(2, 4)))
    pipe = pd2.PipelineModule(
        model, mse_loss, num_microbatches=2, schedule="chimera", example_args=batches[0].args
    )
    with pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        for batch in batches:
            loss = pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            assert float(loss) == pytest.approx(oracle.train_step(batch), rel=1e-5)
        assert_copies_equal(pipe)
        for name, value in pipe.state_dict().items():
            assert_close(name, value, reference.state_dict()[name])


def test_every_parameter_is_shown_once_and_the_depth_is_the_models() -> None:
    task = TASKS["skips"]
    (batch,) = task.batches([8])
    names = [name for name, _ in task.model().named_parameters()]
    with make_pipeline(task, 4, 4, batch, schedule="chimera") as pipe:
        assert pipe.num_stages == 4
        assert pipe.num_microbatches == 4
        assert pipe.stages == [0, 1, 2, 3]
        assert [name for name, _ in pipe.named_parameters()] == names
        assert list(pipe.state_dict()) == names
        assert sorted(pipe.memory_report()) == list(range(8))
        report = pipe.memory_report()
        assert all(report[i].weights == report[i + 4].weights > 0 for i in range(4))
        assert str(pipe).count("parameters on cpu") == 8


def test_what_is_in_flight_is_what_the_schedule_says() -> None:
    task = TASKS["mlp"]
    batches = task.batches([8] * 3)
    schedule = pd2.make_schedule("chimera", 4, 8)
    with make_pipeline(task, 4, 8, batches[0], schedule="chimera") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pipe.flush()
        for stage, memory in pipe.memory_report().items():
            assert memory.most_in_flight == schedule.max_in_flight(stage)


def test_the_timeline_numbers_microbatches_through_the_batch() -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([8])
    with make_pipeline(task, 2, 4, batch, schedule="chimera") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pipe.timeline() as timeline:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        done = {(e.stage, e.microbatch) for e in timeline.gather() if e.kind == "B"}
    simulated = pd2.simulate("chimera", num_stages=2, num_microbatches=4, num_batches=1).events
    assert done == {(e.stage, e.microbatch) for e in simulated if e.kind == "B"}


def test_evaluation_runs_on_the_newest_weights() -> None:
    task, m = TASKS["skips"], 4
    batches = task.batches([2 * m] * 3)
    want = by_oracle(task, batches, m, schedule="chimera")
    model = task.model()
    model.load_state_dict(want.state)
    with make_pipeline(task, 2, m, batches[0], schedule="chimera") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            with torch.no_grad():
                output = pipe(batches[0].args[0][:3])
        pipe.eval()
        assert torch.equal(pipe(batches[0].args[0][:3]), output)
    rows = batches[0].args[0][:3].split(1)
    assert torch.equal(output, torch.cat([model(row) for row in rows]).detach())


@pytest.mark.parametrize("make", [adamw, rmsprop])
def test_what_is_loaded_is_loaded_into_both_copies(make: Make) -> None:
    task, d, m = TASKS["skips"], 2, 4
    batches = task.batches([2 * m] * 6)
    want = by_oracle(task, batches, m, make, schedule="chimera")
    saved: list[Any] = []
    for part in (batches[:3], batches[3:]):
        model = task.model(seed=5) if saved else task.model()
        with make_pipeline(task, d, m, batches[0], schedule="chimera", model=model) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()))
            if saved:
                pipe.load_state_dict(saved[0])
                opt.load_state_dict(saved[1])
                assert_copies_equal(pipe)
            for batch in part:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            assert_copies_equal(pipe)
            saved = [copy_of(pipe.state_dict()), opt.state_dict()]
            for index, state in saved[1]["state"].items():
                saved[1]["state"][index] = copy_of(
                    {key: torch.as_tensor(value) for key, value in state.items()}
                )
    for name, value in want.state.items():
        assert_close(name, saved[0][name], value)


def test_each_pipeline_has_batch_norm_statistics_of_its_own() -> None:
    task, d, m = TASKS["batch norm"], 2, 4
    batches = task.batches([4 * m] * 2)
    reference = task.model()
    model = task.model()
    with make_pipeline(task, d, m, batches[0], schedule="chimera", model=model) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.0))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            for part in batch.args[0].tensor_split(m)[: m // 2]:
                reference(part)
        shown = copy_of(pipe.state_dict())
        buffers = dict(pipe.named_buffers())
        assert_same_state(shown, copy_of(reference.state_dict()))
        assert_same_state(copy_of(buffers), copy_of(dict(reference.named_buffers())))
        pipe.load_state_dict(task.model(seed=3).state_dict())
        for stage in pipe.session.stages:
            for mine, theirs in zip(
                stage.weights.buffers,
                pipe.session.stages[stage.index % d].weights.buffers,
                strict=True,
            ):
                assert torch.equal(mine, theirs)
        given_back = pipe.unsplit()
    assert given_back is model
    assert_same_state(copy_of(model.state_dict()), copy_of(task.model(seed=3).state_dict()))


def test_models_parts_that_are_frozen_stay_so() -> None:
    check_task(TASKS["frozen"], 2, 4, rows=[8] * 3, schedule="chimera")


@pytest.mark.parametrize("failing_stage", [0, 1, 2, 3])
@at_most_three_times
def test_a_failing_stage_ends_the_other_pipeline_too(failing_stage: int) -> None:
    """Also where its copy waits for the sum of their gradients."""
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]
    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        layers, mse_loss, num_microbatches=4, schedule="chimera", example_args=(x,)
    )
    opt = pd2.PipelineOptimizer(adamw(pipe.parameters()))

    def train() -> None:
        for _ in range(5):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()

    train()
    runner = pipe.session.stages[failing_stage].runner

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    runner.compute = fail  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="on purpose") as raised:
        train()
    place = f"stage {failing_stage % 2} in pipeline {failing_stage // 2}, batch 5, microbatch "
    assert place + str(2 * (failing_stage // 2)) in str(raised.value)
    assert time.monotonic() - start < 10
    pipe.close()


@at_most_three_times
def test_a_step_that_fails_on_one_copy_ends_the_other_that_waits_for_it() -> None:
    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        mse_loss,
        num_microbatches=2,
        schedule="chimera",
        example_args=(x,),
    )
    opt = pd2.PipelineOptimizer(rmsprop(pipe.parameters()))
    first = next(iter(pipe.session.stages.in_update_order)).index

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    opt._wrapped.steppers[0, first].step = fail  # type: ignore[method-assign]
    start = time.monotonic()
    pipe.train_step(x, target=x)
    opt.step()
    with pytest.raises(RuntimeError, match="on purpose"):
        pipe.flush()
    assert time.monotonic() - start < 10
    pipe.close()


def test_it_can_be_closed_before_a_copy_has_its_update() -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([8])
    pipe = make_pipeline(task, 4, 4, batch, schedule="chimera")
    pd2.PipelineOptimizer(sgd(pipe.parameters()))
    pipe.train_step(*batch.args, target=batch.target)
    pipe.close()


@pytest.mark.parametrize(
    ("d", "m", "message"),
    [
        (3, 4, "num_stages: 3, schedule: chimera: two pipelines in opposite directions need an"),
        (2, 3, "num_microbatches: 3, schedule: chimera: half of a batch goes through each of 2"),
    ],
)
def test_sizes_that_two_pipelines_forbid_are_refused(d: int, m: int, message: str) -> None:
    (batch,) = TASKS["mlp"].batches([12])
    with pytest.raises(ValueError, match=message):
        make_pipeline(TASKS["mlp"], d, m, batch, schedule="chimera")
