"""The machine's accelerator, of whatever type: CUDA, or one that an extension of torch brings."""

from __future__ import annotations

from typing import Any

import torch


def device_types() -> list[str]:
    """Types of device that a model may be on: the CPU's and the accelerator's, if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def has_index(device: torch.device) -> bool:
    """Whether a device has a number; torch's types say that every device has one."""
    return ":" in str(device)


def with_index(device: torch.device) -> torch.device:
    """The accelerator's device with its number: the current one, where none is given.

    Of two stages with one device it must not look like two.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if has_index(device) or accelerator is None or device.type != accelerator.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def module_of(device_type: str) -> Any:
    """The module of torch for a type of device, as ``torch.cuda`` is CUDA's."""
    return torch.get_device_module(device_type)


def module_in_use() -> tuple[str, Any] | None:
    """The accelerator's type and module, if this process has begun to use it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = module_of(accelerator.type)
    return (accelerator.type, module) if module.is_initialized() else None
