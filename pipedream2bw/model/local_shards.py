"""Tensor-parallel modules: which parameters are shards, and DTensors held as local ones."""

from __future__ import annotations

import fnmatch
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from ..ranks.mesh import SHARDS

_Module = TypeVar("_Module", bound=nn.Module)

_DIMENSIONS = "_pipedream2bw_shard_dimensions"
"""Where a module has the dimensions in which its own parameters are cut, by their names there."""

_DTENSORS = "_pipedream2bw_dtensors"
"""Where a module has what makes DTensors of its own parameters, by their names there."""


class Part(NamedTuple):
    """One of the equal parts into which a tensor is cut.

    Attributes:
        dimension: in which the tensor is cut.
        num_parts: how many parts there are.
        number: of this part, from 0.
    """

    dimension: int
    num_parts: int
    number: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor, which must be divisible."""
        size = whole.shape[self.dimension] // self.num_parts
        return whole.narrow(self.dimension, self.number * size, size).contiguous()

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The whole tensor's shape, from a part's."""
        at = self.dimension
        return (*shape[:at], shape[at] * self.num_parts, *shape[at + 1 :])


def is_dtensor(tensor: object) -> bool:
    """Tells whether ``tensor`` is a DTensor. Does not load their modules, which takes a second."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def as_dtensors(
    state: Any, parts: Mapping[str, Part], shapes: Mapping[str, torch.Size], mesh: DeviceMesh
) -> Any:
    """State by names, nested, in which a process's parts of tensors are DTensors.

    Args:
        shapes: of the parts. What an optimizer keeps of one in another shape stays as it is.
        mesh: the processes of the stage.
    """
    from torch.distributed.tensor import DTensor, Shard

    def shown(path: Sequence[Any], value: Any) -> Any:
        name = next((key.key for key in path if getattr(key, "key", None) in parts), None)
        if name is None or not isinstance(value, torch.Tensor) or value.shape != shapes[name]:
            return value
        if value.device.type != mesh.device_type:
            raise ValueError(
                f"state of {name} on {value.device}, 'tp' of the mesh: {mesh.size()} on "
                f"{mesh.device_type}: a DTensor would move it there. Use pipedream2bw.save()"
            )
        return DTensor.from_local(value, mesh, [Shard(parts[name].dimension)], run_check=False)

    return pytree.tree_map_with_path(shown, state)


def as_local(state: Any, mesh: DeviceMesh | None) -> Any:
    """The other way round.

    Raises:
        ValueError: a DTensor is cut over other processes than those of the stage.
    """

    def local(value: Any) -> Any:
        if not is_dtensor(value):
            return value
        is_ours = mesh is not None and torch.equal(value.device_mesh.mesh, mesh.mesh)
        if any(p.is_partial() or (p.is_shard() and not is_ours) for p in value.placements):
            raise ValueError(
                f"state_dict: a DTensor of {value.placements} over processes "
                f"{value.device_mesh.mesh.tolist()}, the stage's shards are those of "
                f"{None if mesh is None else mesh.mesh.tolist()}: give full_tensor()"
            )
        return value.to_local()

    return pytree.tree_map(local, state)


def refuse_unknown_shards(what: str, facts: Mapping[str, Any]) -> None:
    """Raises ValueError where nothing tells which parameters are shards."""
    num_shards = facts["'tp' of the mesh"]
    if num_shards > 1 and facts["shards"] is None:
        raise ValueError(
            f"{what}, 'tp' of the mesh: {num_shards}, shards: None: nothing tells which parameters "
            "are shards of one and which are equal on all: give the model to "
            "use_local_shards(model, shards={...}) first"
        )


def use_local_shards(
    model: _Module, shards: Mapping[str, tuple[str, int]] | None = None
) -> _Module:
    """Notes which parameters are shards, replaces DTensors by this process's, returns the model.

    A pipeline's buffers hold plain tensors. A module whose parameter was a DTensor makes it again
    when its forward reads the attribute, so that modules work as
    ``torch.distributed.tensor.parallel.parallelize_module`` has made them. Optimizers and
    ``state_dict`` see the shards, under the same names. All other parameters are taken to be equal
    on the processes of a stage, and so are their gradients: ``PipelineOptimizer.step()`` raises
    ValueError where they drift apart.

    >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    >>> block = parallelize_module(model[0], mesh["tp"], plan)
    >>> model = pd2.use_local_shards(model)
    >>> pipe = pd2.PipelineModule(
    ...     model, loss_fn, mesh=mesh, num_stages=1, num_microbatches=4, example_args=(x,)
    ... )

    Args:
        shards: of parameters that the model's own code has cut: a pattern of names, as of
            ``fnmatch``, with the mesh's dimension, ``"tp"``, and the tensor's: ``{"*.up.weight":
            ("tp", 0)}``.

    Raises:
        TypeError: ``shards`` is something else.
        ValueError: a pattern fits no parameter; a parameter has no such dimension, or is given two;
            a DTensor is neither replicated nor cut into equal parts over "tp".
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, int] = {}  # by parameter
    for name, parameter in named.items():
        if is_dtensor(parameter) and (dimension := _dimension_of(name, parameter)) is not None:
            found[id(parameter)] = dimension
    for pattern, given in (shards or {}).items():
        _note(pattern, given, named, found)
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        noted = module.__dict__.setdefault(_DIMENSIONS, {})
        for name, own in list(module._parameters.items()):
            if id(own) in found:
                noted[name] = found[id(own)]
            if own is not None and is_dtensor(own):
                dtensor: Any = own
                if id(dtensor) not in made:
                    shard = dtensor.to_local().detach()
                    made[id(dtensor)] = nn.Parameter(shard, dtensor.requires_grad)
                module._parameters[name] = made[id(dtensor)]
                _show_as_dtensor(module, name, dtensor)
    return model


