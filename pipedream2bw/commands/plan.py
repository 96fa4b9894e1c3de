"""``pipedream2bw plan``: how a model is best trained on given devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._C import planned_schedules
from ..capture.device_figures import KNOWN_DEVICES
from ..pictures.plan import draw_plan
from ..planning.cluster import Cluster, DeviceType
from ..planning.plan import Plan
from ..planning.planner import SCHEDULES, plan
from ..profiling.profile import Profile
from ..profiling.profiler import profile
from .model import build_model
from .plan_report import print_plan
from .profile import known_device, rows_of

_OPTIONS = (
    *("largest_batch", "schedules", "recompute", "width", "num_stages", "optimizer", "precision"),
    *("objective", "slack", "calibration"),
)
"""What :func:`plan` is given by the same names, if at all."""


_MAKING = (
    *("model", "profile", "devices", "memory", "batch", "price", "topology", "rows", "dry"),
    *_OPTIONS,
)
"""What --show needs none of."""


_TOPOLOGIES = {
    "servers": ("inside", "outside", "inside_latency", "outside_latency"),
    "mesh": ("row", "column", "row_latency", "column_latency"),
}


def add_plan_command(commands: Any) -> None:
    """Adds the command to those of a parser."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest way to train a model on given devices",
        description="Finds width, depth, microbatch, split, recomputation and schedule for a model "
        "on given devices; prints what that will take and why nothing else is faster.",
    )
    parser.set_defaults(run=_run)
    what = parser.add_argument_group("what is planned")
    what.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function that returns a dict: model, loss_fn, example_args, target; it is profiled",
    )
    what.add_argument("--profile", metavar="PATH", help="a profile, in place of --model")
    what.add_argument("--devices", type=int, metavar="N", help="how many there are")
    what.add_argument("--memory", metavar="SIZE", help='of each device, like "16GiB"')
    what.add_argument("--batch", type=int, metavar="ROWS", help="of all replicas, at least")
    what.add_argument("--largest-batch", type=int, metavar="ROWS", help="at most; default: --batch")
    what.add_argument(
        "--schedules",
        metavar="NAME,...",
        type=_names,
        help=f"to choose among; default: {','.join(SCHEDULES)}; known besides: "
        f"{', '.join(name for name in planned_schedules() if name not in SCHEDULES)}",
    )
    what.add_argument(
        "--recompute",
        metavar="WAY,...",
        type=_names,
        help="ways to choose among: none, stages, blocks; default: all",
    )
    what.add_argument("--width", type=int, metavar="W", help="replicas; default: the best number")
    what.add_argument("--num-stages", type=int, metavar="D", help="default: the best number")
    what.add_argument("--optimizer", help="sgd, momentum or adamw (default)")
    what.add_argument(
        "--precision", help="bf16 or fp16, if the pipeline has it; of a profile in that dtype"
    )
    what.add_argument(
        "--objective", help="throughput (default), memory, or cost, which needs --price"
    )
    what.add_argument(
        "--slack",
        type=float,
        metavar="SHARE",
        help="of --objective memory: plans may take so much longer than the fastest, default: 0.1",
    )
    what.add_argument("--price", type=float, metavar="PRICE", help="of a device for an hour")
    what.add_argument(
        "--calibration", metavar="PATH", help="what calibrate() learnt from a run, as saved"
    )
    what.add_argument(
        "--topology",
        metavar="SPEC",
        help='links: "servers:8,inside=130GB/s,outside=12GB/s" (devices of a server) or '
        '"mesh:4x8,row=50GB/s,column=25GB/s"; each may have a latency, "inside_latency=5us". '
        "Default: those of the profile",
    )
    how = parser.add_argument_group("how --model is profiled")
    how.add_argument("--rows", metavar="B,...", help="of microbatches, default: 1,2,4")
    how.add_argument(
        "--dry",
        metavar="DEVICE",
        help=f"from a device's figures, without measuring: {', '.join(KNOWN_DEVICES)}",
    )
    output = parser.add_argument_group("what is written")
    output.add_argument("-o", "--output", type=Path, metavar="OUT", help="the plan, JSON")
    output.add_argument("--picture", type=Path, metavar="OUT", help=".png, .svg or .pdf")
    output.add_argument(
        "--show", metavar="PATH", help="prints (and draws) this plan, instead of making one"
    )


