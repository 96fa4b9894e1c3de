"""Counts what a pipeline's stages move, on tensors without values."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .. import _C
from ..capture.captured import Captured
from ..capture.device_figures import DeviceFigures, Work
from ..capture.dry_run import FAKE_LIMITS
from ..checks import check_whole_number
from ..model.added_loss import LossWeight, Weighed
from ..model.clone import copies_of_plain_tensors, structural_clone
from ..model.metrics import computed_loss
from ..model.storages import storage_of
from ..model.surroundings import plain_modes, torch_reports_silenced
from ..model.trees import as_received, bytes_in, tensors_in
from ..pipeline.module import PipelineModule
from ..planner.profiling.peaks import measured_peaks
from ..runtime.local_stages import LocalStage
from ..runtime.session import Session
from ..runtime.timeline import Timeline
from ..schedules.events import Event
from ..stages.program import StageProgram
from .operator_traffic import Moved, TrafficCounter
from .traffic import ActionTraffic, StageTraffic, TrafficReport


def traffic_report(
    pipe: PipelineModule,
    target: Any = None,
    *,
    microbatch_rows: int | None = None,
    figures: DeviceFigures | None = None,
    events: Sequence[Event] | Timeline = (),
) -> TrafficReport:
    """Bytes that the actions of this process's stages move, by kind, and what limits them.

    Each operator reads its inputs and writes its outputs once; views move nothing, and there is
    no cache: a large one moves less, an operator that reads something twice more. Of compiled
    stages the operators before their fusion count. Forward and backward of one microbatch run
    on tensors without values: nothing is computed, drained or changed, and no process waits for
    another. Arguments are those of the example call.

    Updates count as the engine's fused ones: weights, gradients and state are read once,
    weights and state written once; state that does not exist before the first step does not
    count, nor does clipping, nor state of other optimizers. Messages have their size once on
    each side, and may pass without a copy in one process; with w copies of a stage, which are
    replicas or pipelines, the gradients' sum has 2 (w - 1) / w of these going out. As many come in.

    Data movement by operator is the view of "Data Movement Is All You Need" (arXiv 2007.00072).

    Args:
        target: of the loss, with any number of rows; its tensors must have them in dimension 0.
        microbatch_rows: rows of the microbatch; the example's, divided by
            the batch's microbatches, if not given.
        figures: the device's peaks, of :data:`KNOWN_DEVICES` or made by hand; its efficiencies
            are not used. Measured here if not given, by a product of matrices and a copy.
        events: a :meth:`timeline`, or rows of one, for the share of the roofline that is
            reached.

    Raises:
        ValueError: rows below 1; the model has an operator that needs values.
        TypeError: ``figures`` is something else.
    """
    session = pipe.session
    rows = _checked_rows(session, microbatch_rows)
    if figures is not None and not isinstance(figures, DeviceFigures):
        raise TypeError(f"figures: {type(figures).__name__} given, it must be a DeviceFigures")
    dtype = _dtype_of_weights(session)
    if figures is None:
        devices = [stage.weights.device for stage in session.stages]
        figures = measured_peaks(devices[0], dtype)
    with torch_reports_silenced(), plain_modes():
        counted = _Count(session, rows, target).run()
    peak = _Peak(figures)
    seen = events.rows if isinstance(events, Timeline) else events
    depth = session.grid.depth
    return TrafficReport(
        stages={
            stage.index: _stage_traffic(stage, counted[stage.index % depth], session, peak, seen)
            for stage in session.stages
        },
        microbatch_rows=rows,
        dtype=dtype,
        figures=figures,
    )


def _dtype_of_weights(session: Session) -> torch.dtype:
    """That of the first floating-point parameter as stages compute with it."""
    precision = session.stages.options.precision
    for name, parameter in session.root.named_parameters():
        if parameter.is_floating_point():
            return precision.of_parameter(name, parameter)
    return torch.float32


def _checked_rows(session: Session, given: int | None) -> int:
    if given is not None:
        check_whole_number("microbatch_rows", given)
        return given
    captured = session.modes.first.captured
    whole = session.modes.first.whole
    tensors = [captured.signature.tensors[i].example for i in captured.input_positions]
    rows = [int(t.shape[0]) for t, is_whole in zip(tensors, whole, strict=True) if not is_whole]
    count = session.schedule.num_microbatches * session.grid.num_pipelines
    return max(1, rows[0] // count) if rows else 1


@dataclasses.dataclass(frozen=True)
class _Counted:
    """What one stage's microbatch moves, whichever process has the stage."""

    forward: Moved
    backward: Moved
    received: int  # bytes of messages
    sent: int
    gradients_sent: int
    gradients_received: int


