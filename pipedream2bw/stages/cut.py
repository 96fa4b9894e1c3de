"""Cutting a captured model into stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import _C
from ..capture.captured import Captured, names_of_layers
from .codegen import Write, generate
from .program import StageProgram


def split_into_stages(
    captured: Captured,
    boundaries: Sequence[int],
    *,
    numbers_draws: bool = False,
    write: Write | None = None,
) -> list[StageProgram]:
    """Cuts the captured model.

    Args:
        boundaries: the first layer of each stage.
        numbers_draws: whether the stages say which number the draws of each layer have.
        write: as in :func:`generate`.
    """
    draws = _numbered(captured) if numbers_draws else {}
    return _Splitter(captured, list(boundaries), draws, write).programs()


def _numbered(captured: Captured) -> dict[fx.Node, tuple[int, int]]:
    """Gives each layer that may draw random numbers the number of its first draw, and how many.

    What comes after the model, its loss, has the numbers after the last layer's.
    """
    draws: dict[fx.Node, tuple[int, int]] = {}
    number = 0
    for node, count in zip(captured.layer_nodes, captured.found.draws, strict=True):
        if count:
            draws[node] = number, count
            number += count
    (output,) = (node for node in captured.graph.nodes if node.op == "output")
    draws[output] = number, _C.ALL_DRAWS
    return draws


@dataclasses.dataclass
class _LocalSizes:
    """The sizes that a stage does not have to receive."""

    read: dict[str, tuple[str, int]]  # size -> (received tensor, dimension)
    computed: list[fx.Node]  # computed again from what the stage has


class _Splitter:
    def __init__(
        self,
        captured: Captured,
        boundaries: list[int],
        draws: Mapping[fx.Node, tuple[int, int]],
        write: Write | None,
    ) -> None:
        self._captured = captured
        self._draws = draws
        self._write = write
        self._names = names_of_layers(captured)
        self._num_stages = len(boundaries)
        ends = [*boundaries[1:], len(captured.layers)]
        self._ranges = [range(start, end) for start, end in zip(boundaries, ends, strict=True)]
        self._stage_of: dict[fx.Node, int] = {
            captured.layer_nodes[layer]: stage
            for stage, layers in enumerate(self._ranges)
            for layer in layers
        }
        (self._output,) = (node for node in captured.graph.nodes if node.op == "output")
        self._stage_of[self._output] = self._num_stages - 1
        self._position = {node.name: i for i, node in enumerate(captured.graph.nodes)}
        for node in captured.graph.nodes:
            if node.op == "placeholder":
                self._stage_of[node] = 0

    def programs(self) -> list[StageProgram]:
        # moves[producer][consumer]: the values between two stages.
        moves: list[dict[int, list[str]]] = [{} for _ in range(self._num_stages)]
        sizes: list[list[fx.Node]] = [[] for _ in range(self._num_stages)]
        for node in self._captured.graph.nodes:
            if node.op == "get_attr" or node not in self._stage_of:
                continue
            producer = self._stage_of[node]
            for consumer in sorted({self._stage_of[user] for user in node.users} - {producer}):
                if node.name in self._captured.found.sizes:
                    sizes[consumer].append(node)
                else:
                    moves[producer].setdefault(consumer, []).append(node.name)
        own_sizes = [self._local_sizes(stage, wanted, moves) for stage, wanted in enumerate(sizes)]
        owned = self._owned()
        return [
            self._program(stage, moves, own_sizes[stage], owned[stage])
            for stage in range(self._num_stages)
        ]

    def _local_sizes(
        self, stage: int, wanted: list[fx.Node], moves: list[dict[int, list[str]]]
    ) -> _LocalSizes:
        """Finds the sizes that a stage can read or compute itself; adds the others to ``moves``.

        A number would need a message of its own between processes, and nearly always the stage
        receives a tensor that has that size.
        """
        received = {name for consumers in moves for name in consumers.get(stage, ())}
        nodes = {node.name: node for node in self._captured.graph.nodes}
        dimensions = {
            size.node.expr: (name, dimension)
            for name in sorted(received, key=self._position.__getitem__, reverse=True)
            for dimension, size in enumerate(_shape(nodes[name]))
            if isinstance(size, torch.SymInt)
        }
        found = _LocalSizes({}, [])

        def have(node: fx.Node) -> bool:
            name = node.name
            if name in received or name in found.read or node in found.computed:
                return True
            if name not in self._captured.found.sizes or node.op == "placeholder":
                return False
            size = node.meta.get("val")
            if isinstance(size, torch.SymInt) and size.node.expr in dimensions:
                found.read[name] = dimensions[size.node.expr]
                return True
            if node.op == "call_module" or not all(map(have, node.all_input_nodes)):
                return False
            found.computed.append(node)
            return True

        for node in wanted:
            if not have(node):
                received.add(node.name)
                moves[self._stage_of[node]].setdefault(stage, []).append(node.name)
        return found

    def _program(
        self,
        stage: int,
        moves: list[dict[int, list[str]]],
        sizes: _LocalSizes,
        owned: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
    ) -> StageProgram:
        captured = self._captured
        parameters, unused, buffers = owned
        receives = {
            producer: self._in_order(consumers[stage])
            for producer, consumers in enumerate(moves)
            if stage in consumers
        }
        sends = {
            consumer: self._in_order(names) for consumer, names in sorted(moves[stage].items())
        }
        taken = [name for names in receives.values() for name in names]
        inputs = captured.model_inputs if stage == 0 else tuple(taken)
        nodes = [*sizes.computed, *(captured.layer_nodes[i] for i in self._ranges[stage])]
        if stage == self._num_stages - 1:
            nodes.append(self._output)
            outputs: tuple[str, ...] = (self._output.name,)
        else:
            given = {name for names in sends.values() for name in names}
            outputs = self._in_order(given)
        written = {
            storage for layer in self._ranges[stage] for storage in captured.found.writes[layer]
        }
        # The sender still holds the value, and autograd refuses writes to a received leaf.
        cloned = [
            name
            for name in (inputs if stage > 0 else ())
            if not written.isdisjoint(captured.found.storages.get(name, ()))
        ]
        source = generate(
            f"stage {stage}",
            nodes=nodes,
            inputs=inputs,
            outputs=outputs,
            attribute_of=captured.attribute_of,
            cloned_inputs=cloned,
            sizes=sizes.read,
            draws_of=self._draws.get,
            write=self._write,
        )
        return StageProgram(
            index=stage,
            inputs=inputs,
            receives=receives,
            outputs=outputs,
            sends=sends,
            parameters=parameters,
            unused_parameters=unused,
            buffers=buffers,
            layers=self._ranges[stage],
            first_layer_name=next((self._names[layer] for layer in self._ranges[stage]), None),
            home=captured.device,
            source=source,
        )

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self._position.__getitem__))

    def _owned(self) -> list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
        """Returns for each stage the parameters it uses, those it keeps unused, and the buffers."""
        captured = self._captured
        parameters = self._by_stage(captured.layer_parameters)
        buffers = self._by_stage(captured.layer_buffers)
        used = {name: stage for stage, names in enumerate(parameters) for name in names}
        held = {name: stage for stage, names in enumerate(buffers) for name in names}
        unused: list[list[str]] = [[] for _ in range(self._num_stages)]
        for name in captured.parameter_names:
            if name not in used:
                unused[_nearest(name, used)].append(name)
        extra: list[list[str]] = [[] for _ in range(self._num_stages)]
        for name in captured.buffer_names:
            if name not in held:
                extra[_nearest(name, used | held)].append(name)
        return [
            (tuple(parameters[stage]), tuple(unused[stage]), (*buffers[stage], *extra[stage]))
            for stage in range(self._num_stages)
        ]

    def _by_stage(self, names_of_layers: list[tuple[str, ...]]) -> list[list[str]]:
        return [
            list(dict.fromkeys(name for layer in layers for name in names_of_layers[layer]))
            for layers in self._ranges
        ]


def _shape(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _nearest(name: str, placed: dict[str, int]) -> int:
    """Returns the stage of the placed name that shares the longest module path with ``name``."""
    path = name.split(".")

    def num_shared(other: str) -> int:
        pairs = zip(path, other.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    nearest = max(placed, key=num_shared, default=None)
    return 0 if nearest is None else placed[nearest]
