"""What streams wait for beside what they are told to: queues, priorities, kernels' first use."""

from __future__ import annotations

from . import first_use, priorities, queues
from .device import Device
from .section import Rows


def run(device: Device, rows: Rows) -> None:
    for name, ask in (
        ("queues", queues.run),
        ("priorities", priorities.run),
        ("first use", first_use.run),
    ):
        with rows.guarded(name):
            ask(device, rows)