class _Count:
    """Runs the stages one after the other, each with its backward, on fake tensors.

    All of them on one device: what they move does not depend on which, but for its type.
    """

    def __init__(self, session: Session, rows: int, target: Any) -> None:
        self._session = session
        self._captured: Captured = session.modes.first.captured
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._rows = rows
        self._target = pytree.tree_map_only(torch.Tensor, self._cut, target)
        self._root = self._fake_root()
        state = (*self._root.parameters(), *self._root.buffers())
        self._weights = set(map(storage_of, state))
        self._activations: dict[int, torch.Tensor] = {}  # by storage, alive so that none is reused
        self._is_forward = True
        self._values: dict[str, Any] = {}

    def run(self) -> list[_Counted]:
        programs = self._session.modes.first.programs
        leaves = [self._captured.signature.tensors[i] for i in self._captured.input_positions]
        whole = self._session.modes.first.whole
        for name, leaf, is_whole in zip(programs[0].inputs, leaves, whole, strict=True):
            example = leaf.example
            self._values[name] = self._like(example) if is_whole else self._cut(example)
        counted = []
        place = (0, 0, _C.ALL_DRAWS, 0)
        for program in programs:
            try:
                with self._mode, _C.KeyedRandom(place, counts_fakes=True):
                    counted.append(self._stage(program, is_last=program is programs[-1]))
            except FAKE_LIMITS as error:
                raise ValueError(
                    f"traffic_report(): stage {program.index} cannot be run on tensors without "
                    f"values: {error}"
                ) from error
            except Exception as error:
                raise ValueError(
                    f"traffic_report(): stage {program.index}, microbatch_rows: {self._rows}: the "
                    f"model or its loss refuses them: {error}"
                ) from error
        return counted

    def _stage(self, program: StageProgram, *, is_last: bool) -> _Counted:
        options = self._session.stages.options
        self._activations.clear()
        counter = TrafficCounter(self._kind, self._note)
        inputs = [self._values[name] for name in program.inputs]
        if program.index > 0:  # they were sent: leaves
            inputs = [as_received(value) for value in inputs]
        for tensor in tensors_in((inputs, self._target)):
            self._note(tensor)
        self._is_forward = True
        autocast = options.precision.computing(self._captured.device.type)
        with Weighed(LossWeight(), autocast), counter:
            outputs: list[Any] = program.bind(self._root)(inputs)
            if is_last:
                outputs = [computed_loss(options.loss_fn, outputs[0], self._target)]
        forward = counter.take()
        self._values.update(zip(program.outputs, outputs, strict=True))
        for tensor in tensors_in(outputs):
            self._note(tensor)
        sends = program.sends.values()
        sent = tensors_in([self._values[name] for names in sends for name in names])
        received = [] if program.index == 0 else tensors_in(inputs)
        backward = self._backward(program, counter, inputs, outputs)
        if options.recompute[program.index] and backward.work:
            backward.bytes_of.update(forward.bytes_of)
            backward.work[:0] = forward.work
        return _Counted(
            forward=forward,
            backward=backward,
            received=bytes_in(received),
            sent=bytes_in(sent),
            gradients_sent=bytes_in([t for t in received if t.requires_grad]),
            gradients_received=bytes_in([t for t in sent if t.requires_grad]),
        )

    def _backward(
        self, program: StageProgram, counter: TrafficCounter, inputs: list[Any], outputs: list[Any]
    ) -> Moved:
        ends = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        starts = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        names = dict(self._root.named_parameters())
        trained = [names[n] for n in program.parameters if names[n].requires_grad]
        if not ends or not (starts or trained):
            return Moved()
        seeds = [torch.empty_like(tensor) for tensor in ends]
        self._is_forward = False
        with counter:
            found = torch.autograd.grad(ends, [*starts, *trained], seeds, allow_unused=True)
        moved = counter.take()
        for parameter, gradient in zip(trained, found[len(starts) :], strict=True):
            if gradient is not None:  # added to the sum of the batch's
                moved.bytes_of["gradients"] += gradient.numel() * (
                    gradient.element_size() + 2 * gradient_bytes(self._session, parameter.dtype)
                )
        return moved

    def _kind(self, tensor: torch.Tensor) -> str:
        storage = storage_of(tensor)
        if storage in self._weights:
            return "weights"
        return "activations" if self._is_forward or storage in self._activations else "gradients"

    def _note(self, tensor: torch.Tensor) -> None:
        """Remembers what a forward makes, also one that a recomputed block runs again."""
        if self._is_forward or torch.is_grad_enabled():
            self._activations[storage_of(tensor)] = tensor

    def _fake_root(self) -> nn.Module:
        root, precision = self._session.root, self._session.stages.options.precision
        names = {id(p): name for name, p in root.named_parameters()}
        parameters = {
            old: nn.Parameter(
                self._like(old, precision.of_parameter(names[id(old)], old)), old.requires_grad
            )
            for old in root.parameters()
        }
        buffers = {old: self._like(old) for old in root.buffers()}
        state = {**copies_of_plain_tensors(root), **buffers}
        return structural_clone(root, parameters, state, on_trial=True)

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        with self._mode:
            return torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=dtype or tensor.dtype,
                device=self._captured.device,
            )

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode:
            shape = (self._rows, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device=self._captured.device)


