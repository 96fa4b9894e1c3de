"""Models that travel between sites: what is measured, and that training does not notice."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import pipedream2bw as pd2
from tests.references.seldom_oracle import SeldomOracle
from tests.runs.launch import run_ranks
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

SITES, CLASSES = 3, 6


def layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [
        nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, CLASSES)),
    ]


def rows_of(site: int, number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each site has three of the classes; the last, its most frequent, is the next site's first."""
    g = torch.Generator().manual_seed(seed + 100 * site)
    centers = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(1))
    drawn = torch.multinomial(torch.tensor([0.2, 0.2, 0.6]), number, replacement=True, generator=g)
    labels = (2 * site + drawn) % CLASSES
    return centers[labels] + 0.7 * torch.randn(number, 8, generator=g), labels


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> float:
    return float((output.argmax(1) == labels).double().mean())


def travel(rank: int, world: int, folder: str, ranks: int) -> dict[str, Any]:
    site, store = join_site(folder, f"of{ranks}", rank, ranks)
    x, y = rows_of(site, 40, seed=1000)
    scout = pd2.SkewScout([8, 16, 32], threshold=0.02)
    with pd2.PipelineModule(
        layers(), cross_entropy, num_microbatches=2, example_args=(x,), timeout=60
    ) as pipe:
        sync = sync_of(Setting(num_sites=SITES), store, site, every=scout)
        opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.3), replica_sync=sync)

        def evaluate() -> float | None:
            pipe.eval()
            output = pipe(x)
            pipe.train()
            return None if output is None else accuracy(output, y)

        with pytest.raises(ValueError, match="a batch waits"):
            pipe.train_step(x, target=y)
            sync.measure(evaluate)
        opt.step()
        found = []
        for begin in range(3):
            for seed in range(5):
                rows, labels = rows_of(site, 16, seed=10 * begin + seed)
                pipe.train_step(rows, target=labels)
                opt.step()
            before = copy_of(pipe.state_dict())
            every = sync.every
            loss = sync.measure(evaluate)
            after = copy_of(pipe.state_dict())
            assert all(torch.equal(after[name], before[name]) for name in before)
            with sync.evaluating_anchors():
                pipe.eval()
                output = pipe(x)
                pipe.train()
            after = pipe.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before)
            found.append((before, every, loss, sync.every, output, sync.anchors()))
    return {"site": site, "found": found}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_accuracy_loss_is_that_of_the_unsplit_models(ranks: int, tmp_path: Path) -> None:
    results = [
        result.value
        for result in run_ranks(
            travel, SITES * ranks, args=(str(tmp_path), ranks), rendezvous="none", timeout=120
        )
    ]
    scout, known = pd2.SkewScout([8, 16, 32], threshold=0.02), {}
    for time in range(3):
        models = []
        for site in range(SITES):
            parts = [r["found"][time] for r in results if r["site"] == site]
            model = nn.Sequential(*layers()).eval()
            model.load_state_dict({k: v for part in parts for k, v in part[0].items()})
            models.append(model)
        data = [rows_of(site, 40, seed=1000) for site in range(SITES)]
        at_home = [accuracy(models[s](data[s][0]), data[s][1]) for s in range(SITES)]
        abroad = [accuracy(models[s - 1](data[s][0]), data[s][1]) for s in range(SITES)]
        want = sum(at_home) / SITES - sum(abroad) / SITES
        for result in results:
            _, every, loss, chosen, output, anchors = result["found"][time]
            assert loss == pytest.approx(want)
            assert chosen == scout.choose(every, loss, known)[0]
            if output is not None:
                anchored = copy.deepcopy(models[result["site"]])
                parts = [r["found"][time] for r in results if r["site"] == result["site"]]
                anchored.load_state_dict(
                    {k: v for part in parts for k, v in part[5].items()}, strict=False
                )
                assert torch.equal(output, anchored(data[result["site"]][0]))
                assert anchors.keys() <= dict(anchored.named_parameters()).keys()
        known = scout.choose(every, loss, known)[1]
    assert max(loss for _, _, loss, *_ in results[0]["found"]) > 0.1  # the sites' labels differ


SETTING = Setting(batches=12)


