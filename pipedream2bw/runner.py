"""What the engine calls for each microbatch of a stage: the stage's part of the model."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .codegen import StageFunction
from .stage import StageProgram

Structured = tuple[bytes, list[torch.Tensor]]
"""A message: how to rebuild its values (empty: each value is one tensor), and its tensors."""


@dataclasses.dataclass
class BoundProgram:
    """A stage's program with one function for each weight slot."""

    program: StageProgram
    functions: list[StageFunction]
    inbound: list[int]  # producer stages
    sends: list[list[int]]  # by consumer: positions in the outputs

    @classmethod
    def of(cls, program: StageProgram, functions: list[StageFunction]) -> BoundProgram:
        """Orders the edges as the engine does: by stage."""
        position = {name: i for i, name in enumerate(program.outputs)}
        sends = [
            [position[name] for name in program.sends[consumer]]
            for consumer in sorted(program.sends)
        ]
        return cls(program, functions, sorted(program.receives), sends)


@dataclasses.dataclass
class RunInputs:
    """What one run (a batch, or an evaluation) needs on this stage beside the messages."""

    bound: BoundProgram
    sizes: list[int]  # rows of each microbatch
    layouts: list[int]
    training: bool
    values: list[Any] | None = None  # stage 0: the model's inputs by microbatch
    targets: list[Any] | None = None  # last stage of a training batch
    outputs: list[Any] = dataclasses.field(default_factory=list)  # last stage of an evaluation


class StageRunner:
    """Runs one stage's forwards; called by the stage's executor thread."""

    def __init__(
        self,
        stage: int,
        num_stages: int,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        state_pointers: Callable[[], set[int]],
    ) -> None:
        self._is_first = stage == 0
        self._is_last = stage == num_stages - 1
        self._loss_fn = loss_fn
        self._state_pointers = state_pointers
        self._bytes_kept: dict[int, int] = {}
        self.thread: list[int] = []  # the executor's, once it is known
        self.runs: dict[int, RunInputs] = {}
        self.error: BaseException | None = None

    def forward(
        self, run: int, microbatch: int, slot: int, inbound: list[Structured]
    ) -> tuple[list[Structured], torch.Tensor | None, int]:
        """One microbatch: messages in; messages, the loss and activation bytes out."""
        if not self.thread:
            self.thread.append(threading.get_ident())
        try:
            inputs = self.runs[run]
            if not inputs.training:
                messages, _ = self._compute(inputs, microbatch, slot, inbound)
                kept, loss = 0, None
            else:
                layout = inputs.layouts[microbatch]
                if layout in self._bytes_kept:
                    messages, loss = self._compute(inputs, microbatch, slot, inbound)
                else:
                    # The first microbatch of a layout tells how much every one of them keeps.
                    # Views of the user's batch cost nothing beyond the batch itself.
                    batch = inputs.values[microbatch] if inputs.values else []
                    given = {v.untyped_storage().data_ptr() for v in batch}
                    with _SavedBytes(self._state_pointers() | given) as saved:
                        messages, loss = self._compute(inputs, microbatch, slot, inbound)
                    self._bytes_kept[layout] = saved.total
                kept = self._bytes_kept[layout]
            if microbatch == len(inputs.sizes) - 1 and inputs.training:
                del self.runs[run]
            return messages, loss, kept
        except BaseException as error:
            self.error = error
            raise

    def forward_while_alive(self) -> Callable[..., Any]:
        """:meth:`forward` for the engine, which Python's garbage collector cannot look into.

        If the engine held this object, a ``loss_fn`` or a model that knows the pipeline would keep
        it alive for ever.
        """
        method = weakref.WeakMethod(self.forward)

        def forward(*call: Any) -> Any:
            alive = method()
            if alive is None:
                raise RuntimeError("the pipeline is gone")
            return alive(*call)

        return forward

    def _compute(
        self, inputs: RunInputs, microbatch: int, slot: int, inbound: list[Structured]
    ) -> tuple[list[Structured], torch.Tensor | None]:
        bound = inputs.bound
        if self._is_first:
            assert inputs.values is not None
            values = inputs.values[microbatch]
            inputs.values[microbatch] = None  # the graph keeps what the backward needs
        else:
            values = []
            for structure, tensors in inbound:
                values.extend(unpack(structure, tensors) if structure else tensors)
        outputs = bound.functions[slot](values)
        if self._is_last:
            if inputs.training:
                return [], self._loss(outputs[0], inputs, microbatch)
            inputs.outputs.append(outputs[0])
            return [], None
        return [pack([outputs[i] for i in positions]) for positions in bound.sends], None

    def _loss(self, output: Any, inputs: RunInputs, microbatch: int) -> torch.Tensor:
        assert inputs.targets is not None
        loss = self._loss_fn(output, inputs.targets[microbatch])
        inputs.targets[microbatch] = None
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss_fn returned {type(loss).__name__}, it must return a tensor")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"loss_fn returned shape {list(loss.shape)} and dtype {loss.dtype}: it must return "
                "one floating-point number, the mean (or sum) over the microbatch"
            )
        return loss


def pack(values: list[Any]) -> Structured:
    """A message for values that are tensors or pytrees of tensors and constants."""
    if all(isinstance(value, torch.Tensor) for value in values):
        return b"", values
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _IsTensor

    return pickle.dumps(pytree.tree_map(take, values)), tensors


def unpack(structure: bytes, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The values of a message with structure."""
    remaining = iter(tensors)
    values: list[Any] = pytree.tree_map(
        lambda leaf: next(remaining) if leaf is _IsTensor else leaf, pickle.loads(structure)
    )
    return values


class _IsTensor:
    """Stands for a tensor among a message's constants."""


class _SavedBytes:
    """Counts the bytes that autograd saves: each storage once, weights and buffers not at all."""

    def __init__(self, not_counted: set[int]) -> None:
        self._not_counted = not_counted
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor)

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._not_counted:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self._storages.values())

    def __enter__(self) -> _SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
