"""What hangs on an open pipeline: a checkpointer, remedies for the delay, an extra of one's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ..errors import StageError
from ..ranks.operations import Announcement
from ..rules import Exclusion, instance
from .stage_weights import StageWeights

OPTIMIZER, HOOKS, CHECKPOINTER = "optimizer", "hooks", "checkpointer"
"""The places of extensions of which a pipeline has one at a time."""

Kept = dict[str, dict[str, Any]]
"""What is kept of parameters: by a parameter's name, and then by a name of the extension's own."""


RESERVED = (
    *("state", "param_groups", "optimizers", "loss_scale", "loss_scales", "growth_tracker"),
    *("staleness", "delayed_batches", "late_forwards", "stages"),
)
"""Names that state_dict and checkpoints have for other things."""


class Update(NamedTuple):
    """One batch's update on one stage of this process.

    Attributes:
        batch: the number t of the batch.
        weights: the stage's parameters; W(t) is the engine's newest version.
        late_share: of the batch's forwards on the stage, those that read an older version than
            W(t): 0 to 1.
    """

    batch: int
    weights: StageWeights
    late_share: float


class TakenBack(NamedTuple):
    """Train_steps that have not been, as a batch was discarded.

    Attributes:
        batch: the number of the first batch.
        train_step: the number of its first train_step.
        updates: how many optimizer steps had been registered since.
        error: why.
    """

    batch: int
    train_step: int
    updates: int
    error: StageError


class HeldBytes(NamedTuple):
    """Bytes that an extension holds of one stage; frozen weights are not among the others."""

    on_device: int = 0
    on_host: int = 0
    frozen_weights: int = 0


class Extension:
    """What a pipeline, and the PipelineOptimizer that it was given to, tell and ask.

    A subclass overrides what it needs: each method here does nothing. An error ends the pipeline,
    unless a method says otherwise. All ranks call a method, in
    the main thread, unless the method says otherwise. The pipeline refers to its extensions weakly:
    an optimizer keeps those that it was given. One that acts in updates must not refer to the
    pipeline, which then would not end.

    Attributes:
        name: of what it keeps, in ``state_dict`` and in checkpoints: an identifier.
        excludes: what it does not go together with, under its name.
        is_known_before_steps: whether its state has all its keys before a step has been made.
    """

    name = ""
    is_known_before_steps = False

    excludes: ClassVar[Sequence[Exclusion]] = ()

    # ------------------------------------------------------------------ the pipeline's

    def announce(self, mine: Announcement) -> Announcement:
        """Adds what this rank is to tell all others with a train_step or an evaluation."""
        return mine

    def announced(self, everyone: Sequence[Announcement]) -> None:
        """All ranks have told theirs; the train_step or the evaluation follows."""

    def before_evaluation(self) -> None:
        """All ranks have agreed on an evaluation. The pipeline is not drained yet."""

    def before_load(self, seconds: float) -> None:
        """Weights are about to be loaded; waits so many seconds at most. Drained."""

    def weights_loaded(self) -> None:
        """This process's weights have been loaded. Drained."""

    def taken_back(self, taken: TakenBack) -> None:
        """Batches have not been, as the first of them was discarded. Drained.

        ``taken.error.discarded`` has the numbers of their train_steps; none: an evaluation failed.
        """

    def bytes_of(self, stage: int) -> HeldBytes:
        """Bytes that are held of one of the schedule's stages."""
        return HeldBytes()

    # ------------------------------------------------------------------ the optimizer's

    def check(self, session: Any, options: Mapping[str, Any]) -> None:
        """Raises ValueError or TypeError, on all ranks, if it does not go with the others.

        Args:
            session: the pipeline's ``Session``, whose room is above this one's file.
            options: the other arguments of PipelineOptimizer, by their names.
        """

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks, by names that an error is to show."""
        return {}

    def join(self, session: Any) -> None:
        """The optimizer has taken over. Drained; may wait for other ranks."""

    def before_step(self, batch: int) -> None:
        """``opt.step()`` is about to submit a batch's update; may wait for other ranks.

        An error leaves the pipeline open, and the step can be tried again; other ranks do not know.
        """

    def acts_in(self, update: Update) -> bool:
        """Whether :meth:`before_update` and :meth:`after_update` are to be called."""
        return False

    def before_update(self, update: Update, slot: int) -> None:
        """The optimizers are about to step ``slot``, in the thread of the stage's update."""

    def after_update(self, update: Update, slot: int) -> None:
        """The optimizers have stepped: ``slot`` has W(t+1). In the thread of the stage's update."""

    def step_submitted(self, batch: int) -> None:
        """``opt.step()`` has submitted a batch's update on all stages of this process."""

    # ------------------------------------------------------------------ what is saved

    def saved(self) -> dict[str, Any] | None:
        """What is saved beside :meth:`kept`, the same on all ranks: a dictionary of JSON's types.

        None: nothing is saved, nor is :meth:`kept` called; always, or never. The key "kept" is
        taken. Called between two batches, and before :meth:`join`.
        """
        return None

    def kept(self, weights: StageWeights) -> Kept:
        """What is saved of a stage's parameters, live tensors and numbers.

        The one value of a parameter may have the name "". Called between two updates of the stage,
        in a thread of its own; an error ends the save alone.
        """
        return {}

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if it cannot go on from what :meth:`saved` gave in another run."""

    def load(
        self, saved: Mapping[str, Any] | None, kept: Kept, stages: Sequence[StageWeights]
    ) -> None:
        """Takes what :meth:`saved` and :meth:`kept` gave. Drained.

        Args:
            saved: None: there was no such extension.
            kept: of all parameters, whose tensors the caller may change afterwards.
            stages: of this process.
        """

    def known_everywhere(self, steps: Sequence[int]) -> Sequence[int]:
        """The steps of a folder's checkpoints from which a run may go on. Rank 0 alone calls it."""
        return steps


