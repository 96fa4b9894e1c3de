"""The orders of actions that torch.distributed.pipelining makes, without a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import schedules as stock


class StageForOrder:
    """As much of a PipelineStage as torch needs to make its order of actions."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, num_stages, num_ranks
        self.group_rank = index % num_ranks
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.device = torch.device("cpu")
        self.stage_index_to_group_rank = {i: i % num_ranks for i in range(num_stages)}
        self.has_backward = True
        self.submod = self.group = None


def of_torch(order: dict[int, list[Any]]) -> list[list[str]]:
    rows = [[action for action in order[rank] if action is not None] for rank in sorted(order)]
    apart = ([each for action in row for each in action.sub_actions or (action,)] for row in rows)
    return [[name for name in map(str, row) if "REDUCE" not in name] for row in apart]


def zbv(num_ranks: int, num_microbatches: int) -> Any:
    """ZBV: rank r has the stages r and 2p - 1 - r."""
    return _in_a_v(stock.ScheduleZBVZeroBubble, num_ranks, num_microbatches)


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> Any:
    """DualPipeV, in the same V; at least as many microbatches as stages."""
    return _in_a_v(stock.ScheduleDualPipeV, num_ranks, num_microbatches)


def _in_a_v(schedule: Any, num_ranks: int, num_microbatches: int) -> Any:
    d = 2 * num_ranks
    stages = [StageForOrder(index, d, num_ranks) for index in (0, d - 1)]
    return schedule(stages, num_microbatches, loss_fn=lambda a, b: a)
