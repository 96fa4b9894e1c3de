"""Makes a pipeline and its optimizer go on where a checkpoint was saved."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from ..model.checkpoint import Checkpoint
from ..optimizer.cut import SavedOptimizers
from ..optimizer.optimizer import PipelineOptimizer
from ..pipeline.module import PipelineModule
from ..ranks.agreement import Operation
from ..runtime.local_stages import LocalStage
from ..runtime.session import Session
from ..runtime.stage_values import load_versions
from .commit import checkpoints
from .cut import MODEL, OPTIMIZER, buffer_prefix, older
from .folder import Folder
from .manifest import Manifest, RankPart
from .save import (
    OUR_EXTRA,
    Beside,
    Stateful,
    generator_states,
    is_stateful,
    set_generators,
)
from .source import Source
from .waiting import on_all_ranks, on_first_rank

log = logging.getLogger("pipedream2bw")

_Read = TypeVar("_Read")


def load(
    path: str | os.PathLike[str],
    pipe: PipelineModule,
    opt: PipelineOptimizer | None = None,
    *,
    step: int | None = None,
    data: Stateful | None = None,
    schedulers: Sequence[Stateful] = (),
    extra: Mapping[str, Any] | None = None,
    generators: bool = True,
) -> dict[str, Any]:
    """Goes on where :func:`save` made a checkpoint. Every rank calls it; drains.

    A batch that waits for its ``opt.step()`` is taken back first. The pipeline may have another
    number of stages, split, schedule of the same delay, or number of processes: then the run goes
    on with the same bits. Of a checkpoint without the older weight versions that the schedule
    reads, the delay begins anew. Names and shapes must be the same; for a part of the weights there
    is ``pipe.load_checkpoint(folder, strict=False)`` with the checkpoint's own folder.

    Weights that ``pipedream2bw checkpoint import`` made a checkpoint of are loaded as by
    :meth:`PipelineModule.load_checkpoint`. All else, and ``opt``, stays as it is: a run that has
    just been set up begins with them.

    Args:
        path: the folder that was given to ``save``.
        opt: the pipeline's optimizer; None: weights alone, of which others may be frozen than were;
            the checkpoint's schedulers, data and kind of random numbers need not be the pipeline's.
        step: which checkpoint; the newest if None.
        data, schedulers, extra: as they were saved; objects get their state back, before anything
            of the pipeline changes. If one refuses it, on any rank, all get back what they had.
        generators: whether Python's, NumPy's and torch's default random numbers go on, too, where
            as many ranks and replicas saved them.

    Returns:
        The values of ``extra`` that are no objects with a state, by name.

    Raises:
        DamagedCheckpoint: a file is missing, cut or changed; nothing has been loaded then.
        ValueError: there is no checkpoint, or it does not fit: both values are named; an object
            refuses its state. On every rank; nothing has been loaded then.
        TimeoutError: the file system does not answer for half of the pipeline's ``timeout``.
    """
    session = pipe.session
    session.flush_for(Operation.load)
    beside = Beside(data=data, schedulers=schedulers, extra=extra or {})
    folder = session.together(lambda: Folder(path))
    action = "looking for checkpoints"
    name = on_first_rank(session, folder, action, lambda: checkpoints(folder, step)[0])
    source = on_all_ranks(session, folder, f"reading {name}", lambda: Source(folder, name))
    return load_from(source, session, opt, beside, generators=generators)


def load_from(
    source: Source,
    session: Session,
    opt: PipelineOptimizer | None,
    beside: Beside,
    *,
    generators: bool,
) -> dict[str, Any]:
    """Loads a checkpoint whose manifest has been read. Drained; every rank calls it."""

    def reading(read: Callable[[], _Read]) -> _Read:
        return on_all_ranks(session, source.folder, f"reading {source.name}", read)

    if source.manifest.settings is None:
        weights = reading(source.weights)
        mine = session.local_model.wanted(weights.names)
        entries = reading(lambda: weights.read(mine))
        session.load(lambda: Checkpoint(weights.names, lambda _: entries), strict=True)
        return {}
    prepared = reading(lambda: _Prepared(source, session, opt, beside))
    restored = _Restored()
    try:
        session.together(lambda: prepared.restore(restored, generators=generators))
    except BaseException:
        restored.undo()  # also where another rank's object refused
        raise
    with session.ending.failing_closes():  # half of it may have been loaded
        return prepared.load(generators=generators)


class _Restored:
    """The user's objects that have got their states back, and what they had before."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], object]]] = []

    def restore(
        self,
        name: str,
        state: Any,
        load: Callable[[Any], object],
        former: Callable[[], Any],
    ) -> None:
        """Gives an object its state.

        Args:
            load: gives the object a state.
            former: gives the state that it has.

        Raises:
            ValueError: the object refuses it; names the object.
        """
        with contextlib.suppress(Exception):  # which has no state yet: what it gets may stay
            kept = deepcopy(former())
            self._undo.append((name, lambda: load(kept)))
        try:
            load(state)
        except Exception as error:
            raise ValueError(
                f"{name}: the saved state is refused: {type(error).__name__}: {error}"
            ) from error

    def undo(self) -> None:
        """Gives all of them what they had before, as far as they take it."""
        for name, undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:
                log.warning("%s does not take its former state either: %s", name, error)


