"""Events as files: the trace read as JSON, the events read back."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw import Event

COUNTS = st.integers(0, 10**6)
TIMES = st.floats(0, 1e9)
EVENTS = st.builds(
    lambda stage, replica, kind, batch, microbatch, version, times, rank: Event(
        stage, replica, kind, batch, microbatch, version, min(times), max(times), rank
    ),
    COUNTS,
    COUNTS,
    st.sampled_from("FBIWRU"),
    COUNTS,
    COUNTS,
    COUNTS,
    st.tuples(TIMES, TIMES),
    COUNTS,
)


def traced(events: list[Event], path: Path) -> list[dict[str, Any]]:
    pd2.write_trace(events, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    trace: list[dict[str, Any]] = content["traceEvents"]
    return trace


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS))
def test_events_read_back_are_equal(tmp_path: Path, events: list[Event]) -> None:
    pd2.write_events(events, tmp_path / "events.json")
    assert pd2.read_events(tmp_path / "events.json") == events


def test_the_trace_has_every_action_with_its_time_in_microseconds(tmp_path: Path) -> None:
    origin = 86_400.25
    events = [
        Event(1, 2, "F", 3, 4, 2, origin + 0.001, origin + 0.0035),
        Event(0, 2, "B", 3, 0, 2, origin, origin + 0.5),
        Event(1, 0, "I", 0, 1, 0, origin + 2, origin + 3),
        Event(1, 0, "W", 0, 1, 0, origin + 3, origin + 4),
        Event(1, 0, "U", 0, 5, 1, origin + 4, origin + 4.25),
    ]
    complete = [entry for entry in traced(events, tmp_path / "trace.json") if entry["ph"] == "X"]
    read = [
        Event(
            stage=entry["args"]["stage"],
            replica=entry["pid"],
            kind={
                "forward": "F",
                "backward": "B",
                "input gradient": "I",
                "weight gradient": "W",
                "update": "U",
            }[entry["cat"]],
            batch=entry["args"]["batch"],
            microbatch=entry["args"]["microbatch"],
            version=entry["args"]["version"],
            start=round(origin + entry["ts"] / 1e6, 6),
            end=round(origin + (entry["ts"] + entry["dur"]) / 1e6, 6),
        )
        for entry in complete
    ]
    assert sorted(read) == sorted(events)
    assert [entry["ts"] for entry in complete] == sorted(entry["ts"] for entry in complete)
    assert complete[0]["ts"] == 0
    assert {entry["name"] for entry in complete} == {"F 4", "B 0", "I 1", "W 1", "U"}


def test_processes_and_threads_of_the_trace_are_named(tmp_path: Path) -> None:
    events = [Event(s, r, "F", 0, 0, 0, 0.0, 1.0) for r in range(2) for s in range(3)]
    trace = traced(events, tmp_path / "t.json")
    named = [entry for entry in trace if entry["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert processes == {0: "replica 0", 1: "replica 1"}
    assert sorted((pid, name) for (pid, _), name in threads.items()) == [
        (r, f"stage {s}") for r in range(2) for s in range(3)
    ]
    # Perfetto names a thread by its tid alone, and takes the one that has its pid for the main one.
    assert len({tid for _, tid in threads}) == len(threads)
    assert all(pid != tid for pid, tid in threads)
    for entry in trace:
        if entry["ph"] == "X":
            assert threads[entry["pid"], entry["tid"]] == f"stage {entry['args']['stage']}"


def test_ranks_of_several_stages_are_threads_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    run = pd2.simulate("looped_bfs", num_stages=24, num_microbatches=2, stages_per_rank=2)
    trace = traced(run.events, tmp_path / "t.json")
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(names, key=lambda tid: order[tid])] == [
        f"rank {rank}: stages {rank}, {rank + 12}" for rank in range(12)
    ]
    assert {
        e["name"] for e in trace if e["ph"] == "X" and names[e["tid"]].startswith("rank 3:")
    } == {
        *(f"{kind} {j} (stage {s})" for kind in "FB" for j in range(2) for s in (3, 15)),
        *(f"U (stage {s})" for s in (3, 15)),
    }


# Required by the Trace Event Format, by phase: complete, metadata, a flow's start and end.
REQUIRED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": int},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": int, "bp": str},
}
RUNS: list[dict[str, Any]] = [
    {"schedule": "2bw", "num_stages": 4, "num_microbatches": 5, "latency": 0.1 / 3},
    {"schedule": "interleaved_2bw", "num_stages": 6, "num_microbatches": 6, "stages_per_rank": 2},
    {"schedule": "zero_bubble", "num_stages": 3, "num_microbatches": 4},
    {"schedule": "pipedream", "num_stages": 3, "num_microbatches": 1},
]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: str(options["schedule"]))
@pytest.mark.parametrize("forward", [1.0, 0.1, 1e-3 / 7])
def test_the_trace_keeps_the_rules_of_the_format(
    options: dict[str, Any], forward: float, tmp_path: Path
) -> None:
    run = pd2.simulate(**options, forward=forward, backward=forward * 5 / 3, num_batches=6)
    # Unordered, as those of several processes are, and of two replicas.
    events = sorted(run.events, key=lambda event: (event.kind, event.end))
    events += [dataclasses.replace(event, replica=1) for event in events]
    trace = traced(events, tmp_path / "trace.json")
    for entry in trace:
        fields = REQUIRED[entry["ph"]]
        assert entry.keys() == {*fields, "ph"}
        assert all(type(entry[name]) is kind for name, kind in fields.items())
        assert "ts" not in entry or entry["ts"] >= 0
    phases = [entry["ph"] for entry in trace]
    assert phases.index("X") == phases.count("M")  # names before what they name
    times = [entry["ts"] for entry in trace if "ts" in entry]
    assert times == sorted(times)

    # A thread's complete events must not overlap, nor in the nanoseconds that readers keep.
    last: dict[int, int] = {}
    for entry in trace:
        if entry["ph"] == "X":
            begin, duration = 1000 * Decimal(str(entry["ts"])), 1000 * Decimal(str(entry["dur"]))
            assert begin == int(begin)
            assert duration == int(duration) >= 0
            assert last.get(entry["tid"], 0) <= begin
            last[entry["tid"]] = int(begin + duration)

    assert_arrows_are_the_messages(trace, events)


def assert_arrows_are_the_messages(trace: list[dict[str, Any]], events: list[Event]) -> None:
    """Every arrow's ends lie in the actions that send and receive; none is missing."""

    def action_at(entry: dict[str, Any]) -> dict[str, Any]:
        """The one that is open where the entry stands in the file."""
        of_thread = [
            e
            for e in trace[: trace.index(entry)]
            if e["ph"] == "X" and (e["pid"], e["tid"]) == (entry["pid"], entry["tid"])
        ]
        action = of_thread[-1]
        assert action["ts"] <= entry["ts"] < action["ts"] + action["dur"]
        return action

    starts = {entry["id"]: entry for entry in trace if entry["ph"] == "s"}
    ends = {entry["id"]: entry for entry in trace if entry["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len([entry for entry in trace if entry["ph"] in "sf"]) // 2
    found = set()
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        sender, receiver = action_at(start), action_at(end)
        assert sender["pid"] == receiver["pid"]
        for same in ("batch", "microbatch"):
            assert sender["args"][same] == receiver["args"][same]
        kind = sender["name"][0]
        assert receiver["name"][0] == kind
        assert start["name"] == {"F": "activations"}.get(kind, "gradients")
        step = receiver["args"]["stage"] - sender["args"]["stage"]
        assert step == (1 if kind == "F" else -1)
        found.add(
            (start["pid"], kind, *(sender["args"][n] for n in ("batch", "microbatch", "stage")))
        )
    last_stage = max(event.stage for event in events)
    assert found == {
        (event.replica, event.kind, event.batch, event.microbatch, event.stage)
        for event in events
        if (event.kind == "F" and event.stage < last_stage)
        or (event.kind in "BI" and event.stage > 0)
    }


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"events: 0, .* at least 1"):
        pd2.write_trace([], tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_a_time_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        pd2.write_events([Event(0, 0, "F", 0, 0, 0, 0.0, float("nan"))], tmp_path / "events.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "other", "format: 'other', it must be 'pipedream2bw.events'"),
        ("version", 1, "version: 1, it must be 2"),
        ("fields", ["stage"], r"fields: \['stage'\], it must be \['stage', 'replica'"),
        ("events", {}, "events: {}, it must be a list"),
        ("events", [3], r"events\[0\]: 3, it must be a list"),
        ("events", [[0, 0, "F", 0, 0, 0, 0.0]], r"events\[0\]: 7 items, it must have 9"),
        ("events", [[0, 0, "X", 0, 0, 0, 0, 1, 0]], "kind: 'X', known: F, B, I, W, R, U"),
        ("events", [[0, 0, ["F"], 0, 0, 0, 0, 1, 0]], r"kind: \['F'\], it must be a string"),
        (
            "events",
            [[-1, 0, "F", 0, 0, 0, 0, 1, 0]],
            r"events\[0\].stage: -1, it must be at least 0",
        ),
        ("events", [[0, 0, "F", True, 0, 0, 0, 1, 0]], "batch: True, it must be a whole number"),
        ("events", [[0, 0, "F", 0, 0, 0, 0, 1, "a"]], "rank: 'a', it must be a whole number"),
        ("events", [[0, 0, "F", 0, 0, 0, "a", 1, 0]], "start: 'a', it must be a number"),
        (
            "events",
            [[0, 0, "F", 0, 0, 0, 0, 10**400, 0]],
            "end: 1000*.*, it must be a finite number",
        ),
        ("events", [[0, 0, "F", 0, 0, 0, 0, float("inf"), 0]], "JSON has no Infinity"),
        ("events", [[0, 0, "F", 0, 0, 0, 2.0, 1.0, 0]], "start: 2.0, end: 1.0: start <= end"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_place(
    field: str, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "events.json"
    pd2.write_events([Event(0, 0, "F", 0, 0, 0, 0.0, 1.0)], path)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, field: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as raised:
        pd2.read_events(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", ["", "{", "\x80", "[1]", "3"])
def test_a_file_without_events_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"events\.json: (it is not JSON|format: missing)"):
        pd2.read_events(path)
