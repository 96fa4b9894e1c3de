"""The fresh schedules: which forwards are late, and training by that definition."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.optimizer.late_forwards import tied
from tests.references.late_forwards import late_of_2bw
from tests.references.oracle import Batch
from tests.references.remedies import Corrected, Discounted
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    check_task,
    copy_of,
    go_on,
    make_pipeline,
    sgd,
    stage_of_parameters,
    whole,
)
from tests.samples.models import TASKS, Task
from tests.samples.tied_models import TIED

CLIPPED = {"max_grad_norm": 0.1}


class ClippedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step()


def clipped(parameters: Any) -> torch.optim.Optimizer:
    return ClippedSGD(parameters, lr=0.3)


def quick(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def trained(
    task: Task, d: int, m: int, batches: Sequence[Batch], make: Any = sgd, **options: Any
) -> tuple[Trajectory, tuple[int, ...], dict[str, int]]:
    """By the pipeline; its late forwards, and the stages of parameters."""
    of_optimizer = {
        key: options.pop(key)
        for key in ("max_grad_norm", "staleness", "loss_scale")
        if key in options
    }
    options.setdefault("schedule", "2bw_fresh")
    with make_pipeline(task, d, m, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), **of_optimizer)
        got = go_on(pipe, opt, batches)
        return got, pipe.late_forwards, stage_of_parameters(pipe)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_fewest_late_forwards_are_the_formulas(data: st.DataObject) -> None:
    d, slots = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    m = data.draw(st.integers(d, 4 * d + 6))
    backward = data.draw(st.sampled_from([1.0, 2.0, 3.0]))
    schedule = pd2.make_schedule("2bw", d, m)
    for joint in (False, True):
        groups = [list(range(d))] if joint else []
        want = late_of_2bw(d, slots, waits_for_all=joint, backward=backward)
        assert schedule.late_for_slots(slots, groups, backward) == want


def test_the_late_share_is_as_small_as_it_is_said_to_be() -> None:
    for d, m, share in ((4, 8, 0.31), (4, 16, 0.16), (8, 16, 0.28), (8, 32, 0.14)):
        assert round(pd2.make_schedule("2bw_fresh", d, m).late_share, 2) == share
    assert pd2.make_schedule("2bw", 4, 8).late_share == 1
    assert pd2.make_schedule("1f1b", 4, 8).late_share == 0
    found = pd2.simulate("2bw", num_stages=4, num_microbatches=16, update_slots=1)
    assert "16 % of forwards are late" in str(found)


@pytest.mark.parametrize("name", ["2bw_eager", "2bw_split", "interleaved_2bw", "2bw_v"])
def test_one_late_forward_less_makes_a_stage_wait(name: str) -> None:
    """Of every order, when an update takes a slot: none is late in vain."""
    v = 2 if name in ("interleaved_2bw", "2bw_v") else 1
    schedule = pd2.make_schedule(name, 4, 8, v)
    late = schedule.late_for_slots(1, [])
    assert sum(late) < 4 * 8

    def period(numbers: Sequence[int]) -> float:
        given = schedule.with_late_forwards(numbers)
        return pd2.simulate(given, update=3.0 - 1e-9, num_batches=9).period

    steady = pd2.simulate(schedule, num_batches=9).period
    assert period(late) == pytest.approx(steady)
    for stage, number in enumerate(late):
        fewer = [*late[:stage], number - 1, *late[stage + 1 :]]
        with contextlib.suppress(ValueError):  # the version is not made by then in the list
            assert number == 0 or period(fewer) > steady + 1e-6


@pytest.mark.parametrize(
    ("name", "num_stages"), [*itertools.product(["skips", "drawing"], [2, 3, 4, 6]), ("mlp", 8)]
)
def test_fresh_training_is_the_oracles(name: str, num_stages: int) -> None:
    for m in (num_stages, 2 * num_stages + 1, 4 * num_stages):
        check_task(TASKS[name], num_stages, m, [2 * m] * 5, schedule="2bw_fresh")


@pytest.mark.parametrize(
    "options",
    [{"compile": {"backend": "eager"}}, {"compile": {"backend": "eager"}, "accumulate": 2}],
    ids=str,
)
def test_compiled_stages_are_fresh_too(options: dict[str, Any]) -> None:
    check_task(TASKS["skips"], 3, 5, [10] * 6, schedule="2bw_fresh", **options)


def test_stages_of_several_groups_of_tied_weights_have_one_number() -> None:
    with make_pipeline(TASKS["mlp"], 3, 4, TASKS["mlp"].batches([8])[0]) as pipe:
        pipe.session.stages.joint_updates.tied = [[1, 2], [0, 1]]
        assert tied(pipe.session, [5, 4, 3]) == [5, 5, 5]
        pipe.session.stages.joint_updates.tied = [[0, 1], [1, 2]]
        assert tied(pipe.session, [3, 4, 5]) == [5, 5, 5]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", ["2bw", "2bw_eager", "2bw_split", "interleaved_2bw", "2bw_v"])
def test_every_order_can_be_fresh(name: str, slots: int) -> None:
    v = 2 if name in ("interleaved_2bw", "2bw_v") else 1
    task, d, m = TASKS["skips"], 4, 10
    batches = task.batches([2 * m] * 6)
    for clip in ({}, CLIPPED):
        got, late, stage_of = trained(
            task, d, m, batches, quick, schedule=name, stages_per_rank=v, update_slots=slots, **clip
        )
        assert sum(late) < d * m
        if name == "2bw":
            assert list(late) == late_of_2bw(d, slots, waits_for_all=bool(clip))
        want = by_oracle(
            task,
            batches,
            m,
            clipped if clip else quick,
            late_of={name: late[stage] for name, stage in stage_of.items()},
        )
        assert_same(got, want)


def test_tied_stages_have_one_number() -> None:
    """A microbatch reads one version of a parameter; its stages make their updates together."""
    task, d, m = TIED["language model"], 2, 6
    batches = task.batches([2 * m] * 5)
    got, late, _ = trained(task, d, m, batches, update_slots=1)
    assert late == (2, 2)
    late_of = dict.fromkeys((name for name, _ in task.model().named_parameters()), 2)
    want = by_oracle(task, batches, m, late_of=late_of)
    assert_same(got, want, exact=task.exact)
    schedule = pd2.make_schedule("2bw", d, m).with_late_forwards([2, 1])
    with pytest.raises(ValueError, match=r"late_forwards: \[2, 1\], stages with tied parameters"):
        trained(task, d, m, batches, schedule=schedule)


def test_an_update_that_is_measured() -> None:
    """All forwards are late until then."""
    task, d, m = TASKS["skips"], 3, 8
    batches = task.batches([2 * m] * 9)
    with make_pipeline(task, d, m, batches[0], schedule="2bw", update_slots="auto") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses, late = [], []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            late.append(pipe.late_forwards)
            opt.step()
        got = Trajectory([float(x) for x in losses], copy_of(pipe.state_dict()))
        stage_of = stage_of_parameters(pipe)
    assert late[:3] == [(m,) * d] * 3
    assert len(set(late[3:])) == 1
    assert all(d - 1 - i < s <= m for i, s in enumerate(late[3]))

    def measured(number: int, oracle: Any, optimizer: Any) -> None:
        names = [name for name, _ in oracle.model.named_parameters()]
        oracle.late = [late[number][stage_of[name]] for name in names]

    assert_same(got, by_oracle(task, batches, m, between=measured))


def test_a_timeline_in_the_first_batches_puts_measuring_off() -> None:
    task, d, m = TASKS["mlp"], 2, 4
    (batch,) = task.batches([8])
    with make_pipeline(task, d, m, batch, update_slots="auto") as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))

        def train(count: int) -> None:
            for _ in range(count):
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()

        train(2)
        with pipe.timeline() as timeline:
            train(3)
        assert len([row for row in timeline.rows if row.kind == "F"]) >= 3 * d * m
        assert pipe.late_forwards == (m, m)
        train(5)
        assert pipe.late_forwards < (m, m)


@pytest.mark.parametrize("own", [False, True])
def test_error_feedback_is_the_late_share_of_each_stage(own: bool) -> None:
    task, d, m = TASKS["skips"], 3, 5

    class Own(torch.optim.SGD):
        """No fused pass knows it."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return (Own if own else torch.optim.SGD)(parameters, lr=0.1, momentum=0.5)

    batches = task.batches([2 * m] * 6)
    for coefficient in (1.0, 0.7, [0.3, 1.0, 0.6]):
        staleness = pd2.ErrorFeedback(coefficient)
        got, late, stage_of = trained(task, d, m, batches, make, staleness=staleness)
        assert list(late) == late_of_2bw(d)
        of_each = coefficient if isinstance(coefficient, list) else [coefficient] * d

        model = whole(task.model())
        corrected = Corrected(make(model.parameters()), "error feedback", 1.0, 0)
        corrected.late_shares = {
            p: of_each[stage_of[name]] * (late[stage_of[name]] / m)
            for name, p in model.named_parameters()
        }
        late_of = {name: late[stage] for name, stage in stage_of.items()}
        want = by_oracle(task, batches, m, lambda _, c=corrected: c, model=model, late_of=late_of)
        assert_same(got, want)


