"""Whether all ranks were given one batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..ranks.grid import RankGrid
from ..ranks.operations import Announcement
from .step_data import Listed


def check_same_batch(
    grid: RankGrid,
    announced: Sequence[Announcement],
    listed: Sequence[Listed | None],
    *,
    training: bool,
) -> None:
    """Raises ValueError, on every rank, unless what they were given goes together.

    Args:
        listed: of each rank; empty: nobody was given ready-made microbatches.
    """
    modes = [("eval", "train")[rank.training] for rank in announced]
    if len(set(modes)) > 1:
        shown = ", ".join(f"rank {rank}: {mode}" for rank, mode in enumerate(modes))
        raise ValueError(f"train() or eval() must be the same on every rank, got {shown}")
    others = [rank for rank, each in enumerate(announced) if each.model != announced[0].model]
    if others:
        raise ValueError(
            f"the model on rank {others[0]} has other attributes, or modules in other modes, than "
            "on rank 0: what a script changes of a model must be the same on every rank"
        )
    for replica in range(grid.width):
        _check_replica(grid, announced, listed, replica, training=training)


def _check_replica(
    grid: RankGrid,
    announced: Sequence[Announcement],
    listed: Sequence[Listed | None],
    replica: int,
    *,
    training: bool,
) -> None:
    """Raises ValueError unless a replica's ranks were given one batch."""
    begins = range(0, grid.num_stages, grid.depth) if training else (0,)
    one = grid.process_of(0, replica, 0)
    for shard, begin in itertools.product(range(grid.num_shards), begins):
        last = grid.process_of(begin + grid.depth - 1, replica, shard)
        kinds = [announced[rank].is_list for rank in (one, last)]
        if kinds[1] >= 0 and kinds[0] != kinds[1]:
            told = [("a batch", "microbatches=")[kind] for kind in kinds]
            raise ValueError(
                f"given on rank {one}: {told[0]}, on rank {last}: {told[1]}: give "
                "all ranks of a replica the same"
            )
        first, other = (listed[rank] if listed else None for rank in (one, last))
        if first is not None and other is not None:
            check_rows(first.rows, other.target_rows)
        else:
            check_rows([announced[one].argument_rows], [announced[last].target_rows])
        begun = grid.process_of(begin, replica, shard)
        mine, theirs = announced[one], announced[begun]
        if mine.argument_rows != theirs.argument_rows:
            raise ValueError(
                f"rows of the arguments on rank {one}: {mine.argument_rows}, on rank {begun}: "
                f"{theirs.argument_rows}: give all first stages of a replica the same batch"
            )
        if mine.shapes != theirs.shapes:
            raise ValueError(
                f"arguments on rank {one} and on rank {begun}: their shapes or dtypes differ: give "
                "all first stages of a replica the same batch"
            )
    ranks = sorted(set(itertools.chain(*(places[replica] for places in grid.places))))
    targets = {announced[rank].target: rank for rank in reversed(ranks)}
    targets.pop(-1, None)
    if len(targets) > 1:
        raise ValueError(
            f"targets on ranks {' and '.join(map(str, sorted(targets.values())))} differ: all "
            "ranks of one replica must read the same batch. Give a DistributedSampler "
            "num_replicas=pipe.width and rank=pipe.replica, and what shuffles the same seed. Where "
            "ranks compute targets themselves, give them to the last stage's rank alone"
        )


def check_rows(rows: Sequence[int], target_rows: Sequence[int]) -> None:
    """Raises ValueError unless arguments and targets go together; empty: not given here."""
    if rows and target_rows and len(rows) != len(target_rows):
        raise ValueError(
            f"microbatches: {len(rows)} with arguments, {len(target_rows)} with targets: give "
            "all ranks of a replica the same"
        )
    for number, (of_arguments, of_target) in enumerate(zip(rows, target_rows, strict=False)):
        if of_arguments >= 0 and of_target >= 0 and of_arguments != of_target:
            place = f"microbatch {number}: " if len(rows) > 1 else ""
            raise ValueError(
                f"{place}rows of the arguments: {of_arguments}, rows of the target: {of_target}: "
                "give equal rows, or name a tensor in replicated=() to pass it whole to every "
                "microbatch"
            )
