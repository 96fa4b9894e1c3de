"""``eval_step`` in processes: every rank has the loss of its replica, or of all of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.runs.evaluating import TASK, check
from tests.runs.launch import run_ranks
from tests.unit.training.test_eval_step import total


def evaluate(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    summed: dict[str, Any] = {"loss_fn": total, "loss_reduction": "sum", "normalizer": len}
    check("1f1b", num_stages=world)
    check("2bw", rows=(8, 7), num_stages=2, width=world // 2, replica=rank // 2)
    check("1f1b", rows=(8, 3), num_stages=2, width=world // 2, replica=rank // 2, **summed)
    check("chimera", rows=(8, 7), num_stages=world)
    unequal = {"num_microbatches": [4, 2], "num_stages": 2, "width": 2}
    check("1f1b", rows=(8,), replica=rank // 2, **unequal)


def test_it_gives_a_train_steps_numbers_on_every_rank() -> None:
    run_ranks(evaluate, 4, timeout=120)


def go_wrong(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    (batch,) = TASK.batches([8])
    with pd2.PipelineModule(
        TASK.model(), TASK.loss_fn, num_stages=2, num_microbatches=4, example_args=batch.args
    ) as pipe:
        pipe.eval()
        wanted = float(pipe.eval_step(*batch.args, target=batch.target))
        with pytest.raises(ValueError, match="rows of the arguments: 8, rows of the target: 7"):
            pipe.eval_step(*batch.args, target=batch.target[:7])
        with pytest.raises(pd2.errors.StageError, match="loss_fn with target None"):
            pipe.eval_step(*batch.args, **({"target": batch.target} if rank == 0 else {}))
        mine = batch.args if rank == 0 else ()
        target = {"target": batch.target} if rank == 1 else {}
        assert float(pipe.eval_step(*mine, **target)) == wanted
        with pytest.raises(pd2.errors.StageError, match="evaluation_of_loss"):
            pipe(*batch.args) if rank == 0 else pipe.eval_step(*batch.args, target=batch.target)


def test_all_ranks_see_what_is_wrong() -> None:
    run_ranks(go_wrong, 2, timeout=60)
