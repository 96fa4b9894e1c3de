"""``pipedream2bw plan``: how a model is best trained on given devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..device_figures import KNOWN_DEVICES
from ..draw_plan import draw_plan
from ..planner import plan
from ..plans import Plan
from ..profile import Profile
from ..profiler import profile
from .model import build_model
from .plan_report import print_plan
from .profile import known_device, rows_of

_PLANNED = ("model", "profile", "devices", "memory", "batch")  # what --show needs none of
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
        help="to choose among; default: all that the planner knows",
    )
    what.add_argument("--optimizer", default="adamw", help="sgd, momentum or adamw (default)")
    what.add_argument(
        "--objective", default="throughput", help="throughput (default), cost or memory"
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
    for name in _PLANNED:
        value = getattr(given, name)
        if value is not None:
            raise ValueError(f"--{name}: {value}, --show: {given.show}: a saved plan is as it is")
    return Plan.load(given.show)


def _planned(given: argparse.Namespace) -> Plan:
    for name in ("devices", "memory", "batch"):
        if getattr(given, name) is None:
            raise ValueError(f"--{name} is missing: a plan needs --devices, --memory and --batch")
    if (given.model is None) == (given.profile is None):
        raise ValueError(
            f"--model: {given.model}, --profile: {given.profile}: one of them must be given"
        )
    devices = given.devices
    if given.topology is not None:
        devices = parse_topology(given.topology, devices)
    options: dict[str, Any] = {}
    if given.schedules is not None:
        options["schedules"] = tuple(given.schedules.split(","))
    if given.largest_batch is not None:
        options["largest_batch"] = given.largest_batch
    return plan(
        _profile(given),
        devices=devices,
        memory=given.memory,
        batch=given.batch,
        optimizer=given.optimizer,
        objective=given.objective,
        **options,
    )


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


def parse_topology(text: str, devices: int) -> Cluster:
    """A cluster of so many devices from what ``--topology`` takes.

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
    if rows * columns != devices:
        raise ValueError(
            f"--topology: {rows} x {columns} = {rows * columns} devices, --devices: {devices}"
        )
    return Cluster.mesh(rows, columns, **links)
