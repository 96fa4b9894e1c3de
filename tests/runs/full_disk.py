"""Training goes on where nothing can be saved, on a real disk that is full or cannot be written.

The disk is a tmpfs in a namespace of the test's own (tests/distributed/test_storage.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import CORRUPT, steps_in
from pipedream2bw.checkpoint.folder import MANIFEST, Folder
from pipedream2bw.checkpoint.tensor_file import TENSORS
from tests.runs.launch import run_ranks
from tests.runs.saved import saved

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
PAGE = resource.getpagesize()


class SavingRun:
    """A run of two stages that is saved after every batch."""

    def __init__(self, path: Path, seed: int = 0, timeout: float = 20.0) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        self.pipe = pd2.PipelineModule(
            nn.Sequential(*layers),
            mse_loss,
            num_stages=2,
            num_microbatches=2,
            example_args=(X[:4],),
            timeout=timeout,
        )
        self.opt = pd2.PipelineOptimizer(torch.optim.AdamW(self.pipe.parameters(), lr=0.1))
        self.ckpt = pd2.Checkpointer(path, self.pipe, self.opt, every=1, keep=2)
        self.path = path

    def train(self) -> str:
        """Trains a batch and waits for what became of its save: "saved", or why it was not."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.pipe.train_step(X, target=Y)
            self.opt.step()
            try:
                self.ckpt.step()
            except OSError as error:
                return f"raised {error}"
            self.pipe.flush()
            for saving in self.ckpt.under_way:
                saving.done.exception(30)
            self.ckpt._under_way.look()
        texts = [str(each.message) for each in seen if "was not saved" in str(each.message)]
        assert len(texts) <= 1, texts
        return texts[0] if texts else "saved"

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.pipe.state_dict().items()}

    def left(self) -> dict[str, list[str]]:
        """The files in each folder that saves have left, by the folders' names."""
        return {path.name: sorted(os.listdir(path)) for path in self.path.iterdir()}

    def close(self) -> None:
        self.ckpt.close()
        self.pipe.close()


@contextlib.contextmanager
def full(folder: Path, free: int) -> Iterator[None]:
    """Fills the disk up to so many free pages."""
    ballast = folder / "ballast"
    handle = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):
            while os.write(handle, bytes(PAGE)):
                pass
        os.ftruncate(handle, max(0, os.fstat(handle).st_size - free * PAGE))
        yield
    finally:
        os.close(handle)
        ballast.unlink()


@contextlib.contextmanager
def read_only(folder: Path, free: int) -> Iterator[None]:
    """Nothing can be written anywhere on the disk."""
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextlib.contextmanager
def short_files(folder: Path, free: int) -> Iterator[None]:
    """This process can write no file of more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


Prevents = Callable[[Path, int], contextlib.AbstractContextManager[None]]


def saves(
    rank: int, world: int, folder: str, how: Prevents, amounts: list[int], victim: int
) -> dict[str, Any]:
    """Saves while that is prevented on a rank, and afterwards; says what became of each save."""
    path = Path(folder, "run")
    run = SavingRun(path)
    told: list[list[str]] = []
    left: list[dict[str, list[str]]] = []

    def phase(batches: int, free: int | None) -> None:
        run.pipe.flush()
        prevented = how(Path(folder), free) if free is not None and rank == victim else None
        with prevented or contextlib.nullcontext():
            run.pipe.flush()  # so that the other ranks do not save before
            told.append([run.train() for _ in range(batches)])
            run.pipe.flush()
            left.append(run.left())

    phase(2, None)
    for free in amounts:
        phase(2, free)
        phase(1, None)
    phase(5, amounts[0])
    phase(1, None)
    state = run.state()
    run.close()
    again = SavingRun(path, seed=7)
    start = again.ckpt.resume()
    same = all(torch.equal(value, state[name]) for name, value in again.state().items())
    again.close()
    return {"told": told, "left": left, "start": start, "same": same}


def check(found: dict[str, Any], amounts: list[int], cause: str) -> None:
    """Raises AssertionError if a run has not done what it should."""
    told, left = found["told"], found["left"]
    assert told[0] == ["saved", "saved"], told
    for number, free in enumerate(amounts):
        failed, then = told[1 + 2 * number], told[2 + 2 * number]
        assert all(cause in text or "rank" in text for text in failed), (free, failed)
        assert then == ["saved"], (free, then)
    last = told[-2]
    assert all("was not saved, training goes on" in text for text in last[:3]), last
    assert "3 checkpoints in a row could not be saved" in last[3], last
    assert "was not saved, training goes on" in last[4], last  # the count has begun anew
    assert told[-1] == ["saved"], told
    batches = sum(map(len, told))
    assert (found["start"], found["same"]) == (batches, True), found
    for names in left:
        whole = [files for files in names.values() if MANIFEST in files]
        failed = [files for files in names.values() if MANIFEST not in files]
        assert len(whole) == 2, left
        assert not any(name.startswith("part-") for files in whole for name in files), left
        # The last one alone: the next save removes what is left, and no tensors are.
        assert len(failed) <= 1, left
        assert not any(name.endswith(TENSORS) for files in failed for name in files), left


def resumes_where_nothing_can_be_written(folder: str) -> None:
    """A run goes on from a folder that cannot be written, from the older checkpoint if need be."""
    path = Path(folder, "run")
    newest, older = steps_in(Folder(path))
    optimizer = next(saved(path, newest).glob("optimizer*"))
    with read_only(Path(folder), 0):
        run = SavingRun(path, seed=8)
        assert run.ckpt.resume() == newest
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    with read_only(Path(folder), 0):
        assert run.ckpt.resume() == older
    assert run.ckpt.resume() == older
    assert (saved(path, newest) / CORRUPT).exists()
    run.close()


def train_without_a_disk(folder: str) -> None:
    """Lets one process, then two, save to a disk that is full or cannot be written.

    Args:
        folder: a disk of a mebibyte where this process may mount.
    """
    # What a save makes: a folder, files of 1 to 3 pages, a manifest of 2 to 4.
    amounts = [0, 1, 4, 8]
    ways: list[tuple[Prevents, list[int], str]] = [
        (full, amounts, "No space left"),
        (read_only, [0], "Read-only file system"),
    ]
    for world in (1, 2):
        for how, free, cause in ways:
            arguments = (folder, how, free, 0)
            found = (
                [saves(0, 1, *arguments)]
                if world == 1
                else [each.value for each in run_ranks(saves, 2, args=arguments, timeout=100)]
            )
            for each in found:
                check(each, free, cause)
            outcomes = [[[t == "saved" for t in p] for p in each["told"]] for each in found]
            assert all(outcome == outcomes[0] for outcome in outcomes), found
            print(json.dumps({"ranks": world, "cause": cause, "told": found[0]["told"]}))
            if world == 1 and how is read_only:
                resumes_where_nothing_can_be_written(folder)
            for path in sorted(Path(folder, "run").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
