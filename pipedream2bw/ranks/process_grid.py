"""Which of several processes runs which stages, also by a DeviceMesh; and their groups."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .deadline import Deadline
from .grid import Places, RankGrid
from .groups import connect_devices, destroy_groups, new_group

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


class ProcessGrid(RankGrid):
    """The grid of several processes.

    With p ranks in the schedule, process replica * p + r runs the stages of rank r, where no mesh
    says otherwise.

    Where stages are tensor-parallel there is such a grid for each shard of them, apart from the
    others: each process has the groups of its own shard, and all make those of all.

    Args:
        grid: that of one process.
        width: number of replicas.
        world: number of processes.
        order: without a mesh, the process of each replica's rank, [replicas][ranks]; None: a
            replica's ranks are adjacent.

    Raises:
        ValueError: the world's size is not width * p.
    """

    in_processes = True

    def __init__(
        self,
        grid: RankGrid,
        *,
        width: int,
        world: int,
        order: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(grid.placement, grid.num_pipelines, grid.deadline, grid.mesh)
        self.width = width
        mesh, p = self.mesh, self.num_ranks
        if mesh is None and world != width * p:
            what = "stages" if p == self.num_stages else "ranks"
            raise ValueError(
                f"world size: {world}, width * {what}: {width} * {p} = {width * p}: every "
                f"{what[:-1]} of every replica is one process. Run torchrun --nproc-per-node "
                f"{width * p}, or change width or num_stages"
            )
        self.places = [order] if order is not None else places_in(mesh, width, p)
        self.num_shards = len(self.places)
        self.rank = dist.get_rank()
        self.shard, self.replica, own_rank = next(
            (shard, replica, rank)
            for shard, replicas in enumerate(self.places)
            for replica, ranks in enumerate(replicas)
            for rank, process in enumerate(ranks)
            if process == self.rank
        )
        self.local_ranks = [own_rank]
        self.stages = self.stages_of(own_rank)
        self._has_savers = False
        for stage in range(self.depth if width * self.num_pipelines > 1 else 0):
            self._join(stage, self._holders_of(stage))

    def _holders_of(self, stage: int) -> list[list[int]]:
        """The processes that hold a stage, for each shard."""
        copies = self.placement[stage :: self.depth]
        return [[ranks[copy] for ranks in replicas for copy in copies] for replicas in self.places]

    def join_savers(self) -> None:
        if self.width > 1 and not self._has_savers:
            self._has_savers = True
            for stage in range(self.depth):
                self._join(f"savers of {stage}", self._holders_of(stage), "gloo")

    def connect_replicas(self, devices: Sequence[torch.device], most_bytes: int) -> None:
        for stage in self.stages_of_model:
            group = self.replica_group(stage)
            if group is not None:
                connect_devices(group, devices[stage], most_bytes, self.deadline)

    def sum_order(self, stage: int, sums: str) -> list[int]:
        group = self.replica_group(stage)
        if group is None or sums != "ordered":
            return []
        copies = range(stage % self.depth, self.num_stages, self.depth)
        return [
            dist.get_group_rank(group, self.process_of(copy, replica))
            for replica in range(self.width)
            for copy in copies
        ]

    def group_of_replica(self) -> dist.ProcessGroup | None:
        return self._joined(
            None, [ranks for replicas in self.places for ranks in replicas if len(ranks) > 1]
        )

    def group_of_model(self) -> dist.ProcessGroup | None:
        return self._joined("model", [set(itertools.chain(*itertools.chain(*self.places)))])

    def _joined(
        self, key: str | None, teams: Iterable[Collection[int]]
    ) -> dist.ProcessGroup | None:
        if key not in self._groups:
            self._join(key, teams, "gloo")
        return self._groups.get(key)

    def teams_of(self, stages: Iterable[int]) -> list[set[int]]:
        """The processes that run these stages, for each shard and replica."""
        return [
            {self.process_of(stage, replica, shard) for stage in stages}
            for shard, replica in itertools.product(range(self.num_shards), range(self.width))
        ]

    def make_group(self, stages: tuple[int, ...]) -> None:
        self._join(stages, [team for team in self.teams_of(stages) if len(team) > 1], "gloo")

    def _join(
        self,
        key: int | tuple[int, ...] | str | None,
        teams: Iterable[Collection[int]],
        backend: str | None = None,
    ) -> None:
        group = new_group(teams, self.deadline, backend)
        if group is not None:
            self._groups[key] = group

    def close(self) -> None:
        destroy_groups(self._groups.values())
        self._groups.clear()
