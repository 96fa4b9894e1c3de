"""Tensor-parallel modules: which parameters are shards, and DTensors held as local ones."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..ranks.mesh import SHARDS

_Module = TypeVar("_Module", bound=nn.Module)

_DIMENSIONS = "_pipedream2bw_shard_dimensions"
"""Where a module has the dimensions in which its own parameters are cut, by their names there."""

_DTENSORS = "_pipedream2bw_dtensors"
"""Where a module has what makes DTensors of its own parameters, by their names there."""


class Part(NamedTuple):
    """Of a tensor that is cut into equal parts: the dimension, how many parts, and which one."""

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


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` is a DTensor. Does not load their modules, which takes a second."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def refuse_distributed_checkpoint(num_shards: int) -> None:
    """Raises ValueError where torch.distributed.checkpoint asks for shards.

    It takes what several processes have under one name for copies, and keeps the first alone.
    """
    frame = inspect.currentframe() if num_shards > 1 else None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            raise ValueError(
                f"torch.distributed.checkpoint: 'tp' of the mesh: {num_shards}, it must be 1: of "
                "each name it would keep one process's shard. Use pipedream2bw.save(), and export "
                "its checkpoint"
            )
        frame = frame.f_back


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
    on the processes of a stage.

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
        ValueError: a pattern fits no parameter, a parameter has no such dimension, or a DTensor is
            cut in another way than into equal parts over "tp".
    """
    for module in model.modules():
        module.__dict__.setdefault(_DIMENSIONS, {})
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and is_dtensor(parameter):
                dtensor: Any = parameter
                dimension = _dimension_of(f"{prefix}.{name}" if prefix else name, dtensor)
                if dimension is not None:
                    module.__dict__[_DIMENSIONS][name] = dimension
                if id(dtensor) not in made:
                    shard = dtensor.to_local().detach()
                    made[id(dtensor)] = nn.Parameter(shard, dtensor.requires_grad)
                module._parameters[name] = made[id(dtensor)]
                _show_as_dtensor(module, name, dtensor)
    names = dict(model.named_parameters())
    for pattern, (where, dimension) in (shards or {}).items():
        fitting = fnmatch.filter(names, pattern)
        if where != SHARDS or not fitting:
            raise ValueError(
                f"shards: {pattern!r}: {(where, dimension)!r} given, it must be a pattern that "
                f"fits a parameter, with {SHARDS!r} and a dimension. The parameters are: "
                f"{', '.join(names)}"
            )
        for name in fitting:
            if not 0 <= dimension < names[name].dim():
                raise ValueError(
                    f"shards: {pattern!r}: dimension {dimension} given, parameter {name} has "
                    f"{names[name].dim()} dimensions"
                )
            holder, _, own = name.rpartition(".")
            model.get_submodule(holder).__dict__[_DIMENSIONS][own] = dimension
    return model


def shard_dimensions(root: nn.Module) -> dict[str, int] | None:
    """The dimension in which each parameter is cut, by the names of those that are shards.

    None where no module was given to :func:`use_local_shards`.
    """
    found: dict[str, int] = {}
    is_known = False
    for prefix, module in root.named_modules():
        if (mine := module.__dict__.get(_DIMENSIONS)) is not None:
            is_known = True
            found |= {f"{prefix}.{name}" if prefix else name: mine[name] for name in mine}
    return found if is_known else None


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
    dimensions = shard_dimensions(root) or {} if num_parts > 1 else {}
    named = dict(root.named_parameters(remove_duplicate=False))
    cut = {id(named[name]): dimension for name, dimension in dimensions.items()}
    return {
        name: Part(cut[id(parameter)], num_parts, number)
        for name, parameter in named.items()
        if id(parameter) in cut
    }


def shapes_of_shards(root: nn.Module) -> str:
    """What all processes must have alike: parts of a parameter are equal."""
    named = dict(root.named_parameters(remove_duplicate=False))
    dimensions = shard_dimensions(root) or {}
    return str({name: (tuple(named[name].shape), cut) for name, cut in dimensions.items()})


def _dimension_of(name: str, dtensor: Any) -> int | None:
    """The dimension in which a DTensor is cut; None if every process has all of it."""
    mesh, placements = dtensor.device_mesh, dtensor.placements
    (placement,) = placements if len(placements) == 1 else (None,)
    if placement is not None and placement.is_replicate():
        return None
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
        return module.__dict__[_DTENSORS][name](nn.Module.__getattr__(module, name))

    return type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})
