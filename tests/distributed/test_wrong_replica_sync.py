"""Sites that do not fit each other, and sites that are lost: every rank of all of them raises."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import SGD

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.sites import Setting, join_site, pipe_of, sync_of

TWO = Setting()


def text_of(call: Callable[[], Any]) -> str:
    """Of the ValueError that it raises."""
    with pytest.raises(ValueError, match="replica_sync") as raised:
        call()
    return str(raised.value)


def disagree(rank: int, world: int, folder: str) -> list[str]:
    """What each process is told of sites, or ranks of a site, that were set up otherwise."""
    site, store = join_site(folder, "disagree", rank, 2)
    texts = []

    def sync(name: str, **options: Any) -> pd2.ReplicaSync:
        return sync_of(TWO, dist.PrefixStore(name, store), site, **options)

    def optimizer(pipe: pd2.PipelineModule, made: pd2.ReplicaSync) -> pd2.PipelineOptimizer:
        return pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=made)

    processes = Setting(in_processes=True)
    with pipe_of(processes, 0) as pipe:
        for name, options in (
            ("every", {"every": 4 + site}),
            ("outer", {"outer": functools.partial(SGD, lr=0.1 * (1 + site))}),
            ("staggered", {"staggered": site == 0}),
            ("ranks", {"every": 4 + rank % 2}),
        ):
            made = sync(name, **options)
            texts.append(text_of(lambda made=made: optimizer(pipe, made)))
        other = Setting(in_processes=True, task="mlp" if site else "skips")
    with pipe_of(other, 0) as pipe:
        texts.append(text_of(lambda: optimizer(pipe, sync("model"))))
    other = Setting(in_processes=True, schedule="1f1b" if site else "2bw")
    with pipe_of(other, 0) as pipe:
        texts.append(text_of(lambda: optimizer(pipe, sync("schedule"))))
    with pipe_of(processes, 0) as pipe:
        made = sync("right")
        opt = optimizer(pipe, made)
        texts.append(text_of(lambda: optimizer(pipe, made)))
        for _ in range(site):  # the exchange after batch 1 does not come yet
            step(pipe, opt)
        pipe.load_state_dict(pipe.state_dict())
        texts.append(text_of(lambda: step(pipe, opt)))
        pipe.discard_batch()
        if not site:
            pipe.load_state_dict(pipe.state_dict())
            # Site 1 waits with a batch; its weights have come further.
            texts.append(text_of(lambda: [step(pipe, opt), step(pipe, opt)]))
        else:
            texts.append(text_of(lambda: step(pipe, opt)))
    return texts


def step(pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer) -> None:
    (batch,) = TWO.make_task().batches([8])
    pipe.train_step(*batch.args, target=batch.target)
    opt.step()


def test_sites_that_do_not_fit_are_told_on_every_rank(tmp_path: Path) -> None:
    results = [
        result.value
        for result in run_ranks(disagree, 4, args=(str(tmp_path),), rendezvous="none", timeout=120)
    ]
    for texts, expected in zip(
        zip(*results, strict=True),
        (
            "replica_sync: every must be the same on every site, got site 0: 4, site 1: 5",
            "replica_sync: outer must be the same on every site",
            "replica_sync: staggered must be the same on every site",
            "replica_sync must be the same on every rank",
            "replica_sync: parameters of stage",
            "replica_sync: schedule must be the same on every site, got site 0: 2bw, site 1: 1f1b",
            "given to 2 PipelineOptimizers",
            "replica_sync: batch must be the same on every site, got site 0: 0, site 1: 1",
            "replica_sync: batch must be the same on every site",
        ),
        strict=True,
    ):
        for text in texts:
            assert expected in text


def lose(rank: int, world: int, folder: str, how: str) -> tuple[str, float]:
    """Site 1 leaves after two batches; the error of this process and how long it took to come."""
    site, store = join_site(folder, how, rank, 1)
    timeout = 4.0 if how == "silent" else 60.0
    pipe = pipe_of(TWO, site, timeout=timeout)
    opt = pd2.PipelineOptimizer(
        SGD(pipe.parameters(), lr=0.1), replica_sync=sync_of(TWO, store, site)
    )
    step(pipe, opt)
    pipe.flush()
    begin = time.monotonic()
    if site == 1:
        time.sleep(0.5)  # site 0 waits for its stage 1
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "aborted":
            pipe.abort()
            return "", 0.0
        if how == "silent":
            time.sleep(8.0)
        if how == "failing":
            with contextlib.suppress(RuntimeError), pipe.session.control.errors_told():
                raise RuntimeError("site 1 is on fire")
    with pytest.raises(pd2.errors.StageError) as raised:
        for _ in range(5):
            step(pipe, opt)
            pipe.flush()
    return f"{type(raised.value).__name__}: {raised.value}", time.monotonic() - begin


@pytest.mark.parametrize(
    ("how", "kind", "seconds"),
    [
        ("killed", "PeerLost", 3.0),
        ("aborted", "PeerLost", 3.0),
        ("silent", "PeerTimeout", 6.0),
        ("failing", "StageError", 3.0),
    ],
)
def test_a_lost_site_ends_the_others(how: str, kind: str, seconds: float, tmp_path: Path) -> None:
    results = run_ranks(
        lose,
        2,
        args=(str(tmp_path), how),
        rendezvous="none",
        timeout=60,
        expect_failure=how == "killed",
    )
    text, took = results[0].value
    assert text.startswith(kind), text
    assert took < 4 * seconds  # other tests run beside
    assert results[0].exit_code == 0
    if how == "failing":
        assert "site 1 is on fire" in text


def forget(rank: int, world: int, folder: str) -> bool:
    """Whether site 0 has ended within 20 s while site 1 lets it wait."""
    site, store = join_site(folder, "forget", rank, 1)
    pipe = pipe_of(TWO, site)
    opt = pd2.PipelineOptimizer(
        SGD(pipe.parameters(), lr=0.1), replica_sync=sync_of(TWO, store, site)
    )
    if site == 0:
        for _ in range(3):  # stage 1 waits for the other site's
            step(pipe, opt)
        time.sleep(0.5)
        del pipe, opt
        gc.collect()
        store.set("ended", "")
        return True
    end = time.monotonic() + 20
    while time.monotonic() < end and not store.check(["ended"]):
        time.sleep(0.1)
    return store.check(["ended"])


def test_a_pipeline_that_nobody_holds_waits_for_no_site(tmp_path: Path) -> None:
    results = run_ranks(forget, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)
    assert [result.value for result in results] == [True, True]
