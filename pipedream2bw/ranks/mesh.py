"""Where a mesh says that replicas, stages and their shards are."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checks import check_whole_number
from ..rules import instance
from .deadline import Deadline

Places = Sequence[Sequence[Sequence[int]]]
"""The process of each shard, replica and rank of the schedule, in that order."""

Mesh = DeviceMesh | Mapping[str, int]
"""A DeviceMesh, or its sizes by name: then ranks are in order, adjacent along the last one."""

REPLICAS, STAGES, SHARDS = "dp", "pp", "tp"


def check_mesh(mesh: Any, width: int) -> int:
    """The width that goes with ``mesh``, ``width`` if that is None.

    Raises:
        TypeError, ValueError: it is no mesh of all processes, or its dimensions are not known here.
    """
    if mesh is None:
        return width
    kinds = instance("a DeviceMesh, or a dict of sizes by names", DeviceMesh, Mapping)
    kinds.check("mesh", mesh)
    names = _names(mesh)
    if STAGES not in names or not set(names) <= {REPLICAS, STAGES, SHARDS}:
        raise ValueError(
            f"mesh: its dimensions are {names or 'without names'}, they must be 'pp', and 'dp' and "
            "'tp' where there are replicas and tensor-parallel stages"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(mesh, Mapping):
        for name, size in mesh.items():
            check_whole_number(f"mesh[{name!r}]", size)
        if math.prod(mesh.values()) != world:
            raise ValueError(
                f"mesh: {dict(mesh)}, world size: {world}: the sizes must multiply to the world's. "
                f"Run torchrun --nproc-per-node {math.prod(mesh.values())}, or change a size"
            )
    elif (ranks := sorted(mesh.mesh.flatten().tolist())) != list(range(world)):
        raise ValueError(
            f"mesh: ranks {ranks}, world size: {world}: every process must be in the mesh once"
        )
    size = _size(mesh, REPLICAS)
    if width not in (1, size):
        raise ValueError(f"width: {width}, 'dp' of the mesh: {size}: leave out width")
    return size


def places_in(mesh: Mesh | None, width: int, num_ranks: int) -> Places:
    """Where everything is; without a mesh the ranks of a replica are adjacent.

    Args:
        num_ranks: of the schedule.

    Raises:
        ValueError: the mesh has another number of stages.
    """
    if mesh is None:
        return [[list(range(i * num_ranks, (i + 1) * num_ranks)) for i in range(width)]]
    if _size(mesh, STAGES) != num_ranks:
        raise ValueError(
            f"'pp' of the mesh: {_size(mesh, STAGES)}, ranks of the schedule: {num_ranks}: every "
            "rank of a replica is one process"
        )
    names, processes = _names(mesh), _processes(mesh)
    order = [names.index(name) for name in (SHARDS, REPLICAS, STAGES) if name in names]
    places = processes.permute(order).reshape(_size(mesh, SHARDS), width, num_ranks)
    found: Places = places.tolist()
    return found


def mesh_of(places: Places, device_type: str, deadline: Deadline) -> DeviceMesh:
    """A mesh of "dp" and "pp", and of "tp" if there are shards. Every process calls it."""
    processes = torch.tensor(places).permute(1, 2, 0)
    names = (REPLICAS, STAGES, SHARDS) if len(places) > 1 else (REPLICAS, STAGES)
    processes = processes.reshape(processes.shape[: len(names)])
    make = functools.partial(DeviceMesh, device_type, processes, mesh_dim_names=names)
    return deadline.wait("making the mesh", make)


def described(mesh: object) -> str:
    """For comparing it between ranks."""
    if isinstance(mesh, (DeviceMesh, Mapping)):
        return f"{_names(mesh)} {_processes(mesh).tolist()}"
    return str(mesh)


def _names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(mesh) if isinstance(mesh, Mapping) else mesh.mesh_dim_names or ()


def _processes(mesh: Mesh) -> torch.Tensor:
    if isinstance(mesh, Mapping):
        sizes = tuple(mesh.values())
        return torch.arange(math.prod(sizes)).reshape(sizes)
    return mesh.mesh


def _size(mesh: Mesh, name: str) -> int:
    names = _names(mesh)
    return _processes(mesh).shape[names.index(name)] if name in names else 1
