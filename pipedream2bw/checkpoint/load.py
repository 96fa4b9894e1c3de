"""Makes a pipeline and its optimizer go on where a checkpoint was saved."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch

from ..errors import DamagedCheckpoint
from ..model.checkpoint import Checkpoint
from ..model.local_shards import Part, refuse_unknown_shards
from ..optimizer.optimizer import PipelineOptimizer
from ..pipeline.module import PipelineModule
from ..ranks.operations import Operation
from ..rules import instance
from ..runtime.loading import flush_to_load, go_on_from, load_model, weights_loaded
from ..runtime.local_stages import LocalStage
from ..runtime.session import Session
from ..runtime.stage_values import load_versions
from .commit import ABANDONED, CORRUPT, checkpoints, look, set_aside
from .folder import MANIFEST, Folder, step_of
from .manifest import Manifest, RankPart
from .parts import Place
from .save import (
    OUR_EXTRA,
    Stateful,
    UserState,
    generator_states,
    is_stateful,
    set_generators,
)
from .snapshot import MODEL, RANK, buffer_prefix, older
from .source import Source, damage_of
from .waiting import on_all_ranks, on_first_rank

log = logging.getLogger("pipedream2bw")

_VISIBLE_SECONDS = 60.0
"""A network file system may show a folder to other machines as it was so long ago."""
_READS = 3
"""Attempts to read, a second apart: what a network says now it may not say then."""

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
    expand: Mapping[str, str] | None = None,
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
        expand: modules or parameters of the model, by name, and those of the checkpoint that they
            begin as, with their moments and older versions: layers that shared their weights go
            on apart (M6-10T's delinking, arXiv 2110.03888).

    Returns:
        The values of ``extra`` that are no objects with a state, by name.

    Raises:
        DamagedCheckpoint: a file is missing, cut or changed; nothing has been loaded then.
        ValueError: there is no checkpoint, or it does not fit: both values are named; an object
            refuses its state. On every rank; nothing has been loaded then.
        TypeError: ``expand`` is no dict of names.
        TimeoutError: the file system does not answer for half of the pipeline's ``timeout``.
    """
    session = pipe.session
    flush_to_load(session, Operation.load)
    user_state = UserState(data=data, schedulers=schedulers, extra=extra or {})
    folder, names = session.together(lambda: (Folder(path), _names_of(expand)))
    action = "looking for checkpoints"
    name = on_first_rank(session, folder, action, lambda: checkpoints(folder, step)[0])
    source = on_all_ranks(session, folder, f"reading {name}", lambda: Source(folder, name))
    return load_from(source, session, opt, user_state, generators=generators, expand=names)


def _names_of(expand: object) -> Mapping[str, str]:
    """Names here with those in the checkpoint. Raises TypeError for anything else."""
    names: Any = {} if expand is None else expand
    instance("a dict of names, those here with the checkpoint's", Mapping).check("expand", names)
    for name in (*names, *names.values()):
        instance("a name", str).check(f"expand: {names}", name)
    return names  # type: ignore[no-any-return]