@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 3)])
def test_the_share_of_several_train_steps_is_that_of_the_first(d: int, m: int) -> None:
    """Also where all forwards of that one are late."""
    task, count = TASKS["skips"], 3
    batches = task.batches([2 * m] * 4 * count)
    with make_pipeline(
        task, d, m, batches[0], schedule="2bw", update_slots=1, accumulate=count
    ) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), staleness=pd2.ErrorFeedback(0.8))
        losses = []
        for number, batch in enumerate(batches, 1):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            if number % count == 0:
                opt.step()
        late, stage_of = pipe.late_forwards, stage_of_parameters(pipe)
        got = Trajectory([float(x) for x in losses], copy_of(pipe.state_dict()))
    model = whole(task.model())
    corrected = Corrected(sgd(model.parameters()), "error feedback", 0.8, 0)
    late_of = {name: late[stage] for name, stage in stage_of.items()}
    corrected.late_shares = {p: late_of[n] / (m * count) for n, p in model.named_parameters()}
    want = by_oracle(
        task, batches, m, lambda _: corrected, model=model, late_of=late_of, accumulate=count
    )
    assert_same(got, want)


def test_a_discount_is_that_of_the_mean_delay() -> None:
    task, d, m = TASKS["skips"], 3, 5
    batches = task.batches([2 * m] * 6)
    discount = pd2.LearningRateDiscount(4)
    got, late, stage_of = trained(task, d, m, batches, staleness=discount)
    model = whole(task.model())
    delays: Any = [late[stage_of[name]] / m for name, _ in model.named_parameters()]
    optimizer = Discounted(sgd(model.parameters()), 4, 0, delays)
    late_of = {name: late[stage] for name, stage in stage_of.items()}
    want = by_oracle(task, batches, m, lambda _: optimizer, model=model, late_of=late_of)
    assert_same(got, want)