class _Prepared:
    """Everything read and compared, so that loading cannot fail on some ranks alone."""

    def __init__(
        self, source: Source, session: Session, opt: PipelineOptimizer | None, beside: Beside
    ) -> None:
        beside.check()
        self._source = source
        self._session = session
        self._opt = opt
        self._beside = beside
        manifest = source.manifest
        for file_name in manifest.files:
            source.check_file(file_name, sums=False)
        if opt is not None and manifest.optimizer is None:
            raise ValueError("opt: given, the checkpoint has none: it was saved without")
        is_alone = opt is None
        if not is_alone and (manifest.random_seed is None) != (session.random_seed is None):
            kinds = [
                "torch" if seed is None else "keyed"
                for seed in (session.random_seed, manifest.random_seed)
            ]
            raise ValueError(f"random: {kinds[0]!r}, the checkpoint has {kinds[1]!r}")
        self._check_names()
        self._tied = dict(manifest.tied) | session.local_model.tied_names()
        self._dtypes = {
            name: dtype
            for stage in session.stages
            for name, dtype in zip(
                stage.weights.trainable, stage.weights.stepped_dtypes(), strict=True
            )
        }
        self._oldest = self._find_oldest()
        self._part = _part_of(manifest, session)
        self._weights = {stage.index: self._read_weights(stage) for stage in session.stages}
        self._buffers = {stage.index: self._read_buffers(stage) for stage in session.stages}
        self._states = self._read_states() if opt is not None else {}
        shared, schedulers, self._model_state, data, self._extra, self._generators = source.values(
            manifest.optimizer,
            manifest.schedulers,
            manifest.model_state,
            self._part.data,
            self._part.extra,
            self._part.generators,
        )
        self._shared = SavedOptimizers.of(shared) if opt is not None else None
        if opt is not None and self._shared is not None:
            opt.check_cut(self._shared)
        asks_for_all = not is_alone or bool(beside.schedulers)
        if asks_for_all and len(schedulers) != len(beside.schedulers):
            raise ValueError(
                f"schedulers: {len(beside.schedulers)}, the checkpoint has {len(schedulers)}"
            )
        self._schedulers, self._data = schedulers if asks_for_all else (), data
        if (data is None) != (beside.data is None) and not (is_alone and beside.data is None):
            raise ValueError(
                f"data: {'None' if beside.data is None else 'given'}, the checkpoint was saved "
                f"{'without' if data is None else 'with'} it"
            )
        for name in beside.extra:
            if name not in self._extra and not name.startswith(OUR_EXTRA):
                raise ValueError(
                    f"extra: {name!r} given, the checkpoint has {sorted(self._extra) or 'none'}"
                )

    # ------------------------------------------------------------------ compare and read

    def _check_names(self) -> None:
        """Without the optimizer others may be frozen: a value is all that is needed of a weight."""
        local_model, manifest = self._session.local_model, self._source.manifest
        mine, theirs = set(local_model.trainable_names()), set(manifest.trainable)
        is_alone = self._opt is None
        known_here = local_model.persistent_names() if is_alone else mine
        known_there = set(self._source.places(MODEL)) if is_alone else theirs
        only_mine, only_theirs = sorted(mine - known_there), sorted(theirs - known_here)
        if only_mine or only_theirs:
            raise ValueError(
                f"trained parameters: {len(mine)}, the checkpoint has {len(theirs)}: they must be "
                f"the same; only here: {only_mine[:3]}, only there: {only_theirs[:3]}"
            )

    def _find_oldest(self) -> dict[int, int]:
        """The oldest version of each stage that is read again.

        That is the schedule's, or the oldest that the checkpoint has of the stage's parameters;
        where all stages have one delay, of all parameters.
        """
        session, newest = self._session, self._source.manifest.batch
        delays = session.schedule.delay
        trained = set(self._source.manifest.trainable)
        known: list[set[str]] = []
        for age in range(1, max(delays) + 1):
            known.append(set(self._source.places(older(age))))

        def has(names: Iterable[str]) -> int:
            wanted = {self._tied.get(name, name) for name in names}.intersection(trained)
            found = 0
            while found < len(known) and known[found] >= wanted:
                found += 1
            return found

        of_all = has(self._source.manifest.trainable)
        oldest = {}
        for stage in session.stages:
            delay = delays[stage.index]
            kept = of_all if session.schedule.has_one_delay else has(stage.weights.trainable)
            oldest[stage.index] = newest - min(delay, kept)
            if kept < min(delay, newest):
                log.warning(
                    "checkpoint %s has %d older versions of stage %d, the schedule reads %d: its "
                    "delay begins anew",
                    self._source.name, kept, stage.weights.index_in_model, delay,
                )  # fmt: skip
        return oldest

    def _read_weights(self, stage: LocalStage) -> dict[int, dict[str, torch.Tensor]]:
        """The values of the stage's parameters, by version; frozen ones are in the newest."""
        weights, source = stage.weights, self._source
        newest, oldest = source.manifest.batch, self._oldest[stage.index]
        versions = {newest: self._read(MODEL, weights.in_root, widening=True)}
        trained = set(source.manifest.trainable)
        stepped = {n: p for n, p in weights.trainable.items() if self._tied.get(n, n) in trained}
        for version in range(oldest, newest):
            read = self._read(older(newest - version), stepped, widening=False)
            versions[version] = {**versions[newest], **read}  # frozen ones had the same value
        return versions

    def _read(
        self, kind: str, parameters: Mapping[str, nn.Parameter], *, widening: bool
    ) -> dict[str, torch.Tensor]:
        """Reads parameters' values.

        Args:
            widening: whether the parameter's dtype has to hold what was saved.
        """
        source = self._source
        places = source.places(kind)
        wanted = {name: self._tied.get(name, name) for name in parameters}
        for name, saved_as in wanted.items():
            if saved_as not in places:
                raise ValueError(f"{name}: the checkpoint {source.name} does not have it")
            entry = source.entry(saved_as, places[saved_as])
            parameter = parameters[name]
            if entry.shape != tuple(parameter.shape):
                raise ValueError(
                    f"{name}: shape {list(parameter.shape)}, the checkpoint has "
                    f"{list(entry.shape)}: they must be equal"
                )
            master = self._dtypes.get(name, parameter.dtype)
            if widening and torch.promote_types(entry.dtype, master) != master:
                raise ValueError(
                    f"{name}: {master}, the checkpoint has {entry.dtype}, which it cannot hold"
                )
        read = source.read({saved_as: places[saved_as] for saved_as in wanted.values()})
        return {name: read[saved_as] for name, saved_as in wanted.items()}

    def _read_buffers(self, stage: LocalStage) -> dict[str, torch.Tensor]:
        source, replica = self._source, self._part.replica
        ranks = [part.rank for part in source.manifest.ranks if part.replica == replica]
        places = source.places("rank", ranks)
        pipeline = self._session.grid.pipeline(stage.index)
        wanted: dict[str, str] = {}
        for name, buffer in stage.weights.named_buffers().items():
            saved_as = next(
                (
                    p + name
                    for p in (buffer_prefix(pipeline), buffer_prefix(0))
                    if p + name in places
                ),
                None,
            )
            if saved_as is None:
                raise ValueError(f"buffer {name}: the checkpoint {source.name} does not have it")
            entry = source.entry(saved_as, places[saved_as])
            if (entry.shape, entry.dtype) != (tuple(buffer.shape), buffer.dtype):
                raise ValueError(
                    f"buffer {name}: {list(buffer.shape)} of {buffer.dtype}, the checkpoint has "
                    f"{list(entry.shape)} of {entry.dtype}: they must be equal"
                )
            wanted[name] = saved_as
        read = source.read({saved_as: places[saved_as] for saved_as in wanted.values()})
        return {name: read[saved_as] for name, saved_as in wanted.items()}

    def _read_states(self) -> dict[str, dict[str, Any]]:
        """What optimizers keep of this process's parameters, by name."""
        source = self._source
        mine = {name for stage in self._session.stages for name in stage.weights.trainable}
        saved_as = {self._tied.get(name, name) for name in mine}
        places = source.places(OPTIMIZER)
        names = [name for name in places if name.rpartition("/")[0] in saved_as]
        read = source.read({name: places[name] for name in names})
        states: dict[str, dict[str, Any]] = {name: {} for name in saved_as}
        for name in names:
            parameter, _, key = name.rpartition("/")
            states[parameter][key] = read[name]
        (numbers,) = source.values(source.manifest.numbers)
        for name in saved_as.intersection(numbers):
            states[name].update(numbers[name])
        return {name: states[self._tied.get(name, name)] for name in mine}

    # ------------------------------------------------------------------ load

    def restore(self, restored: _Restored, *, generators: bool) -> None:
        """Gives the user's objects their states; the pipeline is as it was."""
        beside = self._beside
        objects: list[tuple[str, Any, Any]] = [
            (f"schedulers: number {number}", scheduler, state)
            for number, (scheduler, state) in enumerate(
                zip(beside.schedulers, self._schedulers, strict=True)
            )
        ]
        if beside.data is not None:
            objects.append(("data", beside.data, self._data))
        for name, value in beside.extra.items():
            if is_stateful(value) and name in self._extra:
                objects.append((f"extra: {name!r}", value, self._extra[name]))
        for name, owner, state in objects:
            restored.restore(
                f"{name}, {type(owner).__name__}", state, owner.load_state_dict, owner.state_dict
            )
        if self._sets(generators):
            restored.restore("generators", self._generators, set_generators, generator_states)

    def _sets(self, generators: bool) -> bool:
        """Whether each rank has generators of its own in the checkpoint."""
        parts, grid = self._source.manifest.ranks, self._session.grid
        replicas = {part.replica for part in parts}
        sizes = (self._session.control.size, grid.width)
        return generators and sizes == (len(parts), len(replicas))

    def load(self, *, generators: bool) -> dict[str, Any]:
        """Changes the pipeline and its optimizer; gives the values of extra."""
        session, manifest = self._session, self._source.manifest
        for stage in session.stages:
            load_versions(stage.weights, self._weights[stage.index])
            buffers = stage.weights.named_buffers()
            with torch.no_grad():
                for name, value in self._buffers[stage.index].items():
                    buffers[name].copy_(value)
            session.local_model.loaded([*self._weights[stage.index][manifest.batch], *buffers])
        session.local_model.load_extra_state(self._model_state)
        session.go_on_from(
            train_steps=manifest.train_steps,
            updates=manifest.batch,
            random_seed=manifest.random_seed,
        )
        session.weights_loaded()
        if self._opt is not None and self._shared is not None:
            self._opt.load_cut(self._shared, self._states)
        if self._sets(generators):  # again: a module's set_extra_state may have drawn
            set_generators(self._generators)
        return {
            name: value
            for name, value in self._extra.items()
            if not is_stateful(self._beside.extra.get(name)) and not name.startswith(OUR_EXTRA)
        }


def _part_of(manifest: Manifest, session: Session) -> RankPart:
    """The part of the same rank, or of the same replica's first rank, or of the first of all."""
    rank, replica = session.grid.rank, session.grid.replica
    same_grid = session.control.size == len(manifest.ranks)
    parts = sorted(manifest.ranks, key=lambda part: part.rank)
    return next(
        (part for part in parts if same_grid and (part.rank, part.replica) == (rank, replica)),
        next((part for part in parts if part.replica == replica), parts[0]),
    )
