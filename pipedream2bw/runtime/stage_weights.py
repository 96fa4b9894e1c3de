"""What one stage holds: its parameters in the engine's buffers, and a clone per weight version."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _C
from ..model.clone import copies_of_buffers, structural_clone
from ..model.local_shards import parameter_at
from ..model.precision import Precision
from ..model.storages import storage_of, with_own_storage
from ..stages.program import StageProgram
from .gradient_guards import ArrivalGuard, EngineGradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One of the stages that a process runs, and with whom it adds up its gradients."""

    index: int  # the schedule's: with two pipelines every stage of the model has two
    pipeline: int
    program: StageProgram
    streams: _C.StageStreams  # of the stage's rank
    num_versions: int
    group: dist.ProcessGroup | None  # the processes that hold the stage
    sum_order: Sequence[int]  # their ranks as their gradients are added up; none: an all-reduce
    bucket_bytes: int  # of gradients that they add up at once
    fault: _C.Fault  # ends waiting for them
    copies: _C.CopySum | None  # shared with the stage's copy in this process
    tied: Mapping[str, tuple[int, ...]]  # parameters of several stages: the model's stages
    precision: Precision
    steps_on_host: bool  # its optimizer
    shared_owners: frozenset[str]  # modules whose own tensors are not all of one stage


