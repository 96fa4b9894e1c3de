"""A run goes on from the newest checkpoint that is whole, whatever was damaged or failed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import statistics
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import CORRUPT, steps_in
from pipedream2bw.checkpoint.folder import INDEX, MANIFEST, Folder
from pipedream2bw.checkpoint.frequency import Frequency
from pipedream2bw.checkpoint.snapshot import Snapshot, begin_snapshot
from pipedream2bw.checkpoint.tensor_file import TENSORS
from pipedream2bw.errors import DamagedCheckpoint
from tests.runs.launch import RankResult, run_ranks
from tests.runs.saved import saved
from tests.unit.checkpoint.conftest import Hangs, Run, X


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_folder_without_checkpoints_begins_at_0(start: Callable[..., Run]) -> None:
    run = start()
    assert run.ckpt.resume() == 0
    run.train(1)
    run.ckpt.close()
    assert start(seed=4).ckpt.resume() == 1


def test_it_keeps_the_newest_and_every_so_many(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(keep=2, keep_every=4)
    run.train(11)
    run.ckpt.close()
    assert steps_in(Folder(tmp_path / "run")) == [11, 10, 8, 4]


def test_a_forked_process_ends_when_it_is_told_to(start: Callable[..., Run]) -> None:
    first, second = start(preempt=["SIGTERM"]), start(preempt=["SIGTERM"])
    fork = multiprocessing.get_context("fork")
    began = fork.Event()

    def work() -> None:
        began.set()
        time.sleep(60)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside fork()
        child = fork.Process(target=work, daemon=True)
        child.start()
    assert began.wait(20)
    child.terminate()
    child.join(20)
    try:
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
    os.kill(os.getpid(), signal.SIGTERM)  # this process goes on noticing it
    with pytest.raises(pd2.Preempted):
        second.ckpt.close()
    first.ckpt.close()


def damage(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: draw.randrange(len(data))])
    elif how == "flip":
        bit = draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(data) + b" ")


@pytest.mark.parametrize("how", ["cut", "flip", "gone", "longer"])
def test_any_damaged_file_is_named_and_the_next_older_checkpoint_taken(
    how: str, start: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(every=2)
    states = {}
    for batch in range(1, 5):
        run.train(1)
        states[batch] = run.state()
    run.ckpt.close()
    draw = random.Random(how)
    newest = saved(tmp_path / "run", 4)
    whole = {path.name: path.read_bytes() for path in newest.iterdir()}
    resumed = start(seed=9)
    for name in sorted(whole.keys() - {INDEX}):
        # Without its manifest a save is none that has ended: see test_saving_again.py.
        for _ in range(0 if (name, how) == (MANIFEST, "gone") else 3):
            caplog.clear()
            damage(newest / name, how, draw)
            before = resumed.state()
            with pytest.raises(DamagedCheckpoint, match=f"{newest.name}/{name}"):
                pd2.load(tmp_path / "run", resumed.pipe, resumed.opt, step=4)
            assert same(resumed.state(), before)
            assert resumed.ckpt.resume() == 2
            assert same(resumed.state(), states[2])
            assert name in caplog.text
            assert f"{newest.name} is set aside as corrupt" in caplog.text
            (newest / CORRUPT).unlink()
            (newest / name).write_bytes(whole[name])
    assert resumed.ckpt.resume() == 4
    assert same(resumed.state(), states[4])


def test_a_run_whose_manifests_are_all_damaged_does_not_begin_anew(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(every=1)
    run.train(2)
    run.ckpt.close()
    for manifest in (tmp_path / "run").glob(f"step-*/{MANIFEST}"):
        manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="none of 2 checkpoints is whole"):
        start(seed=9).ckpt.resume()


def test_a_foreign_manifest_is_refused_and_stays(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    run.train(1)
    run.ckpt.close()
    path = saved(tmp_path / "run", 1) / MANIFEST
    rest = path.read_bytes().partition(b",")[2].replace(b'"version": 1', b'"version": 2')
    path.write_bytes(b'{"sum": "%08x",' % zlib.crc32(rest) + rest)
    with pytest.raises(ValueError, match="version: 2, it must be 1"):
        start().ckpt.resume()
    assert path.exists()


def test_saves_that_fail_warn_and_the_third_in_a_row_raises(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = start()
    run.train(2)
    run.ckpt.close()
    writing = Folder.writing

    def full(self: Folder, *names: str) -> Any:
        if names[-1].startswith("optimizer"):
            raise OSError(28, "No space left on device")
        return writing(self, *names)

    monkeypatch.setattr(Folder, "writing", full)
    with pytest.warns(UserWarning, match="was not saved, training goes on: OSError.*No space"):
        run.train(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(OSError, match=r"3 checkpoints in a row could not be saved.*No space"):
            run.train(5)
    assert steps_in(Folder(tmp_path / "run")) == [2, 1]
    (failed,) = {*(tmp_path / "run").iterdir()} - {saved(tmp_path / "run", n) for n in (1, 2)}
    assert not list(failed.glob(f"*{TENSORS}"))  # the next save removes what is left
    monkeypatch.undo()
    state = run.state()
    resumed = start(seed=8)
    assert resumed.ckpt.resume() == 2
    assert not same(resumed.state(), state)


def test_after_a_failure_that_passes_it_saves_again(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = start()
    write = Folder.write
    failing = True

    def now_and_then(self: Folder, *names: str, data: bytes) -> None:
        if failing and names[-1] == MANIFEST:
            raise OSError(30, "Read-only file system")
        write(self, *names, data=data)

    monkeypatch.setattr(Folder, "write", now_and_then)
    with warnings.catch_warnings(record=True) as seen:
        for failing in (True, True, False, True, True, False):  # noqa: B007
            run.train(1)
            run.pipe.flush()
            for saving in run.ckpt.under_way:
                saving.done.exception(10)
        run.ckpt.close()
    assert sum("Read-only" in str(each.message) for each in seen) == 4
    assert steps_in(Folder(tmp_path / "run"))[0] == 6


def test_a_file_system_that_hangs_does_not_stop_training(
    start: Callable[..., Run], hang: Hangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=2)
    answers = hang("make")
    monkeypatch.setattr(run.pipe.session.control, "timeout", 0.3)
    with pytest.warns(
        UserWarning, match=r"TimeoutError: .*/run: checkpoint 2 took more than 0.3 s"
    ):
        run.train(5)
    answers.set()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_signal_saves_the_run_and_ends_it(
    name: str, evaluates: bool, start: Callable[..., Run]
) -> None:
    run = start(every=100, preempt=[name])
    before = signal.getsignal(signal.Signals[name])
    run.train(3)
    os.kill(os.getpid(), signal.Signals[name])
    with pytest.raises(pd2.Preempted) as ended:
        if evaluates:
            with torch.no_grad():
                run.pipe(X)
        else:
            run.train(5)
    assert ended.value.code == 128 + signal.Signals[name]
    assert signal.getsignal(signal.Signals[name]) != before
    assert not run.pipe.session.ending.is_open
    resumed = start(seed=3)
    assert resumed.ckpt.resume() == (3 if evaluates else 4)


def test_what_every_cannot_be_is_refused(start: Callable[..., Run]) -> None:
    for every in ("often", "10 days", 0, -1):
        with pytest.raises(ValueError, match="every"):
            start(every=every)
    with pytest.raises(TypeError, match="every"):
        start(every=1.5)
    with pytest.raises(ValueError, match="keep: 1, it must be at least 2"):
        start(keep=1)
    with pytest.raises(ValueError, match="preempt: 'SIGNAL', it must be one of"):
        start(preempt=["SIGNAL"])
    with pytest.raises(ValueError, match="max_overhead"):
        start(max_overhead=1.0)


def test_a_pipeline_has_one_at_a_time(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(every=2)

    def another() -> pd2.Checkpointer:
        return pd2.Checkpointer(tmp_path / "far", run.pipe, run.opt, every="0.001s")

    with pytest.raises(ValueError, match=r"/far: the pipeline has .* of .*/run, which"):
        another()
    run.train(2)
    run.ckpt.close()
    first, run.ckpt = run.ckpt, another()
    first.close()  # again, which changes nothing for the other
    run.train(2)
    run.ckpt.close()
    assert steps_in(Folder(tmp_path / "run")) == [2]
    assert steps_in(Folder(tmp_path / "far"))[0] > 2


# ---------------------------------------------------------------- frequency


def overhead(
    *, batch: float, added: float, persist: float, limit: float, batches: int
) -> tuple[float, int]:
    """The share of time that saving adds in the second half, and the batches between saves."""
    frequency = Frequency("auto", limit)
    saving_until, now, spent, counted = -1.0, 0.0, 0.0, 0
    saves = 0
    for number in range(batches):
        due = frequency.is_due() and saving_until < now
        during = now < saving_until
        # What a save adds is spread over the batches during which it is written.
        seconds = batch + (added * batch / persist if during else 0.0)
        now += seconds
        frequency.batch_ended(seconds, is_saving=during)
        if during and now >= saving_until:
            frequency.save_ended(persist)
        if due:
            frequency.save_began()
            saving_until = now + persist
            saves += 1
        if number >= batches // 2:
            spent += seconds - batch
            counted += 1
    return spent / (counted * batch), frequency.batches or 0


@pytest.mark.parametrize(
    ("batch", "added", "persist"), [(0.1, 0.05, 0.5), (0.01, 0.2, 3.0), (1.0, 0.01, 0.2)]
)
def test_auto_keeps_to_the_share_that_is_allowed(
    batch: float, added: float, persist: float
) -> None:
    share, batches = overhead(batch=batch, added=added, persist=persist, limit=0.035, batches=20000)
    assert share <= 0.037
    least = max(persist / batch, added / (0.035 * batch), 1)
    assert batches <= 2.5 * least + 1  # and no less often than it need be


def test_auto_follows_a_disk_that_becomes_slower_and_faster() -> None:
    frequency = Frequency("auto", 0.05)
    found = []
    for added in (0.1, 0.4, 0.1):
        for _ in range(30):
            for _ in range(frequency.batches or 10):
                frequency.batch_ended(0.1, is_saving=False)
            frequency.save_began()
            frequency.batch_ended(0.1 + added, is_saving=True)
            frequency.save_ended(0.5)
        assert frequency.batches is not None
        found.append(frequency.batches)
    assert found[1] >= 2 * found[0]
    assert found[2] <= found[1] / 2


def test_how_often_was_given_is_not_taken_for_what_was_learnt() -> None:
    frequency = Frequency("auto", 0.05)
    frequency.load_state_dict(Frequency(5000, 0.05).state_dict())
    assert frequency.batches is None
    learnt = Frequency("auto", 0.05)
    learnt.load_state_dict({"batches": 12})
    frequency.load_state_dict(learnt.state_dict())
    assert frequency.batches == 12


def test_batches_of_uneven_length_do_not_make_saves_rare() -> None:
    def settled(unevenness: float) -> float:
        noise, between = random.Random(0), []
        frequency = Frequency("auto", 0.035)

        def train(batches: int, *, added: float, is_saving: bool) -> None:
            for _ in range(batches):
                other = noise.expovariate(1 / unevenness) if unevenness else 0.0
                frequency.batch_ended(1.0 + other + added, is_saving=is_saving)

        for _ in range(400):
            train((frequency.batches or 10) - 4, added=0.0, is_saving=False)
            frequency.save_began()
            train(4, added=0.04, is_saving=True)
            frequency.save_ended(4.0)
            between.append(frequency.batches or 0)
        return statistics.fmean(between[100:])

    assert settled(0.3) <= 2 * settled(0.0)


def test_a_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    frequency = Frequency("10min", 0.035)
    now = 599.0
    assert not frequency.is_due()
    now = 600.0
    assert frequency.is_due()
    frequency.save_began()
    now = 1100.0
    assert not frequency.is_due()


PROGRAM = """
import sys, torch
from tests.runs.launch import RankResult, run_ranks
from tests.unit.checkpoint.conftest import Run
run = Run(sys.argv[1], every=2, preempt=())
run.train(2)  # whose last backwards need another batch
if "flush" in sys.argv:
    run.pipe.flush()
