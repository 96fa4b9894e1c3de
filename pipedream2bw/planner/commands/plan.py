"""``pipedream2bw plan`` and ``show``: how a model is best trained on given devices."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._C import planned_schedules
from ...commands.output import check_written
from ...pictures.canvas import Matplotlib
from ...table import table
from ...units import format_bytes, format_seconds
from ..pictures import draw_plan
from ..planning.cluster import Cluster, DeviceType
from ..planning.plan import MEMORY_KINDS, Plan, bytes_of_rank, device_list, limit_of_rank
from ..planning.planner import check_arguments, plan
from ..profiling import profiler
from ..profiling.profile import Profile
from .options import Options
from .profile import MODEL_HELP, PROFILING, build_model

_SEARCH = Options(
    plan,
    {
        "largest-batch": "rows of all replicas, at most; default: --batch",
        "schedules": f"schedules to try, of {', '.join(planned_schedules())}",
        "recompute": "what may be recomputed, of none, stages, blocks",
        "width": "number of replicas; default: the best",
        "num-stages": "number of stages; default: the best",
        "optimizer": "sgd, momentum or adamw",
        "optimizer-device": "cpu: the optimizer's state is in the host's memory",
        "precision": "bf16 or fp16, if the pipeline will have it; needs a profile in that dtype",
        "gradient-dtype": "bfloat16, with --precision bf16: gradients of 2 bytes in place of 4",
        "shard-state": "replicas share out masters and optimizer state",
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
    what.add_argument("--devices", type=int, required=True, metavar="N", help="number of devices")
    what.add_argument(
        "--memory", required=True, metavar="SIZE", help='memory of a device, like "16GiB"'
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
    if given.objective == "cost" and given.price is None:
        raise ValueError("--price is missing: --objective cost needs it")
    devices: int | list[DeviceType] = given.devices
    if given.price is not None:
        devices = [DeviceType("device", given.devices, price_per_hour=given.price)]
    arguments: dict[str, Any] = {
        "devices": parse_topology(given.topology, devices) if given.topology else devices,
        "memory": given.memory,
        "batch": given.batch,
        **_SEARCH.given(given),
    }
    check_arguments(**arguments)
    made = plan(_profile(given), **arguments)
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


def _print(made: Plan, given: argparse.Namespace) -> None:
    if given.picture is not None:
        draw_plan(made, given.picture)
    if given.json:
        print(made.to_json(), end="")
    else:
        print_plan(made)


def _profile(given: argparse.Namespace) -> Profile:
    if given.profile is None:
        profiler.check_arguments(**PROFILING.given(given))
        built = build_model(given.model)
        with contextlib.redirect_stdout(sys.stderr):  # a forward may print
            return profiler.profile(**built, **PROFILING.given(given))
    PROFILING.refuse(given, f"--profile: {given.profile}: a profile is measured already")
    return Profile.load(given.profile)


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


# ---------------------------------------------------------------- tables


def print_plan(plan: Plan) -> None:
    """Prints a plan's sizes, times and memory, what limits it, and the next best plans."""
    tables = [_sizes(plan), _times(plan), _memory(plan)]
    if plan.alternatives:
        tables.append(_alternatives(plan))
    print(*tables, sep="\n\n", end="\n\n")
    print(f"bound by: {plan.bound_by}")
    if plan.total_price:
        print(
            f"all batches cost {plan.total_price:.4g}, begun {plan.start_hour:.4g} hours from now"
        )


def _sizes(plan: Plan) -> str:
    row = {
        "schedule": plan.schedule,
        "replicas": str(plan.width),
        "stages": str(plan.num_stages),
        "on a device": str(plan.stages_per_rank),
        "devices": str(plan.num_devices),
        "microbatches": f"{plan.microbatches_in_words} of {plan.microbatch_rows} rows",
        "batch": f"{plan.batch} rows",
        "step": format_seconds(plan.seconds_per_batch),
        "rows/s": f"{plan.rows_per_second:.4g}",
        "bubble": f"{100 * plan.bubble:.1f} %",
    }
    if plan.shard_state:
        row["state"] = f"1/{plan.width} a replica"
    if plan.gradient_dtype is not None:
        row["gradients"] = plan.gradient_dtype
    if plan.price_per_hour:
        row["price/h"] = f"{plan.price_per_hour:.2f}"
    return table("the plan", list(row), [list(row.values())])


def _times(plan: Plan) -> str:
    rows = []
    for index, stage in enumerate(plan.stages):
        again = "-"
        if stage.recompute:
            names = stage.recomputed
            again = format_seconds(stage.recompute)
            again += f" ({len(names)} blocks)" if isinstance(names, tuple) else ""
        rows.append(
            [
                f"{index}",
                f"{stage.layers[0]} to {stage.layers[1] - 1}",
                stage.begins_at or "-",
                device_list(stage.devices),
                format_seconds(stage.forward),
                format_seconds(stage.input_grad + stage.weight_grad),
                again,
                format_seconds(stage.message) if index < plan.num_stages - 1 else "-",
                format_seconds(stage.update),
            ]
        )
    columns = ("stage", "layers", "begins at", "devices", "forward", "backward", "recompute")
    return table(
        "time of a microbatch; of an update per batch", [*columns, "message", "update"], rows
    )


def _memory(plan: Plan) -> str:
    rows = []
    for rank, stages in enumerate(plan.shape.stages_of_ranks):
        sums = list(bytes_of_rank(plan, stages).values())
        limit = limit_of_rank(plan, rank)
        rows.append(
            [
                device_list(plan.stages[rank].devices),
                ", ".join(str(stage % plan.num_stages) for stage in stages),
                *map(format_bytes, sums),
                format_bytes(sum(sums)),
                format_bytes(limit) if limit < math.inf else "-",
                f"{100 * sum(sums) / limit:.0f} %" if 0 < limit < math.inf else "-",
            ]
        )
    columns = ("devices", "stages", *MEMORY_KINDS, "peak", "limit", "used")
    return table("memory of a device, at its peak", columns, rows)


def _alternatives(plan: Plan) -> str:
    rows = [
        [
            each.schedule,
            f"{each.width} x {each.num_stages}",
            f"{each.microbatches_in_words} of {each.microbatch_rows}",
            each.recompute,
            format_seconds(each.seconds_per_batch),
            f"{each.rows_per_second:.4g}",
            format_bytes(each.peak_bytes),
            each.lost_by,
        ]
        for each in plan.alternatives
    ]
    columns = ("schedule", "replicas x stages", "microbatches", "recompute", "step", "rows/s")
    return table("the next best", [*columns, "peak", "why not"], rows)
