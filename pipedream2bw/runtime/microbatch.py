"""Microbatches: ready-made ones, and a batch's, split along dimension 0."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _C
from ..model.trees import hides_tensors, opened


class Microbatch:
    """One microbatch of a ``train_step``: arguments of the model, and the target.

    A list of them is a batch whose microbatches the caller has made: of different lengths, or
    packed. Rows, and tensors named in ``replicated``, are as those of a batch.
    """

    def __init__(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.target = target

    @property
    def is_empty(self) -> bool:
        return not self.args and not self.kwargs and self.target is None


def microbatch_rows(rows: int, num_microbatches: int) -> list[int]:
    """Rows of each microbatch, as torch.tensor_split gives them: the first ones get one more."""
    base, extra = divmod(rows, num_microbatches)
    return [base + 1] * extra + [base] * (num_microbatches - extra)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy, which need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def has_entries(node: Any) -> bool:
    """Whether a value has an entry for each row: a list without tensors, or a tuple of texts."""
    if type(node) is tuple:  # as torch's default_collate makes of texts
        return bool(node) and all(isinstance(entry, str) for entry in node)
    return type(node) is list and bool(node) and not any(map(_begins_with_tensor, node))


def _begins_with_tensor(entry: Any) -> bool:
    while isinstance(entry, (list, tuple, dict)) and entry:
        entry = next(iter(entry.values() if isinstance(entry, dict) else entry))
    return isinstance(entry, torch.Tensor) or is_array(entry)


def common_rows(named: Sequence[tuple[str, Any]]) -> int | None:
    """The number of rows that all values share, None if there are none.

    Args:
        named: tensors, arrays, and lists with an entry for each row, with their names.

    Raises:
        ValueError: two differ in dimension 0, or a tensor has no dimension 0; both name
            ``replicated``, which passes a value whole.
    """
    first: tuple[str, int] | None = None
    for name, value in named:
        shape = (len(value),) if isinstance(value, (list, tuple)) else value.shape
        if not shape:
            raise ValueError(
                f"{name}: shape [], every tensor is split along dimension 0. Give the tensor rows, "
                "or name it in replicated=() to pass it whole to every microbatch"
            )
        if first is None:
            first = (name, shape[0])
        elif shape[0] != first[1]:
            raise ValueError(
                f"{name}: {shape[0]} rows in dimension 0, {first[0]}: {first[1]}: all "
                "tensors of a batch have the same number of rows, and its lists as many entries. "
                "Name one in replicated=() to pass it whole to every microbatch"
            )
    return None if first is None else first[1]


def refuse_gradients(named: Sequence[tuple[str, Any]]) -> None:
    """Raises ValueError if a value needs a gradient: stages have those of parameters alone."""
    for name, value in named:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(
                f"{name}: requires_grad is True, a pipeline has gradients of parameters alone. "
                "Pass the tensor's detach(), or compute the tensor inside the model"
            )


_LEAF = pytree.tree_structure(None)


@dataclasses.dataclass
class SplitTree:
    """A structure whose tensors, arrays and lists of entries are to be split.

    Other leaves stay whole, and ``replicated`` ones.
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    whole: list[bool]
    rows: int | None

    @classmethod
    def of(cls, tree: Any, what: str, replicated: Collection[str]) -> SplitTree:
        """Reads ``tree``; raises as :func:`common_rows` does, with ``what`` naming the tree.

        Raises:
            TypeError: tensors are in an object that nobody can split.
        """
        with_paths: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
        spec = _LEAF
        if type(tree) is not torch.Tensor:  # to find its path would take longer than all the rest
            with_paths, spec = pytree.tree_flatten_with_path(opened(tree), is_leaf=has_entries)
        leaves = [leaf for _, leaf in with_paths]
        whole = [
            not (isinstance(leaf, torch.Tensor) or is_array(leaf) or has_entries(leaf))
            or any(str(getattr(key, "key", getattr(key, "name", ""))) in replicated for key in path)
            for path, leaf in with_paths
        ]
        named = [(what + pytree.keystr(path), leaf) for path, leaf in with_paths]
        refuse_gradients(named)
        for name, leaf in named:
            if hides_tensors(leaf):
                raise TypeError(
                    f"{name}: {type(leaf).__name__} with tensors in it, which cannot be split into "
                    "microbatches. Give a tensor, a tuple, a dictionary or a dataclass, or give "
                    "microbatches=[Microbatch(..., target=...), ...]"
                )
        split = [each for each, keep in zip(named, whole, strict=True) if not keep]
        return cls(leaves, spec, whole, common_rows(split))

    def split(self, sizes: Sequence[int], streams: _C.StageStreams) -> list[Any]:
        """One tree for each microbatch, its tensors views of the batch's on the stage's device."""
        parts = split_values(self.leaves, self.whole, sizes, streams)
        if self.spec.is_leaf():  # nearly all targets: to unflatten takes longer than to split
            return [leaf for (leaf,) in parts]
        return [pytree.tree_unflatten(leaves, self.spec) for leaves in parts]