class Extensions:
    """The extensions of a pipeline, in the order in which they were put here."""

    def __init__(self) -> None:
        self._places: dict[str, list[weakref.ref[Extension]]] = {}

    def put(self, place: str, extensions: Sequence[Extension]) -> None:
        """Puts extensions at a place, whose former ones are the pipeline's no more."""
        self._places[place] = [weakref.ref(each) for each in extensions]

    def add(self, extension: Extension) -> None:
        """Puts one beside all others, as long as it exists."""
        alive = [each for each in self._places.get("", ()) if each() is not None]
        self._places[""] = [*alive, weakref.ref(extension)]

    def at(self, place: str) -> list[Extension]:
        """The extensions of a place that still exist."""
        found = [each() for each in self._places.get(place, ())]
        return [each for each in found if each is not None]

    def __iter__(self) -> Iterator[Extension]:
        for place in list(self._places):
            yield from self.at(place)

    def bytes_of(self, stage: int) -> HeldBytes:
        """Bytes that all of them hold of a stage."""
        held = [each.bytes_of(stage) for each in self]
        return HeldBytes(*map(sum, zip(*held, strict=True)))


def check_extensions(extensions: Mapping[str, Extension]) -> None:
    """Refuses what cannot be the extensions of one optimizer.

    Args:
        extensions: by what an error calls each.

    Raises:
        TypeError, ValueError: naming the extension and the rule.
    """
    places: dict[int | str, str] = {}  # of an extension, and of its name
    for place, extension in extensions.items():
        instance("of a subclass of pipedream2bw.Extension", Extension).check(place, extension)
        name = extension.name
        if name and (not name.isidentifier() or name in RESERVED):
            raise ValueError(
                f"{place}: name: {name!r}, it must be an identifier, and none of "
                f"{', '.join(RESERVED)}: state_dict and checkpoints have its state under it"
            )
        if saved_by(extension) is not None and not name:
            raise ValueError(f"{place}: name: {name!r}, what has a state must have a name")
        keys: tuple[int | str, ...] = (id(extension), name) if name else (id(extension),)
        for key in keys:
            if key in places:
                raise ValueError(
                    f"{places[key]} and {place}: {type(extension).__name__}, name: {name!r}, is "
                    "given twice: each must be another extension, of another name"
                )
            places[key] = place


def saved_by(extension: Extension) -> dict[str, Any] | None:
    """What an extension saves; TypeError or ValueError if that is no dictionary that can be."""
    saved = extension.saved()
    what = f"{type(extension).__name__}.saved()"
    if saved is None:
        return None
    instance("a dictionary or None", dict).check(what, saved)
    if "kept" in saved:
        raise ValueError(f'{what}: it has the key "kept", which is for what kept() gives')
    return saved


def joined(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """As ``state_dict`` has it: the one value of name "" stands for itself."""
    return {name: of[""] if of.keys() == {""} else of for name, of in kept.items()}


def parted(kept: Mapping[str, Any]) -> Kept:
    """What :func:`joined` was given."""
    return {name: dict(of) if isinstance(of, Mapping) else {"": of} for name, of in kept.items()}
