"""Where the stages begin: balanced by cost, at given names, or as in another capture."""

from __future__ import annotations

import bisect
import dataclasses
import difflib
from collections.abc import Iterator, Sequence

from torch import fx

from .. import _C
from ..capture.captured import Captured, first_layers, modules_around
from .program import StageProgram

_FOR_WHOLE_BLOCKS = 1.01
"""How much slower a split may be that cuts between blocks, which readers know by their names."""


@dataclasses.dataclass(frozen=True)
class Bond:
    """Layers first..last have to be on one stage because of ``what``."""

    first: int
    last: int
    what: str


class Bonds:
    """The bonds of a model's layers."""

    def __init__(self, bonds: Sequence[Bond]) -> None:
        self._bonds = bonds
        self._parting = {cut for bond in bonds for cut in range(bond.first + 1, bond.last + 1)}

    def __iter__(self) -> Iterator[Bond]:
        return iter(self._bonds)

    def allow(self, cut: int) -> bool:
        """Tells whether a stage may begin at layer ``cut``."""
        return cut not in self._parting


def bonds_of(captured: Captured) -> Bonds:
    """Finds the layers that have to be on one stage.

    These share a buffer that one of them writes, a value that one of them writes in place, or one
    by which ``torch.autograd.grad`` differentiates them.
    Parameters may be on several stages, and so may buffers that are only read.
    """
    users: dict[str, list[int]] = {}
    for layer, names in enumerate(captured.layer_buffers):
        for name in names:
            if name in captured.found.written_buffers:
                users.setdefault(name, []).append(layer)
    found = [Bond(layers[0], layers[-1], f"buffer {name!r}") for name, layers in users.items()]
    found.extend(Bond(*bond) for bond in captured.found.bonds)
    return Bonds([bond for bond in found if bond.first != bond.last])


def choose_boundaries(
    captured: Captured, num_stages: int, split: str | Sequence[str] = "auto"
) -> list[int]:
    """Chooses the first layer of every stage.

    Raises:
        ValueError: more stages than layers; an unknown name or a wrong number of names in
            ``split``; or a buffer or value that is written and would be used on two stages.
    """
    num_layers = len(captured.layers)
    if num_stages > num_layers:
        raise ValueError(
            f"num_stages: {num_stages}, layers of the captured model: {num_layers}: every stage "
            "needs at least 1 layer"
        )
    if isinstance(split, str):
        if split != "auto":
            raise ValueError(
                f'split: {split!r} given; it must be "auto", a list of names where stages begin, '
                "or the model a list of modules"
            )
        return _balanced(captured, num_stages)
    boundaries = _named(captured, num_stages, list(split))
    _check_bonds(captured, boundaries)
    return boundaries


def place_like(captured: Captured, programs: Sequence[StageProgram]) -> list[int]:
    """Places another mode's capture so that every parameter and buffer stays on its stage.

    Returns the first layer of every stage. A parameter may be on several stages. A stage may get no
    layer at all (one whose layers do nothing in this mode).

    Raises:
        ValueError: there are no such boundaries; names the stage that cannot begin anywhere.
    """
    stages_of: dict[str, set[int]] = {}
    for program in programs:
        for name in (*program.parameters, *program.unused_parameters, *program.buffers):
            stages_of.setdefault(name, set()).add(program.index)
    everywhere = set(range(len(programs)))
    # By layer: the stages that hold all that it uses. Buffers that are only read may be on several.
    written = captured.found.written_buffers
    allowed = [
        everywhere.intersection(
            *(stages_of[name] for name in parameters if name in stages_of),
            *(stages_of[name] for name in buffers if name in stages_of and name in written),
        )
        for parameters, buffers in zip(
            captured.layer_parameters, captured.layer_buffers, strict=True
        )
    ]
    bonds = bonds_of(captured)
    fits = _what_fits(allowed, bonds, len(programs))
    begins = {program.index: program.first_layer_name for program in programs}
    boundaries = [0]
    for stage in range(1, len(programs)):
        legal = []
        for cut in range(boundaries[-1], len(allowed) + 1):
            if bonds.allow(cut) and fits[stage][cut]:
                legal.append(cut)
            if cut < len(allowed) and stage - 1 not in allowed[cut]:
                break
        if not legal:
            raise ValueError(
                f"stage {stage} cannot begin anywhere in the other mode's capture: its parameters "
                "and those of the stages before are not used one after another"
            )
        boundaries.append(_closest(captured, legal, begins[stage]))
    return boundaries


def crossing_values(captured: Captured) -> list[_C.Value]:
    """Lists the values that layers read, with the nominal seconds of a crossing.

    A model input counts as produced by layer 0, whose rank gets the model's arguments.
    """
    consumers_of: dict[str, tuple[int, list[int]]] = {}
    for producer, consumer, name in values_between(captured.layer_nodes):
        consumers_of.setdefault(name, (producer, []))[1].append(consumer)
    return [
        _C.Value(
            producer=producer,
            consumers=consumers,
            seconds=captured.costs.crossing.get(name, 0.0),
        )
        for name, (producer, consumers) in consumers_of.items()
    ]


def values_between(layer_nodes: Sequence[fx.Node]) -> list[tuple[int, int, str]]:
    """Lists (producer layer, consumer layer, value) of every use of a value in another layer.

    A model input counts as produced by layer 0, whose rank gets the model's arguments.
    """
    index_of = {node: index for index, node in enumerate(layer_nodes)}
    return [
        (index_of.get(value, 0), consumer, value.name)
        for consumer, node in enumerate(layer_nodes)
        for value in node.all_input_nodes
        if value.op != "get_attr" and index_of.get(value, 0) < consumer
    ]


