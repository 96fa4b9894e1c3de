"""Processes of ranks, forked from one process that has imported what most need, and no more.

Importing torch takes a processor longer than most tests, and a test run starts hundreds of ranks.
No rank inherits torch's threads: the process that is forked has started none. Where the import may
start threads or touch a GPU, which no fork survives, a rank is a Python of its own instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib.util
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ("torch", "torch.distributed.pipelining", "pipedream2bw")
"""By name: an import for its effect alone looks like one that may be removed, and once was."""
PRELOADED_WHERE_INSTALLED = ("pytest", "hypothesis")
"""Benchmarks and the check of a GPU do without these."""


@dataclasses.dataclass
class RankProcess:
    """A rank that runs or has ended, in a process group of its own."""

    rank: int
    pid: int
    exit_file: Path

    @property
    def exit_code(self) -> int | None:
        """None while it runs. Negative: the signal that ended it."""
        try:
            return int(self.exit_file.read_text())
        except FileNotFoundError:
            return None

    def end(self) -> None:
        """Ends what is left of it and of its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while self.exit_code is None:
            time.sleep(0.01)


_FRESH = "--fresh"
_WITHOUT_THREADS = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow, which transformers may import
}
_asking = threading.Lock()
_templates: dict[tuple[str, ...], subprocess.Popen[str]] = {}
"""By what they have imported beside ``PRELOADED``."""


def start_rank(
    folder: Path,
    rank: int,
    variables: Mapping[str, str],
    imported: Sequence[str] = (),
    *,
    fresh: bool = False,
) -> RankProcess:
    """A process in which ``launch.run_rank(folder, rank)`` runs, with these variables alone.

    Its output goes to ``folder``/stdout<rank> and stderr<rank>. It has ``imported`` these modules,
    or is ``fresh``: a new Python, which has imported none.
    """
    if fresh:
        return _start_fresh(folder, rank, variables)
    with _asking:  # several threads may start ranks
        return _start_rank(folder, rank, variables, tuple(imported))


def _start_rank(
    folder: Path, rank: int, variables: Mapping[str, str], names: tuple[str, ...]
) -> RankProcess:
    template = _templates.get(names)
    if template is None or template.poll() is not None:
        template = _templates[names] = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), *names],
            cwd=ROOT,
            env=os.environ | _WITHOUT_THREADS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the test run
        )
    assert template.stdin is not None
    assert template.stdout is not None
    exit_file = folder / f"exit{rank}"
    print(
        json.dumps([str(folder), rank, dict(variables), str(exit_file)]),
        file=template.stdin,
        flush=True,
    )
    return RankProcess(rank, int(template.stdout.readline()), exit_file)


def _start_fresh(folder: Path, rank: int, variables: Mapping[str, str]) -> RankProcess:
    """The calling thread lives until the rank has ended: the kernel ends it with this thread."""
    exit_file = folder / f"exit{rank}"
    with (folder / f"stdout{rank}").open("w") as out, (folder / f"stderr{rank}").open("w") as error:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, _FRESH, str(os.getpid()), str(folder), str(rank)],
            cwd=ROOT,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
        )

    def note_end() -> None:
        _write_exit_code(exit_file, process.wait())

    threading.Thread(target=note_end, name=f"end of rank {rank}", daemon=True).start()
    return RankProcess(rank, process.pid, exit_file)


def _write_exit_code(exit_file: Path, code: int) -> None:
    partial = exit_file.with_suffix(".partial")
    with contextlib.suppress(FileNotFoundError):  # nobody asks any more
        partial.write_text(str(code))
        partial.rename(exit_file)


def _serve(parent: int, imported: Sequence[str]) -> Callable[[], None] | None:
    """Forks a rank for each request. Returns in the ranks, with what is to be run there."""
    _end_with_parent(parent)
    installed = filter(importlib.util.find_spec, PRELOADED_WHERE_INSTALLED)
    for name in (*PRELOADED, *installed, *imported):
        importlib.import_module(name)
    if Path("/proc/self/task").exists():
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads, which no fork has"
    gc.freeze()  # or each rank, when it ends, takes a second to look at all of these objects
    running: dict[int, Path] = {}
    while True:
        asked, _, _ = select.select([sys.stdin], [], [], 0.01 if running else None)
        if asked:
            request = sys.stdin.readline()
            if not request:
                return None
            folder, rank, variables, exit_file = json.loads(request)
            pid = os.fork()
            if pid == 0:
                return lambda: _become(Path(folder), rank, variables, os.getppid())
            running[pid] = Path(exit_file)
            print(pid, flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _write_exit_code(running.pop(pid), os.waitstatus_to_exitcode(status))


def _become(folder: Path, rank: int, variables: dict[str, str], parent: int) -> None:
    os.setsid()
    _end_with_parent(parent)
    for descriptor, path, flags in (
        (0, Path(os.devnull), os.O_RDONLY),
        (1, folder / f"stdout{rank}", os.O_WRONLY | os.O_CREAT),
        (2, folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT),
    ):
        file = os.open(path, flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    sys.path += variables.get("PYTHONPATH", "").split(os.pathsep)  # read when Python began
    random.seed()
    _run(folder, rank)


def _become_fresh(folder: Path, rank: int, parent: int) -> None:
    _end_with_parent(parent)
    _run(folder, rank)


def _run(folder: Path, rank: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.chdir(folder)
    from tests.runs.launch import run_rank

    run_rank(folder, rank)


def _end_with_parent(parent: int) -> None:
    """A test run that is killed cannot clean up: have the kernel do it (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__" and sys.argv[1] == _FRESH:
    _become_fresh(Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[2]))
elif __name__ == "__main__":
    run = _serve(int(sys.argv[1]), sys.argv[2:])
    if run is not None:
        run()
