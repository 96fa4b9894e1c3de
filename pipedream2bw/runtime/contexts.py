"""Modes around a call, of its thread or of the process: stages compute in other threads, later."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..model.precision import Precision

_DOES_NOT_REACH = "stages compute in threads of their own, which it does not reach"


def process_wide() -> tuple[Any, ...]:
    """The settings of torch that all threads share, and that forwards read."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def check_process_wide(before: tuple[Any, ...]) -> None:
    """Raises ValueError if the settings are no longer those with which the pipeline was made."""
    names = "torch.set_default_dtype", "torch.use_deterministic_algorithms"
    for name, old, new in zip(names, before, process_wide(), strict=True):
        if old != new:
            raise ValueError(
                f"{name}: {new}, when the pipeline was made it was {old}: stages read it at any "
                "time. Set it for the whole run, before the pipeline is made"
            )


class Contexts:
    """Refuses calls inside a context that would change them in torch, and not in the stages.

    Args:
        precision: how the stages compute, on devices of these types.
    """

    def __init__(self, precision: Precision, device_types: set[str]) -> None:
        self._dtypes = precision.autocast, precision.dtype
        self._device_types = sorted(device_types)
        self._process_wide = process_wide()
        self._device = torch.get_default_device()

    def check(self, *, training: bool) -> None:
        """Looks at the caller's thread, in a microsecond.

        Raises:
            ValueError: naming the context, and the option that has its place.
        """
        if training and not torch.is_grad_enabled():
            raise ValueError(
                "gradients are turned off: call train_step() outside no_grad() and "
                "inference_mode(), or eval_step() for a loss without a training"
            )
        for kind in self._device_types:
            if not torch.is_autocast_enabled(kind):
                continue
            if (dtype := torch.get_autocast_dtype(kind)) not in self._dtypes:
                _refuse(
                    f"torch.autocast({kind!r}, {dtype})",
                    f"Give PipelineModule autocast={dtype}, which is {self._dtypes[0]} now, and "
                    "leave it out around the call",
                )
        if process_wide() != self._process_wide:
            check_process_wide(self._process_wide)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            _refuse("a transform of torch.func", "Transform a function of the model's own forward")
        if training and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            _refuse("saved_tensors_hooks, or save_on_cpu,", "Give recompute= to save memory")
        if (mode := _get_current_dispatch_mode()) is not None:
            _refuse(mode, "Leave it before the call")
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        for mode in modes:
            if not isinstance(mode, DeviceContext):
                _refuse(mode, "Leave it before the call")
        may_differ = modes or self._device.type != "cpu"  # to ask takes longer than all the rest
        if may_differ and (device := torch.get_default_device()) != self._device:
            _refuse(
                f"the default device {device}",
                f"When the pipeline was made it was {self._device}: call it under the same",
            )


def _refuse(context: object, instead: str) -> None:
    name = context if isinstance(context, str) else type(context).__name__
    raise ValueError(f"{name} around the call: {_DOES_NOT_REACH}. {instead}")
