"""Forwards for an engine that records them: what each depends on beside its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .. import _C
from ..model.added_loss import LossWeight
from .run_again import with_tensors
from .runner import MicrobatchInputs, RunInputs, StageRunner

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


class _Looked(NamedTuple):
    """What has been taken out of a run's inputs for a forward that comes next, or never."""

    run: int
    microbatch: int
    inputs: RunInputs
    given: MicrobatchInputs


class RecordedForwards:
    """A runner's forwards, some of which are recorded, and are not called again for their kind."""

    def __init__(self, runner: StageRunner, *, has_metrics: bool) -> None:
        self._runner = runner
        self._has_metrics = has_metrics
        self._kinds = MicrobatchKinds(runner.buffer_places)
        self._looked: _Looked | None = None

    def look(self, call: _C.ForwardCall) -> _C.GivenInputs:
        """Takes what a microbatch of a train_step is given, before :meth:`forward` or instead."""
        inputs, given = self._runner.take(call)
        self._looked = _Looked(call.run, call.microbatch, inputs, given)
        if call.microbatch == 0:
            self._kinds.look_at_buffers()
        share = inputs.sizes[call.microbatch] / inputs.total_rows if self._has_metrics else None
        leaves, structure = pytree.tree_flatten((given.values, given.target))
        # Of a forward that has called add_loss() the weight is a constant, too.
        weight = given.loss_weight if self._runner.adds_losses else None
        kind = self._kinds.number(leaves, structure, weight, share)
        return _C.GivenInputs(given.tensors(), kind, self._kinds.refusal or refusal(leaves))

    def forward(self, call: _C.ForwardCall) -> _C.ForwardResult:
        """Runs one microbatch."""
        looked = self._looked
        if call.given is not None:
            assert looked is not None, "look() comes before a recording"
            given = with_tensors(looked.given, call.given)
            with self._kinds.recording():
                return self._runner.train(looked.inputs, given, call)
        if call.again:
            return self._runner.forward(call)
        self._looked = None
        if looked is not None and (looked.run, looked.microbatch) == (call.run, call.microbatch):
            return self._runner.train(looked.inputs, looked.given, call)
        return self._runner.forward(call)