def gradient_bytes(session: Session, dtype: torch.dtype) -> int:
    """Bytes of an element of the sum of gradients of parameters of a dtype."""
    narrow = session.stages.options.precision.gradient_dtype
    if dtype in (torch.float16, torch.bfloat16) and dtype != narrow:
        return torch.float32.itemsize
    return dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Peak:
    """The roofline: a device's peaks, whatever part of them kernels reach."""

    figures: DeviceFigures

    def times(self, moved: Moved) -> tuple[float, float]:
        """The least seconds, and the part of them of operators that memory limits."""
        peaks = self.figures.flops_per_second
        whole = bound = 0.0
        for flops, dtype, count in moved.work:
            computing = flops / peaks.get(dtype, peaks[torch.float32])
            moving = count / self.figures.bytes_per_second
            whole += max(computing, moving)
            bound += moving if moving > computing else 0.0
        return whole, bound / whole if whole else 0.0


def _stage_traffic(
    stage: LocalStage, counted: _Counted, session: Session, peak: _Peak, events: Sequence[Event]
) -> StageTraffic:
    measured = _Medians(stage.index, session.grid.replica, events)
    update, messages = _update(stage, session)
    return StageTraffic(
        forward=_action(counted.forward, counted.received + counted.sent, peak, measured.of("F")),
        backward=_action(
            counted.backward,
            counted.gradients_received + counted.gradients_sent,
            peak,
            measured.of("B") or measured.of("I", "W"),
            measured.of("R"),
        ),
        update=_action(update, messages, peak, measured.of("U")),
        saved_by_first=sum(
            parameter.numel() * gradient_bytes(session, dtype)
            for parameter, dtype in _trained(stage, session)
        )
        if counted.backward.work
        else 0,
        num_microbatches=session.schedule.num_microbatches,
    )


def _trained(stage: LocalStage, session: Session) -> Iterable[tuple[torch.Tensor, torch.dtype]]:
    precision = session.stages.options.precision
    for name, parameter in stage.weights.trainable.items():
        yield parameter, precision.of_parameter(name, parameter)


def _update(stage: LocalStage, session: Session) -> tuple[Moved, int]:
    """What the update moves, and the bytes of its messages.

    The engine's passes read weights (or masters), gradients and state once, and write weights,
    masters and state once; with shared state a replica does so for its share.
    """
    engine, is_shared = stage.weights.engine.bytes(), stage.weights.engine.is_shared
    copies = session.grid.width * session.grid.num_pipelines
    shares = copies if is_shared else 1
    precision = session.stages.options.precision
    new = half = gradients = 0
    for parameter, dtype in _trained(stage, session):
        new += parameter.numel() * dtype.itemsize
        half += parameter.numel() * dtype.itemsize if dtype.itemsize == 2 else 0
        gradients += parameter.numel() * gradient_bytes(session, dtype)
    read = new - half if engine.masters and not precision.split_master else new
    moved = Moved()
    moved.bytes_of["weights"] = (read + new) // shares + 2 * engine.masters
    moved.bytes_of["gradients"] = gradients // shares
    moved.bytes_of["optimizer"] = 2 * (
        engine.optimizer_state + session.extensions.bytes_of(stage.index).on_device
    )
    if new:
        moved.work.append(Work(0, torch.float32, moved.bytes_of.total()))
    # What any sum over the copies sends and receives: Patarasuk and Yuan, JPDC 69(2), 2009. With
    # shared state its second half are the new weights.
    exchanged = gradients + (new if is_shared else gradients)
    return moved, 2 * ((copies - 1) * exchanged // copies)


def _action(moved: Moved, messages: int, peak: _Peak, *seconds: float | None) -> ActionTraffic:
    least, bound = peak.times(moved)
    measured = [each for each in seconds if each is not None]
    return ActionTraffic(
        **{kind: moved.bytes_of[kind] for kind in ("weights", "activations", "gradients")},
        optimizer=moved.bytes_of["optimizer"],
        messages=messages,
        flops=sum(work.flops for work in moved.work),
        operators=len(moved.work),
        least_seconds=least,
        memory_bound=bound,
        median_seconds=sum(measured) if measured else None,
    )


class _Medians:
    """What the actions of a stage took in a timeline."""

    def __init__(self, stage: int, replica: int, events: Iterable[Event]) -> None:
        self._seconds: dict[str, list[float]] = {}
        for event in events:
            if (event.stage, event.replica) == (stage, replica):
                self._seconds.setdefault(event.kind, []).append(event.end - event.start)

    def of(self, *kinds: str) -> float | None:
        """The medians of these kinds together, None if there are none."""
        found = [statistics.median(self._seconds[kind]) for kind in kinds if kind in self._seconds]
        return sum(found) if found else None
