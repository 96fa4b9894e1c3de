"""A signal that one rank gets saves the run on all of them, and all end with its code."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import steps_in
from pipedream2bw.checkpoint.folder import Folder
from tests.runs.discarding import Failure, batches, make_model
from tests.runs.launch import run_ranks

M, ROWS, COUNT = 4, 8, 6
BAD = 3


def is_told_to_end(
    rank: int, world: int, told: int, when: int, is_bad: bool
) -> tuple[int, list[int]]:
    """Gives the exit code, and which checkpoints there are.

    Args:
        told: the rank that gets the signal.
        when: before which batch; after the last one, in the end of the block.
        is_bad: whether batch BAD fails in the last stage.
    """
    given = batches(COUNT, ROWS)
    failures = [Failure(1, "forward", M * BAD)] * (is_bad and rank == 1)
    try:
        with pd2.PipelineModule(
            list(make_model(failures, 2, norm=False)),
            mse_loss,
            num_microbatches=M,
            example_args=(given[0].args[0][:2],),
            timeout=15.0,
        ) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            with pd2.Checkpointer("run", pipe, opt, every=100) as ckpt:
                for number, batch in enumerate([*given, None]):
                    if number == when and rank == told:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if batch is not None:
                        pipe.train_step(*batch.args, target=batch.target)
                        opt.step()
                        ckpt.step()
    except pd2.Preempted as ended:
        return int(str(ended.code)), steps_in(Folder("run"))
    raise AssertionError("the signal was lost")


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize(
    ("when", "is_bad", "saved"), [(BAD, True, BAD), (COUNT, False, COUNT)], ids=["bad", "last"]
)
def test_all_ranks_save_at_one_batch_and_end(
    told: int, when: int, is_bad: bool, saved: int
) -> None:
    results = run_ranks(is_told_to_end, 2, args=(told, when, is_bad), timeout=60)
    assert [result.value for result in results] == [(128 + signal.SIGTERM, [saved])] * 2
