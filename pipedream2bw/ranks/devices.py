"""Which devices processes have, and that they go together: found before anything is sent."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..accelerator import has_index, module_of
from .agreement import ControlPlane
from .groups import backends_of

_NCCL_THAT_SHARES = (2, 30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a process knows of its device.

    Attributes:
        device: as the user gave it, perhaps without an index.
        num_visible: devices of this type that the process sees.
        host: the machine's name.
        visible: the environment's list of devices that the process may see, "" if there is none.
        uuid: the device's own name in the world, "" if it is not known.
        backend: of the process group for this type of device; None in one process, or without one.
        can_be_shared: the process's NCCL was asked to let several ranks have one device, and can.
        local_rank: the launcher's number of the process on its machine, None if it gave none.
    """

    device: str
    num_visible: int
    host: str = ""
    visible: str = ""
    uuid: str = ""
    backend: str | None = None
    can_be_shared: bool = False
    local_rank: str | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for two processes with one device."""
        return (self.uuid,) if self.uuid else (self.host, self.visible, self.device)


def facts_of(device: torch.device) -> DeviceFacts:
    """What this process knows of ``device``, which is none of the host."""
    module = module_of(device.type)
    num_visible = module.device_count()
    known = has_index(device) and device.index < num_visible
    properties = getattr(module, "get_device_properties", None)
    uuid = getattr(properties(device), "uuid", "") if known and properties else ""
    return DeviceFacts(
        device=str(device),
        num_visible=num_visible,
        host=platform.node(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        uuid=str(uuid),
        backend=backends_of().get(device.type) if dist.is_initialized() else None,
        can_be_shared=device.type == "cuda" and nccl_shares_devices(),
        local_rank=os.environ.get("LOCAL_RANK"),
    )


def nccl_shares_devices() -> bool:
    """Whether NCCL lets several ranks have one device: from 2.30 on, if its variable says so."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" or not dist.is_nccl_available():
        return False
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version[:2] >= _NCCL_THAT_SHARES


def check_device(facts: DeviceFacts) -> None:
    """Raises ValueError if the device is not there."""
    device = torch.device(facts.device)
    if (device.index if has_index(device) else 0) >= facts.num_visible:
        raise ValueError(
            f"device: {facts.device}, devices of that type that this process sees: "
            f"{facts.num_visible}: there is none of that number. Give a device that is there"
        )


def check_sums(facts: DeviceFacts, what: str) -> None:
    """Raises ValueError if processes cannot add up tensors of their devices.

    Args:
        what: what they have in common, with its value.
    """
    if facts.backend in (None, "gloo"):
        raise ValueError(
            f"device: {facts.device}, backend of the process group for it: {facts.backend}, "
            f"{what}: gradients of several processes are added up on their devices. Give the group "
            "another backend, such as nccl; messages between stages alone need none"
        )


def check_apart(everyone: Sequence[DeviceFacts]) -> None:
    """Raises ValueError if two ranks have one device by mistake, or with a backend that cannot."""
    owners: dict[tuple[str, ...], int] = {}
    for rank, facts in enumerate(everyone):
        first = owners.setdefault(facts.identity, rank)
        if first == rank:
            continue
        both = (
            f"rank {first}: {everyone[first].device} of {everyone[first].host}, rank {rank}: "
            f"{facts.device} of {facts.host}: this is one device"
        )
        if facts.local_rank is None and facts.num_visible > 1:
            raise ValueError(
                f"{both} of the {facts.num_visible} that the process sees: without LOCAL_RANK each "
                "process has to choose its own, by torch.accelerator.set_device_index(number)"
            )
        share = facts.can_be_shared and everyone[first].can_be_shared
        if "nccl" in (facts.backend, everyone[first].backend) and not share:
            raise ValueError(
                f"{both}, and NCCL needs one for each process; init_process_group('gloo') lets "
                "them share it"
            )


def agree_on_devices(
    control: ControlPlane, devices: Sequence[torch.device], *, summed: str | None
) -> None:
    """Checks the devices of this process's stages. Every rank calls it, and all raise.

    Args:
        summed: what makes several processes add up tensors of their devices; None: nothing does.

    Raises:
        ValueError: naming the rule and both values.
    """
    on_devices = [device for device in dict.fromkeys(devices) if device.type != "cpu"]

    def own() -> list[DeviceFacts]:
        found = [facts_of(device) for device in on_devices]
        for facts in found:
            check_device(facts)
            if summed is not None and control.size > 1:
                check_sums(facts, summed)
        return found

    found = control.together(own)
    if control.size > 1 and on_devices:
        everyone = [facts for facts, *_ in control.gather(found)]
        control.from_first(lambda: check_apart(everyone))
