"""Tensor-parallel modules whose parameters are DTensors, held as local shards."""

from __future__ import annotations

import inspect
import sys
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

_Module = TypeVar("_Module", bound=nn.Module)


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


def use_local_shards(model: _Module) -> _Module:
    """Replaces parameters that are DTensors by this process's shards, and returns the model.

    A pipeline's buffers hold plain tensors. The module makes the DTensor again in each forward, by
    a parametrization (``torch.nn.utils.parametrize``), so that modules work as
    ``torch.distributed.tensor.parallel.parallelize_module`` has made them.

    >>> shards = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    >>> block = parallelize_module(model[0], mesh["tp"], shards)
    >>> model = pd2.use_local_shards(model)
    >>> pipe = pd2.PipelineModule(
    ...     model, loss_fn, mesh=mesh, num_stages=1, num_microbatches=4, example_args=(x,)
    ... )

    Optimizers and ``state_dict`` see ``weight``'s shard as ``parametrizations.weight.original``.
    """
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_dtensor(parameter):
                dtensor: Any = parameter
                shard = dtensor.to_local().detach()
                module._parameters[name] = nn.Parameter(shard, dtensor.requires_grad)
                # unsafe: no check whether the DTensor may take the shard's place.
                parametrize.register_parametrization(module, name, _AsDTensor(dtensor), unsafe=True)
    return model


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
