"""The launcher of tests/distributed: what it passes on, and that nothing outlives it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.exhaustive import exhaustive
from tests.runs.launch import RankError, run_ranks


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"  # dead, not yet reaped by init


def sum_over_ranks(rank: int, world_size: int, scale: float) -> tuple[bool, torch.Tensor]:
    value = torch.full((2,), scale * rank)
    dist.all_reduce(value)
    return "RANK" in os.environ, value


def make_group_as_under_torchrun(rank: int, world_size: int) -> tuple[str, int]:
    dist.init_process_group("gloo")
    value = torch.ones(())
    dist.all_reduce(value)
    dist.destroy_process_group()
    return os.environ["RANK"], int(value)


def last_rank_raises_others_wait(rank: int, world_size: int) -> None:
    print("output of", rank)
    if rank == world_size - 1:
        raise ValueError("the cause")
    dist.barrier()


ONLY_RANK_ZERO_ENDS = """
import os, pathlib, subprocess, sys, time
def main(rank, world_size, folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(folder, str(rank)).write_text(f"{os.getpid()} {child.pid}")
    if rank > 0:
        time.sleep(600)
"""


def modules_and_parent(rank: int, world_size: int) -> tuple[bool, int]:
    return "torch.distributed.pipelining" in sys.modules, os.getppid()


RANK_ONE_KILLS_ITSELF = """
import os
def main(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), 9)
"""


def test_ranks_meet_through_a_file_and_return_their_values() -> None:
    for result in run_ranks(sum_over_ranks, 2, args=[1.5]):
        has_rank_variable, value = result.value
        assert not has_rank_variable
        assert value.tolist() == [1.5, 1.5]


def test_ranks_find_torchruns_environment() -> None:
    results = run_ranks(make_group_as_under_torchrun, 2, rendezvous="environment")
    assert [result.value for result in results] == [("0", 2), ("1", 2)]


def test_source_text_and_scripts_run(tmp_path: Path) -> None:
    source = "def main(rank, world_size):\n    return rank + world_size"
    assert [result.value for result in run_ranks(source, 2, rendezvous="none")] == [2, 3]
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv[1], os.environ['RANK'], os.getenv('X'))")
    results = run_ranks(
        script, 1, args=["a"], rendezvous="none", rank_environment=True, env={"X": "y"}
    )
    assert results[0].stdout == "a 0 y\n"


def test_failure_shows_every_ranks_output() -> None:
    with pytest.raises(RankError, match="the cause") as caught:
        run_ranks(last_rank_raises_others_wait, 2)
    for rank in range(2):
        assert f"output of {rank}" in str(caught.value)


def test_fresh_ranks_are_not_forked_and_meet_all_the_same() -> None:
    forked, fresh = (
        run_ranks(modules_and_parent, 1, rendezvous="none", fresh=fresh)[0].value
        for fresh in (False, True)
    )
    assert forked[0]
    assert fresh == (False, os.getpid())
    for result in run_ranks(sum_over_ranks, 2, args=[1.5], fresh=True):
        assert result.value[1].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("fresh", [False, True])
def test_expected_failure_returns_exit_codes(fresh: bool) -> None:
    results = run_ranks(
        RANK_ONE_KILLS_ITSELF, 2, rendezvous="none", expect_failure=True, fresh=fresh
    )
    assert [result.exit_code for result in results] == [0, -9]
    with pytest.raises(RankError, match="no rank failed"):
        run_ranks("def main(*_): pass", 1, rendezvous="none", expect_failure=True)


@pytest.mark.parametrize("fresh", [False, *exhaustive(True)])
def test_timeout_dumps_stacks_and_leaves_no_process(tmp_path: Path, fresh: bool) -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not end within 8.0 s") as caught:
        run_ranks(
            ONLY_RANK_ZERO_ENDS,
            2,
            args=[str(tmp_path)],
            timeout=8.0,
            rendezvous="none",
            fresh=fresh,
        )
    assert "in main" in caught.value.results[1].stderr
    pids = [int(word) for file in tmp_path.iterdir() for word in file.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10.0
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def test_functions_that_ranks_cannot_import_are_refused() -> None:
    with pytest.raises(TypeError, match="top of an importable module"):
        run_ranks(lambda rank, world_size: None, 1)
