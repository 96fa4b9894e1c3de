"""Runs a function on several ranks, each a process of its own, and leaves none behind.

Every rank meets the others through a file or through a store whose port the system chooses: tests
may run side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import pickle
import runpy
import signal
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.runs.rank_process import ROOT, RankProcess, start_rank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

GRACE_SECONDS = 10.0
"""How long the other ranks may run on once one has failed, unless failure is expected."""

Rendezvous = Literal["file", "environment", "none"]

_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@dataclass
class RankResult:
    """What one rank left."""

    rank: int
    exit_code: int
    """Negative: the signal that ended the process."""
    stdout: str
    stderr: str
    value: Any
    """What the function returned, or None if it did not return."""
    ended: float = math.nan
    """When the process had ended, of the clock of ``time.time()``."""

    def __str__(self) -> str:
        return (
            f"--- rank {self.rank}, exit code {self.exit_code}\n"
            f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}"
        )


class RankError(AssertionError):
    """Ranks failed or hung; the text holds the output of all of them."""

    def __init__(self, reason: str, results: Sequence[RankResult]) -> None:
        super().__init__("\n".join([reason, *map(str, results)]))
        self.results = list(results)


def in_turn(rank: int, world_size: int, *functions: Callable[[int, int], Any]) -> list[Any]:
    """What each gives; for ``run_ranks``, as starting processes takes longer than many a test."""
    return [function(rank, world_size) for function in functions]


def run_ranks(
    target: Callable[..., Any] | str | Path,
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    rendezvous: Rendezvous = "file",
    rank_environment: bool | None = None,
    expect_failure: bool = False,
    imported: Sequence[str] = (),
    fresh: bool = False,
) -> list[RankResult]:
    """Runs ``target`` on ``world_size`` ranks at once and waits for all of them.

    Args:
        target: a module's function or the source text of a module that defines ``main``, either
            called as ``function(rank, world_size, *args)``; or the path of a script, run as
            ``__main__`` with ``args`` as its arguments.
        args: must be picklable, as must be what the function returns.
        timeout: seconds until all ranks must have ended.
        env: variables to set, or with None to unset, on every rank.
        rendezvous: "file": the process group (gloo) is made before the function is called.
            "environment": the variables are as under torchrun and nobody has made a group yet.
            "none": neither.
        rank_environment: whether RANK, WORLD_SIZE and LOCAL_RANK are set; by default only for
            rendezvous "environment".
        expect_failure: at least one rank must fail, all must end by themselves within the timeout,
            and no exception is raised for a failure.
        imported: modules that take long to import, and start no thread: one process imports them,
            of which all ranks of all such calls are forked.
        fresh: each rank is a new Python instead, which takes seconds: for a GPU, whose libraries
            may start threads when they are imported.

    Raises:
        RankError: a rank failed (or none did, with ``expect_failure``), or the timeout passed;
            in that case every rank's stacks are in its stderr.
    """
    if rank_environment is None:
        rank_environment = rendezvous == "environment"
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        _write_call(folder, target, args, world_size, rendezvous, timeout)
        # The store lives as long as the ranks, here, as torchrun's does in its agent.
        store = None
        if rendezvous == "environment":
            from torch._C._distributed_c10d import TCPStore

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks: list[RankProcess] = []
        try:
            for rank in range(world_size):
                variables = _environment(rank, world_size, rank_environment, store, env or {})
                ranks.append(start_rank(folder, rank, variables, imported, fresh=fresh))
            hung = _wait(ranks, timeout, expect_failure)
        finally:
            for process in ranks:
                process.end()
        results = [_collect(folder, process) for process in ranks]
    if hung:
        raise RankError(f"ranks {hung} did not end within {timeout} s", results)
    failed = [result.rank for result in results if result.exit_code != 0]
    if failed and not expect_failure:
        raise RankError(f"ranks {failed} of {world_size} failed", results)
    if expect_failure and not failed:
        raise RankError("no rank failed, at least one should", results)
    return results


def _write_call(
    folder: Path,
    target: Callable[..., Any] | str | Path,
    args: Sequence[Any],
    world_size: int,
    rendezvous: Rendezvous,
    timeout: float,
) -> None:
    if callable(target) and (target.__module__ == "__main__" or "<" in target.__qualname__):
        raise TypeError(f"{target.__qualname__}: must be at the top of an importable module")
    if isinstance(target, str):
        (folder / "target.py").write_text(textwrap.dedent(target), encoding="utf-8")
    call = (target, tuple(args), world_size, rendezvous, timeout)
    (folder / "call").write_bytes(pickle.dumps(call))


def _environment(
    rank: int,
    world_size: int,
    rank_environment: bool,
    store: TCPStore | None,
    changes: Mapping[str, str | None],
) -> dict[str, str]:
    variables = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
    paths = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    variables |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    if Path("/sys/class/net/lo").exists():
        # A container's host name need not resolve, and no packet has to leave the machine.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank_environment:
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if store is not None:
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    for key, value in changes.items():
        if value is None:
            variables.pop(key, None)
        else:
            variables[key] = value
    return variables


def _wait(ranks: Sequence[RankProcess], timeout: float, expect_failure: bool) -> list[int]:
    """Waits until all have ended. Returns the ranks that had not by the deadline."""
    deadline = time.monotonic() + timeout
    one_failed = False
    while None in (codes := [process.exit_code for process in ranks]):
        if not one_failed and not expect_failure and any(codes):
            one_failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            hung = [rank for rank, code in enumerate(codes) if code is None]
            for rank in hung:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[rank].pid, signal.SIGUSR1)
            time.sleep(1.0)  # for faulthandler to write
            return [] if one_failed else hung
        time.sleep(0.01)
    return []


def _collect(folder: Path, process: RankProcess) -> RankResult:
    rank = process.rank
    value = folder / f"value{rank}"
    assert process.exit_code is not None
    return RankResult(
        rank,
        process.exit_code,
        (folder / f"stdout{rank}").read_text(encoding="utf-8", errors="replace"),
        (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace"),
        pickle.loads(value.read_bytes()) if value.exists() else None,
        process.exit_file.stat().st_mtime,
    )


def run_rank(folder: Path, rank: int) -> None:
    """In the rank's process: calls what :func:`run_ranks` was given."""
    target, args, world_size, rendezvous, timeout = pickle.loads((folder / "call").read_bytes())
    if rendezvous == "file":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    if isinstance(target, Path):
        sys.argv = [str(target), *map(str, args)]
        sys.path.insert(0, str(target.parent))  # as Python does
        main = types.ModuleType("__main__")
        main.__file__ = str(target)
        # By the second name processes that the script starts give its classes back.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(target.read_bytes(), target, "exec"), main.__dict__)
        value = None
    else:
        if isinstance(target, str):
            target = runpy.run_path(str(folder / "target.py"))["main"]
        value = target(rank, world_size, *args)
    partial = folder / f"partial{rank}"
    partial.write_bytes(pickle.dumps(value))
    partial.rename(folder / f"value{rank}")
    if rendezvous == "file" and dist.is_initialized():
        dist.destroy_process_group()
    if not isinstance(target, Path):
        # As Python ends, but for taking torch apart, which costs a processor 0.25 s a rank: scripts
        # and the tests of an interpreter's end do that.
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(0)
