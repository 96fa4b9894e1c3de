"""Actions as files: a trace for chrome://tracing and Perfetto, and JSON to be read again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .timeline import KIND_NAMES, Event

_SCHEMA = "pipedream2bw.events"
_VERSION = 1
_FIELDS = [field.name for field in dataclasses.fields(Event)]


def write_trace(events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Writes the actions in the Trace Event Format, which Perfetto and chrome://tracing show.

    A replica is a process, a stage a thread, an action a complete event named after its kind and
    microbatch, with batch, microbatch and version as arguments. Times are microseconds since the
    first action's start.

    Args:
        events: the actions, in any order.
        path: the file, overwritten.

    Raises:
        ValueError: no events.
        OSError: the file cannot be written.
    """
    if not events:
        raise ValueError(
            "events: 0, a trace needs at least 1; only rank 0 gets events from Timeline.gather()"
        )
    origin = min(event.start for event in events)
    rows = sorted({(event.replica, event.stage) for event in events})
    trace = [
        *(
            _metadata("process_name", replica, 0, f"replica {replica}")
            for replica in sorted({replica for replica, _ in rows})
        ),
        *(_metadata("thread_name", replica, stage, f"stage {stage}") for replica, stage in rows),
        *(_complete(event, origin) for event in sorted(events, key=lambda event: event.start)),
    ]
    content = {"traceEvents": trace, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}


def _complete(event: Event, origin: float) -> dict[str, Any]:
    return {
        # Perfetto colours by name without the number: by kind.
        "name": event.kind if event.kind == "U" else f"{event.kind} {event.microbatch}",
        "cat": KIND_NAMES[event.kind],
        "ph": "X",
        "pid": event.replica,
        "tid": event.stage,
        "ts": 1e6 * (event.start - origin),
        "dur": 1e6 * (event.end - event.start),
        "args": {
            "batch": event.batch,
            "microbatch": event.microbatch,
            "version": event.version,
        },
    }


def write_events(events: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Writes actions as JSON that :func:`read_events` reads: an object with the schema's name and
    version, the names of an event's fields, and one list of their values for each event.

    Args:
        events: the actions; their order is kept.
        path: the file, overwritten.

    Raises:
        ValueError: a time is not finite.
        OSError: the file cannot be written.
    """
    rows = [json.dumps(dataclasses.astuple(event), allow_nan=False) for event in events]
    header = {"schema": _SCHEMA, "version": _VERSION, "fields": _FIELDS}
    body = ",\n".join(rows)
    content = f'{json.dumps(header)[:-1]}, "events": [\n{body}\n]}}\n'
    Path(path).write_text(content, encoding="utf-8")


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The actions that :func:`write_events` wrote, equal in every field and in the same order.

    Raises:
        ValueError: the file is not JSON, of another schema or version, or a row is not an event.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: not JSON ({error}), expected events") from error
    header = content if isinstance(content, dict) else {}
    for key, expected in (("schema", _SCHEMA), ("version", _VERSION), ("fields", _FIELDS)):
        if header.get(key) != expected:
            raise ValueError(
                f"{os.fspath(path)}: {key}: {_short(header.get(key))}, expected: {expected!r}; "
                "write_events() writes such files"
            )
    rows = header.get("events")
    if not isinstance(rows, list):
        raise ValueError(f"{os.fspath(path)}: events: {_short(rows)}, expected: a list")
    return [_event(row, f"{os.fspath(path)}: events[{i}]") for i, row in enumerate(rows)]


def _event(row: Any, where: str) -> Event:
    if not isinstance(row, list) or len(row) != len(_FIELDS):
        raise ValueError(f"{where}: {_short(row)}, expected: the {len(_FIELDS)} values {_FIELDS}")
    event = Event(*row)
    for name in ("stage", "replica", "batch", "microbatch", "version", "rank"):
        value = getattr(event, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{where}: {name}: {_short(value)}, expected: a whole number >= 0")
    if event.kind not in tuple(KIND_NAMES):
        raise ValueError(
            f"{where}: kind: {_short(event.kind)}, expected: one of {', '.join(KIND_NAMES)}"
        )
    for name in ("start", "end"):
        value = getattr(event, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise ValueError(f"{where}: {name}: {_short(value)}, expected: seconds")
    if event.end < event.start:
        raise ValueError(f"{where}: start: {event.start}, end: {event.end}: start <= end must hold")
    return event


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
