"""The part of the model that this process holds, under the model's own names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..capture.captured import place_of
from ..model.checkpoint import Checkpoint
from ..model.local_shards import Part, as_local, parts_here
from ..stages.modes import Mode
from ..units import format_bytes
from .extension import Extensions
from .local_stages import LocalStages
from .stage_memory import memory_of
from .stage_values import masters_shown


class LocalModel:
    """Parameters, buffers and ``state_dict`` of the stages of this process.

    Args:
        mode: says on which stages modules are.
        without_values: names of the parameters and buffers that are to be loaded.

    Attributes:
        placeholder: stands for the trainable parameters of a process that has none.
    """

    def __init__(
        self,
        stages: LocalStages,
        mode: Mode,
        extensions: Extensions,
        without_values: Collection[str],
    ) -> None:
        self._root = stages.root
        self._without_values = set(without_values)
        self._stages = stages
        self._extensions = extensions
        self._mode = mode
        self.placeholder = nn.Parameter(torch.empty(0, 0))  # a matrix, which Muon takes

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        mine = {id(tensor) for stage in self._stages for tensor in stage.weights.parameters()}
        for name, parameter in self._root.named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) in mine:
                yield name, parameter

    @property
    def has_trainable(self) -> bool:
        """Whether this process has a parameter to train."""
        return any(parameter.requires_grad for _, parameter in self.named_parameters())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        mine = self._buffer_names()
        for name, buffer in self._root.named_buffers("", recurse, remove_duplicate):
            if name in mine:
                yield f"{prefix}.{name}" if prefix else name, buffer

    def state(
        self, prefix: str = "", keep_vars: bool = False, *, whole: bool = True
    ) -> dict[str, Any]:
        """The process's part of the ``state_dict``; its tensors are the live ones.

        Args:
            whole: every rank calls it; else masters that other replicas have are their roundings.
        """
        mine, others = self._names(), self._stages.others
        passed = others.as_parameters() if others else contextlib.nullcontext()
        with masters_shown((stage.weights for stage in self._stages), whole=whole), passed:
            full = self._root.state_dict(keep_vars=keep_vars)
        return type(full)((prefix + name, full[name]) for name in full if name in mine)

    def load(self, checkpoint: Checkpoint, strict: bool) -> Any:
        """Loads the process's part of the whole model's; gives what ``nn.Module`` gives."""
        root = self._root
        mine, known = self._names(), self.persistent_names()
        wanted = self.own_names(checkpoint.names)
        parameters = dict(root.named_parameters(remove_duplicate=False))
        given = {id(parameters[name]) for name in wanted if name in parameters}
        absent = sorted(mine.difference(wanted))
        # One entry is enough for a parameter that has several names.
        missing = [name for name in absent if id(parameters.get(name)) not in given]
        unexpected = sorted(set(checkpoint.names) - known)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(root).__name__}: "
                f"missing keys: {missing}, unexpected keys: {unexpected}"
            )
        entries = as_local(checkpoint.read(wanted), self._stages.grid.mesh_of_shards)
        for name, part in self.parts().items():
            whole = part.whole_shape(parameters[name].shape)
            if name in entries and tuple(entries[name].shape) == whole:
                entries[name] = part.of(entries[name])
        with masters_shown((stage.weights for stage in self._stages), change=True):
            result = root.load_state_dict(entries, strict=False)
        self._without_values.difference_update(wanted)
        self._without_values -= {name for name, p in parameters.items() if id(p) in given}
        return type(result)(missing if strict else absent, unexpected)

    def own_names(self, names: Collection[str]) -> list[str]:
        """Gives the names of a ``state_dict`` that belong to this process's part."""
        mine = self._names()
        return [name for name in names if name in mine]

    def parts(self) -> dict[str, Part]:
        """Which parts of the model's sharded parameters this process has, by their names."""
        grid = self._stages.grid
        return parts_here(self._root, grid.shard, grid.num_shards)

    def trainable_names(self) -> tuple[str, ...]:
        """The whole model's trained parameters."""
        return tuple(name for name, p in self._root.named_parameters() if p.requires_grad)

    def tied_names(self) -> dict[str, str]:
        """The further names of the whole model's parameters, and the first one of each."""
        first = {id(parameter): name for name, parameter in self._root.named_parameters()}
        every = self._root.named_parameters(remove_duplicate=False)
        return {name: first[id(p)] for name, p in every if first[id(p)] != name}

    def persistent_names(self) -> frozenset[str]:
        """What the whole model's ``state_dict`` holds."""
        return frozenset(self._root.state_dict(keep_vars=True))

    def beside_state(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Tensors that this process's modules have under names that the ``state_dict`` lacks.

        Such are weights in files, and buffers that are not persistent; None: there is no tensor.
        """
        for name in sorted(names):
            if self._first_stage(name.rpartition(".")[0]) in self._stages.grid.stages:
                found: Any = self._root
                for own in name.split("."):
                    found = getattr(found, own, None)
                yield name, found if isinstance(found, torch.Tensor) else None

    def extra_state(self, stage: int | None = None) -> dict[str, Any]:
        """What this process's modules keep beside parameters and buffers, by their names.

        Args:
            stage: only the modules of this one of the process's stages; None: of all.
        """
        stages = self._stages.grid.stages if stage is None else (stage,)
        return {
            name: module.get_extra_state()
            for name, module in self._with_extra_state()
            if self._first_stage(name) in stages
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Gives the modules what :meth:`extra_state` gave."""
        for name, module in self._with_extra_state():
            if name in state:
                module.set_extra_state(state[name])

    def _with_extra_state(self) -> list[tuple[str, nn.Module]]:
        return [
            (name, module)
            for name, module in self._root.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def loaded(self, names: Collection[str]) -> None:
        """Parameters and buffers of these names have values now."""
        self._without_values.difference_update(names)

    def check_values(self) -> None:
        """Raises ValueError if parameters that were on meta have not been loaded."""
        if self._without_values:
            first = ", ".join(sorted(self._without_values)[:5])
            raise ValueError(
                f"parameters and buffers without values: {len(self._without_values)} ({first}), "
                "there must be none: the model was on meta. Load a checkpoint (load_checkpoint, "
                "load_state_dict), or make the model by pipedream2bw.deferred_init()"
            )

    def describe(self, mode: Mode) -> list[str]:
        """A line for each stage of the model, with what this process holds of it."""
        depth = len(mode.programs)
        has_copies = any(stage.weights.pipeline > 0 for stage in self._stages)
        lines = []
        for program in mode.programs:
            names = [place_of(mode.captured, i) for i in program.layers]
            shown = names[0] if len(names) < 2 else f"{names[0]} ... {names[-1]}" if names else "-"
            line = f"stage {program.index}: {len(names)} layers ({shown})"
            for stage in self._stages:
                if stage.index % depth != program.index:
                    continue
                weights, engine = stage.weights, stage.weights.engine
                memory = memory_of(stage, self._extensions)
                of = f" (pipeline {weights.pipeline})" if has_copies else ""
                frozen = sum(
                    p.numel() for name, p in weights.frozen.items() if weights.counts(name)
                )
                versions = engine.num_versions if weights.trainable else 1
                tied = sum(p.numel() for p in weights.in_root.values()) - weights.num_elements
                line += (
                    f"{of}, {weights.num_elements:,} parameters "
                    f"{f'({frozen:,} frozen) ' if frozen else ''}"
                    f"{f'+ {tied:,} of earlier stages ' if tied else ''}on {weights.device}, "
                    f"{versions} weight version{'s' if versions > 1 else ''} "
                    f"(newest W({engine.newest_version})), {format_bytes(memory.total)}"
                )
            lines.append(line)
        return lines

    @functools.cached_property
    def _first_stages(self) -> dict[str, int]:
        """The first stage that has a part of a module, by the names of modules and their parts."""
        first: dict[str, int] = {}
        for program in self._mode.programs:
            layers = [self._mode.captured.layers[i].name for i in program.layers]
            held = (*program.parameters, *program.unused_parameters, *program.buffers)
            for name in (*layers, *held):
                path = name.split(".")
                for length in range(len(path) + 1):
                    first.setdefault(".".join(path[:length]), program.index)
        return first

    def _first_stage(self, module: str) -> int:
        """The first of the stages that have a part of the module.

        One that no stage has a part of is where its nearest parent is.
        """
        while module and module not in self._first_stages:
            module = module.rpartition(".")[0]
        return self._first_stages.get(module, 0)

    def _buffer_names(self) -> set[str]:
        """Names of the first pipeline's buffers; a second one has statistics of its own."""
        stages = self._stages.of_first_pipeline()
        return {name for stage in stages for name in stage.weights.buffer_names}

    def _names(self) -> set[str]:
        """Entries of the model's state_dict that this process holds, aliases of tied ones too."""
        root, here = self._root, self._stages.grid.stages
        parameters = {name for name, _ in root.named_parameters(remove_duplicate=False)}
        buffers = {name for name, _ in root.named_buffers(remove_duplicate=False)}
        known, mine = self.persistent_names(), self._buffer_names()
        mine |= {name for name, _ in self.named_parameters(remove_duplicate=False)}
        others = known - parameters - buffers
        mine |= {n for n in others if self._first_stage(n.rpartition(".")[0]) in here}
        return mine & known
