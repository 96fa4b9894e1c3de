"""``pipedream2bw draw``: a schedule or a recorded run as text, picture or trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..pictures.text import draw_text
from ..pictures.timeline import draw_timeline
from ..pictures.trace import read_events, write_events, write_trace
from ..schedules.events import Event
from ..schedules.simulate import simulate

_NUM_BATCHES = 3


# Of a picture, text or file that `draw` makes, by the suffix that stands for it.
_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".png": "png",
    ".svg": "svg",
    ".pdf": "pdf",
    ".json": "trace",
}


_FORMATS = (*_FORMAT_OF_SUFFIX.values(), "events")


_SENDS = ("asynchronous", "blocking", "rendezvous")


# Options that say what is simulated, by their names in the namespace.
_SIMULATED = (
    *("stages", "microbatches", "stages_per_rank", "batches"),
    *(
        "forward",
        "backward",
        "input_grad",
        "weight_grad",
        "recompute",
        "update",
        "latency",
        "sends",
    ),
)


def add_draw_command(commands: Any) -> None:
    """Adds the command to those of a parser."""
    draw = commands.add_parser(
        "draw",
        help="draw a schedule, or a recorded run",
        description="Draws a schedule by simulating it, or a recorded run: rows are stages, time "
        "goes to the right. Without -o as text to the terminal.",
    )
    draw.set_defaults(run=_draw)
    source = draw.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help="see `pipedream2bw schedules`")
    source.add_argument(
        "--schedule-file",
        metavar="PATH",
        help="a schedule's text form, or the compute-only CSV of torch.distributed.pipelining",
    )
    source.add_argument("--events", metavar="PATH", help="a run that write_events() wrote")

    sizes = draw.add_argument_group("what is simulated")
    sizes.add_argument("--stages", type=int, metavar="D", help="needed with --schedule")
    sizes.add_argument(
        "--microbatches", type=int, metavar="M", help="of a batch; needed with --schedule"
    )
    sizes.add_argument("--stages-per-rank", type=int, metavar="V", help="default: 1")
    sizes.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help=f"until the pipeline drains, default: {_NUM_BATCHES}",
    )

    times = draw.add_argument_group(
        "how long it takes, on every stage",
        "In seconds if --forward is given; else in forwards of a microbatch, as multiples of its "
        "time.",
    )
    times.add_argument("--forward", type=float, metavar="SECONDS", help="of a microbatch's forward")
    times.add_argument(
        "--backward", type=float, metavar="TIME", help="of its backward, default: twice the forward"
    )
    times.add_argument(
        "--input-grad",
        type=float,
        metavar="TIME",
        help="instead of --backward, with --weight-grad: of the part that the stage before waits "
        "for (I; half the backward if not given)",
    )
    times.add_argument("--weight-grad", type=float, metavar="TIME", help="of the other part (W)")
    times.add_argument(
        "--recompute",
        type=float,
        metavar="TIME",
        help="of a forward that is run again before its backward (R), default: none is",
    )
    times.add_argument("--update", type=float, metavar="TIME", help="of an update, default: 0")
    times.add_argument(
        "--latency",
        type=float,
        metavar="TIME",
        help="of a message from one rank to another, default: 0",
    )
    times.add_argument(
        "--sends",
        choices=_SENDS,
        help="whether a rank goes on at once when it sends (default), waits until the message has "
        "arrived, or until its receiver takes it, which may deadlock",
    )

    output = draw.add_argument_group("what is written")
    output.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="a file; its suffix says the format: .txt, .png, .svg, .pdf, .json (a trace)",
    )
    output.add_argument(
        "--format",
        choices=_FORMATS,
        help="whatever the suffix: text, a picture (needs matplotlib), a trace for Perfetto and "
        "chrome://tracing, or events for --events",
    )
    output.add_argument(
        "--width", type=int, metavar="COLUMNS", help="of text, default: the terminal's"
    )


def _draw(given: argparse.Namespace) -> None:
    write = _writer(given)  # before the work, since its suffix may be wrong
    write(_events(given))


def _writer(given: argparse.Namespace) -> Callable[[list[Event]], object]:
    path: Path | None = given.output
    form = _format(given)
    if given.width is not None and form != "text":
        raise ValueError(f"--width: {given.width}, format: {form}: only text has columns")
    if form == "text":
        unit = "seconds" if _in_seconds(given) else "forwards"
        return lambda events: _write_text(draw_text(events, width=given.width, unit=unit), path)
    if path is None:
        raise ValueError(f"--format: {form}, -o is missing: only text goes to the terminal")
    if form == "trace":
        return lambda events: write_trace(events, path)
    if form == "events":
        return lambda events: write_events(events, path)
    title = given.schedule or Path(given.schedule_file or given.events).name
    unit = "seconds" if _in_seconds(given) else "forwards of a microbatch"
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


def _in_seconds(given: argparse.Namespace) -> bool:
    return given.events is not None or given.forward is not None


def _write_text(text: str, path: Path | None) -> None:
    if path is None:
        print(text)
    else:
        path.write_text(f"{text}\n", encoding="utf-8")


def _events(given: argparse.Namespace) -> list[Event]:
    if given.events is not None:
        for name in _SIMULATED:
            value = getattr(given, name)
            if value is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: {value}, --events: {given.events}: a recorded "
                    "run is drawn as it is"
                )
        return read_events(given.events)
    forward = 1.0 if given.forward is None else given.forward
    backward = given.backward
    if backward is None and given.input_grad is None and given.weight_grad is None:
        backward = 2 * max(forward, 0.0)  # that a forward is negative is said of the forward
    return simulate(
        given.schedule if given.schedule_file is None else Path(given.schedule_file),
        num_stages=given.stages,
        num_microbatches=given.microbatches,
        stages_per_rank=1 if given.stages_per_rank is None else given.stages_per_rank,
        forward=forward,
        backward=backward,
        input_grad=given.input_grad,
        weight_grad=given.weight_grad,
        recompute=0.0 if given.recompute is None else given.recompute,
        update=0.0 if given.update is None else given.update,
        latency=0.0 if given.latency is None else given.latency,
        sends=given.sends or _SENDS[0],
        num_batches=_NUM_BATCHES if given.batches is None else given.batches,
    ).events
