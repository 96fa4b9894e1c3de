"""Runs a stage's part of the model, when the engine calls it for a microbatch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from ..capture.saved_bytes import SavedBytes
from ..errors import reworded
from ..model.added_loss import LossWeight, Weighed
from ..model.metrics import (
    Metric,
    computed_loss,
    measure,
    refuse_no_graph,
    refuse_other_weights,
)
from ..model.precision import Precision
from ..model.storages import storage_of
from ..model.trees import opened, tensors_in
from ..options import Options
from ..stages.codegen import StageFunction
from ..stages.program import StageProgram
from ..stages.recompute import Replay
from .contexts import check_process_wide, process_wide
from .messages import check_plain, pack, unpack
from .run_again import RunAgain
from .stage_calls import StageCalls
from .stage_weights import StageWeights
from .written_buffers import Holder, WrittenBuffers, buffer_holders, replayed_places

_NOTHING = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How the stages of a pipeline compute, the same on every rank.

    Attributes:
        pipeline: the pipeline's options, checked.
        loss_fn: gives the loss of a microbatch, from the model's output and the target.
        precision: the dtypes in which stages compute and parameters are kept.
        devices: the device of each stage of the model.
        recompute: for each stage of the model, whether it runs its forwards again.
        compile_options: what ``torch.compile`` is given; empty: nothing is compiled.
        microbatches_of_replicas: how many each replica has, where these numbers differ.
            Empty: all have as many.
        update_slots: that an update takes, which late forwards hide. None: the schedule says which
            are late.
    """

    pipeline: Options
    loss_fn: Callable[[Any, Any], torch.Tensor]
    precision: Precision
    devices: Sequence[torch.device]
    recompute: Sequence[bool]
    compile_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    microbatches_of_replicas: tuple[int, ...] = ()
    update_slots: int | str | None = None

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """What is computed beside the loss."""
        return self.pipeline.metrics or {}

    @property
    def optimizer_on_host(self) -> bool:
        """Whether the stages' optimizers work in the host's memory."""
        return self.pipeline.optimizer_device is not None

    @property
    def bucket_bytes(self) -> int:
        """How many bytes of gradients replicas add up at once."""
        return int(min(self.pipeline.bucket_cap_mb * 2**20, 2.0**62))

    @property
    def is_one_batch(self) -> bool:
        """Whether the rows of all replicas are one batch, with one loss."""
        return bool(self.microbatches_of_replicas or self.pipeline.normalizer)


class BoundProgram:
    """A stage's program with one function for each weight slot.

    Args:
        to_processes: whether other processes may need its outputs.
    """

    def __init__(
        self, program: StageProgram, functions: list[StageFunction], *, to_processes: bool
    ) -> None:
        self.functions = functions
        self._outputs = program.outputs
        self._to_processes = to_processes
        position = {name: i for i, name in enumerate(program.outputs)}
        # By consumer, which the engine orders by stage: positions in the outputs.
        self._sends = [
            [position[name] for name in program.sends[consumer]]
            for consumer in sorted(program.sends)
        ]

    def messages(self, outputs: Sequence[Any]) -> list[_C.Message]:
        """Packs the stage's outputs into one message for each consumer.

        Raises:
            TypeError: an output is no plain tensor, and other processes may need it.
        """
        if self._to_processes and self._sends:
            check_plain(self._outputs, outputs)
        return [pack([outputs[i] for i in positions]) for positions in self._sends]


@dataclasses.dataclass(kw_only=True)
class RunInputs:
    """Inputs of one run (a train_step or an evaluation) on this stage, beside the messages."""

    bound: BoundProgram
    sizes: list[int]  # rows of each microbatch of this pipeline
    total_rows: int  # of the batch
    layouts: list[int]
    training: bool
    begins: int | None = None  # the number of the batch that begins with this run
    loss_weights: list[LossWeight] = dataclasses.field(default_factory=list)  # of a train_step
    values: list[Any] | None = None  # stage 0: the model's inputs by microbatch
    targets: list[Any] | None = None  # last stage
    # Of a train_step the caller's tensors that these are views of, and how often written to.
    given: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list)
    # Last stage of an evaluation: the model's, or given targets the losses and metrics.
    outputs: list[Any] = dataclasses.field(default_factory=list)

    def watch(self, leaves: Iterable[Any], device: torch.device) -> None:
        """Notes how often tensors have been written to.

        Not of those that are copied to the device, or share their memory and so their count.
        """
        for leaf in leaves:
            is_here = isinstance(leaf, torch.Tensor) and leaf.device == device
            if (
                is_here
                and not leaf.is_inference()
                and leaf.nbytes == leaf.untyped_storage().nbytes()
            ):
                self.given.append((leaf, leaf._version))

    def check_unwritten(self) -> None:
        """Raises ValueError if the caller has written to a tensor that is about to be read."""
        for tensor, version in self.given:
            if tensor._version != version:
                raise ValueError(
                    f"a tensor of the batch, of shape {list(tensor.shape)}: "
                    f"{tensor._version - version} writes since train_step(), there must be none "
                    "before the stages have read it. Give each batch tensors of its own, or call "
                    "flush() before you write"
                )


