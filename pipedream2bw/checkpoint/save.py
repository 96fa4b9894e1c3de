"""Saves a pipeline and its optimizer while they train."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import secrets
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..accelerator import module_in_use, module_of
from ..model.local_shards import refuse_unknown_shards
from ..optimizer.optimizer import PipelineOptimizer
from ..optimizer.state_by_name import OptimizerSnapshot
from ..pipeline.module import PipelineModule
from ..ranks.operations import Announcement, Operation
from ..rules import instance
from ..runtime.session import Session
from .encoding import encode
from .folder import Folder, name_of
from .manifest import Manifest, RankPart, SavedSettings
from .saving import Saving
from .snapshot import RANK, HostMemory, begin_snapshot
from .tensor_file import check_saveable
from .writing import Writer

OUR_EXTRA = "pipedream2bw."
"""Begins names in ``extra`` that are not the user's."""


_runs: weakref.WeakKeyDictionary[Session, tuple[str, Iterator[int]]] = weakref.WeakKeyDictionary()
"""By pipeline, how the nonces of its saves begin, and their numbers."""


class Stateful(Protocol):
    """Anything with a state, as ``torch.distributed.checkpoint.stateful.Stateful``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserState:
    """What is saved beside the pipeline and its optimizer.

    Attributes:
        data: the position in the data, of each replica.
        schedulers: of the learning rate, alike on all ranks.
        extra: each rank's own: objects with a state, or values.
    """

    data: Stateful | None = None
    schedulers: Sequence[Stateful] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Raises TypeError, naming what has no state."""
        instance("a list: [scheduler] for one", Sequence).check("schedulers", self.schedulers)
        for name, value in (("data", self.data), *(("schedulers", s) for s in self.schedulers)):
            if value is not None and not is_stateful(value):
                raise TypeError(
                    f"{name}: {type(value).__name__} given, it must have state_dict() and "
                    "load_state_dict(), as ResumableSampler has"
                )
        if not isinstance(self.extra, Mapping) or not all(isinstance(k, str) for k in self.extra):
            raise TypeError(f"extra: {self.extra!r} given, it must be a dictionary with names")


