"""Messages that take their time, differently each, change when things happen and no number."""

from __future__ import annotations

import itertools
import time

import pytest

from benchmarks.measuring.delays import delayed_messages
from tests.exhaustive import exhaustive
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, make_pipeline
from tests.samples.models import TASKS
from tests.samples.schedule_sizes import V_SHAPED

CASES = [
    ("2bw", 4, 1),
    ("2bw_eager", 3, 1),
    ("2bw_split", 4, 1),
    ("interleaved_2bw", 4, 2),
    ("1f1b", 4, 1),
    ("interleaved_zero_bubble", 4, 2),
    ("2bw_v_half", 6, 2),
    ("v_min", 6, 2),
    *exhaustive(*((name, 6, 2) for name in V_SHAPED if name not in ("2bw_v_half", "v_min"))),
]


@pytest.mark.parametrize(("schedule", "d", "v"), CASES)
def test_random_delays_change_no_number(schedule: str, d: int, v: int) -> None:
    task, m = TASKS["skips"], 8
    batches = task.batches([2 * m] * 4)
    want = by_oracle(task, batches, m, schedule=schedule)
    for seed in range(3):
        with delayed_messages(0.0, 2e-3, seed):
            got = by_pipeline(task, batches, d, m, schedule=schedule, stages_per_rank=v)
        assert_same(got, want)


def test_every_message_between_ranks_takes_its_time_and_none_within_a_rank() -> None:
    task, d, m, delay = TASKS["mlp"], 4, 4, 0.02
    (batch,) = task.batches([m])
    options = {"schedule": "interleaved", "stages_per_rank": 2}
    with delayed_messages(delay), make_pipeline(task, d, m, batch, **options) as pipe:
        with pipe.timeline() as timeline:
            pipe.train_step(*batch.args, target=batch.target)
        events = {(event.kind, event.stage, event.microbatch): event for event in timeline.rows}
    for stage, microbatch in itertools.product(range(d - 1), range(m)):
        for kind, before, after in (("F", stage, stage + 1), ("B", stage + 1, stage)):
            sent = events[kind, before, microbatch].end
            assert events[kind, after, microbatch].start >= sent + 0.95 * delay
    with delayed_messages(60.0):  # one rank
        start = time.perf_counter()
        by_pipeline(task, [batch], d, m, schedule="interleaved", stages_per_rank=d)
    assert time.perf_counter() - start < 60.0
