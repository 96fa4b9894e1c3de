"""Which process runs which stages of which replica, and the groups of those that share some."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .deadline import Deadline
from .groups import connect_devices, destroy_groups, new_group
from .mesh import SHARDS, Mesh, Places, places_in


class RankGrid:
    """Which process runs which stages of which replica: one runs all, each rank in a thread.

    Of several processes, with p ranks in the schedule, process replica * p + r runs the stages of
    rank r, where no mesh says otherwise. Every process makes it, with the same arguments. Stages
    are the schedule's: with two pipelines each stage of the model has two.

    Where stages are tensor-parallel there is such a grid for each shard of them, apart from the
    others: each process has the groups of its own shard, and all make those of all.

    Args:
        placement: the schedule's rank of each stage.
        num_pipelines: the schedule's.
        deadline: ends waiting for other processes.
        mesh: of all processes, see :func:`check_mesh`; None: there is none so far.
        width: number of replicas.
        world: number of processes.
        order: without a mesh, the process of each replica's rank, [replicas][ranks]; None: a
            replica's ranks are adjacent.

    Attributes:
        placement, num_pipelines, deadline, width: as given. mesh: if a DeviceMesh was given.
        num_stages, num_ranks: of the schedule.
        depth: stages of the model.
        in_processes: whether there are several.
        places: all processes. num_shards: of each tensor-parallel stage.
        rank, replica, shard: this process, and its replica and shard.
        local_ranks, stages: the schedule's ranks and stages that this process runs.

    Raises:
        ValueError: the world's size is not width * p.
    """

    def __init__(
        self,
        placement: Sequence[int],
        num_pipelines: int,
        deadline: Deadline,
        mesh: Mesh | None = None,
        *,
        width: int = 1,
        world: int = 1,
        order: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.num_stages = len(placement)
        self.num_pipelines = num_pipelines
        self.depth = len(placement) // num_pipelines
        self.width = width
        self.placement = list(placement)
        self.num_ranks = max(placement) + 1
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else None
        self.deadline = deadline
        # By what the processes share: a stage of the model, several stages, (None) a replica, or
        # ("model") the model.
        self._groups: dict[int | tuple[int, ...] | str | None, dist.ProcessGroup] = {}
        self.in_processes = world > 1
        self._check_world(world, mesh)
        self.rank = self.replica = self.shard = 0
        self.local_ranks = list(range(self.num_ranks))
        self.places: Places = [[[0] * self.num_ranks]]
        if self.in_processes:
            self.places = [order] if order is not None else places_in(mesh, width, self.num_ranks)
            self.rank = dist.get_rank()
            self.shard, self.replica, own_rank = next(
                (shard, replica, rank)
                for shard, replicas in enumerate(self.places)
                for replica, ranks in enumerate(replicas)
                for rank, process in enumerate(ranks)
                if process == self.rank
            )
            self.local_ranks = [own_rank]
        self.num_shards = len(self.places)
        self.stages = [s for s, rank in enumerate(self.placement) if rank in self.local_ranks]
        for stage in range(self.depth if width * num_pipelines > 1 else 0):
            self._join(stage, self._holders_of(stage))

    def _check_world(self, world: int, mesh: Mesh | None) -> None:
        width, p = self.width, self.num_ranks
        if not self.in_processes and width != 1:
            raise ValueError(
                f"width: {width}, processes: 1: replicas need one process per rank of the schedule "
                f"and replica: run under torchrun --nproc-per-node {width * p}"
            )
        if self.in_processes and mesh is None and world != width * p:
            what = "stages" if p == self.num_stages else "ranks"
            raise ValueError(
                f"world size: {world}, width * {what}: {width} * {p} = {width * p}: every "
                f"{what[:-1]} of every replica is one process. Run torchrun --nproc-per-node "
                f"{width * p}, or change width or num_stages"
            )

    @property
    def mesh_of_shards(self) -> DeviceMesh | None:
        """The processes of this one's stage, where each has shards of it."""
        return self.mesh[SHARDS] if self.mesh is not None and self.num_shards > 1 else None

    @property
    def stages_of_model(self) -> list[int]:
        """The model's stages that this process runs, in whichever pipeline."""
        return sorted({stage % self.depth for stage in self.stages})

    def is_first(self, stage: int) -> bool:
        """Whether a pipeline begins with it."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Whether a pipeline ends with it."""
        return stage % self.depth == self.depth - 1

    def pipeline(self, stage: int) -> int:
        """The pipeline that it belongs to."""
        return stage // self.depth

    def stages_of(self, rank: int) -> list[int]:
        """The stages of one of the schedule's ranks."""
        return [stage for stage, placed in enumerate(self.placement) if placed == rank]

    def process_of(self, stage: int, replica: int | None = None, shard: int | None = None) -> int:
        """The process that runs ``stage`` of a replica, by default of this process's own."""
        shard = self.shard if shard is None else shard
        replica = self.replica if replica is None else replica
        return self.places[shard][replica][self.placement[stage]]

    def share_a_rank(self, stage: int, other: int) -> bool:
        return self.placement[stage] == self.placement[other]

    def teams_of(self, stages: Iterable[int]) -> list[set[int]]:
        """The processes that run these stages, for each shard and replica."""
        return [
            {self.process_of(stage, replica, shard) for stage in stages}
            for shard, replica in itertools.product(range(self.num_shards), range(self.width))
        ]

    def _holders_of(self, stage: int) -> list[list[int]]:
        """The processes that hold a stage, for each shard."""
        copies = self.placement[stage :: self.depth]
        return [[ranks[copy] for ranks in replicas for copy in copies] for replicas in self.places]

    # ------------------------------------------------------------------ groups

    def replica_group(self, stage: int) -> dist.ProcessGroup | None:
        """The processes that hold one of this process's stages, if there are several."""
        return self._groups.get(stage % self.depth)

    def join_savers(self) -> None:
        """Makes :meth:`savers` of every stage, if they are not there. Every process calls it."""
        if self.width > 1 and f"savers of {self.stages_of_model[0]}" not in self._groups:
            for stage in range(self.depth):
                self._join(f"savers of {stage}", self._holders_of(stage), "gloo")

    def savers(self, stage: int) -> dist.ProcessGroup:
        """The hosts of a stage's replicas, for copies that are made beside updates."""
        return self._groups[f"savers of {stage % self.depth}"]

    def connect_replicas(self, devices: Sequence[torch.device], most_bytes: int) -> None:
        """Connects the devices, one for each stage, that add up a stage's gradients.

        Every process calls it, and all take stages in one order.
        """
        for stage in self.stages_of_model:
            group = self.replica_group(stage)
            if group is not None:
                connect_devices(group, devices[stage], most_bytes, self.deadline)

    def sum_order(self, stage: int, sums: str) -> list[int]:
        """Returns the ranks of :meth:`replica_group` as their gradients are added up.

        Args:
            sums: ``"ordered"``: from replica 0's first pipeline on; else none, in any order.
        """
        group = self.replica_group(stage)
        if group is None or sums != "ordered":
            return []
        copies = range(stage % self.depth, self.num_stages, self.depth)
        return [
            dist.get_group_rank(group, self.process_of(copy, replica))
            for replica in range(self.width)
            for copy in copies
        ]

    def hosts(self, *, of_model: bool) -> dist.ProcessGroup | None:
        """The hosts of this one's replica, or of all, if several. Every process calls it."""
        teams = [
            set(itertools.chain(*(replicas[replica] for replicas in self.places)))
            for replica in range(self.width)
        ]
        key = None
        if of_model:
            key, teams = "model", [set(itertools.chain(*teams))]
        if key not in self._groups:
            self._join(key, [team for team in teams if len(team) > 1], "gloo")
        return self._groups.get(key)

    def make_group(self, stages: tuple[int, ...]) -> None:
        """Joins the hosts of each replica's processes with these stages. Every process calls it.

        Stages make a batch's updates in different batches' actions, so what joins them must not
        keep devices waiting, as a transfer between these would.
        """
        self._join(stages, [team for team in self.teams_of(stages) if len(team) > 1], "gloo")

    def group_of(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group that :meth:`make_group` made; None unless it joins this process to others."""
        return self._groups.get(stages)

    def _join(
        self,
        key: int | tuple[int, ...] | str | None,
        teams: Iterable[Collection[int]],
        backend: str | None = None,
    ) -> None:
        group = new_group(teams, self.deadline, backend) if self.in_processes else None
        if group is not None:
            self._groups[key] = group

    def close(self) -> None:
        """Drops the groups."""
        destroy_groups(self._groups.values())
        self._groups.clear()