def split_values(
    values: Sequence[Any], whole: Sequence[bool], sizes: Sequence[int], streams: _C.StageStreams
) -> list[list[Any]]:
    """``values`` for each microbatch, on the device: split along dimension 0 unless ``whole``."""
    parts: list[Sequence[Any]] = []
    for value, keep in zip(values, whole, strict=True):
        if isinstance(value, torch.Tensor):
            value = _moved(value.detach(), streams)
        if keep:
            parts.append([value] * len(sizes))
        elif isinstance(value, torch.Tensor):
            parts.append(torch.split(value, list(sizes)))
        else:
            ends = list(itertools.accumulate(sizes))
            parts.append([value[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    return [list(microbatch) for microbatch in zip(*parts, strict=True)] or [[] for _ in sizes]


def _moved(tensor: torch.Tensor, streams: _C.StageStreams) -> torch.Tensor:
    """The tensor on the stage's device.

    The caller may write to its own tensor as soon as the call has returned. It waits for no work
    that the stages have been given: inputs are copied on a stream of their own.
    """
    if tensor.device.type != "cpu" or streams.inputs is None:
        moved = tensor.to(streams.device)
    else:
        with streams.inputs:
            if tensor.is_pinned():
                moved = tensor.to(streams.device)
            else:
                moved = tensor.pin_memory().to(streams.device, non_blocking=True)
    streams.use([moved])
    return moved


_MOST_NUMBERS = 16
"""The most numbers of a tensor that are looked at to tell it from others."""


def hash_of_values(trees: Sequence[Any]) -> int:
    """A 62-bit number that tells structures from others by a few of their values.

    It is the same in all processes. -1: there are no tensors, or one is not in the host's memory,
    which is not waited for.
    """
    is_flat = all(type(tree) is torch.Tensor for tree in trees)
    leaves = trees if is_flat else pytree.tree_leaves(opened(list(trees)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = [leaf for leaf in leaves if type(leaf) in (bool, int, float, str)]
    arrays = [leaf for leaf in leaves if is_array(leaf) and leaf.dtype.kind in "biuf"]
    if any(type(each) is not torch.Tensor or each.device.type != "cpu" for each in tensors):
        return -1
    if not (tensors or plain or arrays):
        return -1
    some = [_some(each.detach().flatten()) for each in tensors if each.layout == torch.strided]
    some += [_some(each.ravel()) for each in arrays]
    return hash_of(([each.tolist() for each in some], _some(plain)))


def _some(values: Any) -> Any:
    return values[:: max(1, len(values) // _MOST_NUMBERS)]


def hash_of_shapes(values: Sequence[Any], whole: Sequence[bool], mode: object) -> int:
    """A 62-bit number for all that fixes a microbatch's shapes but its number of rows."""
    described = [
        (tuple(value.shape if keep else value.shape[1:]), str(value.dtype))
        for value, keep in zip(values, whole, strict=True)
        if isinstance(value, torch.Tensor)
    ]
    return hash_of((mode, described))


def hash_of(described: object) -> int:
    """A 62-bit number for what is described by its text, the same in all processes."""
    digest = hashlib.blake2b(repr(described).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
