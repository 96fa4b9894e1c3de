"""A small run that saves itself, and where it may save to."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import Folder
from pipedream2bw.checkpoint.manifest import Manifest, of_bytes
from tests.fuzz.formats import corpus_of
from tests.runs.object_store import object_store
from tests.unit.checkpoint.trained_run import Trained, runs

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))


class Run:
    def __init__(self, path: Path | str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        self.pipe = pd2.PipelineModule(
            nn.Sequential(*layers),
            mse_loss,
            num_stages=2,
            num_microbatches=2,
            example_args=(X[:4],),
            timeout=10.0,
        )
        self.opt = pd2.PipelineOptimizer(torch.optim.AdamW(self.pipe.parameters(), lr=0.1))
        self.ckpt = pd2.Checkpointer(path, self.pipe, self.opt, **{"every": 1, **options})

    def train(self, batches: int) -> None:
        for _ in range(batches):
            self.pipe.train_step(X, target=Y)
            self.opt.step()
            self.ckpt.step()

    def state(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.pipe.state_dict().values()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(path: Path | str = tmp_path / "run", **options: Any) -> Run:
        runs.append(Run(path, **options))
        return runs[-1]

    yield begin
    for run in runs:
        with contextlib.suppress(Exception):
            run.ckpt.close()
        run.pipe.session.ending.abort("the test is over")


@pytest.fixture
def start_trained() -> Iterator[Callable[..., Trained]]:
    with runs() as begin:
        yield begin


def manifest_of(step: int, nonce: str = "a") -> Manifest:
    """A manifest of a batch that lists no files."""
    manifest = of_bytes(corpus_of("manifest")[0])
    return dataclasses.replace(manifest, batch=step, nonce=nonce, files={})


Hangs = Callable[[str], threading.Event]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hangs]:
    """Lets a method of all folders hang up to the event that it gives, or to the test's end."""
    ended = threading.Event()

    def patch(method: str) -> threading.Event:
        stock = getattr(Folder, method)

        def hung(*args: Any, **options: Any) -> Any:
            ended.wait(60)
            return stock(*args, **options)

        monkeypatch.setattr(Folder, method, hung)
        return ended

    yield patch
    ended.set()


@pytest.fixture(scope="session")
def _bucket() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture
def s3_url(_bucket: str) -> str:
    """A place in a local object store where nothing is."""
    return f"{_bucket}/{uuid.uuid4()}"