def is_stateful(value: object) -> bool:
    """Says whether an object has a state of its own."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def save(
    path: str | os.PathLike[str],
    pipe: PipelineModule,
    opt: PipelineOptimizer | None = None,
    *,
    data: Stateful | None = None,
    schedulers: Sequence[Stateful] = (),
    extra: Mapping[str, Any] | None = None,
    versions: str = "all",
) -> Saving:
    """Begins to save a checkpoint, and returns; training goes on meanwhile.

    It is a folder in ``path`` with a name of its own, see ``Saving.path``. When it is whole, an
    earlier one of the same batch is removed.

    Every rank calls it between two batches, after ``opt.step()``. Nothing is drained: each stage's
    state is copied when its last update has been made, and written by a thread. With ``opt`` a run
    that :func:`load` continues gives the same bits as one that was never interrupted: also the
    older weight versions are saved, the moments, and what a remedy for the delay keeps. So are loss
    scales, buffers of every replica, random numbers and counters.

    Args:
        path: a folder that all processes reach, or a URL that fsspec knows, such as
            ``s3://bucket/run``.
        opt: the pipeline's optimizer; None: weights alone.
        data: what knows the position in the data, such as a :class:`ResumableSampler`.
        schedulers: of the learning rate.
        extra: by name; each rank's own. Objects with ``state_dict`` and ``load_state_dict``, or
            values: tensors, numbers, strings, None, and lists, tuples and dictionaries of these.
        versions: ``"newest"`` leaves the older weight versions out: the checkpoint is smaller, and
            the schedule's delay begins anew when it is loaded.

    Raises:
        ValueError, TypeError: the batch waits for its ``opt.step()``; something cannot be saved; on
            every rank. What goes wrong later is told by the :class:`Saving`.
    """
    user_state = UserState(data=data, schedulers=schedulers, extra=extra or {})
    saver = Saver(path, pipe, opt, user_state)
    if versions not in ("all", "newest"):
        raise ValueError(f"versions: {versions!r}, it must be 'all' or 'newest'")
    return saver.save(all_versions=versions == "all")


class Saver:
    """Saves one pipeline into one folder, as often as it is asked to.

    Every rank makes it and calls its methods.

    Attributes:
        folder: of the checkpoints.
        run: how the nonces of all saves of the pipeline begin, the same on all ranks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pipe: PipelineModule,
        opt: PipelineOptimizer | None,
        user_state: UserState,
    ) -> None:
        self.session: Session = pipe.session
        self._opt = opt
        self._user_state = user_state
        self.session.ending.check_open()
        self.folder: Folder = self.session.together(lambda: self._open(path))
        num_groups = 0 if opt is None else len(opt.param_groups)
        with self.session.ending.lost_ranks_close():
            self.session.control.agree_on_objects(
                None, {"path": self.folder.root, "param_groups": num_groups}
            )
            if self.session not in _runs:
                name = self.session.control.from_first(lambda: secrets.token_hex(4))
                _runs[self.session] = name, itertools.count(1)
        self.run, self._numbers = _runs[self.session]
        self._persistent = self.session.local_model.persistent_names()
        self._memory: list[HostMemory] = []  # that is free

    def _open(self, path: str | os.PathLike[str]) -> Folder:
        self._user_state.check()
        refuse_unknown_shards("save()", self.session.facts)
        local = self.session.local_model
        for name in local.persistent_names():
            # In a manifest "$" stands for a kind of value, and "@" begins the names of parts.
            if name.startswith(("$", "@")):
                raise ValueError(f"{name}: names in a checkpoint must not begin with '$' or '@'")
        for name, tensor in (*local.named_parameters(), *local.named_buffers()):
            check_saveable(name, tensor)
        extra_state, num_shards = local.extra_state(), self.session.grid.num_shards
        if num_shards > 1 and extra_state:
            raise ValueError(
                f"save: module {min(extra_state)!r} has get_extra_state(), 'tp' of the mesh: "
                f"{num_shards}, it must be 1: a checkpoint has such a state of one process of a "
                "stage. Keep it in a buffer"
            )
        encode(extra_state, "get_extra_state of the module", {})
        if self._opt is not None and self._opt.has_own_step:
            states = generator_states()  # from which an optimizer's step may draw
            try:
                encode(self._opt.examples(), "optimizer", {})
            finally:
                set_generators(states)
        return Folder(path)

    def check(self) -> None:
        """Raises TypeError or ValueError, on every rank, if something cannot be saved."""
        self.session.together(self._known_now)

    def save(
        self,
        *,
        all_versions: bool = True,
        runs: Collection[str] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> Saving:
        """Begins to save; see :func:`save`.

        Args:
            runs: whose earlier checkpoint of the batch may be removed; None: any.
            then: called on rank 0 when the checkpoint is whole, in the thread that wrote it. It
                must not refer to the pipeline.
        """
        session = self.session
        session.ending.check_open()
        optimizer: OptimizerSnapshot | None = None
        known: list[tuple[Manifest, RankPart, dict[str, torch.Tensor]]] = []

        def local() -> Announcement:
            nonlocal optimizer
            session.accumulation.check_between_batches("save")
            optimizer = None if self._opt is None else self._opt.snapshot()
            known.append(self._known_now())
            return Announcement()

        with session.ending.failing_closes():
            session.agree(Operation.save, session.accumulation.num_updates, local)
        manifest, own, tensors = known[-1]
        nonce = f"{self.run}{next(self._numbers):04d}"
        manifest = dataclasses.replace(manifest, nonce=nonce)
        memory = self._memory.pop() if self._memory else HostMemory()
        saving = Saving(session, self.folder, name_of(manifest.batch, nonce))
        snapshot = begin_snapshot(
            session,
            optimizer,
            memory,
            saving,
            all_versions=all_versions,
            in_model=self._persistent if session.grid.replica == session.grid.shard == 0 else (),
        )
        snapshot.add(RANK, tensors)
        # Nothing that the thread holds refers to the pipeline: it would not end when it is dropped.
        free = self._memory
        saving.done.add_done_callback(lambda _: free.append(memory))
        Writer(
            saving=saving,
            snapshot=snapshot,
            manifest=manifest,
            own=own,
            num_ranks=session.control.size,
            runs=runs,
            then=then,
        ).start()
        return saving

    def _known_now(self) -> tuple[Manifest, RankPart, dict[str, torch.Tensor]]:
        """What every rank knows of the checkpoint, what is this rank's own, and its tensors."""
        session, user_state = self.session, self._user_state
        schedule, grid, local = session.schedule, session.grid, session.local_model
        rank, tied = grid.rank, local.tied_names()
        tensors: dict[str, torch.Tensor] = {}

        def encoded(value: Any, name: str) -> Any:
            return encode(value, f"rank{rank}/{name}", tensors)

        own = RankPart(
            rank=rank,
            replica=grid.replica,
            shard=grid.shard,
            data=encoded(_state_of(user_state.data), "data"),
            extra=encoded({n: _state_of(v) for n, v in user_state.extra.items()}, "extra"),
            generators=encoded(generator_states(), "generators"),
        )
        manifest = Manifest(
            nonce=self.run,  # and a number, once it is saved
            batch=session.accumulation.num_updates,
            train_steps=session.num_train_steps,
            random_seed=session.random_seed,
            settings=SavedSettings(
                schedule=schedule.name,
                delays=tuple(schedule.delay),
                num_stages=schedule.depth,
                num_ranks=session.control.size,
                width=grid.width,
                num_microbatches=session.stages.options.microbatches_of_replicas
                or schedule.total_microbatches,
                precision=str(session.stages.options.precision.dtype),
                torch=torch.__version__,
            ),
            trainable=local.trainable_names(),
            tied=tied,
            shards={n: part.dimension for n, part in local.parts().items() if n not in tied},
            schedulers=encode(
                [_state_of(scheduler) for scheduler in user_state.schedulers],
                "schedulers",
                tensors if rank == 0 else {},
            ),
        )
        # Their owners go on changing them.
        copies = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        return manifest, own, copies


def _state_of(value: Any) -> Any:
    return value.state_dict() if is_stateful(value) else value


def generator_states() -> dict[str, Any]:
    """The states of the generators that programs draw from by default."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    in_use = module_in_use()
    if in_use is not None:
        device_type, module = in_use
        states[device_type] = module.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def set_generators(states: Mapping[str, Any]) -> None:
    """Sets the generators to what :func:`generator_states` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        module_of(accelerator.type).set_rng_state(states[accelerator.type])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(states["numpy"])