def load_whole(
    session: Session,
    folder: Folder,
    step: int | None,
    opt: PipelineOptimizer,
    user_state: UserState,
) -> dict[str, Any] | None:
    """Loads the newest checkpoint that is whole; None if there are no checkpoints.

    Newer ones are set aside: as corrupt if they are damaged or cannot be read, as abandoned if an
    older one was asked for. If none is whole, all of them stay as they are. Every rank calls it.

    Args:
        step: the only one that may be taken; None: any.

    Raises:
        DamagedCheckpoint: there are checkpoints, and none is whole.
        ValueError: a rank does not see what rank 0 sees; another version wrote it; there is no
            such step.
        TimeoutError: the file system hangs.
    """
    there = on_first_rank(
        session, folder, "looking for checkpoints", lambda: look(folder).checkpoints
    )

    def candidates() -> list[str]:
        steps = list(dict.fromkeys(map(step_of, there)))
        for extension in opt.extensions:  # may know which of them other sites have, too
            steps = list(extension.known_everywhere(steps))
        if step is not None and step not in steps:
            raise ValueError(f"step: {step}, {folder.path} has {steps or 'none'}")
        return [name for name in there if step_of(name) in (steps if step is None else [step])]

    with session.ending.lost_ranks_close():
        names: list[str] = session.control.from_first(candidates)
    damage: dict[str, str] = {}
    for name in names:
        reading = f"reading {name}"
        source, found = on_all_ranks(
            session, folder, reading, functools.partial(_checked, session, folder, name)
        )
        decide = functools.partial(_damage, folder, name, session.gather(found))
        wrong = on_first_rank(session, folder, reading, decide)
        if wrong is None:
            assert source is not None
            try:
                loaded = load_from(source, session, opt, user_state, generators=True)
            # On every rank, and nothing has changed: only who reads a tensor compares its sum.
            except DamagedCheckpoint as error:
                wrong = str(error)
            else:
                newer = there[: there.index(name)]
                leave = functools.partial(_set_aside, folder, newer, damage)
                on_first_rank(session, folder, "setting newer checkpoints aside", leave)
                return loaded
        damage[name] = wrong
        log.warning("%s: the next older checkpoint is taken", wrong)
    if names:
        texts = "; ".join(damage.values())
        raise DamagedCheckpoint(
            f"{folder.path}: none of {len(names)} checkpoints is whole: {texts}"
        )
    return None


def _checked(session: Session, folder: Folder, name: str) -> tuple[Source | None, str | None]:
    """A checkpoint, and what this rank finds wrong with it.

    Each rank reads some of the files to compare their sums.
    """
    rank, begin, found = session.grid.rank, time.monotonic(), ""
    for read in range(_READS):
        if read > 0:
            time.sleep(1.0)
        try:
            while rank != 0 and not folder.holds(name, MANIFEST):
                if time.monotonic() - begin > _VISIBLE_SECONDS:
                    raise ValueError(
                        f"{folder.path}: rank 0 sees {name}, rank {rank} does not: it must be one "
                        "folder for all processes"
                    )
                time.sleep(0.5)
            source = Source(folder, name)
            for number, file_name in enumerate(sorted(source.manifest.files)):
                source.check_file(file_name, sums=number % session.control.size == rank)
            return source, None
        except DamagedCheckpoint as error:
            return None, str(error)
        except OSError as error:
            found = f"{name}: {type(error).__name__}: {error}"
    return None, found


def _damage(folder: Folder, name: str, found: Sequence[str | None]) -> str | None:
    """What is wrong with a checkpoint. On rank 0, with what each rank has found."""
    rank = next((rank for rank, text in enumerate(found) if text is not None), 0)
    if rank == 0:
        return found[0]
    try:  # a rank may have read another folder
        mine = next(damage_of(folder, name, sums=True), None)
    except OSError as error:
        mine = str(error)
    if mine is None:
        raise ValueError(
            f"{folder.path}: rank {rank} reads {found[rank]}; rank 0 reads a whole checkpoint: it "
            "must be one folder for all processes"
        )
    return mine


def _set_aside(folder: Folder, newer: Sequence[str], damage: Mapping[str, str]) -> None:
    for name in newer:
        why = CORRUPT if name in damage else ABANDONED
        try:
            set_aside(folder, name, why)
            log.warning("checkpoint %s is set aside as %s", name, why)
        except OSError as error:
            log.warning("checkpoint %s could not be set aside: %s", name, error)


