"""Process groups whose transfers run on a device, where no thread waits for them."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist

from .. import _C

TIMEOUT = datetime.timedelta(days=1)
"""The timeout of a group that carries messages, which never comes: the engine's own rules end
waiting, while the group would count the user's pauses too, and end the process."""

_MOST_BLOCKS = 4
"""How many multiprocessors of a device NCCL takes for a transfer: a few reach the bandwidth of a
link, while by default up to 32 are kept from the stages' work, with 12 MiB each."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"  # ErrorHandlingMode of torch's ProcessGroupNCCL.hpp


def check_built(device_type: str, has_nccl: bool) -> None:
    """Raises ValueError if processes cannot join for want of NCCL."""
    if device_type == "cuda" and not has_nccl:
        raise ValueError(
            "type of the model's device: cuda, backends of this torch: gloo without nccl: several "
            "processes with GPUs need a torch that is built with NCCL, or init_process_group('gloo'"
            ") before, by which messages go over the host's memory"
        )


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The name of a group's backend for each type of device; by default of the default group."""
    parts = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (part.partition(":") for part in parts)}


def backend_for_all() -> str | None:
    """The backends of the default group, and gloo for hosts; None if it has one for hosts itself.

    It has none after ``init_process_group("nccl")``, nor, where there is an accelerator, after
    ``init_process_group()`` or ``init_device_mesh``; but a model may be on the CPU there.
    """
    backends = backends_of()
    if "cpu" in backends:
        return None
    return ",".join(f"{kind}:{backend}" for kind, backend in ({"cpu": "gloo"} | backends).items())


def go_over_hosts(device_types: Collection[str]) -> bool:
    """Whether messages between devices of these types go over the hosts' memory.

    They do where the process group has nothing better than gloo, which knows the host alone.
    """
    first, *others = set(device_types)
    return bool(others) or first == "cpu" or backends_of().get(first, "gloo") == "gloo"


def runs_on_device(group: dist.ProcessGroup) -> bool:
    """Whether any of a group's transfers run on a device, where no thread waits for them."""
    return any(
        device != "cpu" and backend != "gloo" for device, backend in backends_of(group).items()
    )


@contextlib.contextmanager
def errors_left_to_engine() -> Iterator[None]:
    """Groups made inside do not end the process when a transfer fails, unless the user says so.

    The engine tells the cause to all ranks, for which the process has to live.
    """
    is_own = _ERROR_HANDLING not in os.environ
    if is_own:
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY
    try:
        yield
    finally:
        if is_own:
            os.environ.pop(_ERROR_HANDLING, None)


def options_of_messages(backend: str) -> Any:
    """Options of a group that carries messages, for torch; None: that backend's own.

    Messages come before all other work of the device, since another stage waits for them. Other
    groups of the user's and the library's keep their blocks: that is why it is no variable of the
    environment. The user's ``NCCL_MAX_CTAS`` comes first, for all groups.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if "NCCL_MAX_CTAS" not in os.environ:
        options.config.max_ctas = _MOST_BLOCKS
    return options


def end_with_fault(group: dist.ProcessGroup, fault: _C.Fault) -> None:
    """Aborts the group when the pipeline fails, if its transfers run on a device."""
    if runs_on_device(group):
        _C.abort_on_fault(fault, group.group_name)
