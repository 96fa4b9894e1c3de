"""``pipedream2bw draw`` and ``schedules``: draw a schedule or a run, and list the schedules."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import _C
from ...commands.output import check_written, print_json
from ...pictures.canvas import Matplotlib
from ...pictures.text import draw_text
from ...pictures.timeline import draw_timeline
from ...pictures.trace import read_events, write_events, write_trace
from ...schedules.events import Event
from ..simulation import simulate
from .options import Options

_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".png": "png",
    ".svg": "svg",
    ".pdf": "pdf",
    ".json": "trace",
}
_FORMATS = (*_FORMAT_OF_SUFFIX.values(), "events")

_SIZES = Options(
    simulate,
    {
        "stages": "number of stages; needed with --schedule",
        "microbatches": "microbatches of a batch; needed with --schedule",
        "stages-per-rank": "number of stages of each rank",
        "batches": "number of batches until the pipeline drains",
    },
)

_TIMES = Options(
    simulate,
    {
        "forward": "a microbatch's forward",
        "backward": "its backward; default: twice the forward",
        "input-grad": "the part of the backward that the stage before waits for (I); with "
        "--weight-grad, in place of --backward",
        "weight-grad": "the other part of the backward (W)",
        "recompute": "a forward that is repeated before its backward (R)",
        "update": "an update of the weights",
        "latency": "a message from one rank to another",
    },
)


def add_draw_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    draw = commands.add_parser(
        "draw",
        help="draw a schedule, or a recorded run",
        description="Draws a schedule by simulating it, or a recorded run. Rows are stages, time "
        "goes to the right. Without -o the terminal shows it as text.",
    )
    draw.set_defaults(run=_draw)
    source = draw.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help="see `pipedream2bw schedules`")
    source.add_argument(
        "--schedule-file",
        type=Path,
        metavar="PATH",
        help="a schedule's text form, or the compute-only CSV of torch.distributed.pipelining",
    )
    source.add_argument(
        "--events", type=Path, metavar="PATH", help="a run that write_events() wrote"
    )
    _SIZES.add_to(draw.add_argument_group("what is simulated"))
    times = draw.add_argument_group(
        "how long each action takes",
        "All times are the same on every stage. With --forward they are in seconds, without it in "
        "multiples of a forward.",
    )
    _TIMES.add_to(times)
    output = draw.add_argument_group("what is written")
    output.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="a file; its suffix decides the format: .txt, .png, .svg, .pdf, .json (a trace)",
    )
    output.add_argument(
        "--format",
        choices=_FORMATS,
        help="the format, whatever the suffix: text, a picture (needs matplotlib), a trace for "
        "Perfetto and chrome://tracing, or events for --events",
    )
    output.add_argument(
        "--width", type=int, metavar="COLUMNS", help="width of text; default: the terminal's"
    )


def add_schedules_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    schedules = commands.add_parser(
        "schedules",
        help="list the schedules and the sizes that they need",
        description="Lists the schedules and the sizes that they need.",
    )
    schedules.set_defaults(run=_list_schedules)
    schedules.add_argument("--json", action="store_true", help="print JSON")


def _draw(given: argparse.Namespace) -> None:
    # Before the simulation: the format may be wrong, and its file or matplotlib missing.
    write = _writer(given)
    check_written("-o", given.output)
    write(_events(given))


def _writer(given: argparse.Namespace) -> Callable[[list[Event]], object]:
    path: Path | None = given.output
    form = _format(given)
    in_seconds = given.events is not None or given.forward is not None
    if given.width is not None and form != "text":
        raise ValueError(f"--width: {given.width}, format: {form}: only text has columns")
    if form == "text":
        unit = "seconds" if in_seconds else "forwards"
        return lambda events: _write_text(draw_text(events, width=given.width, unit=unit), path)
    if path is None:
        raise ValueError(f"--format: {form}, -o is missing: only text goes to the terminal")
    if form == "trace":
        return lambda events: write_trace(events, path)
    if form == "events":
        return lambda events: write_events(events, path)
    Matplotlib.load("a timeline")
    title = given.schedule or (given.schedule_file or given.events).name
    unit = "seconds" if in_seconds else "forwards of a microbatch"
    return lambda events: draw_timeline(events, title=title, unit=unit).figure.savefig(
        path, format=form
    )


def _format(given: argparse.Namespace) -> str:
    path: Path | None = given.output
    if given.format is not None:
        return str(given.format)
    if path is None:
        return "text"
    if path.suffix not in _FORMAT_OF_SUFFIX:
        raise ValueError(
            f"-o: {path}, suffix: {path.suffix!r}: it must be one of "
            f"{', '.join(_FORMAT_OF_SUFFIX)}, or --format must be given"
        )
    return _FORMAT_OF_SUFFIX[path.suffix]


def _write_text(text: str, path: Path | None) -> None:
    if path is None:
        print(text)
    else:
        path.write_text(f"{text}\n", encoding="utf-8")


def _events(given: argparse.Namespace) -> list[Event]:
    if given.events is not None:
        for options in (_SIZES, _TIMES):
            options.refuse(given, f"--events: {given.events}: a recorded run has its own")
        return read_events(given.events)
    simulated = _SIZES.given(given) | _TIMES.given(given)
    if simulated.keys().isdisjoint(("backward", "input_grad", "weight_grad")):
        # simulate() refuses a negative forward.
        simulated["backward"] = 2 * max(simulated.get("forward", 1.0), 0.0)
    schedule = given.schedule if given.schedule_file is None else given.schedule_file
    return simulate(schedule, **simulated).events


def _list_schedules(given: argparse.Namespace) -> None:
    if given.json:
        print_json(
            [
                {
                    "name": method.name,
                    "rules": list(method.size_rules),
                    "has_stages_per_rank": method.has_chunks,
                    "is_v": method.is_v,
                    "is_bidirectional": method.is_bidirectional,
                    "is_planned": method.is_planned,
                }
                for method in _C.schedule_methods()
            ]
        )
        return
    print(f"sizes that the schedules need\n{'schedule':<25}rules")
    for method in _C.schedule_methods():
        row = f"{method.name:<25}{'; '.join(method.size_rules)}"
        print(textwrap.fill(row, 100, subsequent_indent=" " * 25))
