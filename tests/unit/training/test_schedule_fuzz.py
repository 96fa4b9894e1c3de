"""Random schedules: what is accepted trains as it says, and nothing is refused that would."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import strategies as st

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.references.schedule_meaning import why_wrong
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    copy_of,
    make_pipeline,
    sgd,
    stage_of_parameters,
)
from tests.samples.models import TASKS
from tests.samples.schedule_plan import KINDS, Change, Plan, changed
from tests.samples.schedule_sizes import TWO_PIPELINES

NUMBERS = st.integers(0, 419)  # 420: every number of choices up to 7 divides it
OFTEN = ["swap", "move", "postpone", "postpone", "split", "merge", "late"]  # what may stay legal
CHANGES = st.builds(Change, st.sampled_from([*KINDS, *OFTEN]), NUMBERS, NUMBERS, NUMBERS, NUMBERS)

WHEN = ("before the step", "after the step")


def settings(max_examples: int) -> hypothesis.settings:
    """A failure is not made smaller, which takes minutes: it shows the schedule as it is."""
    return hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
    )


# Plans have one pipeline; the C++ fuzz has two as well.
ONE_PIPELINE = [name for name in pd2.schedule_names() if name not in TWO_PIPELINES]


@st.composite
def made_plans(draw: Any) -> Plan:
    name = draw(st.sampled_from(ONE_PIPELINE))
    d = draw(st.integers(1, 5))
    v = draw(st.sampled_from([v for v in range(1, d + 1) if d % v == 0]))
    least = draw(st.integers(1, 5))
    for chunks in (v, 1):
        for m in range(least, 2 * d + 2):
            try:
                return Plan.read(str(pd2.make_schedule(name, d, m, chunks)))
            except ValueError:
                continue
    return Plan.read(str(pd2.make_schedule("pipedream", d, 1)))


def refusal(plan: Plan) -> str | None:
    try:
        pd2.load_schedule(plan.text())
    except ValueError as error:
        return str(error)
    return None


def is_convention(plan: Plan, error: str) -> bool:
    """Refused though it would compute the right numbers."""
    # Of a single stage no gradient leaves, whose order others would have to know.
    return plan.num_stages == 1 and "backwards are in microbatch order" in error


@settings(150)
@hypothesis.given(plan=made_plans(), changes=st.lists(CHANGES, min_size=20, max_size=40))
def test_what_computes_the_right_numbers_is_accepted_and_nothing_else(
    plan: Plan, changes: list[Change]
) -> None:
    for change in changes:
        tried = changed(plan, change)
        runs = [2 * tried.batches_behind() + 3, 1, 1, 2, 3, 6]
        wrong = why_wrong(tried, runs)
        refused = refusal(tried)
        if wrong is None and refused is not None and is_convention(tried, refused):
            continue
        assert (wrong is None) == (refused is None), f"{wrong}\n{refused}\n{tried.text()}"
        if wrong is None:
            plan = tried
            pd2.simulate(pd2.load_schedule(plan.text()))


@settings(60)
@hypothesis.given(
    plan=made_plans(),
    changes=st.lists(CHANGES, min_size=20, max_size=40),
    flushes=st.sets(st.sampled_from([(t, when) for t in range(6) for when in WHEN]), max_size=4),
)
def test_what_is_accepted_trains_as_its_delays_say(
    plan: Plan, changes: list[Change], flushes: set[tuple[int, str]]
) -> None:
    for change in changes:
        tried = changed(plan, change)
        if refusal(tried) is None:
            plan = tried
    task, m = TASKS["skips"], plan.num_microbatches
    batches = task.batches([2 * m] * 6)
    options: Any = {"schedule": plan.text()}
    with make_pipeline(task, plan.num_stages, m, batches[0], **options) as pipe:
        stage_of = stage_of_parameters(pipe)
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for t, batch in enumerate(batches):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            if (t, WHEN[0]) in flushes:
                pipe.flush()
            opt.step()
            if (t, WHEN[1]) in flushes:
                pipe.flush()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
    model = task.model()
    delays = [plan.delay[stage_of[name]] for name, _ in model.named_parameters()]
    late = plan.late and [plan.late[stage_of[name]] for name, _ in model.named_parameters()]
    oracle = Oracle(model, sgd(model.parameters()), m, task.loss_fn, delays, late=late)
    want = [oracle.train_step(batch) for batch in batches]
    hypothesis.note(plan.text())
    assert_same(got, Trajectory(want, copy_of(model.state_dict())))
