"""Refuses forwards that write to parameters, of which stages have versions that batches share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..model.storages import bytes_of_storage, storage_of
from ..model.trees import tensors_in


class WrittenParameterError(ValueError):
    """A forward writes to a parameter."""


class ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices inside which parameters operators write to, also by ``.data`` and ``.detach()``.

    Args:
        model: a copy, that runs inside, as may further ones with the same parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {name: (p, storage_of(p)) for name, p in model.named_parameters()}
        self._written: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            names = [argument.name for argument in schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for argument in schema.arguments:
                if argument.is_write:
                    for tensor in tensors_in(given.get(argument.name)):
                        self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            written, (begin, end) = storage_of(tensor), bytes_of_storage(tensor)
            for name, (parameter, storage) in self._parameters.items():
                if storage == written:
                    first, last = bytes_of_storage(parameter)
                    if first < end and begin < last:
                        self._written.append(name)

    def check(self, model: nn.Module) -> None:
        """Raises WrittenParameterError if one was written, or ``model`` got other memory for it."""
        now = dict(model.named_parameters())
        assigned = [
            name
            for name, (parameter, storage) in self._parameters.items()
            if now.get(name) is not parameter or storage_of(parameter) != storage
        ]
        for name in (*self._written, *assigned):
            raise WrittenParameterError(
                f"parameter {name}: the model's forward writes to it, which it must not: "
                "microbatches share the weights that it would change. Write to it after each step, "
                "in a hook of the optimizer (register_step_post_hook), or let the forward compute "
                "what it needs of it (torch.nn.utils.parametrize). A value that is not trained can "
                "be a buffer"
            )
