"""Rows that draw are the undisturbed run's after a resume, and nothing else draws differently."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import pipedream2bw as pd2

LENGTH, BATCH = 10, 4  # every third batch has rows of two epochs


class Draws(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([row, random.random(), float(torch.rand(())), np.random.rand()])


def read(sampler: pd2.ResumableSampler, batches: int, **options: Any) -> torch.Tensor:
    """Rows of so many batches, which are trained."""

    def trained() -> Iterator[torch.Tensor]:
        loader = DataLoader(pd2.SeededRows(Draws()), batch_sampler=sampler, **options)
        while True:
            for batch in loader:
                sampler.advance()
                yield batch

    stream = trained()
    return torch.cat([next(stream) for _ in range(batches)])


def sampler_at(position: int, **options: Any) -> pd2.ResumableSampler:
    sampler = pd2.ResumableSampler(LENGTH, BATCH, **{"seed": 3, **options})
    sampler.load_state_dict({**sampler.state_dict(), "position": position})
    return sampler


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    return read(sampler_at(0), 8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
    ],
)
def test_a_resumed_run_sees_the_rows_of_the_undisturbed_one(
    undisturbed: torch.Tensor, options: dict[str, Any]
) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    assert torch.equal(read(sampler_at(4 * BATCH), 4, **options), undisturbed[4 * BATCH :])


def test_rows_draw_by_seed_epoch_and_row(undisturbed: torch.Tensor) -> None:
    drawn = undisturbed[:, 1:]
    assert len(drawn.unique()) == drawn.numel()  # of 3.2 epochs
    assert not torch.isin(read(sampler_at(0, seed=4), 2)[:, 1:], drawn).any()
    replicas = [read(sampler_at(0, width=2, replica=i), 8).reshape(8, 2, 4) for i in range(2)]
    assert torch.equal(torch.cat(replicas, dim=1).flatten(0, 1), undisturbed)


def test_other_draws_of_the_process_stay_as_they_are() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(torch.rand(())), np.random.rand()]

    def seed() -> None:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)

    rows = pd2.SeededRows(Draws())
    first, second = next(iter(sampler_at(0)))[:2]
    seed()
    want = [drawn(), drawn()]
    seed()
    got = [rows[first] is None or drawn(), rows[second] is None or drawn()]
    assert got == want


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_has_the_weights_of_the_undisturbed_one(tmp_path: Path, workers: int) -> None:
    def trained(batches: int, folder: str) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        sampler = sampler_at(0)
        with pd2.PipelineModule(
            [nn.Linear(4, 4), nn.Linear(4, 4)],
            nn.functional.mse_loss,
            num_microbatches=2,
            example_args=(torch.zeros(BATCH, 4),),
            timeout=60.0,
        ) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.01))
            with pd2.Checkpointer(tmp_path / folder, pipe, opt, data=sampler, every=4) as ckpt:
                start = step = ckpt.resume()
                while step < batches:
                    loader = DataLoader(
                        pd2.SeededRows(Draws()), batch_sampler=sampler, num_workers=workers
                    )
                    for x in loader:
                        pipe.train_step(x, target=x)
                        opt.step()
                        sampler.advance()
                        ckpt.step()
                        step += 1
                        if step == batches:
                            break
            return start, torch.cat([p.flatten() for p in pipe.full_state_dict().values()])

    _, want = trained(8, "undisturbed")
    trained(5, "resumed")
    start, got = trained(8, "resumed")
    assert start == 4
    assert torch.equal(got, want)


def test_what_has_no_rows_of_a_resumable_sampler_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(LENGTH))

    with pytest.raises(TypeError, match="dataset: Stream given, SeededRows takes one that gives"):
        pd2.SeededRows(Stream())
    rows = pd2.SeededRows(Draws())
    assert len(rows) == LENGTH
    with pytest.raises(TypeError, match=r"row 3: int given, .* batch_sampler=sampler"):
        rows[3]
