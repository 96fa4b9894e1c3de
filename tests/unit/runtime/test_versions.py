"""Which weights every action reads, in what order a stage works, and how many versions live."""

from __future__ import annotations

import collections
from typing import Any

import pytest

import pipedream2bw as pd2
from tests.runs.trajectory import make_pipeline, sgd
from tests.samples.models import TASKS

NUM_BATCHES = 6


def log_of(
    num_stages: int,
    m: int,
    schedule: str = "2bw",
    flush_before: tuple[int, ...] = (),
    load_before: int = -1,
) -> tuple[list[pd2.Event], dict[int, Any]]:
    task = TASKS["skips"]
    batches = task.batches([m] * NUM_BATCHES)
    with make_pipeline(task, num_stages, m, batches[0], schedule=schedule) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with pipe.timeline() as timeline:
            for number, batch in enumerate(batches):
                if number in flush_before:
                    pipe.flush()
                if number == load_before:
                    pipe.load_state_dict(task.model().state_dict())
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
        gathered = timeline.gather()
        assert sorted(timeline.rows) == gathered
        return sorted(gathered, key=lambda event: (event.stage, event.end)), pipe.memory_report()


def rule(num_stages: int, m: int, delay: int) -> set[tuple[int, str, int, int, int]]:
    expected = set()
    for stage in range(num_stages):
        for t in range(NUM_BATCHES):
            for j in range(m):
                expected.add((stage, "F", t, j, max(t - delay, 0)))
                expected.add((stage, "B", t, j, max(t - delay, 0)))
            expected.add((stage, "U", t, m - 1, t + 1))
    return expected


@pytest.mark.parametrize("flush_before", [(), (1,), (2, 3, 5)])
@pytest.mark.parametrize(("num_stages", "m"), [(1, 1), (1, 3), (2, 2), (3, 4), (4, 4), (6, 8)])
def test_every_microbatch_reads_the_version_of_the_rule(
    num_stages: int, m: int, flush_before: tuple[int, ...]
) -> None:
    events, _ = log_of(num_stages, m, flush_before=flush_before)
    rows = [(e.stage, e.kind, e.batch, e.microbatch, e.version) for e in events]
    assert len(rows) == len(set(rows))
    assert set(rows) == rule(num_stages, m, delay=1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "m"), [(1, 2), (2, 1), (3, 4), (4, 6)])
def test_flush_schedules_read_the_newest_version(schedule: str, num_stages: int, m: int) -> None:
    events, report = log_of(num_stages, m, schedule)
    rows = {(e.stage, e.kind, e.batch, e.microbatch, e.version) for e in events}
    assert rows == rule(num_stages, m, delay=0)
    for stage in range(num_stages):
        assert report[stage].most_live_versions == 1
        in_flight = m if schedule == "gpipe" else min(num_stages - stage, m)
        assert report[stage].most_in_flight == in_flight


def test_loaded_weights_are_every_version() -> None:
    # Loading before batch 3 replaces W(3) and W(2): batches 3 and 4 both read what was loaded.
    events, report = log_of(3, 3, load_before=3)
    read = {(e.batch, e.version) for e in events if e.kind != "U"}
    assert read == {(0, 0), (1, 0), (2, 1), (3, 3), (4, 3), (5, 4)}
    assert all(stage.most_live_versions <= 2 for stage in report.values())


@pytest.mark.parametrize(("num_stages", "m"), [(1, 1), (2, 2), (3, 7), (5, 5), (6, 6)])
def test_two_versions_live_and_one_activation_per_stage_ahead(num_stages: int, m: int) -> None:
    events, report = log_of(num_stages, m)
    for stage in range(num_stages):
        assert report[stage].most_live_versions == 2
        assert report[stage].most_in_flight == min(num_stages - stage, m)
        in_flight = most = 0
        readers: collections.Counter[int] = collections.Counter()
        newest = 0
        for event in (e for e in events if e.stage == stage):
            if event.kind == "F":
                in_flight += 1
                readers[event.version] += 1
            elif event.kind == "B":
                in_flight -= 1
                readers[event.version] -= 1
            else:
                newest = event.version
                # What it overwrote was W(newest - 2): nobody may be between F and B with it.
                assert readers[newest - 2] == 0
            live = {newest} | {version for version, count in readers.items() if count}
            assert len(live) <= 2
            most = max(most, in_flight)
        assert most == min(num_stages - stage, m)
        assert in_flight == 0


@pytest.mark.parametrize(("num_stages", "m"), [(2, 2), (3, 4), (6, 6)])
def test_a_stage_works_in_the_order_of_one_forward_one_backward(num_stages: int, m: int) -> None:
    events, _ = log_of(num_stages, m)
    for stage in range(num_stages):
        lag = num_stages - 1 - stage
        kinds = [(e.kind, e.batch * m + e.microbatch) for e in events if e.stage == stage]
        compute = [(kind, k) for kind, k in kinds if kind != "U"]
        total = NUM_BATCHES * m
        expected: list[tuple[str, int]] = [("F", k) for k in range(lag)]
        for k in range(lag, total):  # never emptied in between: batches follow like microbatches
            expected += [("F", k), ("B", k - lag)]
        expected += [("B", k) for k in range(total - lag, total)]
        assert compute == expected


@pytest.mark.parametrize(("num_stages", "m"), [(2, 3), (3, 7), (4, 9)])
def test_eager_2bw_has_twice_as_many_in_flight_and_two_versions(num_stages: int, m: int) -> None:
    events, report = log_of(num_stages, m, "2bw_eager")
    assert {(e.stage, e.kind, e.batch, e.microbatch, e.version) for e in events} == rule(
        num_stages, m, delay=1
    )
    for stage in range(num_stages):
        assert report[stage].most_in_flight == 2 * (num_stages - stage) - 1
        assert report[stage].most_live_versions == 2


@pytest.mark.parametrize("flush_before", [(), (1,), (2, 3, 5)])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_pipedream_keeps_a_version_for_each_microbatch_in_flight(
    num_stages: int, flush_before: tuple[int, ...]
) -> None:
    events, report = log_of(num_stages, 1, "pipedream", flush_before)
    for event in (e for e in events if e.kind != "U"):
        assert event.version == max(event.batch - (num_stages - 1 - event.stage), 0)
    for stage in range(num_stages):
        assert report[stage].weights == (num_stages - stage) * report[stage].gradients
        if not flush_before:
            assert report[stage].most_in_flight == num_stages - stage
            assert report[stage].most_live_versions == num_stages - stage


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe"])
def test_no_action_starts_before_what_it_waits_for_has_ended(schedule: str) -> None:
    d, m = 4, 5
    events, _ = log_of(d, m, schedule)
    end = {(e.stage, e.kind, e.batch, e.microbatch): e.end for e in events}
    for e in events:
        assert e.start <= e.end
        if e.kind == "F" and e.stage > 0:
            assert e.end > end[e.stage - 1, "F", e.batch, e.microbatch]
        if e.kind == "B":
            assert e.start >= end[e.stage, "F", e.batch, e.microbatch]
            if e.stage < d - 1:
                assert e.end > end[e.stage + 1, "B", e.batch, e.microbatch]
        if e.kind == "U":
            assert e.start >= end[e.stage, "B", e.batch, m - 1]
