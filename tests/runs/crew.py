"""Processes that run one function after another, each on as many of them as it needs.

Starting eight processes takes longer than most trainings of tiny models.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs.launch import run_ranks

LIFE_SECONDS = 3600.0


class Crew:
    """``run(function, world, ...)`` calls ``function(rank, world, ...)`` on the first processes.

    Each call has a process group (gloo) of its own; what a call has left behind is not the next
    one's. A call that fails leaves the others their processes; one that hangs ends all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self.path = Path(self._folder.name)
        self._count = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._start, name="crew")
        self._thread.start()

    def _start(self) -> None:
        try:
            run_ranks(
                _serve,
                self._size,
                args=(str(self.path),),
                timeout=LIFE_SECONDS,
                rendezvous="none",
                imported=("torch.distributed.tensor.parallel",),
            )
        except BaseException as error:
            self._error = error

    def run(
        self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0
    ) -> list[Any]:
        """What it gives on each process. Raises AssertionError with what they raise."""
        assert world <= self._size
        number, self._count = self._count, self._count + 1
        _put(self.path / f"call-{number}", (function, world, args))
        wanted = [self.path / f"result-{number}-{rank}" for rank in range(world)]
        deadline = time.monotonic() + timeout
        while not all(path.exists() for path in wanted):
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._end_all()
                raise AssertionError(f"{args}: no answer in {timeout} s") from self._error
            time.sleep(0.005)
        found = [pickle.loads(path.read_bytes()) for path in wanted]
        if errors := [text for _, text in found if text]:
            raise AssertionError("\n".join(errors))
        return [value for value, _ in found]

    def _end_all(self) -> None:
        """Ends the processes, whose stacks are in the error of their run."""
        pids = [int(path.read_text()) for path in self.path.glob("pid-*")]
        for sent in (signal.SIGUSR1, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
            time.sleep(1.0)
        self._thread.join()

    def close(self) -> None:
        _put(self.path / f"call-{self._count}", None)
        self._thread.join()
        self._folder.cleanup()
        if self._error is not None:
            raise self._error


def _put(path: Path, value: Any) -> None:
    partial = path.with_name(f"partial-{path.name}")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)


def _serve(rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from pipedream2bw.pipeline import opening

    torch.set_num_threads(1)
    path, number = Path(folder), 0
    (path / f"pid-{rank}").write_text(str(os.getpid()))
    while True:
        asked = path / f"call-{number}"
        while not asked.exists():
            time.sleep(0.005)
        call = pickle.loads(asked.read_bytes())
        if call is None:
            return
        function, world, args = call
        if rank < world:
            value, error = None, ""
            # Idle processes have made fewer pipelines, whose numbers all ranks must agree on.
            opening._numbers = itertools.count(1000 * number)
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{path}/rendezvous-{number}",
                    rank=rank,
                    world_size=world,
                    timeout=datetime.timedelta(seconds=60),
                )
                value = function(rank, world, *args)
            except BaseException:
                error = f"--- rank {rank} of {world}\n{traceback.format_exc()}"
            _put(path / f"result-{number}-{rank}", (value, error))
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        number += 1
