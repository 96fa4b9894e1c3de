"""Runs in processes that are killed at a random moment go on with the bits of undisturbed ones."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint import load as loading
from pipedream2bw.checkpoint.commit import steps_in
from pipedream2bw.checkpoint.folder import Folder
from pipedream2bw.errors import DamagedCheckpoint
from tests.exhaustive import exhaustive
from tests.runs.launch import RankError, RankResult, run_ranks
from tests.runs.lives import (
    SETTINGS,
    Life,
    Setting,
    differences,
    first_life,
    random_life,
    run_life,
    whole_of,
)
from tests.runs.outcomes import Outcome, assert_raised, attempt
from tests.runs.pickling import Stack, is_message, pickles
from tests.runs.saved import saved
from tests.runs.trajectory import assert_close


def ended_early(setting: Setting, life: Life, folder: Path) -> list[RankResult]:
    """All ranks of a life that a signal should end; [] if that came too late."""
    try:
        return run_life(setting, life, folder)
    except RankError as error:
        if any(result.exit_code for result in error.results):
            raise
        return []


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        "2bw muon, error feedback",
        "replicas of 4 and 2 microbatches",
        "V's, shares of the state",
        # A loss scale in threads: test_save_and_load.py.
        *exhaustive("chimera", "loss scale", "shares of one parameter", "shares of the state"),
    ],
)
def test_a_killed_run_goes_on_with_the_bits_of_an_undisturbed_one(
    name: str, tmp_path: Path
) -> None:
    setting, draw = SETTINGS[name], random.Random(name)
    undisturbed = run_life(setting, first_life(setting), tmp_path / "undisturbed")
    assert any(result.value["cut"] for result in undisturbed) == (setting.table > 0)
    want = whole_of(undisturbed)
    for _ in range(2):
        ended_early(setting, random_life(setting, draw, by=signal.SIGKILL), tmp_path / "run")
    last = run_life(setting, random_life(setting, draw, by=None), tmp_path / "run")
    assert differences(whole_of(last), want) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_run_goes_on_with_4_2_1_and_3_stages(tmp_path: Path) -> None:
    setting = SETTINGS["2bw sgd, batch norm"]
    want = whole_of(run_life(setting, first_life(setting), tmp_path / "undisturbed"))
    starts = []
    for number, depth in enumerate((4, 2, 1, 3)):
        part = dataclasses.replace(setting, batches=6 * (number + 1))
        life = Life(schedule="2bw", ranks=depth, stages=1, in_threads=depth == 1, every=6)
        results = run_life(part, life, tmp_path / "run")
        starts.append(results[0].value["start"])
    assert starts == [0, 6, 12, 18]
    assert differences(whole_of(results), want) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_run_goes_on_with_2_replicas_1_and_2_unequal_ones_within_1e_6(tmp_path: Path) -> None:
    # The rows of a batch come in the same 12 microbatches.
    alone = Setting(norm=True, feedback=True, num_microbatches=12, batches=2)
    wide = dataclasses.replace(alone, width=2, num_microbatches=6)
    unequal = dataclasses.replace(alone, width=2, num_microbatches=(8, 4))
    in_threads = Life(schedule="2bw", ranks=2, stages=1, in_threads=True, every=2)
    in_processes = dataclasses.replace(in_threads, ranks=1, in_threads=False)
    undisturbed = dataclasses.replace(alone, batches=6)
    want = whole_of(run_life(undisturbed, in_threads, tmp_path / "undisturbed"))
    losses: dict[int, list[float]] = {}
    starts = []
    for number, setting in enumerate((wide, alone, unequal)):
        life = in_processes if setting.width == 2 else in_threads
        part = dataclasses.replace(setting, batches=2 * (number + 1))
        results = run_life(part, life, tmp_path / "run")
        got = whole_of(results)
        starts.append(results[0].value["start"])
        for (_, batch), loss in got["losses"].items():
            losses.setdefault(batch, []).append(loss)
    assert starts == [0, 2, 4]
    for batch, of_replicas in losses.items():
        loss = torch.tensor(sum(of_replicas) / len(of_replicas))
        assert_close(f"loss {batch}", loss, torch.tensor(want["losses"][0, batch]), within=1e-6)
    buffers = {name for _, name in want["buffers"]}
    for name in set(want["state"]) - buffers:
        assert_close(name, got["state"][name], want["state"][name], within=1e-6)
    # Each replica's own; a new one begins with the first's.
    counts = {
        (name[0], int(n))
        for name, n in got["buffers"].items()
        if name[1].endswith("num_batches_tracked")
    }
    assert counts == {(0, 2 * 6 + 2 * 12 + 2 * 8), (1, 2 * 6 + 2 * 12 + 2 * 4)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_signal_to_one_rank_saves_all_and_ends_them(tmp_path: Path) -> None:
    setting = dataclasses.replace(SETTINGS["2bw adamw"], batches=2000)
    life = Life(
        schedule="2bw", ranks=2, stages=1, every=5000, victims=(1,), after=0.2,
        signal=signal.SIGUSR1,
    )  # fmt: skip
    results = ended_early(setting, life, tmp_path)
    code = 128 + signal.SIGUSR1
    assert [result.exit_code for result in results] == [code, code], results
    last = dataclasses.replace(setting, batches=1)
    again = run_life(last, dataclasses.replace(life, victims=()), tmp_path)
    assert again[0].value["start"] == again[1].value["start"] > 0


X = torch.ones(4, 3)


def two_layers() -> pd2.PipelineModule:
    return pd2.PipelineModule(
        [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)],
        torch.nn.functional.mse_loss,
        num_microbatches=2,
        example_args=(X[:2],),
        timeout=30.0,
    )


def train_and_save(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, ckpt: pd2.Checkpointer
) -> None:
    """Two batches."""
    for _ in range(2):
        pipe.train_step(X, target=X)
        opt.step()
        ckpt.step()


def other_folders(rank: int, world: int, folder: str) -> dict[str, Outcome]:
    """What rank 1 finds where it does not see the folder that rank 0 sees."""
    outcomes = {}
    with two_layers() as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        outcomes["path"] = attempt(lambda: pd2.Checkpointer(f"{folder}/of-{rank}", pipe, opt))
        with pd2.Checkpointer(folder, pipe, opt, every=1, preempt=()) as ckpt:
            train_and_save(pipe, opt, ckpt)
        read, holds = Folder.open, Folder.holds
        loading._VISIBLE_SECONDS = 0.2
        if rank == 1:
            Folder.holds = lambda *_: False  # type: ignore[method-assign,assignment]
        outcomes["not there"] = attempt(ckpt.resume)
        Folder.holds = holds  # type: ignore[method-assign]
        if rank == 1:

            def gone(self: Folder, *names: str, **options: Any) -> object:
                raise FileNotFoundError(names[-1])

            Folder.open = gone  # type: ignore[method-assign,assignment]
        outcomes["other files"] = attempt(ckpt.resume)
        Folder.open = read  # type: ignore[method-assign]
        assert ckpt.resume() == 2
    assert steps_in(Folder(folder)) == [2, 1]
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_that_see_other_folders_all_raise_and_rename_nothing(tmp_path: Path) -> None:
    results = run_ranks(other_folders, 2, args=[str(tmp_path)], timeout=100)
    assert_raised(
        (result.value for result in results),
        {
            "path": ("ValueError", ["path must be the same on every rank", "of-0", "of-1"]),
            "not there": ("ValueError", ["rank 0 sees step-00000002-", ", rank 1 does not"]),
            "other files": ("ValueError", ["rank 1 reads step-00000002-", "rank 0 reads a whole"]),
        },
    )


class Moody:
    """Its state can be set to what it was at first, and to anything else if it is willing."""

    def __init__(self, is_willing: bool) -> None:
        self.is_willing = is_willing
        self.state = "first"

    def state_dict(self) -> dict[str, str]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, str]) -> None:
        if not self.is_willing and state["state"] != "first":
            raise RuntimeError("unwilling")
        self.state = state["state"]


def one_refuses(rank: int, world: int, folder: str) -> dict[str, Outcome]:
    """Rank 1 alone has an object that refuses its state."""
    with two_layers() as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        mood = Moody(is_willing=rank != 1)
        options: dict[str, Any] = {"every": 1, "keep": 9, "preempt": (), "extra": {"mood": mood}}
        with pd2.Checkpointer(folder, pipe, opt, **options) as ckpt:
            mood.state = "saved"
            train_and_save(pipe, opt, ckpt)
            mood.state = "first"
            train_and_save(pipe, opt, ckpt)
            weights = {name: value.clone() for name, value in pipe.state_dict().items()}
            found = {"refused": attempt(lambda: ckpt.resume(step=2))}
            assert mood.state == "first"
            assert all(torch.equal(value, weights[n]) for n, value in pipe.state_dict().items())
            train_and_save(pipe, opt, ckpt)
            mood.is_willing = True
            assert ckpt.resume(step=2) == 2
            assert mood.state == "saved"
    return found


@pytest.mark.timeout(120)
def test_an_object_of_one_rank_that_refuses_its_state_leaves_all_ranks_as_they_were(
    tmp_path: Path,
) -> None:
    refused = ["extra: 'mood', Moody: the saved state is refused: RuntimeError: unwilling"]
    assert_raised(
        (r.value for r in run_ranks(one_refuses, 2, args=[str(tmp_path)], timeout=100)),
        {"refused": ("ValueError", refused)},
    )


def unpickling(rank: int, world: int, folder: str) -> list[Stack]:
    """What is pickled and unpickled while two ranks go on past a damaged checkpoint."""
    with two_layers() as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.Adam(pipe.parameters(), lr=0.1))
        extra = {"a": [torch.ones(2), {"b": 1}]}
        with pd2.Checkpointer(folder, pipe, opt, every=1, preempt=(), extra=extra) as ckpt:
            train_and_save(pipe, opt, ckpt)
        if rank == 0:
            (path,) = saved(folder, 2).glob("optimizer-00002-*")
            path.write_bytes(path.read_bytes()[:-1])
        with pickles() as found:
            with pytest.raises(DamagedCheckpoint):  # of which the ranks tell each other
                pd2.load(folder, pipe, opt, step=2)
            assert ckpt.resume() == 1
        assert ckpt.extra["a"][1] == {"b": 1}
    return found


@pytest.mark.timeout(120)
def test_ranks_that_go_on_unpickle_each_others_messages_and_no_file(tmp_path: Path) -> None:
    for result in run_ranks(unpickling, 2, args=[str(tmp_path)], timeout=100):
        assert [stack for stack in result.value if not is_message(stack)] == []
        assert any("DamagedCheckpoint" in stack[0] for stack in result.value)
    assert (saved(tmp_path, 2) / "corrupt").exists()


OWN_CODE = 5

AFTER_ITS_LAST = {
    "resume, choosing": (loading, "on_first_rank"),
    "resume, reading": (loading, "on_all_ranks"),
    "load, choosing": (loading, "Folder"),
    "load, reading": (loading, "on_all_ranks"),
}
"""What a rank does last before it ends, while the others wait for it in the next exchange."""


def loses_one(rank: int, world: int, folder: str, moment: str, victim: int) -> None:
    """One rank ends while all load a checkpoint; the other closes, and ends itself."""
    pipe = two_layers()
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    ckpt = pd2.Checkpointer(folder, pipe, opt, every=1, preempt=())
    train_and_save(pipe, opt, ckpt)
    pipe.flush()
    module, name = AFTER_ITS_LAST[moment]
    does = getattr(module, name)

    def does_last(*args: Any) -> Any:
        done = does(*args)
        if rank == victim:
            os._exit(9)
        return done

    with mock.patch.object(module, name, does_last):
        resumes = moment.startswith("resume")
        print(*attempt(ckpt.resume if resumes else lambda: pd2.load(folder, pipe, opt)))
    pipe.close()
    sys.exit(OWN_CODE)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", AFTER_ITS_LAST)
def test_who_loses_a_rank_while_all_load_a_checkpoint_closes_and_ends_as_it_would(
    moment: str, victim: int, tmp_path: Path
) -> None:
    args = (str(tmp_path), moment, victim)
    results = run_ranks(loses_one, 2, args=args, timeout=50, expect_failure=True)
    assert results[victim].exit_code == 9, results[victim]
    other = results[1 - victim]
    assert other.stdout.split(" ")[0] in ("PeerLost", "PeerTimeout"), other
    assert other.exit_code == OWN_CODE, other
