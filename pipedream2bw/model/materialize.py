"""Models with parameters on meta: captured without values, made where their stage is."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .clone import structural_clone
from .deferred import Recipe, attributes_of
from .replacing import replace_tensors

Example = tuple[Sequence[Any], Mapping[str, Any]]


def is_on_meta(root: nn.Module) -> bool:
    """Whether a parameter or buffer has no memory."""
    return any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def home_of(root: nn.Module, example: Example) -> torch.device:
    """Where the model is; one on meta is to be where its arguments are.

    Raises:
        ValueError: an argument of a model on meta is on meta, too.
    """
    if is_on_meta(root):
        tensors = [item for item in pytree.tree_leaves(example) if isinstance(item, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                "example_args: a tensor on meta, the model is on meta: its arguments must be on "
                "the device that it is to be on"
            )
    else:
        tensors = list(root.parameters())
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def for_capture(root: nn.Module, example: Example) -> Iterator[tuple[nn.Module, Example]]:
    """The model and example to capture: those themselves, or where there is meta, stand-ins.

    Stand-ins are on the CPU, in memory which is not touched and so takes none up: a capture reads
    no parameter.
    """
    if not is_on_meta(root):
        yield root, example
        return
    tensors = {
        tensor: torch.empty_like(tensor, device="cpu")
        for tensor in (*root.parameters(), *root.buffers())
        if tensor.device.type != "cpu"
    }
    parameters = {
        old: nn.Parameter(new, old.requires_grad)
        for old, new in tensors.items()
        if isinstance(old, nn.Parameter)
    }
    clone = structural_clone(root, parameters)
    for module in clone.modules():
        module._buffers = {
            name: buffer if buffer is None else tensors.get(buffer, buffer)
            for name, buffer in module._buffers.items()
        }
    try:
        yield clone, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, example)
    finally:
        for tensor in tensors.values():
            tensor.untyped_storage().resize_(0)


def materialize(root: nn.Module, names: Collection[str]) -> set[str]:
    """Gives the named parameters and buffers memory on the CPU, and values where these are known.

    Returns the names of those that have no values and are to be loaded. Where :func:`deferred_init`
    made the model, all have values.

    Raises:
        ValueError: a parameter was changed since.
    """
    named = dict(root.named_parameters()) | dict(root.named_buffers())
    hollow = {name: named[name] for name in names if named[name].is_meta}
    without_values = set()
    made: dict[int, torch.Tensor] = {}
    by_tape: dict[int, list[tuple[torch.Tensor, Recipe]]] = {}
    for name, tensor in hollow.items():
        recipe = Recipe.of(tensor)
        if recipe is None:
            made[id(tensor)] = torch.empty_like(tensor, device="cpu")
            without_values.add(name)
        else:
            recipe.check(name, tensor)
            by_tape.setdefault(id(recipe.tape), []).append((tensor, recipe))
    for members in by_tape.values():
        values = members[0][1].tape.make([recipe.geometry for _, recipe in members])
        for (tensor, _), value in zip(members, values, strict=True):
            made[id(tensor)] = value.to(tensor.dtype)

    def new_of(tensor: torch.Tensor) -> torch.Tensor:
        value = made.get(id(tensor))
        if value is None or not isinstance(tensor, nn.Parameter):
            return tensor if value is None else value
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
            vars(value).update(attributes_of(tensor))
            made[id(tensor)] = value
        return value

    replace_tensors(root.modules(), new_of)
    for parameter in root.parameters():
        Recipe.forget(parameter)  # those of other processes' stages are not needed any more
    return without_values
