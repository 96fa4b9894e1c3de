"""What streams wait for beside what they are told to: queues, priorities, kernels' first use."""

from __future__ import annotations

from . import first_use, priorities, queues
from .device import Device
from .section import Rows


def run(device: Device, rows: Rows) -> None:
    for name, ask, seconds in (
        ("queues", queues.run, 1.0),
        ("priorities", priorities.run, 3.0),
        ("first use", first_use.run, 5.0),
    ):
        if rows.has_time(name, seconds):
            with rows.guarded(name):
                ask(device, rows)
