"""Which process runs which stages of which replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .deadline import Deadline

Places = Sequence[Sequence[Sequence[int]]]
"""The process of each shard, replica and rank of the schedule, in that order."""


class RankGrid:
    """Which process runs which stages of which replica: one runs all, each rank in a thread.

    Of several processes there is a :class:`ProcessGrid`. Every process makes it, with the same
    arguments. Stages are the schedule's: with two pipelines each stage of the model has two.

    Args:
        placement: the schedule's rank of each stage.
        num_pipelines: the schedule's.
        deadline: ends waiting for other processes.
        mesh: of all processes, see :func:`check_mesh`; None: there is none so far.

    Attributes:
        placement, num_pipelines, deadline, mesh: as given.
        num_stages, num_ranks: of the schedule.
        depth: stages of the model.
        width: number of replicas.
        in_processes: whether there are several.
        places: all processes. num_shards: of each tensor-parallel stage.
        rank, replica, shard: this process, and its replica and shard.
        local_ranks, stages: the schedule's ranks and stages that this process runs.
    """

    in_processes = False

    def __init__(
        self,
        placement: Sequence[int],
        num_pipelines: int,
        deadline: Deadline,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.num_stages = len(placement)
        self.num_pipelines = num_pipelines
        self.depth = len(placement) // num_pipelines
        self.width = self.num_shards = 1
        self.rank = self.replica = self.shard = 0
        self.placement = list(placement)
        self.num_ranks = max(placement) + 1
        self.local_ranks = list(range(self.num_ranks))
        self.stages = list(range(self.num_stages))
        self.places: Places = [[[0] * self.num_ranks]]
        self.mesh = mesh
        self.deadline = deadline
        # By what the processes share: a stage of the model, several stages, (None) a replica, or
        # ("model") the model.
        self._groups: dict[int | tuple[int, ...] | str | None, dist.ProcessGroup] = {}

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

    def replica_group(self, stage: int) -> dist.ProcessGroup | None:
        """The processes that hold one of this process's stages, if there are several."""
        return self._groups.get(stage % self.depth)

    def join_savers(self) -> None:
        """Makes :meth:`savers` of every stage, if they are not there. Every process calls it."""

    def savers(self, stage: int) -> dist.ProcessGroup:
        """The hosts of a stage's replicas, for copies that are made beside updates."""
        return self._groups[f"savers of {stage % self.depth}"]

    def connect_replicas(self, devices: Sequence[torch.device], most_bytes: int) -> None:
        """Connects the devices, one for each stage, that add up a stage's gradients.

        Every process calls it, and all take stages in one order.

        Args:
            most_bytes: of what they add up at once.
        """

    def sum_order(self, stage: int, sums: str) -> list[int]:
        """Returns the ranks of :meth:`replica_group` as their gradients are added up.

        Args:
            sums: ``"ordered"``: from replica 0's first pipeline on; else none, in any order.
        """
        return []

    def group_of_replica(self) -> dist.ProcessGroup | None:
        """The processes of this one's replica, if there are several. Every process calls it."""
        return None

    def group_of_model(self) -> dist.ProcessGroup | None:
        """All processes, if there are several. Every process calls it."""
        return None

    def make_group(self, stages: tuple[int, ...]) -> None:
        """Joins the hosts of each replica's processes with these stages. Every process calls it.

        Stages make a batch's updates in different batches' actions, so what joins them must not
        keep devices waiting, as a transfer between these would.
        """

    def group_of(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group that :meth:`make_group` made; None unless it joins this process to others."""
        return self._groups.get(stages)

    def close(self) -> None:
        """Drops the groups."""