if "close" in sys.argv:
    run.pipe.close()
"""


def run_program(folder: Path, *arguments: Any) -> RankResult:
    script = folder / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    (result,) = run_ranks(script, 1, args=arguments, rendezvous="none", timeout=60)
    return result


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("exit", "the program ended first"),
        ("close", "the pipeline ended before batch 2 was copied"),
    ],
)
def test_a_program_that_does_not_wait_for_its_save_tells_that_it_is_lost(
    end: str, reason: str, tmp_path: Path
) -> None:
    result = run_program(tmp_path, tmp_path / "run", end)
    assert re.search(f"checkpoint 2 was not saved: {reason}", result.stderr), result.stderr
    assert steps_in(Folder(tmp_path / "run")) == []


def test_a_program_that_ends_once_its_state_is_copied_saves_it(tmp_path: Path) -> None:
    for number in range(3):
        path = tmp_path / str(number)
        run_program(tmp_path, path, "flush")
        assert steps_in(Folder(path)) == [2]


def test_a_thread_that_has_written_keeps_nothing_of_what_it_wrote(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots: list[weakref.ref[Snapshot]] = []

    def begin(*args: Any, **options: Any) -> Snapshot:
        snapshot = begin_snapshot(*args, **options)
        snapshots.append(weakref.ref(snapshot))
        return snapshot

    monkeypatch.setattr("pipedream2bw.checkpoint.save.begin_snapshot", begin)
    run = start()
    run.train(1)
    # Python's own list of threads may keep it like this up to the interpreter's end.
    (thread,) = (t for t in threading.enumerate() if t.name == "pipedream2bw: checkpoint 1")
    run.ckpt.close()
    thread.join(20)
    gc.collect()
    assert [snapshot() for snapshot in snapshots] == [None]
