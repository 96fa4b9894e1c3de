"""``pipedream2bw plan`` and ``show``: how a model is best trained on given devices."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._C import planned_schedules
from ...commands.output import check_written
from ...pictures.canvas import Matplotlib
from ..pictures import draw_plan
from ..planning.cluster import Cluster, DeviceType
from ..planning.plan import Plan
from ..planning.planner import check_arguments, plan
from ..planning.throughputs import Throughputs, rows_of, throughputs
from ..profiling import profiler
from ..profiling.peaks import KNOWN_DEVICES
from ..profiling.profile import Profile
from .options import Options
from .profile import MODEL_HELP, PROFILING, build_model

_SEARCH = Options(
    plan,
    {
        "largest-batch": "rows of all replicas, at most; default: --batch",
        "schedules": f"schedules to try, of {', '.join(planned_schedules())}",
        "recompute": "what may be recomputed, of none, stages, blocks",
        "tensor-parallel": "numbers of devices to try that share a stage, like 1,2,4",
        "sharded": "with these: layers whose outputs stay in parts, like '*.up'",
        "summed": "with these: layers whose outputs they add up, like '*.down'",
        "width": "number of replicas; default: the best",
        "num-stages": "number of stages; default: the best",
        "max-late-share": "of all forwards under 2bw_fresh, those that may be late, if they fit",
        "optimizer": "sgd, momentum or adamw",
        "optimizer-device": "cpu: the optimizer's state is in the host's memory",
        "precision": "bf16 or fp16, if the pipeline will have it; needs a profile in that dtype",
        "gradient-dtype": "bfloat16, with --precision bf16: gradients of 2 bytes in place of 4",
        "shard-state": "replicas share out masters and optimizer state",
        "staleness": "ErrorFeedback or NesterovCorrection: counts the steps that it keeps",
        "objective": "throughput, memory, or cost, which needs --price",
        "slack": "with --objective memory: the share of the least time that a plan may add to it",
        "calibration": "a margin of memory that calibrate() learned from a run",
    },
)

_TOPOLOGIES = {
    "servers": ("DEVICES", "inside", "outside"),
    "mesh": ("ROWSxCOLUMNS", "row", "column"),
}
"""The sizes and the links that each topology has."""


def add_plan_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest way to train a model on given devices",
        description="Finds width, depth, microbatch, split, recomputation and schedule for a model "
        "on given devices; prints what that will take and why nothing else is faster.",
    )
    parser.set_defaults(run=_plan)
    what = parser.add_argument_group("what is planned")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="MODULE:FUNCTION", help=f"{MODEL_HELP}; it is profiled")
    source.add_argument("--profile", metavar="PATH", help="a saved profile")
    devices = what.add_mutually_exclusive_group(required=True)
    devices.add_argument("--devices", type=int, metavar="N", help="number of devices")
    devices.add_argument(
        "--type",
        action="append",
        metavar="SPEC",
        help='devices of one type, "v100:8,throughput=0.4,memory=16GiB,price=2.5": their '
        "throughput over that of the profiled device, which may leave it out; may be repeated",
    )
    what.add_argument(
        "--memory",
        metavar="SIZE",
        help='memory of a device, like "16GiB", unless each --type has its own',
    )
    what.add_argument(
        "--batch", type=int, required=True, metavar="ROWS", help="rows of all replicas, at least"
    )
    what.add_argument("--price", type=float, metavar="PRICE", help="price of a device for an hour")
    what.add_argument(
        "--topology",
        metavar="SPEC",
        help='links: "servers:8,inside=130GB/s,outside=12GB/s" (devices of a server) or '
        '"mesh:4x8,row=50GB/s,column=25GB/s"; each may have a latency, "inside_latency=5us"; '
        "default: the profile's links",
    )
    _SEARCH.add_to(what)
    PROFILING.add_to(parser.add_argument_group("how --model is profiled"))
    output = parser.add_argument_group("what is written")
    output.add_argument("-o", "--output", type=Path, metavar="OUT", help="the plan, JSON")
    output.add_argument(
        "--table",
        action="store_true",
        help="in place of a plan: rows a second of the best plan on 1, 2, 4, ... devices of each "
        "--type, for a scheduler",
    )
    _add_picture(output)


def add_show_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "show",
        help="print, and draw, a saved plan",
        description="Prints a saved plan as `pipedream2bw plan` printed it.",
    )
    parser.set_defaults(run=_show)
    parser.add_argument("plan", metavar="PATH", help="a plan that `pipedream2bw plan -o` wrote")
    _add_picture(parser)


def _add_picture(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--json", action="store_true", help="print the plan's JSON, no tables")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="OUT",
        help="a picture of the plan, .png, .svg or .pdf (needs matplotlib)",
    )


def _plan(given: argparse.Namespace) -> None:
    _check_picture(given.picture)
    check_written("-o", given.output)
    if given.type is not None and given.price is not None:
        raise ValueError(f"--price: {given.price}, --type: {given.type[0]}: it says price= itself")
    if given.table and (given.type is None or given.picture is not None):
        raise ValueError(
            f"--table: True, --type: {given.type}, --picture: {given.picture}: a table is of "
            "types, and has no picture"
        )
    devices: int | list[DeviceType] = given.devices
    if given.price is not None:
        devices = [DeviceType("device", given.devices, price_per_hour=given.price)]
    if given.type is not None:
        devices = [parse_type(text) for text in given.type]

    def cluster_of(devices: int | list[DeviceType]) -> Any:
        return parse_topology(given.topology, devices) if given.topology else devices

    own = [each.memory for each in devices] if isinstance(devices, list) else [None]
    if given.memory is None and None in own:
        raise ValueError(f"--memory: None, --type: {given.type}: give it, or each its memory=")
    search = {"memory": given.memory or own[0], "batch": given.batch, **_SEARCH.given(given)}
    if given.table and (given.topology or "").startswith("mesh"):
        raise ValueError(
            f"--table: True, --topology: {given.topology}: a mesh has one number of devices, a "
            "table has 1, 2, 4, ... of them. Give servers:, or leave out --topology"
        )
    if given.table and isinstance(devices, list):
        for each, tried in rows_of(devices, search.get("tensor_parallel", 1)):
            if tried:
                check_arguments(devices=cluster_of([each]), **{**search, "tensor_parallel": tried})
    else:
        check_arguments(devices=cluster_of(devices), **search)
    profile = _profile(given)
    for text in given.type or ():
        _check_known(text, profile)
    made: Plan | Throughputs
    if given.table and isinstance(devices, list):
        made = throughputs(profile, devices, cluster_of=cluster_of, **search)
    else:
        made = plan(profile, devices=cluster_of(devices), **search)
    if given.output is not None:
        made.save(given.output)
    _print(made, given)


def _show(given: argparse.Namespace) -> None:
    _check_picture(given.picture)
    _print(Plan.load(given.plan), given)


def _check_picture(path: Path | None) -> None:
    """Raises an error if the picture cannot be drawn: planning before that may take minutes."""
    if path is None:
        return
    check_written("--picture", path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"--picture: {path}, suffix: {path.suffix!r}: it must be .png, .svg or .pdf"
        )
    Matplotlib.load("a plan")


def _print(made: Plan | Throughputs, given: argparse.Namespace) -> None:
    if given.picture is not None and isinstance(made, Plan):
        draw_plan(made, given.picture)
    print(made.to_json() if given.json else f"{made}\n", end="")


def _profile(given: argparse.Namespace) -> Profile:
    if given.profile is None:
        profiler.check_arguments(**PROFILING.given(given))
        built = build_model(given.model)
        with contextlib.redirect_stdout(sys.stderr):  # a forward may print
            return profiler.profile(**built, **PROFILING.given(given))
    PROFILING.refuse(given, f"--profile: {given.profile}: a profile is measured already")
    return Profile.load(given.profile)


def parse_type(text: str) -> DeviceType:
    """The devices that ``--type`` describes: "v100:8,throughput=0.4,memory=16GiB,price=2.5".

    Raises:
        ValueError: the part that is wrong, with what is allowed.
    """
    head, *parts = text.split(",")
    name, _, count = head.partition(":")
    if not name or not count.isdecimal():
        raise ValueError(f"--type: {head!r}, it must be NAME:COUNT")
    options: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in ("throughput", "memory", "price"):
            raise ValueError(f"--type: {key!r}, known: throughput, memory, price")
        try:
            number = value if key == "memory" else float(value)
        except ValueError:
            raise ValueError(f"--type: {part!r}, it must be a number") from None
        options["price_per_hour" if key == "price" else key] = number
    return DeviceType(name, int(count), **options)


def _check_known(text: str, profile: Profile) -> None:
    """Raises ValueError if a type has neither a throughput nor the profiled device's name."""
    name = text.partition(":")[0]
    figures = KNOWN_DEVICES.get(name)
    names = (name, figures.name if figures is not None else name)
    if ",throughput=" not in text and profile.device.name not in names:
        raise ValueError(
            f"--type: {text}, the profile's device: {profile.device.name!r}: it has no times of "
            "another type. Give throughput=, over the profiled device's"
        )