@dataclasses.dataclass
class MicrobatchInputs:
    """Inputs of one microbatch, beside the messages.

    It is taken out of the run's inputs: the graph keeps what the backward needs.
    """

    values: list[Any]  # stage 0: the model's inputs
    target: Any
    loss_weight: LossWeight | None = None  # of a train_step

    @classmethod
    def of(cls, inputs: RunInputs, microbatch: int) -> MicrobatchInputs:
        values, target = [], None
        if inputs.values is not None:
            values, inputs.values[microbatch] = inputs.values[microbatch], None
        if inputs.targets is not None:
            target, inputs.targets[microbatch] = inputs.targets[microbatch], None
        return cls(values, target, inputs.loss_weights[microbatch] if inputs.training else None)

    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(opened((self.values, self.target)))


class StageRunner:
    """Runs one stage's forwards; called by the stage's executor thread.

    Args:
        options: how the pipeline's stages compute. With ``recompute`` a forward of a train_step is
            called again before its backward.

    Attributes:
        device: of the stage.
        calls: what the stage is to call between its runs.
        buffer_places: lists the buffers that its forwards use.
        bytes_kept: of a microbatch for its backward, by layout.
        adds_losses: whether a forward has called :func:`add_loss`, so that it depends on the weight
            of the microbatch's loss.
    """

    def __init__(
        self, stage: int, num_stages: int, weights: StageWeights, options: StageOptions
    ) -> None:
        self._is_first = stage == 0
        self._is_last = stage == num_stages - 1
        self.loss_fn = loss_fn = options.loss_fn
        self._metrics = options.metrics
        self.device, self._device_type = weights.device, weights.device.type
        losses = loss_fn.modules() if self._is_last and isinstance(loss_fn, nn.Module) else ()
        of_losses = [Holder(module._buffers, None) for module in losses]
        loss_places = [(holder, leaf) for holder, _ in of_losses for leaf in holder]
        self.buffer_places = lambda: [*replayed_places(weights), *loss_places]
        self._buffers = WrittenBuffers(lambda: [*buffer_holders(weights), *of_losses])
        self.calls = StageCalls()
        self._begun: list[tuple[int, int]] = []  # batches that may be taken back, and first runs
        self._precision = options.precision
        self._again = (
            RunAgain(self.buffer_places, weights.frozen.values())
            if options.recompute[stage]
            else None
        )
        self.bytes_kept: dict[int, int] = {}  # by layout
        self.adds_losses = False
        self._first_added: tuple[int, Weighed] | None = None  # and the batch
        self._weights = weights
        self._has_graph = False  # a loss of the train_step
        self._writes_to_targets = False
        self._runs: dict[int, RunInputs] = {}
        self.thread: list[int] = []  # the executor's, once it is known
        self._process_wide = process_wide()
        self._default_device = torch.get_default_device()  # the caller's: threads have their own

    def begin(self, run: int, inputs: RunInputs) -> None:
        """Takes what a run needs, before it is submitted to the engine."""
        if run < 0:  # the stage is idle: an interrupted evaluation may have left its outputs
            self._runs = {other: kept for other, kept in self._runs.items() if other >= 0}
        self._runs[run] = inputs

    def outputs_of(self, run: int) -> list[Any]:
        """Gives an evaluation's outputs on the last stage, by microbatch, and ends the run."""
        outputs = self._runs.pop(run).outputs
        _C.use_here(tensors_in(opened(outputs)))
        return outputs

    def forward(self, call: _C.ForwardCall) -> _C.ForwardResult:
        """Runs one microbatch."""
        if call.again:
            assert self._again is not None
            return self._again.forward(call, self.compute)
        inputs = self._runs[call.run]
        if inputs.training:
            return self.train(*self.take(call), call)
        self._prepare(call)
        own = MicrobatchInputs.of(inputs, call.microbatch)
        has_loss = inputs.targets is not None
        messages, loss, output = self.compute(
            inputs.bound, call.slot, own, call.inbound, has_loss=has_loss
        )
        if loss is not None:
            inputs.outputs.append((loss, self._measure(output, own.target, inputs, call)))
        elif self._is_last:
            inputs.outputs.append(output)
        return _C.ForwardResult(messages)

    def _prepare(self, call: _C.ForwardCall) -> None:
        if not self.thread:
            self.thread.append(threading.get_ident())
            if self._default_device.type != "cpu":
                torch.set_default_device(self._default_device)
        if process_wide() != self._process_wide:
            check_process_wide(self._process_wide)
        self.calls.make(call.run)

    def take(self, call: _C.ForwardCall) -> tuple[RunInputs, MicrobatchInputs]:
        """What a microbatch of a train_step is given, out of the run's inputs."""
        self._prepare(call)
        inputs = self._runs[call.run]
        if not self._writes_to_targets:
            inputs.check_unwritten()
        if call.microbatch == 0 and inputs.begins is not None:
            self._begin_batch(inputs.begins, call.run)
        if call.microbatch == len(inputs.sizes) - 1:
            del self._runs[call.run]
        weight = inputs.loss_weights[call.microbatch]
        if call.loss_scale != weight.scale:
            weight = dataclasses.replace(weight, scale=call.loss_scale)
            inputs.loss_weights[call.microbatch] = weight
        return inputs, MicrobatchInputs.of(inputs, call.microbatch)

    def _begin_batch(self, batch: int, run: int) -> None:
        newest = self._weights.engine.newest_version
        while self._begun and self._begun[0][0] < newest:  # its update has been made
            self._buffers.forget(self._begun.pop(0)[1])
        if self._first_added is not None and self._first_added[0] < newest:
            self._first_added[1].warn_of_lost(self._weights.index_in_model)
        self._begun.append((batch, run))
        self._buffers.begin(run)

    def take_back(self, batch: int, run: int) -> None:
        """Makes as if the batch, whose first run has that number, had not begun. The stage is idle.

        Evaluations are over, too.
        """
        self._buffers.restore(run)
        self._begun = [begun for begun in self._begun if begun[0] < batch]
        self._first_added = None
        self.calls.take_back(run)
        self._runs = {other: inputs for other, inputs in self._runs.items() if 0 <= other < run}
        if self._again is not None:
            self._again.take_back(run)

    def count_anew(self) -> None:
        """Batches and runs get numbers that others had before. The stage is idle."""
        self._begun.clear()
        self._first_added = None
        self._buffers.forget_all()

    def train(
        self, inputs: RunInputs, own: MicrobatchInputs, call: _C.ForwardCall
    ) -> _C.ForwardResult:
        """Runs one microbatch of a train_step."""
        layout, inbound, added = inputs.layouts[call.microbatch], call.inbound, self._first_added
        is_new = layout not in self.bytes_kept
        observed = is_new or self._again is not None
        with self._observed(layout, own, inbound) if observed else _NOTHING as replay:
            try:
                messages, loss, output = self.compute(inputs.bound, call.slot, own, inbound)
            except (IndexError, RuntimeError, ValueError) as error:
                if inputs.sizes[call.microbatch] == 1 < inputs.total_rows:
                    raise _one_row_told(error, inputs.total_rows) from error
                raise
        if loss is not None:
            self._check_graph(loss, inputs, call, is_new=is_new)
        kept = self.bytes_kept[layout]
        if self._again is not None and replay is not None:
            if _is_differentiable(inbound) or _is_differentiable(messages, loss):
                kept = self._again.keep(call, inputs.bound, own, replay, kept)
                self._first_added = added  # the losses that train are those of the next call
            else:
                kept = 0  # the forward will not be called again
        metrics = None
        if self._is_last and self._metrics:
            metrics = self._measure(output, own.target, inputs, call)
        for tensor, before in inputs.given if self._is_last else ():
            if tensor._version != before:
                self._writes_to_targets = True  # loss_fn or a metric, maybe to later targets too
        return _C.ForwardResult(messages, loss, kept, metrics)

    def _measure(
        self, output: Any, target: Any, inputs: RunInputs, call: _C.ForwardCall
    ) -> torch.Tensor:
        share = inputs.sizes[call.microbatch] / inputs.total_rows
        return measure(self._metrics, output, target, share, self.device)

    def _check_graph(
        self, loss: torch.Tensor, inputs: RunInputs, call: _C.ForwardCall, *, is_new: bool
    ) -> None:
        """Raises WrongLossError if a train_step trains nothing, or what is no weight of its stage.

        Args:
            is_new: whether the microbatch is the first of its layout.
        """
        if is_new and loss.requires_grad:
            mine = [tensor for message in call.inbound for tensor in message.tensors]
            mine += self._weights.slot_parameters[call.slot]
            mine += self._weights.model.parameters()  # which refuse gradients by themselves
            refuse_other_weights(loss, mine)
        self._has_graph = loss.requires_grad or (self._has_graph and call.microbatch > 0)
        if self._has_graph or call.microbatch < len(inputs.sizes) - 1:
            return
        if any(parameter.requires_grad for parameter in self._weights.model.parameters()):
            refuse_no_graph()

    @contextlib.contextmanager
    def _observed(
        self, layout: int, own: MicrobatchInputs, inbound: Sequence[_C.Message]
    ) -> Iterator[Replay | None]:
        """Surrounds a forward of a layout that is new, or that is to run again.

        Counts what the first microbatch of a layout keeps: every one of them keeps as much. Views
        of the user's batch cost nothing beyond the batch itself. What was received is counted
        apart if it is kept to be received again.
        """
        given = own.tensors()
        with self._again.first(layout, given) if self._again else _NOTHING as replay:
            if layout in self.bytes_kept:
                yield replay
                return
            not_counted = self._weights.storage_pointers() | _storages(given)
            if self._again is not None:
                not_counted |= _storages(tensor for part in inbound for tensor in part.tensors)
            with SavedBytes(not_counted) as saved:
                yield replay
            self.bytes_kept[layout] = saved.total

    def forget(self) -> None:
        """Drops what was kept for microbatches that will not be finished, and for later ones."""
        self._runs.clear()
        if self._again is not None:
            self._again.forget()
        self.calls.forget()

    def compute(
        self,
        bound: BoundProgram,
        slot: int,
        own: MicrobatchInputs,
        inbound: list[_C.Message],
        *,
        has_loss: bool = True,
    ) -> tuple[list[_C.Message], torch.Tensor | None, Any]:
        """Messages; of the last stage the loss, if it has one, and the model's output."""
        with Weighed(own.loss_weight, self._precision.computing(self._device_type)) as weighed:
            outputs = bound.functions[slot](self._values(own, inbound))
            loss = None
            if self._is_last and has_loss:
                loss = computed_loss(self.loss_fn, outputs[0], own.target)
        self.adds_losses |= weighed.has_added
        if weighed.num_waiting > 0 and self._first_added is None:
            self._first_added = self._begun[-1][0], weighed
        if self._is_last:
            return [], loss, outputs[0]
        return bound.messages(outputs), None, None

    def _values(self, own: MicrobatchInputs, inbound: list[_C.Message]) -> list[Any]:
        if self._is_first:
            cast: list[Any] = self._precision.cast(own.values)
            return cast
        values: list[Any] = []
        for message in inbound:
            structure, tensors = message.structure, message.tensors
            values.extend(unpack(structure, tensors) if structure else tensors)
        return values


