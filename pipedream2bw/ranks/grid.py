"""Which process runs which stages of which replica."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from .deadline import Deadline
from .mesh import Places, places_in


class RankGrid:
    """Which process runs which stages of which replica.

    With p ranks in the schedule, process replica * p + r runs the stages of rank r, where no mesh
    says otherwise. A world of one process runs all of them, each rank in a thread. Every process
    makes it, with the same arguments.

    Where stages are tensor-parallel there is such a grid for each shard of them, apart from the
    others: each process has the groups of its own shard, and all make those of all.

    Stages are the schedule's: with two pipelines each stage of the model has two.

    Args:
        placement: the schedule's rank of each stage.
        num_pipelines: the schedule's.
        width: number of replicas.
        world: number of processes.
        deadline: ends waiting for other processes.
        mesh: of all processes, see :func:`check_mesh`.
        order: without a mesh, the process of each replica's rank, [replicas][ranks]; None: a
            replica's ranks are adjacent.

    Raises:
        ValueError: the world's size is not width * p, or width > 1 in one process.
    """

    def __init__(
        self,
        *,
        placement: Sequence[int],
        num_pipelines: int,
        width: int,
        world: int,
        deadline: Deadline,
        mesh: DeviceMesh | None = None,
        order: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.num_stages = len(placement)
        self.num_pipelines = num_pipelines
        self.depth = len(placement) // num_pipelines
        self.width = width
        self.rank = 0
        self.replica = 0
        self.shard = 0
        self._placement = list(placement)
        self._num_ranks = p = max(placement) + 1
        self._own_rank = 0
        self.places: Places = [[[0] * p]]
        self.deadline = deadline
        # By what the processes share: a stage of the model, several stages, or (None) a replica.
        self._groups: dict[int | tuple[int, ...] | None, dist.ProcessGroup] = {}
        self.mesh = mesh
        self.in_processes = world > 1
        if not self.in_processes:
            if width != 1:
                raise ValueError(
                    f"width: {width}, processes: 1: replicas need one process per rank of the "
                    f"schedule and replica: run under torchrun --nproc-per-node {width * p}"
                )
            return
        if mesh is None and world != width * p:
            what = "stages" if p == self.num_stages else "ranks"
            raise ValueError(
                f"world size: {world}, width * {what}: {width} * {p} = {width * p}: every "
                f"{what[:-1]} of every replica is one process"
            )
        self.places = [order] if order is not None else places_in(mesh, width, p)
        self.rank = dist.get_rank()
        self.shard, self.replica, self._own_rank = next(
            (shard, replica, rank)
            for shard, replicas in enumerate(self.places)
            for replica, ranks in enumerate(replicas)
            for rank, process in enumerate(ranks)
            if process == self.rank
        )
        for stage in range(self.depth if width * num_pipelines > 1 else 0):
            copies = placement[stage :: self.depth]
            holders = [
                [ranks[copy] for ranks in replicas for copy in copies] for replicas in self.places
            ]
            self._join(stage, holders)

    @property
    def local_ranks(self) -> list[int]:
        """The schedule's ranks that this process runs."""
        return [self._own_rank] if self.in_processes else list(range(self._num_ranks))

    @property
    def stages(self) -> list[int]:
        """The stages that this process runs."""
        here = self.local_ranks
        return [stage for stage, rank in enumerate(self._placement) if rank in here]

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
        return [stage for stage, placed in enumerate(self._placement) if placed == rank]

    @property
    def num_shards(self) -> int:
        """The number of shards of each tensor-parallel stage."""
        return len(self.places)

    def process_of(self, stage: int, replica: int | None = None, shard: int | None = None) -> int:
        """The process that runs ``stage`` of a replica, by default of this process's own."""
        shard = self.shard if shard is None else shard
        replica = self.replica if replica is None else replica
        return self.places[shard][replica][self._placement[stage]]

    def share_a_rank(self, stage: int, other: int) -> bool:
        return self._placement[stage] == self._placement[other]

    def replica_group(self, stage: int) -> dist.ProcessGroup | None:
        """The processes that hold one of this process's stages, if there are several."""
        return self._groups.get(stage % self.depth)

    def group_of_replica(self) -> dist.ProcessGroup | None:
        """The processes of this one's replica, if there are several. Every process calls it."""
        if self.in_processes and None not in self._groups:
            replicas = [ranks for replicas in self.places for ranks in replicas]
            self._join(None, replicas, backend="gloo")
        return self._groups.get(None)

    def teams_of(self, stages: Iterable[int]) -> list[set[int]]:
        """The processes that run these stages, for each shard and replica."""
        return [
            {self.process_of(stage, replica, shard) for stage in stages}
            for shard, replica in itertools.product(range(self.num_shards), range(self.width))
        ]

    def make_group(self, stages: tuple[int, ...]) -> None:
        """Joins the processes of each replica that run these stages. Every process calls it."""
        self._join(stages, [team for team in self.teams_of(stages) if len(team) > 1])

    def group_of(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group that :meth:`make_group` made; None unless it joins this process to others."""
        return self._groups.get(stages)

    def _join(
        self,
        key: int | tuple[int, ...] | None,
        teams: Iterable[Collection[int]],
        backend: str | None = None,
    ) -> None:
        group = new_group(teams, self.deadline, backend)
        if group is not None:
            self._groups[key] = group

    def close(self) -> None:
        """Drops the groups."""
        destroy_groups(self._groups.values())
        self._groups.clear()


def number_groups_alike(store: Store, name: str) -> None:
    """Sets torch's number of the next group to the highest of all ranks. Every process calls it.

    A pipeline that failed while it made groups may have made more of them on some ranks.

    Args:
        name: of the pipeline, the same on every rank.
    """
    world = dist.distributed_c10d._world
    keys = [f"pipedream2bw/{name}/groups/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], str(world.group_count))
    world.group_count = max(map(int, store.multi_get(keys)))


def new_group(
    teams: Iterable[Collection[int]], deadline: Deadline, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Makes a group of each team's processes; gives the one that this process is in.

    torch numbers groups by how many a process has made, so every process calls it, in one order.
    """
    timeout = datetime.timedelta(seconds=deadline.seconds)
    make = functools.partial(dist.new_group, timeout=timeout, backend=backend)
    own = None
    for team in teams:
        made = deadline.wait("making a group", functools.partial(make, sorted(team)))
        if isinstance(made, dist.ProcessGroup):  # else this process is in another team
            own = made
    return own


def broadcast(
    tensor: torch.Tensor, group: dist.ProcessGroup, source: int, deadline: Deadline
) -> None:
    """Gives all processes of a group the tensor of one, by its number in the group."""
    send = functools.partial(dist.broadcast, tensor, group=group, group_src=source)
    if tensor.device.type == "cpu":
        deadline.wait("broadcasting", send)
    else:
        send()  # only enqueues it, in this thread's stream


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends the groups, as far as they still exist."""
    for group in groups:
        with contextlib.suppress(Exception):  # the default group may be gone, and they with it
            dist.destroy_process_group(group)
