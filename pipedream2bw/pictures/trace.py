"""Writes actions as files: a trace for chrome://tracing and Perfetto, and JSON to read again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checks import check_whole_number
from ..json_document import Field, parse_document
from ..schedules.events import KIND_NAMES, Event, Row, row_name, row_of, stages_of_rows

_FORMAT = "pipedream2bw.events"
_VERSION = 2
_FIELDS = [field.name for field in dataclasses.fields(Event)]
_ARGUMENTS = ("batch", "microbatch", "version", "stage")  # of an action in a trace


def write_trace(events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Writes the actions in the Trace Event Format, which Perfetto and chrome://tracing show.

    A replica is a process, and a rank a thread. An action is a complete event named after its kind
    and microbatch, and after its stage if the rank has several. All its numbers are arguments.
    Arrows lead from a stage's forward to the next stage's, and from a backward to the one before.
    Times are microseconds since the first action's start.

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
    rows = stages_of_rows(events)
    # Unlike the format's other readers, Perfetto names threads by tid alone; and it puts a thread
    # whose tid is the pid first.
    threads = {row: number for number, row in enumerate(rows, 1)}
    origin = min(event.start for event in events)

    def nanoseconds(time: float) -> int:
        return round(1e9 * (time - origin))

    def at(event: Event, time: int) -> dict[str, Any]:
        # Whole nanoseconds, all that the readers know: what is rounded alike cannot overlap.
        return {"pid": event.replica, "tid": threads[row_of(event)], "ts": time / 1e3}

    def complete(event: Event) -> dict[str, Any]:
        begin, end = nanoseconds(event.start), nanoseconds(event.end)
        # Perfetto colours by name without the numbers: by kind.
        name = event.kind if event.kind == "U" else f"{event.kind} {event.microbatch}"
        if len(rows[row_of(event)]) > 1:
            name += f" (stage {event.stage})"
        return {
            "name": name,
            "cat": KIND_NAMES[event.kind],
            "ph": "X",
            **at(event, begin),
            "dur": (end - begin) / 1e3,
            "args": {name: getattr(event, name) for name in _ARGUMENTS},
        }

    def flow(number: int, sender: Event, receiver: Event) -> list[dict[str, Any]]:
        name = "activations" if sender.kind == "F" else "gradients"
        common = {"name": name, "cat": "messages", "id": number}
        # Ends belong to the action that encloses them: the last nanosecond and the first.
        sent = max(nanoseconds(sender.end) - 1, nanoseconds(sender.start))
        received = nanoseconds(receiver.start)
        return [
            {**common, "ph": "s", **at(sender, sent)},
            {**common, "ph": "f", "bp": "e", **at(receiver, received)},
        ]

    timed = [complete(event) for event in sorted(events, key=lambda e: (e.start, e.end))]
    for number, (sender, receiver) in enumerate(_messages(events)):
        timed += flow(number, sender, receiver)
    # Stable: what encloses an arrow's end stays before it.
    content = {
        "traceEvents": [*_names(rows, threads), *sorted(timed, key=lambda entry: entry["ts"])],
        "displayTimeUnit": "ms",
    }
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def _names(rows: dict[Row, list[int]], threads: dict[Row, int]) -> Iterator[dict[str, Any]]:
    """Names of processes and threads, and their order: sorted by name 10 would come before 2."""
    for replica in sorted({replica for replica, _ in rows}):
        yield _metadata("process_name", replica, 0, name=f"replica {replica}")
        yield _metadata("process_sort_index", replica, 0, sort_index=replica)
    for (replica, rank), stages in rows.items():
        thread = threads[replica, rank]
        yield _metadata("thread_name", replica, thread, name=row_name((replica, rank), stages))
        yield _metadata("thread_sort_index", replica, thread, sort_index=rank)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _messages(events: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Sender and receiver of each message: F to the next stage's F, B or I to the B or I before."""

    def key(event: Event, stage: int) -> tuple[int, int, bool, int, int]:
        return event.replica, stage, event.kind == "F", event.batch, event.microbatch

    waiting = [event for event in events if event.kind in "FBI"]
    receivers = {key(event, event.stage): event for event in waiting}
    for sender in waiting:
        receiver = receivers.get(key(sender, sender.stage + (1 if sender.kind == "F" else -1)))
        if receiver is not None and sender.end <= receiver.start:
            yield sender, receiver


def write_events(events: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Writes actions as JSON that :func:`read_events` reads: an object with the format's name and
    version, the names of an event's fields, and one list of their values for each event.

    Args:
        events: the actions; their order is kept.
        path: the file, overwritten.

    Raises:
        ValueError: a time is not finite.
        OSError: the file cannot be written.
    """
    rows = [json.dumps(dataclasses.astuple(event), allow_nan=False) for event in events]
    header = {"format": _FORMAT, "version": _VERSION, "fields": _FIELDS}
    body = ",\n".join(rows)
    content = f'{json.dumps(header)[:-1]}, "events": [\n{body}\n]}}\n'
    Path(path).write_text(content, encoding="utf-8")


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The actions that :func:`write_events` wrote, equal in every field and in the same order.

    Raises:
        ValueError: the file is not JSON, of another format or version, or a row is not an event.
        OSError: the file cannot be read.
    """
    try:
        document = parse_document(Path(path).read_bytes(), _FORMAT, _VERSION)
        names, rows = document.fields("fields", "events")
        if names.value != _FIELDS:
            names.fail(repr(_FIELDS))
        return [_event(row) for row in rows.items()]
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _event(row: Field) -> Event:
    values = (item.value for item in row.items(len(_FIELDS)))
    event = Field(dict(zip(_FIELDS, values, strict=True)), row.where).read(Event)
    for name in ("stage", "replica", "batch", "microbatch", "version", "rank"):
        check_whole_number(f"{row.where}.{name}", getattr(event, name), at_least=0)
    if event.kind not in KIND_NAMES:
        raise ValueError(f"{row.where}.kind: {event.kind!r}, known: {', '.join(KIND_NAMES)}")
    if event.end < event.start:
        raise ValueError(
            f"{row.where}: start: {event.start}, end: {event.end}: start <= end must hold"
        )
    return event
