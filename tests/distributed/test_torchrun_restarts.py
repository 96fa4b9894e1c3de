"""Under torchrun's restarts and changing numbers of processes ``resume()`` alone goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_torchrun import TORCHRUN, finish, start
from tests.runs.launch import ROOT
from tests.runs.restarting import SLOW, train

SCRIPT = str(ROOT / "tests" / "runs" / "restarting.py")


def assert_as_undisturbed(folder: Path, batches: int, ranks: Sequence[int]) -> list[int]:
    """Ranks of the last life have the bits of a run of two threads; gives where they went on."""
    want = train(folder / "undisturbed", batches, num_stages=2, every=1000)
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in ranks]
    state: dict[str, Any] = {}
    for result in results:
        state.update(result["state"])
        assert result["losses"]
        assert result["losses"].items() <= want["losses"].items()
    assert state == want["state"]
    return [result["start"] for result in results]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torchrun_restarts_a_killed_run_that_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    arguments = [
        "--max-restarts",
        "1",
        SCRIPT,
        str(tmp_path),
        "--batches",
        "12",
        "--kill",
        "1",
        "7",
    ]
    code, errors = finish(start([*TORCHRUN, *arguments]))
    assert code == 0, errors
    assert "exitcode: -9" in errors, errors
    assert min(assert_as_undisturbed(tmp_path, 12, ranks=(0, 1))) > 0


def agent(folder: Path, batches: int) -> list[str]:
    """torchrun on one of two machines, which meet in a file: one is enough, two are taken."""
    waits = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1",
        "--rdzv-backend", "c10d", "--rdzv-id", "run", "--rdzv-endpoint", str(folder / "meeting"),
        "--rdzv-conf", f"store_type=file,{waits}",
        SCRIPT, str(folder), "--batches", str(batches), "--every", "10",
    ]  # fmt: skip


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = start(arguments)
    try:
        yield process
    finally:
        lose(process)


def lose(process: subprocess.Popen[str]) -> None:
    """As if its machine were gone: with its workers, which torchrun gives groups of their own."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for each in (process.pid, *map(int, children)):
            os.kill(each, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.exhaustive  # test_resume.py goes on with other numbers of stages, one after the other
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="finds torchrun's workers in /proc")
def test_a_run_goes_on_with_the_machines_that_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = 100
    # Without it torch gives machines that join the address of a store that only the others know.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    def reached(world: int) -> int:
        file = tmp_path / f"at-{world}"
        return int(file.read_text()) if file.exists() else -1

    (tmp_path / SLOW).touch()
    with started(agent(tmp_path, batches)) as first:
        wait_until(lambda: reached(1) >= 2, "the first machine did not begin alone")
        with started(agent(tmp_path, batches)) as second:
            wait_until(lambda: reached(2) >= 0, "the second machine did not join")
            joined = reached(2)
            wait_until(lambda: reached(2) >= joined + 5, "two machines did not train")
            lose(second)
        (tmp_path / SLOW).unlink()
        code, errors = finish(first, timeout=90)
    assert code == 0, errors
    (went_on,) = assert_as_undisturbed(tmp_path, batches, ranks=(0,))
    assert went_on >= joined, errors
