"""Sites that average seldom train as the definition says, to the bit."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.extras.sites import SiteLink
from tests.distributed.test_replica_sums import COUNT, NUMEL, Scaled, bytes_sent
from tests.exhaustive import exhaustive
from tests.references.seldom_oracle import SeldomOracle
from tests.runs.launch import run_ranks
from tests.runs.rank_process import ROOT
from tests.runs.sites import (
    Setting,
    SiteResult,
    assert_expected,
    expected,
    join_site,
    pipe_of,
    result_of,
    sync_of,
    train_site,
)

THREADS = [
    Setting(num_stages=1),
    Setting(),
    Setting(averages=True),
    Setting(num_stages=4, every=3),
    Setting(schedule="1f1b"),
    Setting(num_stages=4, every=3, staggered=False),
    Setting(every=1, momentum=0.0),
    Setting(precision="bf16"),
    Setting(precision="bf16", schedule="1f1b"),
    Setting(task="layers", num_stages=4, every=3),
    Setting(task="drawing"),
    Setting(num_stages=4, every=3, late=True),
]
FOUR_SITES = [Setting(num_sites=4), Setting(num_sites=4, num_stages=1, schedule="1f1b")]
PROCESSES = [
    Setting(in_processes=True),
    Setting(in_processes=True, schedule="1f1b", precision="bf16", late=True),
]
REPLICAS = [
    Setting(in_processes=True, num_stages=1, width=2),
    Setting(in_processes=True, num_stages=1, width=2, hook=True, late=True),
]


@pytest.mark.parametrize(
    "settings",
    [THREADS, FOUR_SITES, PROCESSES, REPLICAS],
    ids=["threads", "four sites", "processes", "replicas"],
)
def test_sites_train_as_the_definition_says(settings: list[Setting], tmp_path: Path) -> None:
    ranks = settings[0].num_sites * settings[0].ranks
    results = run_ranks(
        train_site, ranks, args=(str(tmp_path), settings), rendezvous="none", timeout=120
    )
    for number, setting in enumerate(settings):
        want = expected(setting, results[0].value[number].stages)
        for result in results:
            assert_expected(setting, result.value[number], want)


def discard(rank: int, world: int, folder: str) -> SiteResult:
    """Site 1 meets a bad batch, just before an exchange and in it."""
    site, store = join_site(folder, "discard", rank, 1)
    setting = Setting()
    with pipe_of(setting, site) as pipe:
        sync = sync_of(setting, store, site)
        opt = pd2.PipelineOptimizer(setting.sgd(pipe.parameters()), replica_sync=sync)
        losses = []
        for number, batch in enumerate(setting.data()[site][0]):
            if site == 1 and number in (3, 6):
                with pytest.raises(pd2.errors.StageError) as raised:
                    pipe.train_step(*batch.args, target=torch.zeros(8, 3))
                    opt.step()
                    pipe.flush()
                assert raised.value.discarded == (number,)
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        return result_of(site, pipe, losses, sync)


def test_a_batch_that_one_site_discards_is_none_of_the_others_business(tmp_path: Path) -> None:
    results = run_ranks(discard, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)

    def begin_delay_anew(oracle: SeldomOracle) -> None:
        site: Any = oracle.sites[1]
        site.oracle.restart_delay()

    before = {3: begin_delay_anew, 6: begin_delay_anew}
    want = expected(Setting(), results[0].value.stages, before)
    for result in results:
        assert_expected(Setting(), result.value, want)


def exchange_slowly(rank: int, world: int, folder: str) -> list[pd2.Event]:
    """Over a link that is so slow that the next batch's loss is known before it is through."""
    site, store = join_site(folder, "slow link", rank, 1)
    setting = Setting(schedule="2bw")
    average = SiteLink.average
    known = [threading.Event() for _ in range(setting.batches)]  # the loss of each batch
    known.append(known[-1])  # no batch follows the last
    exchanging = itertools.count(1, 2)  # the second stage's batches 1, 5, 9, the first's 3, 7

    def slow(link: SiteLink, flat: torch.Tensor) -> None:
        if not known[next(exchanging) + 1].wait(30.0):
            raise TimeoutError("no batch trains beside the exchange")
        average(link, flat)

    with mock.patch.object(SiteLink, "average", slow), pipe_of(setting, site) as pipe:
        opt = pd2.PipelineOptimizer(
            setting.sgd(pipe.parameters()), replica_sync=sync_of(setting, store, site)
        )
        with pipe.timeline() as timeline:
            for number, batch in enumerate(setting.data()[site][0]):
                float(pipe.train_step(*batch.args, target=batch.target))
                opt.step()
                known[number].set()
    assert next(exchanging) == setting.batches + 1
    return timeline.rows


