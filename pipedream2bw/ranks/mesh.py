"""Where a DeviceMesh says that replicas, stages and their shards are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .deadline import Deadline

Places = Sequence[Sequence[Sequence[int]]]
"""The process of each shard, replica and rank of the schedule, in that order."""

REPLICAS, STAGES, SHARDS = "dp", "pp", "tp"


def check_mesh(mesh: object, width: int) -> int:
    """The width that goes with ``mesh``, ``width`` if that is None.

    Raises:
        TypeError, ValueError: it is no mesh of all processes, or its dimensions are not known here.
    """
    if mesh is None:
        return width
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: {type(mesh).__name__} given, it must be a DeviceMesh")
    names = mesh.mesh_dim_names or ()
    if STAGES not in names or not set(names) <= {REPLICAS, STAGES, SHARDS}:
        raise ValueError(
            f"mesh: its dimensions are {names or 'without names'}, they must be 'pp', and 'dp' and "
            "'tp' where there are replicas and tensor-parallel stages"
        )
    processes = sorted(mesh.mesh.flatten().tolist())
    world = dist.get_world_size()
    if processes != list(range(world)):
        raise ValueError(
            f"mesh: ranks {processes}, world size: {world}: every process must be in the mesh once"
        )
    size = _size(mesh, REPLICAS)
    if width not in (1, size):
        raise ValueError(f"width: {width}, 'dp' of the mesh: {size}: leave out width")
    return size


def places_in(mesh: DeviceMesh | None, width: int, num_ranks: int) -> Places:
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
    names = mesh.mesh_dim_names or ()
    order = [names.index(name) for name in (SHARDS, REPLICAS, STAGES) if name in names]
    places = mesh.mesh.permute(order).reshape(_size(mesh, SHARDS), width, num_ranks)
    found: Places = places.tolist()
    return found


def mesh_of(places: Places, device_type: str, deadline: Deadline) -> DeviceMesh:
    """A mesh of the dimensions "dp" and "pp". Every process calls it."""
    (replicas,) = places
    make = functools.partial(
        DeviceMesh, device_type, torch.tensor(replicas), mesh_dim_names=(REPLICAS, STAGES)
    )
    return deadline.wait("making the mesh", make)


def described(mesh: object) -> str:
    """For comparing it between ranks."""
    if isinstance(mesh, DeviceMesh):
        return f"{mesh.mesh_dim_names} {mesh.mesh.tolist()}"
    return str(mesh)


def _size(mesh: DeviceMesh, name: str) -> int:
    names = mesh.mesh_dim_names or ()
    return int(mesh.size(names.index(name))) if name in names else 1
