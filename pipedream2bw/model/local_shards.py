"""Tensor-parallel modules: which parameters are shards, and DTensors held as local ones."""

from __future__ import annotations

import fnmatch
import inspect
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..ranks.mesh import SHARDS

_Module = TypeVar("_Module", bound=nn.Module)

_DIMENSIONS = "_pipedream2bw_shard_dimensions"
"""Where a module has the dimensions in which its own parameters are cut, by their names there."""


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
                "each name it would keep one process's shard. Save the state_dict() of every "
                "process with torch.save"
            )
        frame = frame.f_back


def use_local_shards(
    model: _Module, shards: Mapping[str, tuple[str, int]] | None = None
) -> _Module:
    """Notes which parameters are shards, replaces DTensors by this process's, returns the model.

    A pipeline's buffers hold plain tensors. A module with DTensors makes each again in its forward,
    by a parametrization (``torch.nn.utils.parametrize``), so that modules work as
    ``torch.distributed.tensor.parallel.parallelize_module`` has made them. All other parameters are
    taken to be equal on the processes of a stage.

    >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    >>> block = parallelize_module(model[0], mesh["tp"], plan)
    >>> model = pd2.use_local_shards(model)
    >>> pipe = pd2.PipelineModule(
    ...     model, loss_fn, mesh=mesh, num_stages=1, num_microbatches=4, example_args=(x,)
    ... )

    Optimizers and ``state_dict`` see ``weight``'s shard as ``parametrizations.weight.original``.

    Args:
        shards: of parameters that the model's own code has cut: a pattern of names, as of
            ``fnmatch``, with the mesh's dimension, ``"tp"``, and the tensor's: ``{"*.up.weight":
            ("tp", 0)}``.

    Raises:
        ValueError: a pattern fits no parameter, a parameter has no such dimension, or a DTensor is
            cut in another way than into equal parts over "tp".
    """
    found: dict[str, int] = {}
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_dtensor(parameter):
                full = f"{prefix}.{name}" if prefix else name
                dtensor: Any = parameter
                shard = dtensor.to_local().detach()
                dimension = _dimension_of(full, dtensor)
                module._parameters[name] = nn.Parameter(shard, dtensor.requires_grad)
                # unsafe: no check whether the DTensor may take the shard's place.
                parametrize.register_parametrization(module, name, _AsDTensor(dtensor), unsafe=True)
                if dimension is not None:
                    found[f"{full.removesuffix(name)}parametrizations.{name}.original"] = dimension
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
            found[name] = dimension
    for module in model.modules():
        module.__dict__.pop(_DIMENSIONS, None)
    model.__dict__[_DIMENSIONS] = {}
    for name, dimension in found.items():
        holder, _, own = name.rpartition(".")
        model.get_submodule(holder).__dict__.setdefault(_DIMENSIONS, {})[own] = dimension
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


class _AsDTensor(nn.Module):
    """Makes the DTensor of which this process has a shard; its gradient is the shard's."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self._from_local = type(like).from_local
        self._mesh, self._placements = like.device_mesh, like.placements
        self._shape, self._stride = like.shape, like.stride()

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._from_local(
            shard,
            self._mesh,
            self._placements,
            run_check=False,
            shape=self._shape,
            stride=self._stride,
        )
        return made

    def extra_repr(self) -> str:
        return f"shape={tuple(self._shape)}, placements={self._placements}"
