"""Which devices processes have, and that they go together: found before anything is sent."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..accelerator import module_of
from .agreement import ControlPlane
from .device_groups import backends_of


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
        local_rank: the launcher's number of the process on its machine, None if it gave none.
    """

    device: str
    num_visible: int
    host: str = ""
    visible: str = ""
    uuid: str = ""
    backend: str | None = None
    local_rank: str | None = None

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for two processes with one device."""
        return (self.uuid,) if self.uuid else (self.host, self.visible, self.device)


def facts_of(device: torch.device) -> DeviceFacts:
    """What this process knows of ``device``, which is none of the host."""
    module = module_of(device.type)
    num_visible = module.device_count()
    known = _has_index(device) and device.index < num_visible
    properties = getattr(module, "get_device_properties", None)
    uuid = getattr(properties(device), "uuid", "") if known and properties else ""
    return DeviceFacts(
        device=str(device),
        num_visible=num_visible,
        host=platform.node(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        uuid=str(uuid),
        backend=backends_of().get(device.type) if dist.is_initialized() else None,
        local_rank=os.environ.get("LOCAL_RANK"),
    )


def _has_index(device: torch.device) -> bool:
    return ":" in str(device)  # torch's types say that every device has one


def check_device(facts: DeviceFacts, num_processes: int) -> None:
    """Raises ValueError if the device is not there, or if it is not known which one is meant."""
    device = torch.device(facts.device)
    if not _has_index(device) and num_processes > 1 and facts.num_visible > 1:
        if facts.local_rank is None:
            raise ValueError(
                f"device: {facts.device}, devices that this process sees: {facts.num_visible}: "
                "without LOCAL_RANK each process has to name its own, as "
                f"torch.device('{device.type}', number)"
            )
        return
    if (device.index if _has_index(device) else 0) >= facts.num_visible:
        raise ValueError(
            f"device: {facts.device}, devices of that type that this process sees: "
            f"{facts.num_visible}: there is none of that number"
        )


def check_sums(facts: DeviceFacts, what: str) -> None:
    """Raises ValueError if processes cannot add up tensors of their devices.

    Args:
        what: what they have in common, with its value.
    """
    if facts.backend in (None, "gloo"):
        raise ValueError(
            f"device: {facts.device}, backend of the process group for it: {facts.backend}, "
            f"{what}: gradients of several processes are added up on their devices, which needs "
            "another backend, such as nccl; messages between stages alone do not"
        )


def why_not_apart(everyone: Sequence[DeviceFacts]) -> str | None:
    """Says which ranks have one device that NCCL is to serve; None if there are none."""
    owners: dict[tuple[str, ...], int] = {}
    for rank, facts in enumerate(everyone):
        first = owners.setdefault(facts.identity, rank)
        if first != rank and "nccl" in (facts.backend, everyone[first].backend):
            return (
                f"rank {first}: {everyone[first].device} of {everyone[first].host}, rank {rank}: "
                f"{facts.device} of {facts.host}: this is one device, and NCCL needs one for each "
                "process; init_process_group('gloo') lets them share it"
            )
    return None


def check_apart(everyone: Sequence[DeviceFacts]) -> None:
    """Raises ValueError if two ranks have one device and a backend that cannot serve both."""
    why_not = why_not_apart(everyone)
    if why_not is not None:
        raise ValueError(why_not)


def agree_on_devices(
    control: ControlPlane, devices: Sequence[torch.device], *, summed: str | None
) -> str | None:
    """Checks the devices of this process's stages. Every rank calls it, and all raise.

    Args:
        summed: what makes several processes add up tensors of their devices; None: nothing does.

    Returns:
        Why no process group can join ranks' devices, None if one can; the same on all ranks. It is
        an error only where such a group is needed: messages between two ranks of one device go
        through its memory.

    Raises:
        ValueError: naming the rule and both values.
    """
    on_devices = [device for device in dict.fromkeys(devices) if device.type != "cpu"]

    def own() -> list[DeviceFacts]:
        found = [facts_of(device) for device in on_devices]
        for facts in found:
            check_device(facts, control.size)
            if summed is not None and control.size > 1:
                check_sums(facts, summed)
        return found

    found = control.together(own)
    if control.size > 1 and on_devices:
        everyone = [facts for facts, *_ in control.gather(found)]
        check = check_apart if summed is not None else why_not_apart
        return control.from_first(lambda: check(everyone))
    return None
