"""Forwards of a stage that run again before their backward: ``recompute``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import _C
from ..stages.recompute import BufferPlaces, Replay, Replayer


class RunAgain:
    """What the forwards of one stage's microbatches need to run again.

    Args:
        buffer_places: lists the buffers that the forwards may use.
        frozen: parameters, to which no forward may write.
    """

    def __init__(self, buffer_places: BufferPlaces, frozen: Iterable[nn.Parameter]) -> None:
        self._buffer_places = buffer_places
        self._frozen = list(frozen)
        self._replayers: dict[int, Replayer] = {}  # by layout
        self._kept: dict[tuple[int, int], tuple[Any, Replay, Any, int]] = {}

    @contextlib.contextmanager
    def first(self, layout: int, inputs: Sequence[torch.Tensor]) -> Iterator[Replay]:
        """Surrounds a microbatch's first forward.

        Raises:
            RuntimeError: it wrote to something that it must not write to twice.
        """
        if layout not in self._replayers:
            self._replayers[layout] = Replayer(self._buffer_places)
        with self._replayers[layout].first(inputs, keep_inputs=True) as replay:
            before = [parameter._version for parameter in self._frozen]
            yield replay
            if before != [parameter._version for parameter in self._frozen]:
                raise RuntimeError(
                    "recompute: the forward writes to a frozen parameter, which would change "
                    "twice: make it a buffer"
                )

    def keep(
        self, call: _C.ForwardCall, bound: Any, given: Any, replay: Replay, bytes_kept: int
    ) -> int:
        """Keeps what a microbatch needs to run again; gives the bytes that this is.

        Args:
            bytes_kept: what the backward needs once it has run again.
        """
        self._kept[call.run, call.microbatch] = bound, replay, given, bytes_kept
        return replay.nbytes()

    def forward(
        self, call: _C.ForwardCall, compute: Callable[..., tuple[Any, Any, Any]]
    ) -> _C.ForwardResult:
        """Runs a microbatch's forward again, by the runner's ``compute``."""
        bound, replay, given, bytes_kept = self._kept.pop((call.run, call.microbatch))
        with replay.again():
            given = with_tensors(given, replay.inputs)
            messages, loss, _ = compute(bound, call.slot, given, call.inbound)
        return _C.ForwardResult(outbound=messages, loss=loss, bytes_kept=bytes_kept)

    def take_back(self, run: int) -> None:
        """Drops what was kept of this run and later ones."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] < run}

    def forget(self) -> None:
        """Drops all that was kept."""
        self._kept.clear()


def with_tensors(given: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """A microbatch's inputs with other tensors in the places of theirs."""
    remaining = iter(tensors)
    values, target = pytree.tree_map_only(
        torch.Tensor, lambda _: next(remaining), (given.values, given.target)
    )
    return dataclasses.replace(given, values=values, target=target)
