"""What a recorded forward depends on beside its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..model.added_loss import LossWeight

_MOST_KINDS = 64
_MOST_TIMES_REPLACED = 2

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of arguments whose equality says that a forward does the same with them."""


class MicrobatchKinds:
    """Numbers the kinds of microbatches that a stage has had.

    A recorded forward serves the microbatches of one kind: it has their constants, and the
    addresses of the buffers that the modules held.

    Args:
        places: gives the modules' dictionaries of buffers, and the names there.

    Attributes:
        refusal: why no forward can be recorded; empty: they may be.
    """

    def __init__(self, places: Callable[[], Sequence[tuple[dict[str, Any], str]]]) -> None:
        self._find_places = places
        self._known: list[tuple[Any, ...]] = []
        self._buffers: tuple[int, ...] = ()
        self._times_replaced = 0  # one after the other
        self.refusal = ""

    def look_at_buffers(self) -> None:
        """Notices buffers that have been put in the place of others since the last call."""
        tensors = (holder[leaf] for holder, leaf in self._find_places())
        now = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._times_replaced = self._times_replaced + 1 if now != self._buffers else 0
        if self._times_replaced > _MOST_TIMES_REPLACED:
            self.refusal = "its modules replace buffers"
        self._buffers = now

    def number(
        self,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        weight: LossWeight | None,
        share: float | None,
    ) -> int:
        """Gives equal microbatches the same number.

        Args:
            leaves, structure: what the microbatch is given beside the messages.
            weight: of its loss, if a forward depends on it.
            share: of its rows in the batch, if metrics are weighted with it.
        """
        constants = [(type(leaf), leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        kind = (constants, structure, self._buffers, weight, share)
        if self.refusal or refusal(leaves):  # which may not even be comparable
            return -1
        if kind not in self._known:
            if len(self._known) == _MOST_KINDS:
                self.refusal = "its arguments that are no tensors keep changing"
                return -1
            self._known.append(kind)
        return self._known.index(kind)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Surrounds a forward that is recorded, and so will not be called again.

        Raises:
            RuntimeError: it has put another buffer in the place of one, which it would do no more.
        """
        before = [(holder, leaf, holder[leaf]) for holder, leaf in self._find_places()]
        try:
            yield
            replaced = [leaf for holder, leaf, buffer in before if holder[leaf] is not buffer]
            if replaced:
                raise RuntimeError(f"it replaces buffers: {', '.join(replaced)}")
        finally:
            for holder, leaf, buffer in before:
                holder[leaf] = buffer


def refusal(leaves: Sequence[Any]) -> str:
    """Why a forward that is given these cannot be recorded; empty if it may be."""
    others = {
        type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))
    }
    return f"an argument is of type {min(others)}" if others else ""
