"""Models with parameters on meta, which are captured without values and made on their stage."""

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
from .trees import tensors_in

Example = tuple[Sequence[Any], Mapping[str, Any]]


def is_on_meta(root: nn.Module) -> bool:
    """Tells whether a parameter or buffer has no memory."""
    return any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def home_of(root: nn.Module, example: Example) -> torch.device:
    """Returns the model's device; for a model on meta the device of its arguments.

    Raises:
        ValueError: an argument of a model on meta is on meta, too.
    """
    if is_on_meta(root):
        tensors = tensors_in(example)
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                "example_args: a tensor on meta, the model is on meta: its arguments must be on "
                "the device that it is to be trained on"
            )
    else:
        tensors = list(root.parameters())
    return tensors[0].device if tensors else torch.device("cpu")


@contextlib.contextmanager
def for_capture(root: nn.Module, example: Example) -> Iterator[tuple[nn.Module, Example]]:
    """Gives the model and the example to capture, with stand-ins for tensors on meta.

    Stand-ins are on the CPU, in memory that is never touched and so costs none: a capture reads no
    parameter.
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
    buffers = {old: new for old, new in tensors.items() if old not in parameters}
    try:
        yield (
            structural_clone(root, parameters, buffers),
            pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, example),
        )
    finally:
        for tensor in tensors.values():
            tensor.untyped_storage().resize_(0)


@contextlib.contextmanager
def brought_together(root: nn.Module, example: Example) -> Iterator[nn.Module]:
    """Gives the model on the example's device, for a capture while its stages are on several.

    Parameters of other devices have stand-ins without values: a capture reads none.
    """
    leaves = pytree.tree_leaves(example)
    home = next((each.device for each in leaves if isinstance(each, torch.Tensor)), None)
    away = [p for p in root.parameters() if home is not None and p.device != home]
    buffers = {b: b.detach().to(home) for b in root.buffers() if home not in (None, b.device)}
    if not away and not buffers:
        yield root
        return
    parameters = {p: nn.Parameter(torch.empty_like(p, device=home), p.requires_grad) for p in away}
    yield structural_clone(root, parameters, buffers)


def materialize(root: nn.Module, names: Collection[str]) -> set[str]:
    """Gives the named parameters and buffers memory on the CPU, and values where these are known.

    Returns the names of those that have no values and are to be loaded: none where
    :func:`deferred_init` made the model.

    Raises:
        ValueError: a parameter was changed since :func:`deferred_init` returned.
    """
    if not is_on_meta(root):
        return set()
    named = dict(root.named_parameters()) | dict(root.named_buffers())
    without_values = set()
    made: dict[int, torch.Tensor] = {}
    by_tape: dict[int, list[tuple[torch.Tensor, Recipe]]] = {}
    for name in names:
        tensor = named[name]
        recipe = Recipe.of(tensor)
        if not tensor.is_meta:
            continue
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
    for tensor in named.values():
        if isinstance(tensor, nn.Parameter) and id(tensor) in made:
            parameter = nn.Parameter(made[id(tensor)], tensor.requires_grad)
            vars(parameter).update(attributes_of(tensor))
            made[id(tensor)] = parameter
    replace_tensors(root.modules(), lambda tensor: made.get(id(tensor), tensor))
    for parameter in root.parameters():
        Recipe.forget(parameter)  # other processes make the parameters of their stages
    return without_values