def start(schedule: str = "2bw_fresh", m: int = 6, **options: Any) -> tuple[Any, Any, Batch]:
    task = TASKS["mlp"]
    (batch,) = task.batches([2 * m])
    of_optimizer = {key: options.pop(key) for key in ("max_grad_norm",) if key in options}
    pipe = make_pipeline(task, 3, m, batch, schedule=schedule, **options)
    opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), **of_optimizer)
    return pipe, opt, batch


def train(pipe: Any, opt: Any, batch: Batch, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(pipe.train_step(*batch.args, target=batch.target))
        opt.step()
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("options", [{}, {"update_slots": 2}, {"update_slots": "auto"}])
def test_a_run_goes_on_from_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    pipe, opt, batch = start(**options)
    with pipe:
        train(pipe, opt, batch, 5)
        pd2.save(tmp_path, pipe, opt).wait()
        late, want = pipe.late_forwards, train(pipe, opt, batch, 4)
    pipe, opt, batch = start(**options)
    with pipe:
        pd2.load(tmp_path, pipe, opt)
        assert pipe.late_forwards == late
        assert train(pipe, opt, batch, 4) == want


@pytest.mark.parametrize(
    "other", [{"update_slots": 2}, {"max_grad_norm": 1.0}, {"m": 7, "update_slots": 3}]
)
def test_a_run_with_other_numbers_is_another_run(other: dict[str, Any], tmp_path: Path) -> None:
    pipe, opt, batch = start()
    with pipe:
        train(pipe, opt, batch, 2)
        pd2.save(tmp_path, pipe, opt).wait()
    pipe, opt, batch = start(**other)
    text = r"late_forwards: \[.*\], the checkpoint has \[3, 2, 1\]: they must be equal"
    with pipe, pytest.raises(ValueError, match=text):
        pd2.load(tmp_path, pipe, opt)


def test_a_change_of_what_is_late_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe, opt, batch = start("2bw")
    with pipe:
        train(pipe, opt, batch, 2)
        pd2.save(tmp_path, pipe, opt).wait()
    pipe, opt, batch = start("2bw_fresh")
    with pipe:
        pd2.load(tmp_path, pipe, opt)
    assert (
        "late forwards of its stages: all, the run's schedule: 2bw_fresh: other forwards are late"
        in caplog.text
    )


def test_another_split_is_said_and_the_saved_one_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    pipe, opt, batch = start(split=["1", "2"])
    with pipe:
        train(pipe, opt, batch, 3)
        pd2.save(tmp_path, pipe, opt).wait()
        want = train(pipe, opt, batch, 3)
    pipe, opt, batch = start(split=["1", "3"])
    text = r"begin at \['1', '3'\], the checkpoint's at \['1', '2'\]: .* split=\['1', '2'\] goes on"
    with pipe, pytest.warns(UserWarning, match=text):
        pd2.load(tmp_path, pipe, opt)
    pipe, opt, batch = start(split=["1", "2"])
    with pipe:
        pd2.load(tmp_path, pipe, opt)  # warnings are errors
        assert train(pipe, opt, batch, 3) == want


def test_the_optimizers_state_names_them() -> None:
    pipe, opt, batch = start()
    with pipe:
        opt.init_state()
        train(pipe, opt, batch, 2)
        state = opt.state_dict()
        assert state["late_forwards"] == {
            "late_forwards": [3, 2, 1],
            "split": ["4", "7"],
            "kept": {},
        }
        opt.load_state_dict(state)
    pipe, opt, batch = start(update_slots=2)
    with pipe, pytest.raises(ValueError, match="late_forwards"):
        opt.load_state_dict(state)


def test_fresh_forwards_take_no_memory_more() -> None:
    totals = []
    for schedule in ("2bw", "2bw_fresh"):
        for clip in ({}, CLIPPED):
            pipe, opt, batch = start(schedule, **clip)
            with pipe:
                train(pipe, opt, batch, 4)
                totals.append({k: each.total for k, each in pipe.memory_report().items()})
    assert totals[0] == totals[2]
    assert totals[1] == totals[3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"update_slots": 0}, ValueError, "update_slots: 0, it must be at least 1"),
        ({"update_slots": 1.5}, TypeError, "update_slots: 1.5"),
        ({"update_slots": "fast"}, ValueError, "update_slots: 'fast', known: 'auto'"),
        (
            {"update_slots": 5},
            ValueError,
            "slots: 5, num_microbatches: 6: 7 .* late on stage 0, .* num_microbatches=7 or more",
        ),
    ],
)
def test_what_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        start(**options)