def load_from(
    source: Source,
    session: Session,
    opt: PipelineOptimizer | None,
    user_state: UserState,
    *,
    generators: bool,
    expand: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Loads a checkpoint whose manifest has been read. Drained; every rank calls it."""

    def reading(read: Callable[[], _Read]) -> _Read:
        return on_all_ranks(session, source.folder, f"reading {source.name}", read)

    if source.manifest.settings is None:
        if expand:
            raise ValueError(f"expand: {dict(expand)}: {source.name} was imported, not saved")
        weights = reading(source.weights)
        mine = session.local_model.own_names(weights.names)
        entries = reading(lambda: weights.read(mine))
        load_model(session, lambda: Checkpoint(weights.names, lambda _: entries), strict=True)
        return {}
    prepared = reading(
        lambda: _Prepared(source, session, opt, user_state, generators=generators, expand=expand)
    )
    with contextlib.ExitStack() as undo:  # also where another rank's object refuses
        session.together(lambda: prepared.restore(undo))
        undo.pop_all()
    with session.ending.failing_closes():  # half of it may have been loaded
        return prepared.load()


def _restore(
    undo: contextlib.ExitStack,
    name: str,
    state: Any,
    load: Callable[[Any], object],
    former: Callable[[], Any],
) -> None:
    """Gives one of the user's objects its state, and ``undo`` what gives it back the former one."""

    def give_back(kept: Any) -> None:
        try:
            load(kept)
        except Exception as error:
            log.warning("%s does not take its former state either: %s", name, error)

    with contextlib.suppress(Exception):  # which has no state yet: what it gets may stay
        undo.callback(give_back, deepcopy(former()))
    try:
        load(state)
    except Exception as error:
        raise ValueError(
            f"{name}: the saved state is refused: {type(error).__name__}: {error}"
        ) from error


class _Prepared:
    """Everything read and compared, so that loading cannot fail on some ranks alone."""

    def __init__(
        self,
        source: Source,
        session: Session,
        opt: PipelineOptimizer | None,
        user_state: UserState,
        *,
        generators: bool,
        expand: Mapping[str, str],
    ) -> None:
        user_state.check()
        self._source = source
        self._session = session
        self._opt = opt
        self._user_state = user_state
        manifest = source.manifest
        if manifest.shards:
            refuse_unknown_shards("load()", session.facts)
        for file_name in manifest.files:
            source.check_file(file_name, sums=False)
        if opt is not None and manifest.optimizer is None:
            raise ValueError("opt: given, the checkpoint has none: it was saved without")
        if opt is not None and (manifest.random_seed is None) != (session.random_seed is None):
            kinds = [
                "torch" if seed is None else "keyed"
                for seed in (session.random_seed, manifest.random_seed)
            ]
            raise ValueError(f"random: {kinds[0]!r}, the checkpoint has {kinds[1]!r}")
        self._places = source.places(MODEL)
        self._expanded = self._expand(expand)
        self._check_names()
        tied = session.local_model.tied_names()
        aliases = {name: self._expanded.get(first, first) for name, first in tied.items()}
        self._tied = dict(manifest.tied) | aliases | self._expanded
        self._parts = session.local_model.parts()
        part = _part_of(manifest, session)
        self._weights = {stage.index: self._read_weights(stage) for stage in session.stages}
        self._ahead = {stage.index: self._read_ahead(stage) for stage in session.stages}
        self._buffers = {
            stage.index: self._read_buffers(stage, part.replica) for stage in session.stages
        }
        self._states = self._read_states() if opt is not None else {}
        self._shared, schedulers, self._model_state, data, self._extra, self._generators = (
            source.values(
                manifest.optimizer,
                manifest.schedulers,
                manifest.model_state,
                part.data,
                part.extra,
                part.generators,
            )
        )
        if opt is not None:
            for each in self._shared["optimizers"]:
                each["members"] = [
                    [*group, *(name for name, saved in self._expanded.items() if saved in group)]
                    for group in each["members"]
                ]
            opt.snapshot().check(self._shared)
            if ("late_forwards" in self._shared) != session.has_fresh_forwards:
                theirs = self._shared.get("late_forwards", {}).get("late_forwards")
                log.warning(
                    "checkpoint %s: late forwards of its stages: %s, the run's schedule: %s: other "
                    "forwards are late from here on",
                    source.name, theirs or "all", session.schedule.name,
                )  # fmt: skip
        # Whether each rank has generators of its own in the checkpoint.
        replicas = {each.replica for each in manifest.ranks}
        theirs = (len(manifest.ranks), len(replicas), manifest.num_shards)
        sizes = (session.control.size, session.grid.width, session.grid.num_shards)
        self._sets_generators = generators and sizes == theirs
        self._check_user_state(schedulers, data)
        self._schedulers, self._data = schedulers, data

    # ------------------------------------------------------------------ compare and read

    def _expand(self, expand: Mapping[str, str]) -> dict[str, str]:
        """The names here that ``expand`` means, and those under which their values were saved."""
        local_model, source = self._session.local_model, self._source
        names = local_model.persistent_names().union(local_model.trainable_names())
        tied = source.manifest.tied
        expanded = {}
        for here, there in expand.items():
            what = f"expand: {here!r} from {there!r}"
            found = [name for name in names if name == here or name.startswith(f"{here}.")]
            if not found:
                raise ValueError(f"{what}: no parameter or buffer here has the first name")
            for name in sorted(found):
                saved = there + name.removeprefix(here)
                expanded[name] = tied.get(saved, saved)
                if expanded[name] not in self._places:
                    raise ValueError(
                        f"{what}: {name} would begin as {saved}, which the checkpoint "
                        f"{source.name} does not have. Give a name of the checkpoint's model"
                    )
        return expanded

    def _check_user_state(self, schedulers: Sequence[Any], data: Any) -> None:
        """Weights alone need nothing of the user's that was saved beside them."""
        mine, is_alone = self._user_state, self._opt is None
        is_left_out = is_alone and not mine.schedulers
        if not is_left_out and len(schedulers) != len(mine.schedulers):
            raise ValueError(
                f"schedulers: {len(mine.schedulers)}, the checkpoint has {len(schedulers)}. Give "
                "schedulers= as when it was saved"
            )
        is_left_out = is_alone and mine.data is None
        if not is_left_out and (data is None) != (mine.data is None):
            raise ValueError(
                f"data: {'None' if mine.data is None else 'given'}, the checkpoint was saved "
                f"{'without' if data is None else 'with'} it. Give data= as when it was saved"
            )
        for name in mine.extra:
            if name not in self._extra and not name.startswith(OUR_EXTRA):
                raise ValueError(
                    f"extra: {name!r} given, the checkpoint has {sorted(self._extra) or 'none'}"
                )

    def _check_names(self) -> None:
        """Without the optimizer others may be frozen: a value is all that is needed of a weight."""
        local_model, manifest = self._session.local_model, self._source.manifest

        def saved_names(names: Iterable[str]) -> set[str]:
            return {self._expanded.get(name, name) for name in names}

        mine, theirs = saved_names(local_model.trainable_names()), set(manifest.trainable)
        here, places = saved_names(local_model.persistent_names()), self._places
        known_here, known_there = (mine, theirs) if self._opt is not None else (here, set(places))
        only_mine, only_theirs = sorted(mine - known_there), sorted(theirs - known_here)
        if only_mine or only_theirs:
            raise ValueError(
                f"trained parameters: {len(mine)}, the checkpoint has {len(theirs)}: they must be "
                f"the same; only here: {_first(only_mine)}, only there: {_first(only_theirs)}"
            )
        for name, value in local_model.beside_state(places.keys() - here):
            saved = self._source.read({name: places[name]})[name]
            if value is None or value.dtype != saved.dtype or not torch.equal(value.cpu(), saved):
                found = (
                    "the model does not have it" if value is None else "the model's values differ"
                )
                raise ValueError(
                    f"{name}: {found}, the checkpoint {self._source.name} has it: they must be "
                    "equal. Make the model with the checkpoint's frozen weights"
                )

    def _oldest(self, stage: LocalStage) -> int:
        """The oldest version of a stage that is read again.

        That is the schedule's, or the oldest that the checkpoint has of the stage's parameters;
        where all stages have one delay, of all parameters.
        """
        source, schedule = self._source, self._session.schedule
        newest, delay = source.manifest.batch, schedule.delay[stage.index]
        most = min(delay, newest)  # a stage that trains nothing lacks none of them
        trained = set(source.manifest.trainable)
        names = trained
        if not schedule.has_one_delay:
            names = trained.intersection(self._saved_as(stage.weights.trainable).values())
        kept = 0
        while kept < most and source.places(older(kept + 1)).keys() >= names:
            kept += 1
        if kept < most:
            log.warning(
                "checkpoint %s has %d older versions of stage %d, the schedule reads %d: its "
                "delay begins anew",
                source.name, kept, stage.weights.index_in_model, delay,
            )  # fmt: skip
        return newest - kept

    def _saved_as(self, names: Iterable[str]) -> dict[str, str]:
        """The names of this process's parameters, with those under which they were saved."""
        return {name: self._tied.get(name, name) for name in names}

    def _parts_of(self, saved_as: Mapping[str, str]) -> dict[str, Part]:
        """Which parts this process has, by the names under which parameters were saved."""
        return {saved: self._parts[name] for name, saved in saved_as.items() if name in self._parts}

    def _read_weights(self, stage: LocalStage) -> dict[int, dict[str, torch.Tensor]]:
        """The values of the stage's parameters, by version; frozen ones are in the newest."""
        weights, source = stage.weights, self._source
        newest = source.manifest.batch
        stepped = zip(weights.trainable, weights.stepped_dtypes(), strict=True)
        dtypes = {name: p.dtype for name, p in weights.in_root.items()} | dict(stepped)

        def fits(name: str, saved: torch.dtype) -> None:
            if torch.promote_types(saved, dtypes[name]) != dtypes[name]:
                raise ValueError(
                    f"{name}: {dtypes[name]}, the checkpoint has {saved}, which it cannot hold"
                )

        saved_as = self._saved_as(weights.in_root)
        whole = self._read(self._places, saved_as, weights.in_root, fits)
        versions = {newest: whole}
        trained = set(source.manifest.trainable)
        older_too = {n: s for n, s in self._saved_as(weights.trainable).items() if s in trained}
        for version in range(self._oldest(stage), newest):
            places = source.places(older(newest - version))
            read = self._read(places, older_too, weights.trainable, lambda *_: None)
            versions[version] = {**whole, **read}  # frozen ones had the same value
        return versions

    def _read_ahead(self, stage: LocalStage) -> dict[int, torch.Tensor]:
        """The newest weights that are ahead of their masters, here and there, by position."""
        weights, places = stage.weights, self._source.places(older(0))
        names = {name: i for i, name in enumerate(weights.trainable) if i in weights.ahead}
        saved_as = {n: saved for n, saved in self._saved_as(names).items() if saved in places}
        read = self._read(places, saved_as, weights.trainable, lambda *_: None)
        return {names[name]: value for name, value in read.items()}

    def _read_buffers(self, stage: LocalStage, replica: int) -> dict[str, torch.Tensor]:
        source, grid = self._source, self._session.grid
        buffers = stage.weights.named_buffers()
        own, first = buffer_prefix(grid.pipeline(stage.index)), buffer_prefix(0)

        def fits(name: str, saved: torch.dtype) -> None:
            if saved != buffers[name].dtype:
                raise ValueError(
                    f"buffer {name}: {buffers[name].dtype}, the checkpoint has {saved}: they must "
                    "be equal"
                )

        def of_shard(shard: int) -> dict[str, torch.Tensor]:
            of_both = (replica, shard)
            ranks = [p.rank for p in source.manifest.ranks if (p.replica, p.shard) == of_both]
            places = source.places(RANK, ranks)
            named = {n: self._expanded.get(n, n) for n in buffers}
            saved_as = {n: own + s if own + s in places else first + s for n, s in named.items()}
            # One without elements has no value to go on with.
            wanted = {n: s for n, s in saved_as.items() if s in places or buffers[n].numel() > 0}
            return self._read(places, wanted, buffers, fits)

        num_shards = source.manifest.num_shards
        if num_shards == grid.num_shards:
            return of_shard(grid.shard)
        read, *others = map(of_shard, range(num_shards))
        for other in others:
            if differing := [n for n in read if not torch.equal(read[n], other[n])]:
                raise ValueError(
                    f"buffer {differing[0]}: it differs between the {num_shards} processes of a "
                    f"stage that saved it: {grid.num_shards} cannot go on with it, {num_shards} can"
                )
        return read

    def _read(
        self,
        places: Mapping[str, Place],
        saved_as: Mapping[str, str],
        here: Mapping[str, torch.Tensor],
        fits: Callable[[str, torch.dtype], None],
    ) -> dict[str, torch.Tensor]:
        """Reads values of parameters or buffers.

        Args:
            places: of tensors, by their names there.
            saved_as: these, by the names here.
            here: by name, what has the shape.
            fits: raises ValueError if what has this name cannot take the dtype.
        """
        source = self._source
        for name, saved in saved_as.items():
            if saved not in places:
                raise ValueError(f"{name}: the checkpoint {source.name} does not have it")
            entry = source.entry(saved, places[saved])
            shape, part = tuple(here[name].shape), self._parts.get(name)
            if entry.shape != (shape if part is None else part.whole_shape(shape)):
                of = "" if part is None else f" in each of {part.num_parts} shards"
                raise ValueError(
                    f"{name}: shape {list(shape)}{of}, the checkpoint has "
                    f"{list(entry.shape)}: they must be equal"
                )
            fits(name, entry.dtype)
        wanted = {saved: places[saved] for saved in saved_as.values()}
        read = source.read(wanted, self._parts_of(saved_as))
        return {name: read[saved] for name, saved in saved_as.items()}

    def _read_states(self) -> dict[str, dict[str, Any]]:
        """What optimizers keep of this process's parameters, by name."""
        mine = self._saved_as(n for stage in self._session.stages for n in stage.weights.trainable)
        states = self._source.states(set(mine.values()), self._parts_of(mine))
        found = {name: states.get(saved, {}) for name, saved in mine.items()}
        # What was one parameter's goes on apart.
        return found | {n: deepcopy(found[n]) for n in self._expanded if n in found}

    # ------------------------------------------------------------------ load

    def restore(self, undo: contextlib.ExitStack) -> None:
        """Gives the user's objects their states; the pipeline is as it was."""
        mine = self._user_state
        objects: list[tuple[str, Any, Any]] = [
            (f"schedulers: number {number}", *each)
            for number, each in enumerate(zip(mine.schedulers, self._schedulers, strict=False))
        ]
        if mine.data is not None:
            objects.append(("data", mine.data, self._data))
        for name, value in mine.extra.items():
            if is_stateful(value) and name in self._extra:
                objects.append((f"extra: {name!r}", value, self._extra[name]))
        for name, owner, state in objects:
            what = f"{name}, {type(owner).__name__}"
            _restore(undo, what, state, owner.load_state_dict, owner.state_dict)
        if self._sets_generators:
            _restore(undo, "generators", self._generators, set_generators, generator_states)

    def load(self) -> dict[str, Any]:
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
        go_on_from(
            session,
            train_steps=manifest.train_steps,
            updates=manifest.batch,
            random_seed=manifest.random_seed,
        )
        weights_loaded(session)
        for stage in session.stages:
            for i, value in self._ahead[stage.index].items():
                stage.weights.engine.set_weight(i, value)
        if self._opt is not None:
            self._opt.load_snapshot(self._shared, self._states)
        if self._sets_generators:  # again: a module's set_extra_state may have drawn
            set_generators(self._generators)
        return {
            name: value
            for name, value in self._extra.items()
            if not is_stateful(self._user_state.extra.get(name)) and not name.startswith(OUR_EXTRA)
        }


def _first(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return f"{names[:3]}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _part_of(manifest: Manifest, session: Session) -> RankPart:
    """The part of the same rank, else of the same shard or replica, else of the first of all."""
    rank, replica, shard = session.grid.rank, session.grid.replica, session.grid.shard
    same_grid = session.control.size == len(manifest.ranks)

    def likeness(part: RankPart) -> tuple[bool, bool, bool, int]:
        is_of_replica = part.replica == replica
        is_same = same_grid and is_of_replica and part.rank == rank
        return is_same, is_of_replica and part.shard == shard, is_of_replica, -part.rank

    return max(manifest.ranks, key=likeness)
