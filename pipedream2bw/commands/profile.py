"""``pipedream2bw profile``: measures a model's layers and writes what a planner reads."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from ..capture.device_figures import KNOWN_DEVICES, DeviceFigures
from ..profiling.profile import Profile
from ..profiling.profiler import profile
from .model import build_model


def add_profile_command(commands: Any) -> None:
    """Adds the command to those of a parser."""
    parser = commands.add_parser(
        "profile",
        help="measure a model's layers for the planner",
        description="Measures what a model's layers take, and writes it as JSON. Under torchrun "
        "all ranks measure at once, and links between them too; rank 0 writes.",
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a function that returns a dict: model, loss_fn, example_args, target",
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="OUT", help="the profile, JSON"
    )
    parser.add_argument(
        "--rows", default="1,2,4", metavar="B,...", help="of microbatches, default: 1,2,4"
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="threads that measure at once: the stages that this machine will have, default: 1",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for each number of rows, default: 2"
    )
    parser.add_argument(
        "--dry",
        metavar="DEVICE",
        help=f"from a device's figures, without measuring: {', '.join(KNOWN_DEVICES)}",
    )


def _run(given: argparse.Namespace) -> None:
    figures = known_device(given.dry)
    rows = rows_of(given.rows)
    started = time.monotonic()
    found = profile(
        **build_model(given.model),
        microbatch_rows=rows,
        parallel=given.parallel,
        seconds=given.seconds,
        dry=figures,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        found.save(given.output)
        print(_summary(found, time.monotonic() - started))


def known_device(name: str | None) -> DeviceFigures | None:
    """What ``--dry`` names."""
    if name is not None and name not in KNOWN_DEVICES:
        raise ValueError(f"--dry: {name!r}, known: {', '.join(KNOWN_DEVICES)}")
    return None if name is None else KNOWN_DEVICES[name]


def rows_of(text: str) -> list[int]:
    """What ``--rows`` says."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--rows: {text!r}, it must be whole numbers with commas between")
    return [int(part) for part in parts]


def _summary(found: Profile, seconds: float) -> str:
    runs = sum(layer.can_cut_after for layer in found.layers) + 1
    ends = [0, *(i + 1 for i, layer in enumerate(found.layers) if layer.can_cut_after)]
    timed = sum(found.layers[end].repeats is None for end in ends)
    lines = [
        f"{found.model_name} on {found.device.name}, profiled in {seconds:.1f} s: "
        f"{len(found.layers)} layers, {runs} runs of them, {timed} different",
        f"{'rows':>5} {'forward':>10} {'backward':>10} {'kept':>10}",
    ]
    for item in found.microbatches:
        backward = sum(item.input_grad) + sum(item.weight_grad)
        kept = sum(item.activation_bytes) / 2**20
        lines.append(
            f"{item.rows:5} {1e3 * sum(item.forward):7.2f} ms {1e3 * backward:7.2f} ms "
            f"{kept:6.1f} MiB"
        )
    return "\n".join(lines)
