"""Events as files: the trace read as JSON, the events read back."""

from __future__ import annotations

import json
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
    st.sampled_from("FBIWU"),
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
            stage=entry["tid"],
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
    named = [entry for entry in traced(events, tmp_path / "t.json") if entry["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert processes == {0: "replica 0", 1: "replica 1"}
    assert threads == {(r, s): f"stage {s}" for r in range(2) for s in range(3)}
    assert len(named) == len(processes) + len(threads)


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
        ("schema", "other", "schema: 'other', expected: 'pipedream2bw.events'"),
        ("version", 2, "version: 2, expected: 1"),
        ("fields", ["stage"], r"fields: \['stage'\], expected: \['stage', 'replica'"),
        ("events", {}, "events: {}, expected: a list"),
        ("events", [3], r"events\[0\]: 3, expected: the 9 values"),
        ("events", [[0, 0, "F", 0, 0, 0, 0.0]], r"events\[0\]: .* the 9 values"),
        ("events", [[0, 0, "X", 0, 0, 0, 0, 1, 0]], "kind: 'X', expected: one of F, B, I, W, U"),
        ("events", [[0, 0, ["F"], 0, 0, 0, 0, 1, 0]], r"kind: \['F'\], expected: one of"),
        ("events", [[-1, 0, "F", 0, 0, 0, 0, 1, 0]], "stage: -1, expected: a whole number >= 0"),
        ("events", [[0, 0, "F", True, 0, 0, 0, 1, 0]], "batch: True, expected: a whole number"),
        ("events", [[0, 0, "F", 0, 0, 0, 0, 1, "a"]], "rank: 'a', expected: a whole number >= 0"),
        ("events", [[0, 0, "F", 0, 0, 0, "a", 1, 0]], "start: 'a', expected: seconds"),
        ("events", [[0, 0, "F", 0, 0, 0, 0, float("inf"), 0]], "end: inf, expected: seconds"),
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
    with pytest.raises(ValueError, match=r"events\.json: (not JSON|schema: None)"):
        pd2.read_events(path)
