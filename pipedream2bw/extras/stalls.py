"""How long a pipeline waits for its data, found by running it with and without."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..checks import check_whole_number
from ..model.sources import sources_kept
from ..pipeline.module import PipelineModule
from ..runtime.microbatch import Microbatch
from ..schedules.events import Event

_WARMUP = 2  # batches before the first that are timed: memory is touched, kernels are chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataStalls:
    """What :func:`data_stalls` found; ``print`` shows it in words.

    Attributes:
        batches: how many each run had.
        synthetic: seconds of a batch when one batch is given over and over: the pipeline alone.
        cached: seconds of a batch when the loader's batches are in memory.
        as_is: seconds of a batch as the loader gives them.
        loading: seconds that the loader takes for a batch when nothing else is done.
        waiting: of this process's first and last stage, a share of the time of the run as it is:
            the stage was idle while this process waited for the loader.
    """

    batches: int
    synthetic: float
    cached: float
    as_is: float
    loading: float
    waiting: Mapping[int, float]

    @property
    def stall(self) -> float:
        """Seconds of each batch for which everything waits for data."""
        return max(0.0, self.as_is - self.cached)

    @property
    def share(self) -> float:
        """The share of the time in which everything waits for data: ``stall / as_is``."""
        return self.stall / self.as_is

    def with_workers(self, factor: float) -> float:
        """Seconds of a batch if so many times as many workers loaded, each as fast as now."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor: {factor}, it must be positive and finite")
        return max(self.cached, self.loading / factor)

    @property
    def workers_needed(self) -> int:
        """How many times as many workers would keep up with the pipeline."""
        return max(1, math.ceil(self.loading / self.cached))

    def __str__(self) -> str:
        def ms(seconds: float) -> str:
            return f"{seconds * 1e3:.1f} ms"

        waits = ", ".join(f"stage {stage} {share:.0%}" for stage, share in self.waiting.items())
        needed = self.workers_needed
        lines = [
            f"of each batch, {ms(self.as_is)}, {ms(self.stall)} are waited for data "
            f"({self.share:.0%}); mean of {self.batches} batches",
            f"  one batch over and over  {ms(self.synthetic)}",
            f"  batches from memory      {ms(self.cached)}",
            f"  as is                    {ms(self.as_is)}",
            f"  the loader alone         {ms(self.loading)}",
        ]
        lines += [f"idle while this process waits for the loader: {waits}"] if waits else []
        lines += [
            f"a cache of ready batches would give {ms(self.cached)} a batch; "
            f"{needed} times the workers, {ms(self.with_workers(needed))}"
            if needed > 1
            else "the loader keeps up: neither more workers nor a cache would help"
        ]
        return "\n".join(lines)


def with_target_last(item: Any) -> Microbatch:
    """Takes ``(*arguments, target)``."""
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise TypeError(
            f"loader: gives {type(item).__name__}, data_stalls takes (*arguments, target): give "
            "as_call, a function from what it gives to a pd2.Microbatch"
        )
    return Microbatch(*item[:-1], target=item[-1])


def data_stalls(
    loader: Iterable[Any],
    pipe: PipelineModule,
    batches: int = 20,
    *,
    as_call: Callable[[Any], Microbatch] = with_target_last,
) -> DataStalls:
    """Finds how long a pipeline waits for its data, by short runs that differ in that alone.

    After DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB
    2021): the loader as it is, so that what it reads is as cold as in training; the loader alone,
    whose batches are kept in memory; training on these; and on the first of them, over and over.
    Each run begins and ends drained, which counts in all of them alike.

    Nothing is trained. All train_steps are one batch under :meth:`PipelineModule.no_sync`, which
    has no update and is taken back at the end (:meth:`PipelineModule.discard_batch`): weights,
    optimizer, buffers, random numbers and the count of batches are as before; the delay begins
    anew. A batch takes less than in training by what its update is not hidden. Forwards and
    backwards do run, and hooks and metrics are called.

    Every rank calls it, each with the loader that feeds it; each gets what it measured. What is
    loaded beside the pipeline's work costs nothing until it takes longer than that. What beginning
    an iteration takes beyond a usual batch, such as the start of workers, is left out: an epoch has
    it once.

    Args:
        loader: what training iterates over. It is iterated anew for each run, and again when it
            ends before ``batches``.
        pipe: between two batches.
        batches: how many are timed in each run; so many are held in memory.
        as_call: gives the arguments of ``train_step`` for what the loader gives; without it that is
            ``(*arguments, target)``.

    Raises:
        ValueError: a batch waits for its ``opt.step()``; ``accumulate`` is more than 1; ``batches``
            below 1; the loader gives nothing.
        TypeError: the loader cannot be iterated anew, or gives something else.
        Exception: what the loader raises; on the other ranks a ValueError with its words.
    """
    check_whole_number("batches", batches)
    if isinstance(loader, Iterator) or not hasattr(type(loader), "__iter__"):
        raise TypeError(
            f"loader: {type(loader).__name__} given, it must be iterable more than once: a "
            "DataLoader or a list, no iterator"
        )
    pipe.session.accumulation.check_between_batches("data_stalls()")
    with sources_kept():
        try:
            with pipe.no_sync():
                return _measure(loader, pipe, batches, as_call)
        finally:
            if pipe.session.ending.is_open:
                pipe.discard_batch()


