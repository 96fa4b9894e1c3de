"""What shares memory with a parameter, which every weight version has elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm


def check_aliases(root: nn.Module) -> None:
    """Refuses two Parameters over the same memory, which the stages' copies would take apart.

    Raises:
        ValueError: names both and tells which is frozen.
    """
    placed = sorted(
        (parameter.data_ptr(), number, name, parameter)
        for number, (name, parameter) in enumerate(root.named_parameters())
        if _is_dense(parameter.data) and parameter.data_ptr()
    )
    for (begin, _, one, first), (other_begin, _, other, second) in itertools.pairwise(placed):
        if other_begin < begin + first.nbytes:
            raise ValueError(
                f"parameters {one} and {other} are two Parameters over the same memory, with "
                f"requires_grad {first.requires_grad} and {second.requires_grad}: a tied weight "
                "must be one Parameter, trained or frozen wherever it is used: assign the "
                "Parameter itself (head.weight = embedding.weight)"
            )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory, in whatever order, is its elements and no others."""
    if type(tensor) is not torch.Tensor or not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def check_views(root: nn.Module) -> None:
    """Refuses tensors over a parameter's memory: they would keep what the parameter was at first.

    Looks at buffers and at the modules' plain attributes, also in lists, tuples and dictionaries.

    Raises:
        ValueError: names the tensor and the parameter.
    """
    parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}  # by storage
    for name, parameter in root.named_parameters():
        if _has_storage(parameter.data):
            parameters.setdefault(_storage(parameter), []).append((name, parameter))
    for where, tensor in _other_tensors(root):
        for name, parameter in parameters.get(_storage(tensor), ()):
            first, second = _extent(tensor), _extent(parameter)
            if first[0] < second[1] and second[0] < first[1]:
                raise ValueError(
                    f"{where} is a view of the memory of parameter {name}: it must be made in the "
                    "forward, from the parameter: the pipeline has several versions of its "
                    "weights, none of them there"
                )


def _other_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for owner, module in root.named_modules():
        prefix = f"{owner}." if owner else ""
        for name, buffer in module._buffers.items():
            if _has_storage(buffer):
                yield f"buffer {prefix}{name}", buffer
        # The old spectral_norm keeps the weight there until its hook has made another one.
        made_anew = {
            hook.name for hook in module._forward_pre_hooks.values() if type(hook) is SpectralNorm
        }
        for name, value in vars(module).items():
            if name not in _OF_MODULES and name not in made_anew:
                for tensor in _tensors_in(value, depth=2):
                    yield f"attribute {prefix}{name}", tensor


# What nn.Module itself keeps: parameters, buffers, modules and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        if _has_storage(value):
            yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)


def _has_storage(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that is the tensor's, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