def test_a_schedule_that_states_them_and_slots_are_too_much() -> None:
    own: Any = pd2.make_schedule("2bw", 3, 6).with_late_forwards([4, 4, 4])
    pipe, _, _ = start(own)
    with pipe:
        assert pipe.late_forwards == (4, 4, 4)
    with pytest.raises(ValueError, match="states which forwards are late: leave out one"):
        start(own, update_slots=1)


def test_other_remedies(recwarn: pytest.WarningsRecorder) -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([8])
    with make_pipeline(task, 2, 4, batch, schedule="2bw_fresh") as pipe:
        make: Callable[..., Any] = torch.optim.AdamW
        pd2.PipelineOptimizer(make(pipe.parameters()))
        assert not [each for each in recwarn if "late" in str(each.message)]
        with pytest.raises(ValueError, match="steps whose gradients are all late"):
            pd2.PipelineOptimizer(make(pipe.parameters()), staleness=pd2.NesterovCorrection())
        with pytest.raises(ValueError, match="coefficient: 3 given, num_stages: 2: one for each"):
            feedback = pd2.ErrorFeedback([1.0, 1.0, 1.0])
            pd2.PipelineOptimizer(make(pipe.parameters()), staleness=feedback)


def test_tied_stages_make_equal_corrections() -> None:
    task = TIED["language model"]
    (batch,) = task.batches([12])
    with make_pipeline(task, 2, 6, batch, schedule="2bw_fresh") as pipe:
        adamw = torch.optim.AdamW(pipe.parameters())
        feedback = pd2.ErrorFeedback([0.2, 1.0])
        with pytest.raises(ValueError, match=r"coefficient: \[0.2, 1.0\] for the stages \[0, 1\]"):
            pd2.PipelineOptimizer(adamw, staleness=feedback)