def _note(
    pattern: str, given: Any, named: Mapping[str, nn.Parameter], found: dict[int, int]
) -> None:
    """Puts the dimension of the parameters that a pattern fits into ``found``."""
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    where, dimension = given if is_pair else (None, None)
    if where != SHARDS or not isinstance(dimension, int) or isinstance(dimension, bool):
        raise TypeError(
            f"shards: {pattern!r}: {given!r} given, it must be ({SHARDS!r}, the dimension of the "
            "tensor)"
        )
    fitting = fnmatch.filter(named, pattern)
    if not fitting:
        raise ValueError(
            f"shards: {pattern!r} fits 0 parameters, it must fit one: {', '.join(named)}"
        )
    for name in fitting:
        parameter = named[name]
        if not 0 <= dimension < parameter.dim():
            raise ValueError(
                f"shards: {pattern!r}: dimension {dimension} given, parameter {name} has "
                f"{parameter.dim()}: it must be 0 to {parameter.dim() - 1}"
            )
        if found.setdefault(id(parameter), dimension) != dimension:
            raise ValueError(
                f"shards: {pattern!r}: dimension {dimension} given for parameter {name}, which is "
                f"cut in dimension {found[id(parameter)]}: give one"
            )


def shard_dimensions(root: nn.Module) -> dict[str, int] | None:
    """The dimension in which each parameter is cut, by all names of those that are shards.

    None unless every module with parameters of its own was given to :func:`use_local_shards`.
    """
    cut: dict[int, int] = {}
    for module in root.modules():
        noted = module.__dict__.get(_DIMENSIONS)
        mine = [name for name, each in module._parameters.items() if each is not None]
        if noted is None and mine:
            return None
        noted = noted or {}
        cut |= {id(module._parameters[name]): noted[name] for name in mine if name in noted}
    named = root.named_parameters(remove_duplicate=False)
    return {name: cut[id(parameter)] for name, parameter in named if id(parameter) in cut}


def parameter_at(root: nn.Module, name: str) -> nn.Parameter:
    """The parameter of this name: a shard where the module's attribute gives a DTensor."""
    holder, _, own = name.rpartition(".")
    found = root.get_submodule(holder)._parameters[own]
    assert found is not None
    return found


def parts_here(root: nn.Module, number: int, num_parts: int) -> dict[str, Part]:
    """Which part of each sharded parameter a process has, by all its names.

    Args:
        number: of the process among those of its stage.
    """
    dimensions = (shard_dimensions(root) or {}) if num_parts > 1 else {}
    return {name: Part(cut, num_parts, number) for name, cut in dimensions.items()}


def put_together(
    of_shards: Sequence[Mapping[str, Any]], parts: Mapping[str, Part]
) -> dict[str, Any]:
    """The whole of what a stage's processes have; ValueError if what is no shard differs."""
    first, *others = of_shards
    whole = dict(first)
    for name in first:
        if name in parts:
            whole[name] = torch.cat([each[name] for each in of_shards], parts[name].dimension)
        elif isinstance(first[name], torch.Tensor):
            for number, other in enumerate(others, 1):
                if not torch.equal(first[name], other[name]):
                    raise ValueError(
                        f"{name}: process {number} of a stage has other values than process 0, "
                        "what is no shard must be equal on all. Name it in "
                        "use_local_shards(model, shards={...}) if it is one"
                    )
    return whole


def shapes_of_shards(root: nn.Module) -> str:
    """What all processes must have alike: parts of a parameter are equal."""
    named = dict(root.named_parameters(remove_duplicate=False))
    dimensions = shard_dimensions(root) or {}
    return str({name: (tuple(named[name].shape), cut) for name, cut in dimensions.items()})


def _dimension_of(name: str, dtensor: Any) -> int | None:
    """The dimension in which a DTensor is cut; None if every process has all of it."""
    mesh, placements = dtensor.device_mesh, dtensor.placements
    if all(placement.is_replicate() for placement in placements):
        return None
    (placement,) = placements if len(placements) == 1 else (None,)
    cut: int | None = getattr(placement, "dim", None)
    is_equal = cut is not None and dtensor.shape[cut] % mesh.size() == 0
    if not is_equal or (mesh.mesh_dim_names or (SHARDS,)) != (SHARDS,):
        raise ValueError(
            f"parameter {name}: a DTensor of shape {tuple(dtensor.shape)} placed as {placements} "
            f"on the mesh {mesh.mesh_dim_names}, it must be replicated, or cut into equal parts "
            f"over the dimension {SHARDS!r} alone"
        )
    return cut


def _show_as_dtensor(module: nn.Module, name: str, like: Any) -> None:
    """Has an attribute give the DTensor of which the parameter is this process's part."""
    make = functools.partial(
        type(like).from_local,
        device_mesh=like.device_mesh,
        placements=like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    module.__dict__.setdefault(_DTENSORS, {})[name] = make
    # nn.Module finds parameters where classes have no such attribute: torch.nn.utils.parametrize
    # gives a module a class of its own, too, but other names to its parameters.
    kind: Any = type(module)
    module.__class__ = _class_with(kind, name)


@functools.cache
def _class_with(kind: Any, name: str) -> Any:
    def read(module: nn.Module) -> Any:
        # So that what traces reads of parameters sees this one.
        shard = nn.Module.__getattr__(module, name)
        try:
            return module.__dict__[_DTENSORS][name](shard)
        except AttributeError as error:  # after which nn.Module would give the shard
            raise RuntimeError(f"parameter {name}: no DTensor: {error}") from error

    return type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})
