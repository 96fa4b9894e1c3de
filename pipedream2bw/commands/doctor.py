"""``pipedream2bw doctor``: what this machine has, and what of the package works here."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from typing import Any

import torch
import torch.distributed as dist

from .. import _build_info
from ..units import format_bytes
from .output import Report

SHARED_MEMORY = "/dev/shm"
LITTLE_SHARED_MEMORY = 256 * 2**20
EXTRAS = {
    "matplotlib": "pictures: draw_timeline, draw -o, plan --picture",
    "tqdm": "progress bars",
    "safetensors": "reading safetensors files by their own library",
    "s3fs": "checkpoints in object stores (s3://)",
    "transformers": "models and the Trainer of transformers",
}
"""Packages that something optional needs, and what."""


def add_doctor_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="versions, build, devices, backends and memory, and what will not work here",
        description="Reports what this machine has. The exit code is 1 if something that training "
        "needs is missing or too small.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


class Machine(Report):
    """What this machine has."""

    def __str__(self) -> str:
        memory = self["shared_memory"]
        rows = {
            "pipedream2bw": f"{self['pipedream2bw']}, built for {self['built_for']}",
            "torch": self["torch"],
            "python": f"{self['python']} ({sys.executable})",
            "system": f"{self['system']}, {self['cores']} cores",
            "devices": _named(self["devices"]),
            "backends": ", ".join(self["backends"]) or "none",
            "shared memory": "none"
            if memory is None
            else f"{format_bytes(memory['free'])} of {format_bytes(memory['total'])} free",
            "compiler": self["compiler"] or "none",
            **{name: version or "none" for name, version in self["packages"].items()},
        }
        lines = [f"problem: {problem}" for problem in self["problems"]] or ["training works here"]
        lines += [f"{what:14} {here}" for what, here in rows.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self["notes"])])


def examine() -> Machine:
    """What this machine has."""
    built = f"torch {_build_info.TORCH_VERSION}, "
    built += f"CUDA {_build_info.TORCH_CUDA}" if _build_info.WITH_CUDA else "without CUDA"
    found: dict[str, Any] = {
        "pipedream2bw": _version("pipedream2bw") or "not installed, run from its source",
        "built_for": built,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": _devices(),
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi")
            if dist.is_available() and dist.is_backend_available(name)
        ],
        "shared_memory": _shared_memory(),
        "compiler": shutil.which(os.environ.get("CXX", "c++")),
        "packages": {name: _version(name) for name in EXTRAS},
    }
    found["problems"], found["notes"] = _problems(found), _notes(found)
    return Machine(found)


def _run(given: argparse.Namespace) -> int:
    found = examine()
    found.show(as_json=given.json)
    return 1 if found["problems"] else 0


def _devices() -> list[dict[str, Any]]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    if accelerator.type != "cuda":
        count = torch.accelerator.device_count()
        return [{"device": f"{accelerator.type}:{number}"} for number in range(count)]
    devices = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices.append(
            {
                "device": f"cuda:{number}",
                "name": properties.name,
                "memory": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return devices


def _shared_memory() -> dict[str, int] | None:
    """Bytes of the file system through which processes of a machine exchange messages."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    size = os.statvfs(SHARED_MEMORY)
    return {"total": size.f_frsize * size.f_blocks, "free": size.f_frsize * size.f_bavail}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _problems(found: dict[str, Any]) -> list[str]:
    """What training needs and does not find."""
    problems = []
    if not found["backends"]:
        problems.append("torch has no backend for processes (gloo): one process only")
    memory = found["shared_memory"]
    if memory is None:
        problems.append(f"{SHARED_MEMORY} does not exist: processes exchange messages over gloo")
    elif memory["free"] < LITTLE_SHARED_MEMORY:
        problems.append(
            f"{SHARED_MEMORY} has {format_bytes(memory['free'])} left, under "
            f"{format_bytes(LITTLE_SHARED_MEMORY)}: in a container raise --shm-size"
        )
    if found["devices"] and not _build_info.WITH_CUDA:
        problems.append(
            "the package was built without CUDA: on these devices it does not train. Build it "
            "with nvcc on PATH and PIPEDREAM2BW_CUDA=1"
        )
    return problems


def _notes(found: dict[str, Any]) -> list[str]:
    """What does not work, and needs not."""
    notes = [
        f"{name} is not installed; it is needed for {purpose}"
        for name, purpose in EXTRAS.items()
        if found["packages"][name] is None
    ]
    if not found["devices"]:
        notes.append("no accelerator: stages run on the CPU")
    elif "nccl" not in found["backends"]:
        notes.append("torch has no NCCL: processes exchange messages through the host")
    if found["compiler"] is None:
        notes.append("no C++ compiler: the package cannot be built again here")
    return notes


def _named(devices: list[dict[str, Any]]) -> str:
    if not devices:
        return "none"
    return ", ".join(
        f"{device['device']} {device['name']} {format_bytes(device['memory'])}"
        if "name" in device
        else device["device"]
        for device in devices
    )
