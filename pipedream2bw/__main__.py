"""The command line: ``pipedream2bw draw`` and ``pipedream2bw schedules``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .draw import draw_timeline
from .schedules import make_schedule, schedule_names
from .simulate import simulate
from .text_picture import draw_text
from .timeline import Event
from .trace import read_events, write_trace

_NUM_BATCHES = 3
_EXAMPLE_STAGES = 4  # of the rules that `schedules` shows


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        # What follows a first line is the validator's grid.
        self.exit(2, f"{self.prog}: {message.splitlines()[0]}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns 0; exits with code 2 and one line if the input is bad.

    Args:
        arguments: those after the program's name; ``sys.argv[1:]`` if not given.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error) or type(error).__name__)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pipedream2bw", description="Pictures of pipeline schedules.")
    commands = parser.add_subparsers(required=True, metavar="draw | schedules")

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
    simulated = draw.add_argument_group("what is simulated")
    simulated.add_argument("--stages", type=int, metavar="D")
    simulated.add_argument("--microbatches", type=int, metavar="M", help="of a batch")
    simulated.add_argument("--stages-per-rank", type=int, metavar="V", help="default: 1")
    simulated.add_argument("--batches", type=int, metavar="N", help=f"default: {_NUM_BATCHES}")
    simulated.add_argument(
        "--forward", type=float, metavar="S", help="seconds of a microbatch's forward, default: 1"
    )
    simulated.add_argument("--backward", type=float, metavar="S", help="default: 2")
    draw.add_argument(
        "--width", type=int, metavar="COLUMNS", help="of text; default: the terminal's"
    )
    draw.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="a file: .png, .svg or .pdf (needs matplotlib), .json (a trace for Perfetto), .txt",
    )

    schedules = commands.add_parser("schedules", help="list the schedules and what they need")
    schedules.set_defaults(run=_list_schedules)
    return parser


def _draw(given: argparse.Namespace) -> None:
    write = _writer(given)  # before the work, since its suffix may be wrong
    write(_events(given))


def _writer(given: argparse.Namespace) -> Callable[[list[Event]], object]:
    path: Path | None = given.output
    suffix = None if path is None else path.suffix
    if given.width is not None and suffix not in (None, ".txt"):
        raise ValueError(f"--width: {given.width}, -o: {path}: only text has a width in columns")
    if path is None:
        return lambda events: print(draw_text(events, width=given.width))
    if suffix in (".png", ".svg", ".pdf"):
        title = given.schedule or Path(given.schedule_file or given.events).name
        return lambda events: draw_timeline(events, path, title=title)
    if suffix == ".json":
        return lambda events: write_trace(events, path)
    if suffix == ".txt":
        return lambda events: _write_text(draw_text(events, width=given.width), path)
    raise ValueError(
        f"-o: {path}, suffix: {suffix!r}: it must be one of .png, .svg, .pdf, .json, .txt"
    )


def _write_text(text: str, path: Path) -> None:
    path.write_text(f"{text}\n", encoding="utf-8")


def _events(given: argparse.Namespace) -> list[Event]:
    if given.events is not None:
        for name in ("stages", "microbatches", "stages_per_rank", "batches", "forward", "backward"):
            value = getattr(given, name)
            if value is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: {value}, --events: {given.events}: a recorded "
                    "run is drawn as it is"
                )
        return read_events(given.events)
    return simulate(
        given.schedule if given.schedule_file is None else Path(given.schedule_file),
        num_stages=given.stages,
        num_microbatches=given.microbatches,
        stages_per_rank=1 if given.stages_per_rank is None else given.stages_per_rank,
        forward=1.0 if given.forward is None else given.forward,
        backward=2.0 if given.backward is None else given.backward,
        num_batches=_NUM_BATCHES if given.batches is None else given.batches,
    ).events


def _list_schedules(given: argparse.Namespace) -> None:
    names = schedule_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {'; '.join(_rules(name))}")


def _rules(name: str) -> list[str]:
    """What the generator demands of small numbers of microbatches, one and two stages a rank."""
    rules: list[str] = []
    for stages_per_rank in (1, 2):
        for num_microbatches in range(1, 2 * _EXAMPLE_STAGES):
            try:
                make_schedule(name, _EXAMPLE_STAGES, num_microbatches, stages_per_rank)
            except ValueError as error:
                values, rule = str(error).rsplit(": ", 1)
                if values.startswith("stages_per_rank"):
                    return [*(rules or ["any num_microbatches"]), "stages_per_rank 1"]
                rule = rule.removeprefix(f"{name} ")
                if rule.rpartition(">= ")[2].isdigit():  # a rule without a short formula
                    rule += f" for {_EXAMPLE_STAGES} stages, {stages_per_rank} on a rank"
                if rule not in rules:
                    rules.append(rule)
    return [*(rules or ["any num_microbatches"]), "any stages_per_rank"]


if __name__ == "__main__":
    sys.exit(main())
