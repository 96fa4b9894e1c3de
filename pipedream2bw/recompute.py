"""Running a forward a second time, on what it read the first time.

Recomputing activations in place of keeping them (arXiv 1604.06174) gives the same numbers only if
the second forward finds the inputs and buffers as the first did, and draws the same random numbers.
The engine sees to those of the CPU; a device's generator is set back here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import _C
from .saved_bytes import count_as_saved

BufferPlaces = Callable[[], Sequence[tuple[dict[str, Any], str]]]
"""The dictionaries and names under which modules hold buffers."""

# Held by forwards that may draw from a device's generator: threads share it.
_drawing = threading.RLock()


class Replayer:
    """Makes forwards of one layout repeatable.

    The first one tells which inputs and buffers they write to. Only those are copied for the later
    ones.

    Args:
        device: of the stage.
        buffer_places: of the buffers that the forwards may use.
    """

    def __init__(self, device: torch.device, buffer_places: BufferPlaces) -> None:
        self._generator = None if device.type == "cpu" else _Generator(device)
        self._buffer_places = buffer_places
        self._written_inputs: list[int] | None = None  # None: nothing is known yet
        self._written_buffers: list[int] = []

    @property
    def writes_to_inputs(self) -> bool:
        """Whether the forwards so far did."""
        return bool(self._written_inputs)

    @contextlib.contextmanager
    def first(self, inputs: Sequence[torch.Tensor]) -> Iterator[Replay]:
        """Around a first forward on ``inputs``; gives what the second one needs."""
        places = self._buffer_places()
        buffers = [holder[leaf] for holder, leaf in places]
        is_known = self._written_inputs is not None
        input_indices = self._written_inputs if is_known else range(len(inputs))
        buffer_indices = self._written_buffers if is_known else range(len(buffers))
        assert input_indices is not None
        replay = Replay(list(inputs), self._generator)
        for index in input_indices:
            replay.inputs[index] = _copy(inputs[index])
        replay.buffers = [(*places[i], _copy(buffers[i])) for i in buffer_indices]
        counts = [tensor._version for tensor in (*inputs, *buffers)]
        with _drawing if self._generator else contextlib.nullcontext():
            if self._generator:
                replay.drawn_from = self._generator.state()
            yield replay
            if self._generator:
                replay.drawn_to = self._generator.state()
        if is_known:
            return
        changed = [t._version != n for t, n in zip((*inputs, *buffers), counts, strict=True)]
        self._written_inputs = [i for i in range(len(inputs)) if changed[i]]
        # BatchNorm's operator writes without counting; and a module's buffers change together.
        writers = {
            id(holder)
            for (holder, leaf, copied), buffer, is_changed in zip(
                replay.buffers, buffers, changed[len(inputs) :], strict=True
            )
            if is_changed or holder[leaf] is not buffer or not torch.equal(buffer, copied)
        }
        self._written_buffers = [i for i, (holder, _) in enumerate(places) if id(holder) in writers]
        replay.inputs = [
            replay.inputs[i] if i in self._written_inputs else tensor
            for i, tensor in enumerate(inputs)
        ]
        replay.buffers = [replay.buffers[i] for i in self._written_buffers]


class Replay:
    """What one forward read that will not be there any more when it is run again."""

    def __init__(self, inputs: list[torch.Tensor], generator: _Generator | None) -> None:
        self.inputs = inputs
        self.buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._generator = generator
        self.drawn_from: torch.Tensor | None = None  # states of a device's generator
        self.drawn_to: torch.Tensor | None = None

    def nbytes(self) -> int:
        """Bytes held for the second forward, the inputs apart."""
        return sum(copied.nbytes for _, _, copied in self.buffers)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the second forward, which uses ``inputs``. Leaves everything as it was.

        Raises:
            RuntimeError: another thread drew from the device's generator during the forwards.
        """
        now = [holder[leaf] for holder, leaf, _ in self.buffers]
        try:
            for holder, leaf, copied in self.buffers:
                holder[leaf] = copied
            with contextlib.nullcontext() if self._generator is None else self._drawn_again():
                yield
        finally:
            for (holder, leaf, _), tensor in zip(self.buffers, now, strict=True):
                holder[leaf] = tensor

    @contextlib.contextmanager
    def _drawn_again(self) -> Iterator[None]:
        assert self._generator is not None
        assert self.drawn_from is not None
        assert self.drawn_to is not None
        with _drawing:
            before = self._generator.state()
            try:
                self._generator.set(self.drawn_from)
                yield
                reached = self._generator.state()
            finally:
                self._generator.set(before)
        if not torch.equal(reached, self.drawn_from) and not torch.equal(reached, self.drawn_to):
            raise RuntimeError(
                "recompute: a forward cannot be run again as it was: another thread drew random "
                "numbers from the device's default generator meanwhile; give what runs beside the "
                "pipeline a torch.Generator of its own"
            )


class _Generator:
    """A device's default generator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(self._device)
        return state

    def set(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self._device)


class Block:
    """A part of a stage that keeps its inputs only, and is run again when its gradient arrives.

    torch.utils.checkpoint with random numbers and buffers as :class:`Replayer` has them.
    """

    def __init__(self, name: str, root: nn.Module, device: torch.device) -> None:
        self._name = name
        modules = list(root.get_submodule(name).modules())
        self._replayer = Replayer(
            device,
            lambda: [
                (module._buffers, leaf)
                for module in modules
                for leaf, buffer in module._buffers.items()
                if buffer is not None
            ],
        )

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """``function(*inputs)``.

        Raises:
            ValueError: the block writes to its inputs.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            count_as_saved(tensor)
        passes = _Passes(self._replayer, tensors)
        outputs = checkpoint(
            function,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (passes.first(), _EachTime(passes.again)),
        )
        if self._replayer.writes_to_inputs:
            raise ValueError(
                f"recompute: block {self._name} writes to its inputs in place: it cannot be run "
                "again on them; recompute whole stages (recompute=True) instead"
            )
        return outputs


class _Passes:
    """Around both forwards of one call of a block."""

    def __init__(self, replayer: Replayer, inputs: Sequence[torch.Tensor]) -> None:
        self._replayer = replayer
        self._inputs = inputs
        self._seed = _C.draw_seed()
        self._replay: Replay | None = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with _C.PrivateGenerator(self._seed), self._replayer.first(self._inputs) as replay:
            yield
        self._replay = replay
        replay.inputs = []

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        assert self._replay is not None
        with _C.PrivateGenerator(self._seed), self._replay.again():
            yield


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


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