class StageWeights:
    """The parameters and buffers of one stage, and a clone of its modules for each weight slot.

    The model's own Parameters stay as handles: optimizers and ``state_dict`` know them. They are
    views of the newest version's buffer, brought up to date by :meth:`show_newest`, or of the
    float32 master if there is one. The stage computes with other Parameters, one set for each slot
    of the engine's, because autograd remembers the Parameter, not its storage: a handle that moves
    would corrupt the backwards in flight.

    Args:
        model: the user's.
        root: the model that the stage is of: the user's, or the second pipeline's own.
        taken: parameters of which an earlier stage in this process has the root's as its handles.

    Attributes:
        guards: of the handles, which let no gradient arrive there.
        shared_owners: modules whose own tensors are not all of one stage.
        rounded: the positions of the weights that are rounded from whole float32 masters.
        ahead: those of them that are not the newest masters' roundings, but a correction ahead.
        handles_step: whether an optimizer steps the handles themselves, in an update.
    """

    def __init__(
        self, model: nn.Module, root: nn.Module, spec: StageSpec, taken: frozenset[str]
    ) -> None:
        program, device = spec.program, spec.streams.device
        self.index = spec.index
        self.index_in_model = program.index
        self.pipeline = spec.pipeline
        self.streams = spec.streams
        self.device = device
        self.model = model
        self.root = root
        self.fault = spec.fault
        self._tied = spec.tied
        self.shared_owners = spec.shared_owners
        self.taken = taken
        used = (*program.parameters, *program.unused_parameters)
        self.in_root = {name: parameter_at(root, name) for name in dict.fromkeys(used)}
        for name, parameter in self.in_root.items():
            if not parameter.requires_grad and name not in taken:
                parameter.data = parameter.data.to(device)
        own = {  # on one device in the same memory, if frozen
            name: another_copy(p, spec.precision, device) if name in taken else p
            for name, p in self.in_root.items()
        }
        self.trainable = {name: p for name, p in own.items() if p.requires_grad}
        self.frozen = {name: p for name, p in own.items() if not p.requires_grad}
        self.handles = list(self.trainable.values())
        # The user's Parameters of these names, which an optimizer knows.
        self.originals = [parameter_at(model, name) for name in self.trainable]
        self.guards = [
            handle.register_post_accumulate_grad_hook(ArrivalGuard(name))  # type: ignore[no-untyped-call]
            for name, handle in self.trainable.items()
        ]
        dtypes = [spec.precision.of_parameter(name, p) for name, p in self.trainable.items()]
        self.rounded = [
            i
            for i, (handle, dtype) in enumerate(zip(self.handles, dtypes, strict=True))
            if spec.precision.of_master(handle) != dtype and not spec.precision.split_master
        ]
        self.ahead: Collection[int] = ()
        self.buffer_names = program.buffers
        self._holders: dict[str, tuple[dict[str, Any], str]] = {}
        for name in program.buffers:
            owner, _, leaf = name.rpartition(".")
            self._holders[name] = (root.get_submodule(owner)._buffers, leaf)
        for name, buffer in self.named_buffers().items():
            holder, leaf = self._holders[name]
            holder[leaf] = buffer.to(device)
        self.engine = _C.Stage(
            parameters=[handle.detach().to(device) for handle in self.handles],
            names=list(self.trainable),
            num_versions=spec.num_versions,
            replica_group="" if spec.group is None else spec.group.group_name,
            sum_order=spec.sum_order,
            bucket_bytes=spec.bucket_bytes,
            copy_sum=spec.copies,
            copy=spec.pipeline,
            dtypes=dtypes,
            split_master=spec.precision.split_master,
            gradient_dtype=spec.precision.gradient_dtype,
            streams=spec.streams,
            steps_on_host=spec.steps_on_host,
        )
        self.slot_parameters: list[list[nn.Parameter]] = []
        for slot in range(self.engine.num_slots):
            parameters = [
                nn.Parameter(self.engine.weight(slot, i)) for i in range(len(self.handles))
            ]
            for i, parameter in enumerate(parameters):
                self.engine.attach(i, parameter)
            self.slot_parameters.append(parameters)
        self.clones: list[nn.Module] = []  # by slot; shared with the process's other stages
        self.handles_step = False
        self._stepped: dict[int, int] = {}  # by handle: what wrote last was known
        self.show_newest()

    @property
    def is_shown(self) -> bool:
        """Whether its handles are the user's Parameters."""
        return self.root is self.model

    def parameters(self) -> list[nn.Parameter]:
        """The model's own Parameters that this stage holds, frozen ones too."""
        return [*self.handles, *self.frozen.values()]

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The model's stages that hold the parameter."""
        return self._tied.get(name, (self.index_in_model,))

    def counts(self, name: str) -> bool:
        """Whether the parameter counts here: a tied one does on the first stage that holds it."""
        return self.stages_of(name)[0] == self.index_in_model

    @property
    def num_elements(self) -> int:
        """Elements of all parameters that count here, frozen ones too."""
        return sum(p.numel() for name, p in self.in_root.items() if self.counts(name))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The stage's buffers as they are now: a module may have put new tensors in place."""
        return list(self.named_buffers().values())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The stage's buffers as they are now, by name."""
        there = {name: holder[leaf] for name, (holder, leaf) in self._holders.items()}
        return {name: buffer for name, buffer in there.items() if buffer is not None}

    def shown(self, name: str) -> torch.Tensor:
        """The values that the handle of that name shows, or the frozen parameter's. Drained."""
        return {**self.frozen, **self.trainable}[name].detach()

    def show_newest(self) -> None:
        """Points the handles to the newest weights. The pipeline must be drained.

        With float32 masters to these; with split ones, of which there is no whole tensor, with
        those in the host's memory or shared out to replicas to the 16-bit weights.
        """
        self.engine.show()
        slot = self.engine.newest_slot
        for i, (name, handle) in enumerate(self.trainable.items()):
            hidden = self.engine.hides_master(i)
            shown = self.engine.weight(slot, i) if hidden else self.engine.master(slot, i)
            handle.data = with_own_storage(shown)
            guard = handle.grad  # none: new, or somebody's zero_grad(); of a master no more shown
            if not isinstance(guard, EngineGradient) or guard.dtype != handle.dtype:
                handle.grad = EngineGradient(name, handle)
        self._note_shown()

    def _note_shown(self) -> None:
        shown = {**self.trainable, **self.frozen}
        self._shown = [(name, p, p.data_ptr(), p._version) for name, p in shown.items()]
        self.note_stepped(self.handles)

    def check_written(self, *, running: bool) -> None:
        """Takes what was written to the parameters, in their memory, since they were shown.

        Args:
            running: whether batches may be being computed.

        Raises:
            ValueError: it was written at the wrong time, or elsewhere.
        """
        if running and self.handles_step:
            return  # an update writes to them, in another thread
        if all(p._version == version and p.data_ptr() == at for _, p, at, version in self._shown):
            return
        shown = self._shown
        self._note_shown()  # errors are told once
        for name, parameter, address, version in shown:
            if parameter.data_ptr() != address:
                self.show_newest()
                raise ValueError(
                    f"parameter {name}: other memory was assigned to its data. The pipeline owns "
                    "the memory of the weights: after a flush() write to it in place"
                )
            if parameter._version != version:
                self._take_written(name, running=running)

    def check_unwritten(self, handles: Iterable[nn.Parameter]) -> None:
        """Raises ValueError if a handle was written to that an update is about to step.

        In the update: where handles step, nobody else can tell an update's writes from a script's.
        """
        for handle in handles:
            if handle._version != self._stepped[id(handle)]:
                name = next(name for name, each in self.trainable.items() if each is handle)
                raise _written_too_early(name)

    def note_stepped(self, handles: Iterable[nn.Parameter]) -> None:
        """What has been written to these handles was a step of theirs."""
        self._stepped.update((id(handle), handle._version) for handle in handles)

    def _take_written(self, name: str, *, running: bool) -> None:
        if running:
            raise _written_too_early(name)
        if name not in self.trainable:
            return
        i, slot = list(self.trainable).index(name), self.engine.newest_slot
        weight = self.engine.weight(slot, i)
        if self.engine.hides_master(i):
            self.engine.set_master(i, weight.float())
        else:
            weight.copy_(self.engine.master(slot, i))  # itself, where there is none

    def stepped_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which an optimizer steps the trainable parameters."""
        return [
            torch.float32 if self.engine.hides_master(i) else handle.dtype
            for i, handle in enumerate(self.handles)
        ]

    def check_requires_grad(self) -> None:
        """Raises ValueError if a parameter was frozen or unfrozen after the pipeline was made."""
        for name, parameter in self.in_root.items():
            if parameter.requires_grad != (name in self.trainable):
                raise ValueError(
                    f"parameter {name}: requires_grad is {parameter.requires_grad}, it was "
                    f"{not parameter.requires_grad} when the pipeline was made. Freeze and "
                    "unfreeze before: the pipeline keeps versions of the trained parameters alone"
                )

    def storage_pointers(self) -> set[int]:
        """The storages of weights and buffers."""
        slots = (self.engine.slot_buffers(slot) for slot in range(self.engine.num_slots))
        tensors = itertools.chain(*slots, self.frozen.values(), self.buffers)
        return set(map(storage_of, tensors))


def share_out(
    model: nn.Module, specs: Sequence[StageSpec], hooked: Collection[str]
) -> list[StageWeights]:
    """Takes the model over: the weights of the stages that this process runs.

    Args:
        hooked: names of the modules on which a forward registers hooks.
    """
    made: list[StageWeights] = []
    taken: dict[nn.Module, set[str]] = {}  # by root
    for pipeline in sorted({spec.pipeline for spec in specs}):
        mine = [spec for spec in specs if spec.pipeline == pipeline]
        root = model
        if pipeline > 0 and mine[0].copies is not None:  # over tensors of its own, in one process
            own = {p: another_copy(p, mine[0].precision) for p in model.parameters()}
            root = structural_clone(model, own, copies_of_buffers(model))
        of_pipeline: list[StageWeights] = []
        names = taken.setdefault(root, set())
        for spec in mine:
            of_pipeline.append(StageWeights(model, root, spec, frozenset(names)))
            names.update(of_pipeline[-1].in_root)
        for group in _without_common_parameters(of_pipeline):
            _make_clones(root, group, hooked)
        made += of_pipeline
    return made


def _without_common_parameters(stages: Sequence[StageWeights]) -> list[list[StageWeights]]:
    """Groups of stages that one clone serves."""
    groups: list[list[StageWeights]] = []
    for stage in stages:
        for group in groups:
            if all(stage.in_root.keys().isdisjoint(other.in_root) for other in group):
                group.append(stage)
                break
        else:
            groups.append([stage])
    return groups


def _make_clones(root: nn.Module, stages: Sequence[StageWeights], hooked: Collection[str]) -> None:
    modules = [root.get_submodule(name) for name in hooked]
    for slot in range(max(stage.engine.num_slots for stage in stages)):
        mapping: dict[nn.Parameter, nn.Parameter] = {}
        for stage in stages:  # the root's Parameters, and those that it computes with in the slot
            parameters = stage.slot_parameters[slot % stage.engine.num_slots]
            own = {**stage.frozen, **dict(zip(stage.trainable, parameters, strict=True))}
            mapping.update((parameter, own[name]) for name, parameter in stage.in_root.items())
        clone = structural_clone(root, mapping, hooked=modules)
        for stage in stages:
            if slot < stage.engine.num_slots:
                stage.clones.append(clone)


def another_copy(
    parameter: nn.Parameter, precision: Precision, device: torch.device | None = None
) -> nn.Parameter:
    """A parameter for another copy, which gets the first one's values later: these are exact."""
    # Not detach(), whose version counts the parameter's writes, too.
    data = parameter.data.to(device, precision.of_master(parameter))
    return nn.Parameter(data, parameter.requires_grad)


def _written_too_early(name: str) -> ValueError:
    return ValueError(
        f"parameter {name} was written to while batches were being computed, of which it shows no "
        "weights. Call flush() before, and then write"
    )
