"""The dtypes in which stages compute, and in which parameters are kept and updated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from ..options import Options
from ..rules import DTYPES


class Precision:
    """What ``precision=`` and the options beside it of a pipeline mean for its model.

    Raises:
        ValueError: the device, or a parameter, does not go with the precision.
    """

    def __init__(self, root: nn.Module, options: Options, device_type: str) -> None:
        precision = options.precision
        self.dtype = None if precision is None else DTYPES[precision]
        if precision is not None:
            _check_device(precision, DTYPES[precision], device_type)
        self.split_master, self.gradient_dtype = options.split_master, options.gradient_dtype
        self.autocast = options.autocast
        self._root = root
        self._parameters = {
            name: dtype
            for name, tensor, dtype in self._tensors()
            if isinstance(tensor, nn.Parameter)
        }
        self._before: dict[str, torch.dtype] = {}
        for name, tensor, _ in self._tensors():
            if tensor.requires_grad and tensor.dtype not in DTYPES.values():
                raise ValueError(
                    f"parameter {name}: {tensor.dtype}, precision: {precision!r}: what is trained "
                    "must be float32, bfloat16 or float16, as its master is float32"
                )

    def _tensors(self) -> list[tuple[str, torch.Tensor, torch.dtype]]:
        """Floating-point parameters and buffers, each once: name, tensor and stages' dtype."""
        if self.dtype is None:
            return []
        full = {
            id(tensor)
            for module in self._root.modules()
            if isinstance(module, _NormBase)
            for tensor in (*module._parameters.values(), *module._buffers.values())
        }
        return [
            (name, tensor, torch.float32 if id(tensor) in full else self.dtype)
            for name, tensor in _named(self._root)
            if tensor.is_floating_point()
        ]

    def of_parameter(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """Returns the dtype in which stages compute with a parameter of the model."""
        return self._parameters.get(name, parameter.dtype)

    def of_converted(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """Returns the dtype of a parameter of ``model.to(dtype)``, which converts norms too."""
        if self.dtype is None or not parameter.is_floating_point():
            return parameter.dtype
        return self.dtype

    def of_master(self, parameter: torch.Tensor) -> torch.dtype:
        """Returns the dtype in which a parameter is kept, whatever its handle shows."""
        is_master = self.dtype is not None and parameter.requires_grad
        return torch.float32 if is_master else parameter.dtype

    def cast(self, values: Any) -> Any:
        """Converts the floating-point tensors among ``values`` to the dtype of the precision."""
        if self.dtype is None:
            return values
        return pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, values
        )

    def computing(self, device_type: str) -> contextlib.AbstractContextManager[Any] | None:
        """Returns the autocast for a stage's forward and the loss function, if there is one."""
        if self.autocast is None:
            return None
        # All threads share the cache of cast weights, and any thread that leaves autocast empties
        # it: with the cache, bits would depend on timing.
        return torch.autocast(device_type, dtype=self.autocast, cache_enabled=False)

    @contextlib.contextmanager
    def as_in_stages(self) -> Iterator[dict[int, str]]:
        """Converts the model for a capture to the dtypes of its stages, and back at the end.

        Gives the addresses of the storages that its parameters had before, with their names.
        """
        if self.dtype is None:
            yield {}
            return
        tensors = self._tensors()
        storages = {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor, _ in tensors
            if isinstance(tensor, nn.Parameter)
        }
        before = [
            (tensor, tensor.data, tensor.grad if tensor.is_leaf else None)
            for _, tensor, _ in tensors
        ]
        try:
            for _, tensor, dtype in tensors:
                if tensor.is_leaf:
                    tensor.grad = None  # a fake tensor would get it in the other dtype
                tensor.data = tensor.data.to(dtype)
            yield storages
        finally:
            for tensor, data, gradient in before:
                tensor.data = data
                if tensor.is_leaf:
                    tensor.grad = gradient

    def convert(self) -> None:
        """Converts the model in place: trained parameters to float32, the rest as in the stages."""
        for name, tensor, dtype in self._tensors():
            if not tensor.requires_grad:
                self._before[name] = tensor.dtype
            tensor.data = tensor.data.to(torch.float32 if tensor.requires_grad else dtype)

    def restore(self) -> None:
        """Converts what is not trained back to the dtypes that it had before."""
        for name, tensor in _named(self._root):
            if name in self._before:
                tensor.data = tensor.data.to(self._before[name])


def _named(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()


def _check_device(precision: str, dtype: torch.dtype, device_type: str) -> None:
    """Tries what every model needs; torch does not report which other operators it has."""
    try:
        with torch.enable_grad():
            matrix = torch.ones(2, 2, dtype=dtype, device=device_type, requires_grad=True)
            (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ValueError(
            f"precision: {precision!r}, device: {device_type}: torch cannot multiply matrices of "
            f"{dtype} there: {error}"
        ) from error
