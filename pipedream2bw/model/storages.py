"""The memory behind tensors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number for the storage of a tensor, also of a fake one, unique while it lives."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of the storage that is the tensor's, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor of a storage of its own, which begins where it does.

    Tools that save files take tensors of one storage for tied ones, and leave all but one out.
    """
    return dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]


def return_freed_memory() -> None:
    """Has the C library return freed memory to the system; only glibc can.

    glibc keeps freed blocks of up to 32 MiB for itself. When the pipeline has taken over a model of
    many smaller parameters, that would be the model's whole size once more.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class ParameterElsewhere(nn.Parameter):
    """A parameter that another process has: here it has a shape, and no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        is_property = name in ("__get__", "__set__") and func.__self__ is not nn.Parameter.data
        if not is_property and name not in _TELL_NO_VALUES.split():
            raise RuntimeError(
                f"{name}: a parameter of a stage in another process, whose values are not here. "
                "Read pipe.parameters() or pipe.state_dict() for this process's, and "
                "pipe.full_state_dict() for all"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_TELL_NO_VALUES = """
    __hash__ __eq__ __len__ size dim ndimension numel nelement stride storage_offset element_size
    data_ptr untyped_storage is_floating_point is_complex is_contiguous requires_grad_ get_device
    register_hook register_post_accumulate_grad_hook
"""


class OtherStages:
    """The parameters of stages that other processes run: their memory, if any, is given back.

    Shapes stay, as the model may be captured again in its other mode.
    """

    def __init__(self, root: nn.Module, kept: Sequence[torch.Tensor]) -> None:
        kept_storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._released: list[tuple[nn.Parameter, torch.UntypedStorage, int]] = []
        for parameter in root.parameters():
            if parameter.is_meta:
                continue
            storage = parameter.untyped_storage()
            alone = storage.nbytes() == parameter.numel() * parameter.element_size()
            if alone and storage.nbytes() and storage.data_ptr() not in kept_storages:
                self._released.append((parameter, storage, storage.nbytes()))
        self._resize(whole=False)
        self._refuse_reads(refuses=True)

    def _resize(self, *, whole: bool) -> None:
        for _, storage, nbytes in self._released:
            storage.resize_(nbytes if whole else 0)

    def _refuse_reads(self, *, refuses: bool) -> None:
        for parameter, _, _ in self._released:
            if type(parameter) in (nn.Parameter, ParameterElsewhere):
                parameter.__class__ = ParameterElsewhere if refuses else nn.Parameter

    @contextlib.contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Lets code of torch pass them on that reads no values."""
        self._refuse_reads(refuses=False)
        try:
            yield
        finally:
            self._refuse_reads(refuses=True)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the parameters memory, of no defined content, for the time of a capture."""
        with self.as_parameters():
            self._resize(whole=True)
            try:
                yield
            finally:
                self._resize(whole=False)