def _one_row_told(error: Exception, rows: int) -> Exception:
    """An error of the user's code that tells that the microbatch has one of the batch's rows."""
    text = f"{str(error).rstrip('.')}. This microbatch has 1 of the batch's {rows} rows"
    hint = "If the model needs more, give larger batches or fewer microbatches"
    return reworded(error, f"{text}. {hint}")


def while_alive(bound_method: Any) -> Callable[..., Any]:
    """A method for the engine, which Python's garbage collector cannot look into.

    If the engine held the method's owner, a ``loss_fn``, a hook or a model that knows the pipeline
    would keep it alive.
    """
    # Not a WeakMethod, whose call is one in Python: every microbatch makes it.
    reference, method = weakref.ref(bound_method.__self__), bound_method.__func__

    def call_it(*arguments: Any) -> Any:
        alive = reference()
        if alive is None:
            raise RuntimeError("the pipeline is gone")
        return method(alive, *arguments)

    return call_it


def _is_differentiable(messages: Sequence[_C.Message], loss: torch.Tensor | None = None) -> bool:
    tensors = [tensor for message in messages for tensor in message.tensors]
    return any(tensor.requires_grad for tensor in (*tensors, *(() if loss is None else (loss,))))


def _storages(values: Iterable[Any]) -> set[int]:
    return {storage_of(value) for value in values if isinstance(value, torch.Tensor)}
