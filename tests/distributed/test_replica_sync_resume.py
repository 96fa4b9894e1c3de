"""Sites go on where they were saved, with the bits of a run that nobody disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import name_of
from tests.runs.launch import run_ranks
from tests.runs.sites import (
    Setting,
    SiteResult,
    assert_expected,
    expected,
    join_site,
    pipe_of,
    stages_of,
    sync_of,
)
from tests.runs.trajectory import copy_of

EVERY_SAVE, LAST_OF_FIRST_LIFE = 3, 8


def lives(rank: int, world: int, folder: str, setting: Setting, then: Setting) -> dict[str, Any]:
    """A life that ends in the middle, and one that goes on from what it saved."""
    losses: list[float] = []
    starts = []
    for life, current in enumerate((setting, then)):
        site, store = join_site(folder, f"life{life}", rank, setting.ranks)
        own = Path(folder, f"site{site}")
        if life == 1 and site == 1 and rank % setting.ranks == 0:  # it was lost before it was whole
            shutil.rmtree(own / name_of(6))
        if dist.is_initialized():
            dist.barrier()
        torch.manual_seed(100 * life + site)  # nothing of the former life's beginning
        pipe = pipe_of(current, site + 10 * life)
        sync = sync_of(current, store, site)
        opt = pd2.PipelineOptimizer(current.sgd(pipe.parameters()), replica_sync=sync)
        data = current.data()[site][0]
        with pd2.Checkpointer(own, pipe, opt, every=EVERY_SAVE, preempt=()) as ckpt:
            start = ckpt.resume()
            starts.append(start)
            made = []
            for batch in data[start : LAST_OF_FIRST_LIFE if life == 0 else None]:
                made.append(pipe.train_step(*batch.args, target=batch.target))
                opt.step()
                ckpt.step()
            pipe.flush()
        losses = [*losses[:start], *map(float, made)]
        state, anchors = copy_of(pipe.state_dict()), sync.anchors()
        stages = stages_of(pipe)
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return {
        "starts": starts,
        "result": SiteResult(site, 0, losses, state, anchors, stages),
    }


@pytest.mark.parametrize(
    ("setting", "then"),
    [
        (Setting(batches=14), Setting(batches=14)),
        (Setting(batches=14, precision="bf16"), Setting(batches=14, precision="bf16")),
        (
            Setting(batches=14, staggered=False),
            Setting(batches=14, staggered=False, num_stages=1, num_microbatches=4),
        ),
        (Setting(batches=14, in_processes=True), Setting(batches=14, in_processes=True)),
    ],
    ids=["2bw", "masters", "fewer stages", "processes"],
)
def test_sites_go_on_from_the_newest_checkpoint_that_all_have(
    setting: Setting, then: Setting, tmp_path: Path
) -> None:
    ranks = setting.num_sites * setting.ranks
    args = (str(tmp_path), setting, then)
    results = run_ranks(lives, ranks, args=args, rendezvous="none", timeout=120)
    want = expected(setting, results[0].value["result"].stages)
    for result in results:
        assert result.value["starts"] == [0, 3]
        assert_expected(setting, result.value["result"], want)