def describe_layer(captured: Captured, index: int) -> str:
    """Describes a layer for a message: its name and the module that it is in."""
    name = captured.layers[index].name
    around = modules_around(captured.layer_nodes[index])
    return f"{name!r} in {around[-1]!r}" if around and around[-1] != name else repr(name)


def block_around(captured: Captured, index: int) -> str | None:
    """The outermost member of a list or sequence of modules that a layer is in."""
    for name in modules_around(captured.layer_nodes[index]):
        if name.rpartition(".")[2].isdigit():
            return name
    return None


def _what_fits(allowed: Sequence[set[int]], bonds: Bonds, num_stages: int) -> list[list[bool]]:
    """Tells by stage and layer whether that stage and later ones can have the layers from there."""
    fits = [[False] * len(allowed) + [True] for _ in range(num_stages + 1)]
    for layer in reversed(range(len(allowed))):
        for stage in reversed(range(num_stages)):
            fits[stage][layer] = (stage in allowed[layer] and fits[stage][layer + 1]) or (
                bonds.allow(layer) and fits[stage + 1][layer]
            )
    return fits


def _check_bonds(captured: Captured, boundaries: Sequence[int]) -> None:
    """Raises ValueError if boundaries separate what has to stay on one stage."""
    for bond in bonds_of(captured):
        first, last = (bisect.bisect(boundaries, layer) - 1 for layer in (bond.first, bond.last))
        if first != last:
            raise ValueError(
                f"{bond.what} is used in stages {first} and {last} (layers "
                f"{describe_layer(captured, bond.first)} and "
                f"{describe_layer(captured, bond.last)}): "
                "choose a split that puts both uses into one stage"
            )


def _balanced(captured: Captured, num_stages: int) -> list[int]:
    if captured.how == "list" and len(captured.layers) == num_stages:
        boundaries = list(range(num_stages))
        _check_bonds(captured, boundaries)
        return boundaries
    bonds = bonds_of(captured)
    num_layers = len(captured.layers)
    can_cut = [bonds.allow(cut) for cut in range(1, num_layers)]
    cuts = [cut for cut, can in enumerate(can_cut, 1) if can]
    if len(cuts) < num_stages - 1:
        longest = max(bonds, key=lambda bond: bond.last - bond.first)
        raise ValueError(
            f"num_stages: {num_stages}, but the model can be cut in only {len(cuts)} places: "
            f"{longest.what} is used by layers {describe_layer(captured, longest.first)} and "
            f"{describe_layer(captured, longest.last)}, which have to be on one stage. "
            f"Give num_stages <= {len(cuts) + 1}"
        )
    if len(cuts) == num_stages - 1:
        return [0, *cuts]
    layers = [
        _C.LayerCost(forward=layer.forward_cost, input_grad=layer.backward_cost)
        for layer in captured.layers
    ]
    values = crossing_values(captured)
    fastest = _C.split_stages(layers, num_stages, can_cut, values)
    between_blocks = [
        can and block_around(captured, cut - 1) != block_around(captured, cut)
        for cut, can in enumerate(can_cut, 1)
    ]
    if sum(between_blocks) < num_stages - 1:
        return fastest
    whole_blocks = _C.split_stages(layers, num_stages, between_blocks, values)
    least, found = (_slowest(split, layers, values) for split in (fastest, whole_blocks))
    return whole_blocks if found <= _FOR_WHOLE_BLOCKS * least else fastest


def _slowest(
    boundaries: Sequence[int], layers: Sequence[_C.LayerCost], values: Sequence[_C.Value]
) -> float:
    """Seconds of the slowest stage, by the rule of :func:`_C.split_stages`."""

    def stage_of(layer: int) -> int:
        return bisect.bisect(boundaries, layer) - 1

    seconds = [0.0] * len(boundaries)
    for number, layer in enumerate(layers):
        seconds[stage_of(number)] += layer.forward + layer.input_grad
    for value in values:
        touched = {stage_of(layer) for layer in (value.producer, *value.consumers)}
        for stage in touched if len(touched) > 1 else ():
            seconds[stage] += value.seconds
    return max(seconds)


def _named(captured: Captured, num_stages: int, names: list[str]) -> list[int]:
    if len(names) != num_stages - 1:
        raise ValueError(
            f"split: {len(names)} names, num_stages: {num_stages}: give num_stages - 1 = "
            f"{num_stages - 1} names, of the layers where stages 1, 2, ... begin"
        )
    first_layer = first_layers(captured)
    boundaries = [0]
    for name in names:
        if name not in first_layer:
            close = difflib.get_close_matches(str(name), first_layer, n=5, cutoff=0.5)
            known = close or sorted(first_layer, key=first_layer.__getitem__)[:10]
            raise ValueError(
                f"split: {name!r} is no module or layer of the captured model; "
                f"{'close matches' if close else 'the first ones'}: {', '.join(map(repr, known))}"
            )
        layer = first_layer[name]
        if layer <= boundaries[-1]:
            raise ValueError(
                f"split: {name!r} begins at layer {layer}, the stage before begins at layer "
                f"{boundaries[-1]}. Give names in the order of execution, each once"
            )
        boundaries.append(layer)
    return boundaries


def _closest(captured: Captured, legal: list[int], name: str | None) -> int:
    """Returns the legal cut at the layer called ``name``, else the cheapest one to cross."""
    first = first_layers(captured).get(name) if name is not None else None
    if first in legal:
        return first
    costs = [0.0] * (len(captured.layers) + 1)  # of what crosses each cut, in nominal seconds
    for value in crossing_values(captured):
        for cut in range(value.producer + 1, value.consumers[-1] + 1):
            costs[cut] += value.seconds
    return min(legal, key=costs.__getitem__)
