"""Running a forward a second time, on what it read the first time.

Recomputing activations in place of keeping them (arXiv 1604.06174) gives the same numbers only
under conditions. The second forward must find the inputs and buffers as the first did, and draw the
same random numbers. The engine repeats the random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import _C
from ..capture.attribute import Attribute
from ..capture.saved_bytes import count_as_saved

BufferPlaces = Callable[[], Sequence[tuple[dict[str, Any], str]]]
"""Lists the dictionaries and names under which modules hold buffers."""


class Replayer:
    """Makes forwards of a stage on inputs of the same shapes repeatable.

    The first forward shows which inputs and buffers are written to. Only those are copied for later
    forwards, which may write to no others.

    Args:
        buffer_places: lists the buffers that the forwards may use; a buffer may be None.
    """

    def __init__(self, buffer_places: BufferPlaces) -> None:
        self._buffer_places = buffer_places
        self._written_inputs: list[int] | None = None  # None: nothing is known yet
        self._written_buffers: set[tuple[int, str]] = set()

    @property
    def writes_to_inputs(self) -> bool:
        """Whether forwards have written to their inputs."""
        return bool(self._written_inputs)

    @contextlib.contextmanager
    def first(self, inputs: Sequence[torch.Tensor], *, keep_inputs: bool) -> Iterator[Replay]:
        """Watches a first forward on ``inputs``, and gives what the second one needs.

        Raises:
            RuntimeError: the forward has written to what earlier ones did not write to.
        """
        places = list(self._buffer_places())
        buffers = [holder[leaf] for holder, leaf in places]
        known = self._written_inputs
        replay = Replay()
        if keep_inputs:
            replay.inputs = [
                _copy(tensor) if known is None or index in known else tensor
                for index, tensor in enumerate(inputs)
            ]
        replay.buffers = [
            (holder, leaf, _copy(buffer))
            for (holder, leaf), buffer in zip(places, buffers, strict=True)
            if known is None or (id(holder), leaf) in self._written_buffers
        ]
        counts = [_version(tensor) for tensor in (*inputs, *buffers)]
        yield replay
        after = [_version(tensor) for tensor in (*inputs, *(h[leaf] for h, leaf in places))]
        changed = [was != now for was, now in zip(counts, after, strict=True)]
        written_inputs = [i for i in range(len(inputs)) if changed[i]]
        # BatchNorm's operator writes without a new version; a module's buffers change together.
        copies = {(id(holder), leaf): copied for holder, leaf, copied in replay.buffers}
        writers = {
            id(holder)
            for (holder, leaf), is_changed in zip(places, changed[len(inputs) :], strict=True)
            if is_changed or (known is None and not _equal(holder[leaf], copies[id(holder), leaf]))
        }
        if known is None:
            self._written_inputs = written_inputs
            self._written_buffers = {(id(h), leaf) for h, leaf in places if id(h) in writers}
            if keep_inputs:
                replay.inputs = [
                    copied if i in written_inputs else tensor
                    for i, (copied, tensor) in enumerate(zip(replay.inputs, inputs, strict=True))
                ]
            replay.buffers = [place for place in replay.buffers if id(place[0]) in writers]
        elif not set(written_inputs) <= set(known) or not writers <= {
            holder for holder, _ in self._written_buffers
        }:
            names = [leaf for holder, leaf in places if id(holder) in writers]
            raise RuntimeError(
                f"recompute: a forward wrote to inputs {written_inputs} and buffers {names}, the "
                f"first microbatch's to inputs {known} and {len(self._written_buffers)} buffers: "
                "every microbatch has to write to the same ones. Leave out recompute= here"
            )
        replay.remember_versions()


class Replay:
    """The state that a forward read, for the time when it is run again."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.buffers: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []
        self._versions: list[Any] = []

    def nbytes(self) -> int:
        """Returns the bytes held for the second forward, without the inputs."""
        return sum(copied.nbytes for _, _, copied in self.buffers if copied is not None)

    def remember_versions(self) -> None:
        """Remembers the inputs as they are: nobody may write to them from now on."""
        self._versions = [_version(tensor) for tensor in self.inputs]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Prepares a second forward, which uses ``inputs``, and restores everything after it.

        Raises:
            RuntimeError: somebody wrote to the inputs since the first forward.
        """
        if self._versions != [_version(tensor) for tensor in self.inputs]:
            raise RuntimeError(
                "recompute: an input was written to before its forward was run again: a batch's "
                "tensors are read until its backward is done"
            )
        now = [holder[leaf] for holder, leaf, _ in self.buffers]
        try:
            for holder, leaf, copied in self.buffers:
                holder[leaf] = _copy(copied)  # it may be run a third time
            yield
        finally:
            for (holder, leaf, _), tensor in zip(self.buffers, now, strict=True):
                holder[leaf] = tensor


class Block:
    """Runs a part of a stage of which only the inputs are kept, and runs it again for its backward.

    This is torch.utils.checkpoint with the buffers of a :class:`Replayer`.

    Args:
        name: the named module.
        attributes: what the part refers to, as other stages may run the rest of the module.
    """

    def __init__(self, name: str, attributes: Sequence[Attribute], root: nn.Module) -> None:
        self._name = name
        called = [each.found_in(root) for each in attributes if each.kind == "module"]
        modules = dict.fromkeys(module for each in called for module in each.modules())
        read = [each.target.rpartition(".") for each in attributes if each.kind == "buffer"]
        own = [(root.get_submodule(owner)._buffers, leaf) for owner, _, leaf in read]
        self._replayer = Replayer(
            lambda: [*own, *((each._buffers, leaf) for each in modules for leaf in each._buffers)]
        )

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns ``function(*inputs)``.

        Raises:
            ValueError: the block writes to its inputs.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            count_as_saved(tensor)
        replays: list[Replay] = []

        @contextlib.contextmanager
        def first() -> Iterator[None]:
            with self._replayer.first(tensors, keep_inputs=False) as replay:  # the checkpoint does
                yield
            replays.append(replay)

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            place = _C.random_place()  # which the checkpoint has set back
            assert place is not None
            with _C.KeyedRandom(place, repeats=True), replays[0].again():
                yield

        outputs = checkpoint(
            function,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (first(), _EachTime(again)),
        )
        if self._replayer.writes_to_inputs:
            raise ValueError(
                f"recompute: block {self._name} writes to its inputs in place: the block cannot be "
                "run again on them. Recompute whole stages (recompute=True) instead"
            )
        return outputs


class _EachTime:
    """A context manager that may be entered again: a backward in two halves runs a block twice."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


def _version(tensor: torch.Tensor | None) -> Any:
    """Returns what changes when a tensor is written to, or another one takes its place."""
    return None if tensor is None else (id(tensor), tensor._version)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()