def measured(rank: int, world: int, folder: str) -> SiteResult:
    """Trains, and measures what seems to be no loss after batch 5."""
    site, store = join_site(folder, "measured", rank, 1)
    with pipe_of(SETTING, site) as pipe:
        sync = sync_of(SETTING, store, site, every=pd2.SkewScout([3, 4]))
        opt = pd2.PipelineOptimizer(SETTING.sgd(pipe.parameters()), replica_sync=sync)
        losses = []
        for number, batch in enumerate(SETTING.data()[site][0]):
            if number == 5:
                x = SETTING.data()[1 - site][0][3].args[0]

                def evaluate(x: torch.Tensor = x) -> float:
                    with torch.no_grad():
                        return float(pipe(x).isfinite().double().mean())

                assert sync.measure(evaluate) == 0.0
                assert sync.every == 4
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        return result_of(site, pipe, losses, sync)


def test_a_run_that_is_measured_changes_its_interval_and_nothing_else(tmp_path: Path) -> None:
    results = run_ranks(measured, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)
    three = dataclasses.replace(SETTING, every=3)

    def change(oracle: SeldomOracle) -> None:
        oracle.every, oracle.since = 4, 5
        oracle.offsets = [2 * offset for offset in oracle.offsets]  # of two stages: 0, 1; 0, 2

    want = expected(three, results[0].value.stages, before={5: change})
    for result in results:
        assert_expected(three, result.value, want)


def evaluating_does_not_train(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, sync: pd2.ReplicaSync, folder: str
) -> None:
    """What would write over weights that are away, or take others for them, is refused."""
    (batch,) = SETTING.make_task().batches([8])
    pipe.train_step(*batch.args, target=batch.target)  # waits for its step
    before = copy_of(pipe.state_dict())
    inside = {
        "opt.step()": opt.step,
        "train_step()": lambda: pipe.train_step(*batch.args, target=batch.target),
        "loading weights": lambda: pipe.load_state_dict(before),
        "save": lambda: pd2.save(folder, pipe, opt),
    }
    with sync.evaluating_anchors():
        for what, call in inside.items():
            with pytest.raises(ValueError, match="called inside evaluating_anchors") as raised:
                call()
            assert str(raised.value).startswith(what)
        with torch.no_grad():
            pipe(*batch.args)
    after = pipe.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    opt.step()
    pipe.load_state_dict(before)
    pd2.save(folder, pipe, opt).wait()


def wrong(rank: int, world: int, folder: str) -> None:
    site, store = join_site(folder, "wrong", rank, 1)
    with pipe_of(SETTING, site, timeout=30.0) as pipe:
        sync = sync_of(SETTING, store, site)
        opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=sync)
        with pytest.raises(ValueError, match="measure: every: 4, it must be a SkewScout"):
            sync.measure(lambda: 0.5)
        assert opt.replica_sync is sync
        evaluating_does_not_train(pipe, opt, sync, f"{folder}/{site}")
    pipe = pipe_of(SETTING, site, timeout=30.0)
    sync = sync_of(SETTING, store, site, every=pd2.SkewScout([4]))
    opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=sync)
    assert opt.replica_sync is sync
    with pytest.raises(TypeError, match="measure: evaluate gave None, it must give a float"):
        sync.measure(lambda: None if site == 1 else 0.5)
    assert sync.measure(lambda: 0.5) == 0.0
    (batch,) = SETTING.make_task().batches([8])

    def train() -> float:
        with pytest.raises(ValueError, match=r"train_step\(\): called inside measure\(\)"):
            pipe.train_step(*batch.args, target=batch.target)
        return 0.5

    assert sync.measure(train) == 0.0

    def fail() -> float:
        if site == 0:
            return 0.5
        raise KeyError("site 1 has no such rows")

    with pytest.raises((pd2.errors.StageError, KeyError), match="no such rows"):
        sync.measure(fail)
    with pytest.raises(pd2.errors.StageError, match="no such rows"):
        pipe.flush()


def apart(rank: int, world: int, folder: str) -> None:
    """Sites measure after different batches."""
    site, store = join_site(folder, "apart", rank, 1)
    with pipe_of(SETTING, site, timeout=30.0) as pipe:
        sync = sync_of(SETTING, store, site, every=pd2.SkewScout([4]))
        opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), replica_sync=sync)
        if site == 1:
            (batch,) = SETTING.make_task().batches([8])
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        with pytest.raises(ValueError, match="measure: batch must be the same on every site"):
            sync.measure(lambda: 0.5)


def test_what_is_measured_wrongly_is_told_on_all_sites(tmp_path: Path) -> None:
    run_ranks(wrong, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)
    run_ranks(apart, 2, args=(str(tmp_path),), rendezvous="none", timeout=60)
