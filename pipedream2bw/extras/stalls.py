"""How long a pipeline waits for its data, found by running it with and without."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint.sampler import ResumableSampler
from ..checks import check_number, check_whole_number
from ..model.sources import sources_kept
from ..pipeline.module import PipelineModule
from ..rules import instance
from ..runtime.microbatch import Microbatch
from ..schedules.events import Event

_CALL = instance("a pd2.Microbatch", Microbatch)
_WARMUP = 2  # batches before the first that are timed: memory is touched, kernels are chosen
_RUNS = 3  # of each kind: a median of them is not that of one moment of a busy machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataStalls:
    """What :func:`data_stalls` found; ``print`` shows it in words.

    Times are seconds of a batch, medians of three runs.

    Attributes:
        batches: how many each run had.
        synthetic: when the loader's batches are in memory: the pipeline alone.
        cached: when the loader's rows have been read before: it prepares them.
        as_is: when they have not: it fetches and prepares them.
        preparing: what the loader takes alone, for rows that have been read before.
        loading: what the loader takes alone, for rows that have not.
        spread: the least and the greatest time of each kind, by the names above.
        waiting: of this process's first and last stage, a share of the time of the runs as it is:
            the stage was idle while this process waited for the loader.
        rereads: the loader's iteration had fewer batches than the runs as it is took, so that some
            of their rows had been read before.
    """

    batches: int
    synthetic: float
    cached: float
    as_is: float
    preparing: float
    loading: float
    spread: Mapping[str, tuple[float, float]]
    waiting: Mapping[int, float]
    rereads: bool

    @property
    def stall(self) -> float:
        """Seconds of each batch for which everything waits for data."""
        return max(0.0, self.as_is - self.synthetic)

    @property
    def fetch_stall(self) -> float:
        """Seconds of the stall that a cache of all rows would save."""
        return max(0.0, self.as_is - max(self.cached, self.synthetic))

    @property
    def preparation_stall(self) -> float:
        """Seconds of the stall that would be left with a cache of all rows."""
        return self.stall - self.fetch_stall

    @property
    def share(self) -> float:
        """The share of the time in which everything waits for data: ``stall / as_is``."""
        return self.stall / self.as_is

    def with_workers(self, factor: float, cached: float = 0.0) -> float:
        """Seconds of a batch with more workers, a cache, or both.

        Args:
            factor: so many times as many workers load, each as fast as now.
            cached: the share of the rows that a cache in memory holds.
        """
        check_number("factor", factor, below=math.inf)
        if not 0 <= cached <= 1:
            raise ValueError(f"cached: {cached}, it must be a share, from 0 to 1")
        fetching = max(0.0, self.loading - self.preparing)
        return max(self.synthetic, (self.loading - cached * fetching) / factor)

    @property
    def workers_needed(self) -> int:
        """How many times as many workers would keep up with the pipeline, without a cache."""
        return max(1, math.ceil(self.loading / self.synthetic))

    def __str__(self) -> str:
        def ms(seconds: float) -> str:
            return f"{seconds * 1e3:.1f} ms"

        waits = ", ".join(f"stage {stage} {share:.0%}" for stage, share in self.waiting.items())
        needed = self.workers_needed
        lines = [
            f"of each batch, {ms(self.as_is)}, {ms(self.stall)} are waited for data "
            f"({self.share:.0%}); medians of {_RUNS} runs of {self.batches} batches",
            f"of that {ms(self.fetch_stall)} for fetching, "
            f"{ms(self.preparation_stall)} for preparing",
        ]
        for name, words in _WORDS.items():
            least, most = map(ms, self.spread[name])
            lines += [f"  {words:36}{ms(getattr(self, name)):>9}  ({least} to {most})"]
        too_few = "the loader has too few batches: rows as they are had partly been read before"
        lines += [too_few] if self.rereads else []
        lines += [f"idle while this process waits for the loader: {waits}"] if waits else []
        lines += [
            f"a cache of all rows would give {ms(self.with_workers(1, 1))} a batch, "
            f"of half of them {ms(self.with_workers(1, 0.5))};\n"
            f"{needed} times the workers, {ms(self.with_workers(needed))}"
            if needed > 1
            else "this process's loader keeps up: neither more workers nor a cache would help"
        ]
        return "\n".join(lines)


_WORDS = {
    "synthetic": "batches from memory",
    "cached": "rows read before",
    "as_is": "as is",
    "preparing": "the loader alone, rows read before",
    "loading": "the loader alone",
}


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
    batches: int = 12,
    *,
    as_call: Callable[[Any], Microbatch] = with_target_last,
) -> DataStalls:
    """Finds how long a pipeline waits for its data, by short runs that differ in that alone.

    After DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB
    2021). One iteration feeds the pipeline, and goes on alone: its rows are as cold as in training.
    A second one, with the random numbers of the first, gives the same rows again, which a cache
    (the system's, of files) holds now. Last, its batches feed the pipeline from memory. Each is
    done three times. A run ends drained, and its time begins with its second batch.

    Rows are cold if nothing has read them since the machine started, or dropped its cache.

    Nothing is trained. All train_steps are one batch under :meth:`PipelineModule.no_sync`, which
    has no update and is taken back at the end (:meth:`PipelineModule.discard_batch`): weights,
    optimizer, buffers, random numbers and the count of batches are as before; the delay begins
    anew. A batch takes less than in training by what its update is not hidden. Forwards and
    backwards do run, and hooks and metrics are called.

    Every rank calls it, each with the loader that feeds it; each gets what it measured. What is
    loaded beside the pipeline's work costs nothing until it takes longer than that. What beginning
    an iteration takes beyond a usual batch, such as the start of workers, is left out: an epoch has
    it once. So is what workers have loaded ahead while nobody waited.

    Args:
        loader: what training iterates over. It is iterated anew for rows read before, and whenever
            it ends. For cold rows an iteration should have about 7 * ``batches``, and four times
            what its workers load ahead.
        pipe: between two batches.
        batches: how many are timed in each run; so many are held in memory. Take a multiple of the
            number of workers, which finish together.
        as_call: gives the arguments of ``train_step`` for what the loader gives; without it that is
            ``(*arguments, target)``.

    Raises:
        ValueError: a batch waits for its ``opt.step()``; ``accumulate`` is more than 1; ``batches``
            below 1; the loader gives nothing.
        TypeError: the loader cannot be iterated anew, or gives something else.
        Exception: what the loader raises; on the other ranks a ValueError with its words.
    """
    pipe.session.together(lambda: _check(loader, batches))
    pipe.session.accumulation.check_between_batches("data_stalls()")
    with sources_kept():
        try:
            with pipe.no_sync():
                return _measure(loader, pipe, batches, as_call)
        finally:
            if pipe.session.ending.is_open:
                pipe.discard_batch()


def _check(loader: object, batches: int) -> None:
    check_whole_number("batches", batches)
    if isinstance(loader, Iterator) or not hasattr(type(loader), "__iter__"):
        raise TypeError(
            f"loader: {type(loader).__name__} given, it must be iterable more than once: a "
            "DataLoader or a list, no iterator"
        )


def _measure(
    loader: Iterable[Any],
    pipe: PipelineModule,
    batches: int,
    as_call: Callable[[Any], Microbatch],
) -> DataStalls:
    together = pipe.session.together  # what fails on one rank is raised on all
    mine = getattr(loader, "num_workers", 0) or 1, getattr(loader, "prefetch_factor", 0) or 0
    workers, prefetched = zip(*pipe.session.control.told_by_all(mine), strict=True)
    # Ranks of a replica must take the same batches, whatever workers each of them has.
    ahead = max(w * p for w, p in zip(workers, prefetched, strict=True))
    opened = functools.partial(_repeatable, loader, math.lcm(*workers), ahead)

    def trained(stream: _Stream) -> tuple[list[float], list[dict[int, float]]]:
        runs = []
        for _ in range(_RUNS):
            together(stream.catch_up)
            runs.append(_run(stream, pipe, batches, as_call))
        seconds, waiting = zip(*runs, strict=True)
        return list(seconds), list(waiting)

    times: dict[str, list[float]] = {}
    with opened() as stream:  # workers that persist draw more when they are started
        first = together(stream.take)
    _run(_Stream([first]), pipe, _WARMUP, as_call)
    with opened() as stream:  # begins with what that one has loaded, and drops it
        times["as_is"], waiting = trained(stream)
        times["loading"], _ = together(lambda: _alone(stream, batches))
        rereads = stream.iterations > 1
    with opened() as stream:
        times["cached"], _ = trained(stream)
        times["preparing"], kept = together(lambda: _alone(stream, batches))
    times["synthetic"], _ = trained(_Stream(kept))
    return DataStalls(
        batches=batches,
        **{name: statistics.median(runs) for name, runs in times.items()},
        spread={name: (min(runs), max(runs)) for name, runs in times.items()},
        waiting={s: statistics.median(run[s] for run in waiting) for s in waiting[0]},
        rereads=rereads,
    )


def _run(
    stream: _Stream,
    pipe: PipelineModule,
    batches: int,
    as_call: Callable[[Any], Microbatch],
) -> tuple[float, dict[int, float]]:
    """Seconds of a batch, and the shares in which the first and the last stage wait for data."""
    pipe.flush()
    with pipe.timeline() as timeline:
        for number in range(1 + batches):
            try:
                call: Any = as_call(stream.take())
                _CALL.check("what as_call gives", call)
            except Exception as error:
                text = f"data_stalls(): {type(error).__name__}: {error}"
                with contextlib.suppress(ValueError):  # so that the other ranks do not wait
                    pipe.train_step(microbatches=(_refused(text) for _ in range(1)))
                raise
            pipe.train_step(*call.args, target=call.target, **call.kwargs)
            if number == 0:  # for which one waits as long as loading takes, also beside slow work
                stream.parts()
                begin = time.monotonic()
        pipe.flush()
        seconds = time.monotonic() - begin
    depth = pipe.session.grid.depth

    def idle_in(spans: Sequence[tuple[float, float]], stages: Iterable[int]) -> float:
        busy = [row for row in timeline.rows if row.stage % depth in stages]
        return _idle_in(spans, busy)

    usual, beginnings = stream.parts()
    seconds -= idle_in(beginnings, range(depth))
    mine = [stage for stage in dict.fromkeys((0, depth - 1)) if stage in pipe.stages]
    return seconds / batches, {stage: idle_in(usual, [stage]) / seconds for stage in mine}


def _alone(stream: _Stream, batches: int) -> tuple[list[float], list[Any]]:
    """The seconds that a batch takes, of each run; and the batches of the last."""
    stream.catch_up()
    stream.parts()
    times: list[float] = []
    for _ in range(_RUNS):
        kept = [stream.take() for _ in range(-(-batches // stream.workers) * stream.workers)]
        times.append(sum(end - start for start, end in stream.parts()[0]) / len(kept))
    return times, kept[:batches]


def _refused(text: str) -> Microbatch:
    raise ValueError(text)


class _Stream:
    """A loader's items without an end, and when they were waited for."""

    def __init__(self, loader: Iterable[Any], workers: int = 1, ahead: int = 0) -> None:
        self.workers, self._ahead = workers, ahead
        self.iterations = 0
        self._items = self._endless(loader)
        self._spans: list[tuple[float, float, bool]] = []

    def _endless(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        while True:
            iteration = self.iterations
            _may_be_iterated(loader)
            for number, item in enumerate(loader):
                self.iterations += number == 0
                yield item
            if self.iterations == iteration:
                raise ValueError("loader: gives no batch, it must give at least one")

    def close(self) -> None:
        """Ends the iteration and its workers now, not when garbage is collected."""
        self._items.close()

    def catch_up(self) -> None:
        """Drops what workers have loaded while nobody waited."""
        for _ in range(self._ahead):
            next(self._items)

    def take(self) -> Any:
        """The next item."""
        start, iterations = time.monotonic(), self.iterations
        item = next(self._items)
        self._spans.append((start, time.monotonic(), self.iterations > iterations))
        return item

    def parts(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """The waits since the last call, each of a usual item; what beginnings took beyond that."""
        others = [end - start for start, end, begins in self._spans if not begins]
        longest = sum(others) / len(others) if others else math.inf
        usual, beyond = [], []
        for start, end, begins in self._spans:
            until = min(end, start + longest) if begins else end
            usual.append((start, until))
            beyond.append((until, end))
        self._spans.clear()
        return usual, beyond


@contextlib.contextmanager
def _repeatable(loader: Iterable[Any], workers: int = 1, ahead: int = 0) -> Iterator[_Stream]:
    """A stream of a loader, which another one repeats: its random numbers come back."""
    own = getattr(loader, "generator", None)
    state = own.get_state() if isinstance(own, torch.Generator) else None
    try:
        with sources_kept(), contextlib.closing(_Stream(loader, workers, ahead)) as stream:
            yield stream
    finally:
        if own is not None and state is not None:
            own.set_state(state)
        _may_be_iterated(loader)


def _may_be_iterated(loader: Iterable[Any]) -> None:
    """Tells a ResumableSampler that its rows may come again: nothing is trained."""
    for name in ("batch_sampler", "sampler"):
        if isinstance(sampler := getattr(loader, name, None), ResumableSampler):
            sampler.load_state_dict(sampler.state_dict())


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