def _measure(
    loader: Iterable[Any],
    pipe: PipelineModule,
    batches: int,
    as_call: Callable[[Any], Microbatch],
) -> DataStalls:
    def run(items: Iterable[Any]) -> tuple[float, dict[int, float]]:
        return _run(items, pipe, batches, as_call)

    together = pipe.session.together  # what fails on one rank is raised on all
    first = together(lambda: next(_endless(loader))[0])
    _run([first] * _WARMUP, pipe, _WARMUP, as_call)
    as_is, waiting = run(loader)
    kept, loading = together(lambda: _loaded(loader, batches))
    cached, _ = run(kept)
    synthetic, _ = run([first])
    return DataStalls(
        batches=batches,
        synthetic=synthetic,
        cached=cached,
        as_is=as_is,
        loading=loading,
        waiting=waiting,
    )


def _run(
    loader: Iterable[Any],
    pipe: PipelineModule,
    batches: int,
    as_call: Callable[[Any], Microbatch],
) -> tuple[float, dict[int, float]]:
    """Seconds of a batch, and the shares in which the first and the last stage wait for data."""
    waits = _Waits()
    pipe.flush()
    with pipe.timeline() as timeline:
        items = _endless(loader)
        begin = time.monotonic()
        for _ in range(batches):
            try:
                call = _checked(as_call(waits.take(items)))
            except Exception as error:
                text = f"data_stalls(): {type(error).__name__}: {error}"
                with contextlib.suppress(ValueError):  # so that the other ranks do not wait
                    pipe.train_step(microbatches=(_refused(text) for _ in range(1)))
                raise
            pipe.train_step(*call.args, target=call.target, **call.kwargs)
        pipe.flush()
        seconds = time.monotonic() - begin
    depth = pipe.session.grid.depth

    def idle_in(spans: Sequence[tuple[float, float]], stages: Iterable[int]) -> float:
        busy = [row for row in timeline.rows if row.stage % depth in stages]
        return _idle_in(spans, busy)

    usual, beginnings = waits.parts()
    seconds -= idle_in(beginnings, range(depth))
    mine = [stage for stage in dict.fromkeys((0, depth - 1)) if stage in pipe.stages]
    return seconds / batches, {stage: idle_in(usual, [stage]) / seconds for stage in mine}


def _loaded(loader: Iterable[Any], batches: int) -> tuple[list[Any], float]:
    """Batches, and the seconds that one takes."""
    waits, items = _Waits(), _endless(loader)
    kept = [waits.take(items) for _ in range(batches)]
    return kept, sum(end - start for start, end in waits.parts()[0]) / batches


def _checked(call: Any) -> Microbatch:
    if not isinstance(call, Microbatch):
        raise TypeError(f"as_call: gives {type(call).__name__}, it must give a pd2.Microbatch")
    return call


def _refused(text: str) -> Microbatch:
    raise ValueError(text)


class _Waits:
    """When the items of a loader were waited for."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, bool]] = []

    def take(self, items: Iterator[tuple[Any, bool]]) -> Any:
        """The next item."""
        start = time.monotonic()
        item, begins = next(items)
        self._spans.append((start, time.monotonic(), begins))
        return item

    def parts(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """The waits, each of a usual item; and what the first of an iteration took beyond that."""
        others = [end - start for start, end, begins in self._spans if not begins]
        longest = sum(others) / len(others) if others else math.inf
        usual, beyond = [], []
        for start, end, begins in self._spans:
            until = min(end, start + longest) if begins else end
            usual.append((start, until))
            beyond.append((until, end))
        return usual, beyond


def _idle_in(waits: Sequence[tuple[float, float]], events: Sequence[Event]) -> float:
    """Seconds of ``waits`` in which none of ``events`` was under way."""
    busy = sorted((event.start, event.end) for event in events)
    idle = 0.0
    for start, end in waits:
        idle += end - start
        reached = start
        for begun, done in busy:
            overlap = min(end, done) - max(reached, begun)
            if overlap > 0:
                idle -= overlap
                reached = max(reached, done)
    return idle


def _endless(loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """The loader's items without an end, each with whether an iteration begins with it."""
    while True:
        begins = True
        for item in loader:
            yield item, begins
            begins = False
        if begins:
            raise ValueError("loader: gives no batch, it must give at least one")
