"""Where the losses of train_steps arrive, and whose parts make up one."""

from __future__ import annotations

from .. import _C
from ..ranks.agreement import ControlPlane
from ..ranks.grid import RankGrid
from .runner import StageOptions


def loss_board(
    grid: RankGrid, control: ControlPlane, options: StageOptions, schedule: _C.Schedule
) -> _C.LossBoard:
    """Makes the board that brings losses from the last stages to this process.

    A loss is the replica's own. Where the rows of all replicas are one batch it is that batch's:
    each replica's last stage adds its part to those of the replicas before.
    """
    replicas = range(grid.width) if options.is_one_batch else range(grid.replica, grid.replica + 1)
    return _C.LossBoard(
        fault=control.fault,
        group="" if control.group is None else control.group.group_name,
        shared=control.board,
        ranks=[
            grid.process_of(stage, replica)
            for replica in replicas
            for stage in range(grid.num_stages)
        ],
        replica=grid.replica,
        num_replicas=grid.width,
        num_parts=len(replicas) * grid.num_pipelines,
        first_part=replicas.index(grid.replica) * grid.num_pipelines,
        num_numbers=1 + len(options.metrics),
        runs_behind=schedule.forward_batches_behind,
    )