def _run(given: argparse.Namespace) -> None:
    picture: Path | None = given.picture
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"--picture: {picture}, suffix: {picture.suffix!r}: it must be .png, .svg or .pdf"
        )
    made = _saved(given) if given.show is not None else _planned(given)
    if given.output is not None:
        made.save(given.output)
    if picture is not None:
        draw_plan(made, picture)
    print_plan(made)


def _saved(given: argparse.Namespace) -> Plan:
    for name in _MAKING:
        if (value := getattr(given, name)) is not None:
            shown = ",".join(value) if isinstance(value, list) else value
            raise ValueError(
                f"--{name.replace('_', '-')}: {shown}, --show: {given.show}: a saved plan is as it "
                "is"
            )
    return Plan.load(given.show)


def _planned(given: argparse.Namespace) -> Plan:
    for name in ("devices", "memory", "batch"):
        if getattr(given, name) is None:
            raise ValueError(f"--{name} is missing: a plan needs --devices, --memory and --batch")
    if (given.model is None) == (given.profile is None):
        raise ValueError(
            f"--model: {given.model}, --profile: {given.profile}: one of them must be given"
        )
    if given.objective == "cost" and given.price is None:
        raise ValueError("--price is missing: --objective cost needs it")
    types: int | list[DeviceType] = given.devices
    if given.price is not None:
        types = [DeviceType("device", given.devices, price_per_hour=given.price)]
    devices: int | list[DeviceType] | Cluster = types
    if given.topology is not None:
        devices = parse_topology(given.topology, types)
    options = {name: getattr(given, name) for name in _OPTIONS if getattr(given, name) is not None}
    return plan(_profile(given), devices=devices, memory=given.memory, batch=given.batch, **options)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _profile(given: argparse.Namespace) -> Profile:
    if given.profile is not None:
        for name in ("rows", "dry"):
            if (value := getattr(given, name)) is not None:
                raise ValueError(
                    f"--{name}: {value}, --profile: {given.profile}: a profile is as it is"
                )
        return Profile.load(given.profile)
    figures = known_device(given.dry)
    rows = rows_of(given.rows or "1,2,4")
    return profile(**build_model(given.model), microbatch_rows=rows, dry=figures)


def parse_topology(text: str, devices: int | Sequence[DeviceType]) -> Cluster:
    """A cluster of so many devices, or of these, from what ``--topology`` takes.

    Raises:
        ValueError: names the part that is wrong, and what is allowed.
    """
    head, *parts = text.split(",")
    kind, _, sizes = head.partition(":")
    if kind not in _TOPOLOGIES:
        raise ValueError(f"--topology: {kind!r}, known: {', '.join(_TOPOLOGIES)}")
    known = _TOPOLOGIES[kind]
    links: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"--topology: {name!r}, known: {', '.join(known)}")
        links[name] = value
    for name in known[:2]:
        if name not in links:
            raise ValueError(f"--topology: {name} is missing: {kind} have {known[0]}, {known[1]}")
    numbers = sizes.split("x")
    if not all(number.isdecimal() for number in numbers) or len(numbers) != (
        2 if kind == "mesh" else 1
    ):
        raise ValueError(
            f"--topology: {head!r}, it must be "
            f"{'mesh:ROWSxCOLUMNS' if kind == 'mesh' else 'servers:DEVICES'}"
        )
    if kind == "servers":
        return Cluster.servers(devices, devices_per_server=int(sizes), **links)
    rows, columns = map(int, numbers)
    count = devices if isinstance(devices, int) else sum(each.count for each in devices)
    if rows * columns != count:
        raise ValueError(
            f"--topology: {rows} x {columns} = {rows * columns} devices, --devices: {count}"
        )
    return Cluster.mesh(rows, columns, devices=devices, **links)
