"""Tensor-parallel modules whose parameters are DTensors, held as local shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import parametrize

_Module = TypeVar("_Module", bound=nn.Module)


class _AsDTensor(nn.Module):
    """The DTensor of which this process has a shard; its gradient is the shard's."""

    def __init__(self, like: DTensor) -> None:
        super().__init__()
        self._mesh: DeviceMesh = like.device_mesh
        self._placements: Sequence[Placement] = like.placements
        self._shape, self._stride = like.shape, like.stride()

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = DTensor.from_local(
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


def use_local_shards(model: _Module) -> _Module:
    """Replaces parameters that are DTensors by this process's shards, and returns the model.

    A pipeline's buffers hold plain tensors. The module makes the DTensor again in each forward, by
    a parametrization (``torch.nn.utils.parametrize``), so that what
    ``torch.distributed.tensor.parallel.parallelize_module`` has made of it works as before::

        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        pipe = pd2.PipelineModule(pd2.use_local_shards(model), loss_fn, mesh=mesh, ...)

    Optimizer and ``state_dict`` see ``weight``'s shard as ``parametrizations.weight.original``.
    """
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                shard = parameter.to_local().detach()
                module._parameters[name] = nn.Parameter(shard, parameter.requires_grad)
                # unsafe: no check whether the DTensor may take the shard's place.
                as_dtensor = _AsDTensor(parameter)
                parametrize.register_parametrization(module, name, as_dtensor, unsafe=True)
    return model