def test_what_a_joint_update_has_no_room_for_is_refused() -> None:
    options = {"schedule": "2bw_v_two_thirds", "stages_per_rank": 2, "update_slots": 3}
    task, d, m = TASKS["skips"], 6, 4
    (batch,) = task.batches([2 * m])
    with make_pipeline(task, d, m, batch, **options) as pipe:
        own = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="update_slots: 3, num_microbatches: 4: 5 forwards"):
            pd2.PipelineOptimizer(own, max_grad_norm=1.0)


def test_another_optimizer_may_clip() -> None:
    """Under the first one's numbers stages would wait for each other for ever."""
    task, d, m = TASKS["skips"], 4, 4
    (batch,) = task.batches([2 * m])
    options = {"schedule": "interleaved_2bw", "stages_per_rank": 2, "update_slots": 1}
    with make_pipeline(task, d, m, batch, **options) as pipe:
        own = torch.optim.SGD(pipe.parameters(), lr=0.1)
        opt = pd2.PipelineOptimizer(own)
        train(pipe, opt, batch, 3)
        alone = pipe.late_forwards
        opt = pd2.PipelineOptimizer(own, max_grad_norm=1.0)
        train(pipe, opt, batch, 3)
        assert sum(pipe.late_forwards) > sum(alone)
        pipe.train_step(*batch.args, target=batch.target)
        with pytest.raises(
            ValueError, match=r"with update_slots: .* a batch waits for its opt\.step"
        ):
            pd2.PipelineOptimizer(own)
        opt.step()


@pytest.mark.parametrize("how", ["another optimizer", "a checkpoint"])
def test_measuring_begins_anew(how: str, tmp_path: Path) -> None:
    pipe, opt, batch = start(update_slots="auto")
    stages = pipe.session.stages
    with pipe:
        train(pipe, opt, batch, 1)
        pd2.save(tmp_path, pipe, opt).wait()  # not measured yet
        train(pipe, opt, batch, 1)
        assert stages.recorded_for == "update_slots"
        if how == "another optimizer":
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        else:
            train(pipe, opt, batch, 4)
            assert pipe.late_forwards < (6, 6, 6)
            pd2.load(tmp_path, pipe, opt)
            assert pipe.late_forwards == (6, 6, 6)
        assert stages.recorded_for is None
        train(pipe, opt, batch, 6)
        assert pipe.late_forwards < (6, 6, 6)
        assert stages.recorded_for is None


def test_a_measured_run_goes_on_where_its_numbers_have_room(tmp_path: Path) -> None:
    pipe, opt, batch = start(update_slots=4)
    with pipe:
        train(pipe, opt, batch, 1)
        pd2.save(tmp_path, pipe, opt).wait()
    pipe, opt, batch = start(m=4, update_slots="auto")
    with pipe, pytest.raises(ValueError, match=r"late_forwards: .* has \[6, 5, 4\]"):
        pd2.load(tmp_path, pipe, opt)


def test_a_timeline_has_nothing_of_what_was_measured_before_it() -> None:
    pipe, opt, batch = start(update_slots="auto")
    with pipe:
        train(pipe, opt, batch, 2)
        pipe.flush()
        with pipe.timeline() as timeline:
            train(pipe, opt, batch, 1)
        assert {row.batch for row in timeline.rows} == {2}
