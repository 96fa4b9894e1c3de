"""The buffers that forwards write to, as they were before a run's first forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .stage_weights import StageWeights


class Holder(NamedTuple):
    """A module's dictionary of buffers, and which of them are meant; None: all, also new ones."""

    buffers: dict[str, Any]
    leaves: Sequence[str] | None


def replayed_places(weights: StageWeights) -> list[tuple[dict[str, Any], str]]:
    """The places of every buffer (None too) of the stage's modules."""
    return [
        (holder, leaf)
        for holder, leaves in buffer_holders(weights)
        for leaf in (holder if leaves is None else leaves)
    ]


def buffer_holders(weights: StageWeights) -> list[Holder]:
    """Where the stage's modules hold their buffers.

    Of a module that has tensors of other stages, too, only what this stage uses.
    """
    names = (*weights.trainable, *weights.frozen, *weights.buffer_names)
    leaves: dict[str, list[str]] = {name.rpartition(".")[0]: [] for name in names}
    for name in weights.buffer_names:
        owner, _, leaf = name.rpartition(".")
        leaves[owner].append(leaf)
    return [
        Holder(
            weights.root.get_submodule(owner)._buffers,
            of_owner if owner in weights.shared_owners else None,
        )
        for owner, of_owner in leaves.items()
    ]


class _Kept(NamedTuple):
    """A buffer before a run."""

    holder: dict[str, Any]  # a module's, shared by its clones
    leaf: str
    tensor: torch.Tensor | None  # the object that was there
    version: int  # what its writers had counted up to
    copy: torch.Tensor | None  # None: nobody is known to write to it


class WrittenBuffers:
    """Keeps the buffers of a stage as they were before each of some runs.

    The first run shows which buffers forwards write to: only those are copied from the second one
    on. A stage of which no forward writes to a buffer keeps no copy.

    Args:
        holders: lists where the stage's modules hold buffers.
    """

    def __init__(self, holders: Callable[[], Sequence[Holder]]) -> None:
        self._find_holders = holders
        self._holders: Sequence[Holder] | None = None
        # By the holder's id and the name in it. None: nothing is known yet.
        self._written: set[tuple[int, str]] | None = None
        self._kept: dict[int, list[_Kept]] = {}  # by run, in their order

    def begin(self, run: int) -> None:
        """Remembers the buffers; called in the stage's thread before the run's first forward."""
        if self._holders is None:
            self._holders = self._find_holders()
        self._learn()
        kept: list[_Kept] = []
        for holder, leaves in self._holders:
            # Normalisation writes to its statistics without counting.
            counts_nothing = "running_mean" in holder
            for leaf in list(holder) if leaves is None else leaves:
                tensor = holder.get(leaf)
                if tensor is None:
                    kept.append(_Kept(holder, leaf, None, 0, None))
                    continue
                is_copied = (
                    counts_nothing or self._written is None or (id(holder), leaf) in self._written
                )
                copy = tensor.detach().clone() if is_copied else None
                kept.append(_Kept(holder, leaf, tensor, tensor._version, copy))
        self._kept[run] = kept

    def restore(self, run: int) -> None:
        """Makes the buffers what they were before the run, and forgets it and all later ones.

        Does nothing if the stage has not begun the run. The stage is idle.

        Raises:
            RuntimeError: a buffer was written to for the first time, and of it there is no copy.
        """
        begun = [other for other in self._kept if other >= run]
        if not begun:
            return
        first = self._kept[min(begun)]
        for _, leaf, tensor, version, copy in first:
            if tensor is not None and copy is None and tensor._version != version:
                raise RuntimeError(
                    f"buffer {leaf!r}: a forward has written to the buffer for the first time, and "
                    "no copy was made before. The buffer's values before this batch are lost"
                )
        before = {(id(kept.holder), kept.leaf) for kept in first}
        for holder, leaves in self._holders or ():
            new = [leaf for leaf in holder if (id(holder), leaf) not in before]
            for leaf in new if leaves is None else ():
                del holder[leaf]
        with torch.no_grad():
            for kept in first:
                kept.holder[kept.leaf] = kept.tensor
                if kept.copy is not None and kept.tensor is not None:
                    kept.tensor.copy_(kept.copy)
        for other in begun:
            del self._kept[other]

    def forget(self, run: int) -> None:
        """Forgets the runs up to this one: they will not be taken back."""
        self._learn()
        for other in [other for other in self._kept if other <= run]:
            del self._kept[other]

    def forget_all(self) -> None:
        """Forgets all runs: others get their numbers."""
        self._kept.clear()

    def _learn(self) -> None:
        """Finds out what the runs so far have written to."""
        for of_run in self._kept.values():
            changed = {
                (id(kept.holder), kept.leaf)
                for kept in of_run
                if _is_replaced(kept) or (self._written is None and _differs(kept))
            }
            self._written = changed if self._written is None else self._written | changed


def _is_replaced(kept: _Kept) -> bool:
    """Whether somebody wrote to the buffer, and counted it, or put another one in its place."""
    now = kept.holder.get(kept.leaf)
    return now is not kept.tensor or (now is not None and now._version != kept.version)


def _differs(kept: _Kept) -> bool:
    """Whether the buffer has other bits than its copy."""
    if kept.tensor is None or kept.copy is None or kept.tensor.shape != kept.copy.shape:
        return kept.copy is not None
    as_bytes = (
        tensor.contiguous().view(-1).view(torch.uint8) for tensor in (kept.tensor, kept.copy)
    )
    return not torch.equal(*as_bytes)
