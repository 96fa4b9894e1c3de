"""Sites go on where they were saved, with the bits of a run that nobody disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import pipedream2bw as pd2
from tests.references.seldom_oracle import SeldomOracle
from tests.runs.launch import run_ranks
from tests.runs.saved import saved
from tests.runs.sites import (
    Setting,
    SiteResult,
    assert_expected,
    expected,
    join_site,
    pipe_of,
    result_of,
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
            shutil.rmtree(saved(own, 6))
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
        result = result_of(site, pipe, losses, sync)
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return {"starts": starts, "result": result}


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


def loading(rank: int, world: int, folder: str, what: tuple[str, ...]) -> SiteResult:
    """After batch 5 a site loads what it has itself, or weights that all sites load."""
    site, store = join_site(folder, "loading", rank, 1)
    setting = Setting()
    with pipe_of(setting, site) as pipe:
        sync = sync_of(setting, store, site)
        opt = pd2.PipelineOptimizer(setting.sgd(pipe.parameters()), replica_sync=sync)
        losses = []
        for number, batch in enumerate(setting.data()[site][0]):
            if number == 6:
                weights, state = copy_of(pipe.state_dict()), opt.state_dict()
                others = {name: 0.5 * anchor for name, anchor in sync.anchors().items()}
                for each in what:
                    if each == "optimizer":
                        opt.load_state_dict(state)
                    else:
                        pipe.load_state_dict(weights if each == "weights" else others)
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        with pytest.raises(ValueError, match="init_state: replica_sync: every: 4"):
            opt.init_state()
        return result_of(site, pipe, losses, sync)


@pytest.mark.parametrize("what", [("weights", "optimizer"), ("optimizer", "weights"), ("others",)])
def test_loaded_weights_are_anchors_unless_anchors_are_loaded(
    what: tuple[str, ...], tmp_path: Path
) -> None:
    results = run_ranks(loading, 2, args=(str(tmp_path), what), rendezvous="none", timeout=60)

    def load(oracle: SeldomOracle) -> None:
        if what == ("others",):
            oracle.anchors = [0.5 * anchor for anchor in oracle.anchors]
        for site in oracle.sites:
            if what == ("others",):
                with torch.no_grad():
                    for p, anchor in zip(site.model.parameters(), oracle.anchors, strict=True):
                        p.copy_(anchor)
            site.oracle.restart_delay()

    want = expected(Setting(), results[0].value.stages, before={6: load})
    for result in results:
        assert_expected(Setting(), result.value, want)