def test_an_exchange_is_beside_the_next_batch(tmp_path: Path) -> None:
    results = run_ranks(exchange_slowly, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)
    for result in results:
        for stage, exchanges in ((0, [3, 7]), (1, [1, 5])):
            mine = [event for event in result.value if event.stage == stage]
            updates = {event.batch: event for event in mine if event.kind == "U"}
            for batch in exchanges:
                update = updates[batch]
                beside = {e.batch for e in mine if update.start < e.start and e.end < update.end}
                assert beside <= {batch + 1}
                # A forward may begin before the update does, as a busy machine wakes its thread.
                forwards = [e for e in mine if e.kind == "F" and e.batch == batch + 1]
                assert forwards
                assert all(e.version == batch and e.start < update.end for e in forwards)
                readers = [e for e in mine if e.kind == "F" and e.version == batch + 1]
                assert all(reader.start >= update.end for reader in readers)


def exchanged(rank: int, world: int, folder: str, every: int, width: int) -> tuple[int, int]:
    """Bytes that a process sends in ``2 * COUNT`` batches, and those of its anchors."""
    setting = Setting(every=every, num_sites=world // width)
    site, store = join_site(folder, f"every{every}", rank, width)
    x = torch.ones(2, 8)
    with pd2.PipelineModule(
        [Scaled()], mse_loss, num_microbatches=2, width=width, example_args=(x,), timeout=60
    ) as pipe:
        sync = sync_of(setting, store, site)
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), replica_sync=sync)
        sent = bytes_sent(pipe, opt, x, 2 * COUNT)
        return sent, pipe.memory_report()[0].anchors


@pytest.mark.parametrize(("num_sites", "width"), [(2, 1), (2, 2), *exhaustive((4, 1))])
def test_a_round_sends_what_one_dense_exchange_does(
    num_sites: int, width: int, tmp_path: Path
) -> None:
    """Of each replica; within a site they add up the gradients of every batch besides."""
    dense = 2 * (num_sites - 1) / num_sites * 4 * NUMEL
    within = 2 * COUNT * 2 * (width - 1) / width * 4 * NUMEL
    for every, rounds in ((1, 2 * COUNT), (COUNT, 2)):
        args, ranks = (str(tmp_path), every, width), num_sites * width
        for result in run_ranks(exchanged, ranks, args=args, rendezvous="none", timeout=100):
            sent, anchors = result.value
            assert sent == pytest.approx(dense * rounds + within, rel=0.01)
            assert anchors == 2 * 4 * NUMEL  # and momentum


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def train_apart(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Site 1 takes longer and less at once; all learn the same linear map, of other inputs."""
    site, store = join_site(folder, "slow", rank, 2)
    torch.manual_seed(site)
    truth = torch.randn(6, 6, generator=torch.Generator().manual_seed(7))
    model = [
        nn.Sequential(nn.Linear(6, 16), Slow(0.01 * site), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 6)),
    ]
    losses = []
    with pd2.PipelineModule(
        model, mse_loss, num_microbatches=4 - site, example_args=(torch.zeros(4, 6),), timeout=60
    ) as pipe:
        sync = pd2.ReplicaSync(every=4, store=store, site=site, num_sites=2)
        inner = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        opt = pd2.PipelineOptimizer(inner, replica_sync=sync)
        for _ in range(40):
            x = torch.randn(32 - 14 * site, 6)
            losses.append(pipe.train_step(x, target=x @ truth))
            opt.step()
        anchors = sync.anchors()
        found = [float(loss) for loss in losses]
    return {"losses": found, "anchors": anchors}


def test_two_sites_of_two_processes_learn_though_one_is_slow(tmp_path: Path) -> None:
    results = [
        result.value
        for result in run_ranks(
            train_apart, 4, args=(str(tmp_path),), rendezvous="none", timeout=120
        )
    ]
    for result in results:
        first, last = result["losses"][:4], result["losses"][-4:]
        assert sum(last) < 0.5 * sum(first)
    for stage in (0, 1):  # on both sites
        for name, anchor in results[stage]["anchors"].items():
            assert torch.equal(anchor, results[2 + stage]["anchors"][name])


def follow_the_document(rank: int, world: int, folder: str, port: int) -> dict[str, Any]:
    """Runs the document's example."""
    site, _ = join_site(folder, "document", rank, 2)
    os.environ |= {"SITE": str(site), "SITES_STORE": f"127.0.0.1:{port}", "RANK": str(rank % 2)}
    text = (ROOT / "docs/replica_sync.md").read_text("utf-8")
    example = text.partition("```python\n")[2].partition("```")[0]
    torch.manual_seed(site)
    truth = torch.randn(6, 6, generator=torch.Generator().manual_seed(7))
    inputs = [torch.randn(16, 6) for _ in range(40)]
    losses: list[Any] = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x in inputs:
            yield x, x @ truth
            losses.append(names["loss"])

    names: dict[str, Any] = {
        "model": [nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 6)],
        "loss_fn": mse_loss,
        "x": inputs[0],
        "batches": batches(),
    }
    exec(example, names)
    found = [float(loss) for loss in losses]
    anchors = names["anchors"]
    names["pipe"].close()
    return {"losses": found, "anchors": anchors}


def test_the_documents_example_learns(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = (str(tmp_path), port)
    results = run_ranks(follow_the_document, 4, args=args, rendezvous="none", timeout=100)
    for rank, result in enumerate(results):
        losses, anchors = result.value["losses"], result.value["anchors"]
        assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
        for name, anchor in results[rank % 2].value["anchors"].items():
            assert torch.equal(anchor, anchors[name])