def parse_topology(text: str, devices: int | Sequence[DeviceType]) -> Cluster:
    """The cluster that ``--topology`` describes, of a number of devices or of these types.

    Raises:
        ValueError: the part that is wrong, with what is allowed.
    """
    head, *parts = text.split(",")
    kind, _, sizes = head.partition(":")
    if kind not in _TOPOLOGIES:
        raise ValueError(f"--topology: {kind!r}, known: {', '.join(_TOPOLOGIES)}")
    form, *needed = _TOPOLOGIES[kind]
    known = [*needed, *(f"{name}_latency" for name in needed)]
    links: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"--topology: {name!r}, known: {', '.join(known)}")
        links[name] = value
    for name in needed:
        if name not in links:
            raise ValueError(f"--topology: {name} is missing: {kind} have {', '.join(needed)}")
    numbers = sizes.split("x")
    if not all(map(str.isdecimal, numbers)) or len(numbers) != len(form.split("x")):
        raise ValueError(f"--topology: {head!r}, it must be {kind}:{form}")
    if kind == "servers":
        return Cluster.servers(devices, devices_per_server=int(sizes), **links)
    rows, columns = map(int, numbers)
    count = devices if isinstance(devices, int) else sum(each.count for each in devices)
    if rows * columns != count:
        raise ValueError(
            f"--topology: {rows} x {columns} = {rows * columns} devices, --devices: {count}"
        )
    return Cluster.mesh(rows, columns, devices=devices, **links)
