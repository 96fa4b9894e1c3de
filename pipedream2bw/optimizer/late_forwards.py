"""Which forwards of a batch are late, where those alone are that cannot wait for the update."""

from __future__ import annotations

import collections
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _C
from ..ranks.operations import Announcement
from ..runtime.extension import Extension, Kept, TakenBack
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from ..schedules.load import check_room

_PURPOSE = "update_slots"

_MEASURED = 3
"""Batches in which an update is measured: the first one, of which everything is slower, and two."""


class Measured(NamedTuple):
    """How long a stage takes, in seconds.

    Attributes:
        update: from the end of a batch's last backward until the weights can be read.
        forward, backward: of one microbatch.
    """

    update: float
    forward: float
    backward: float


def tied(session: Session, late: Sequence[int]) -> list[int]:
    """The numbers, alike where stages have parameters in common: a microbatch reads one version."""
    alike, groups = list(late), session.stages.joint_updates.tied
    for stages in groups * len(groups):  # a stage may be of several groups
        most = max(alike[each] for each in stages)
        for stage in stages:
            alike[stage] = most
    return alike


def late_for(session: Session, slots: int, *, has_norm: bool) -> list[int]:
    """The fewest late forwards that hide updates of so many slots.

    Args:
        has_norm: whether updates will wait for each other on all stages.
    """
    updates, schedule = session.stages.joint_updates, session.schedule
    joint = [*updates.tied, *[range(schedule.num_stages)] * has_norm]
    backward = 3.0 if any(session.stages.options.recompute) else 2.0  # in forwards
    return tied(session, schedule.late_for_slots(slots, joint, backward))


def check_tied(session: Session) -> None:
    """Raises ValueError if a schedule of one's own has other numbers for tied stages."""
    late = session.schedule.late_forwards
    if tied(session, late) != late:
        raise ValueError(
            f"late_forwards: {late}, stages with tied parameters: "
            f"{list(map(list, session.stages.joint_updates.tied))}: they must be alike there, as a "
            "microbatch reads one version of a parameter"
        )


class LateForwards(Extension):
    """Sets how many of a batch's first forwards are late on each stage, and saves the numbers.

    A forward may read W(t) if it begins after the update that makes W(t); the others read W(t-1).
    So the number follows from the schedule's lists and from how long an update takes.

    Args:
        slots: of an update. "auto": it is measured in the first batches, whose forwards are all
            late. None: the schedule states which are late.
    """

    name = "late_forwards"
    is_known_before_steps = True

    def __init__(self, session: Session, slots: int | str | None) -> None:
        self._session = session
        self._is_measured = slots == "auto"
        self._is_fixed = not self._is_measured
        self._steps = 0  # since the stages are recorded for it
        self._end_recording()  # of an optimizer before
        if isinstance(slots, int):
            has_norm = session.stages.joint_updates.have_norm
            self._set(late_for(session, slots, has_norm=has_norm), slots)

    def __str__(self) -> str:
        return str(self._session.schedule.late_forwards)

    def announced(self, everyone: Sequence[Announcement]) -> None:
        session = self._session
        is_training = everyone[0].ends_batch >= 0
        if self._is_fixed or not is_training or not session.accumulation.is_between_batches:
            return
        recorded_for = session.stages.recorded_for
        if recorded_for is None:
            session.stages.record(_PURPOSE)
            self._steps = 0
        elif recorded_for == _PURPOSE and self._steps == _MEASURED:
            self._measure()

    def step_submitted(self, batch: int) -> None:
        self._steps += 1

    def taken_back(self, taken: TakenBack) -> None:
        self._end_recording()

    def _end_recording(self) -> None:
        if self._session.stages.recorded_for == _PURPOSE:
            self._session.stages.take_record()

    def _measure(self) -> None:
        """Takes what has been recorded on all ranks."""
        session = self._session
        session.drain()  # raises if a batch is taken back
        mine = measured(session.stages.take_record())
        everyone = session.control.told_by_all(mine)
        if any(each is None for each in everyone):
            return
        stages = [(stage, of) for each in everyone if each for stage, of in each.items()]
        slowest = max((of for _, of in stages), key=lambda of: of.forward + of.backward)
        updates = [0.0] * session.schedule.num_stages
        for stage, of in stages:
            updates[stage] = max(updates[stage], of.update)
        # The waiting for other stages is in the seconds.
        late = session.schedule.late_for_seconds(updates, slowest.forward, slowest.backward)
        self._set(tied(session, late))

    def _set(self, late: Sequence[int], slots: int | None = None) -> None:
        """Makes this many forwards late: the most that one of the replicas needs.

        Args:
            slots: that were given, for an error.
        """
        session = self._session
        self._end_recording()
        everyone = session.control.told_by_all((list(late), session.schedule.num_microbatches))
        fewest = min(number for _, number in everyone)
        wanted = [max(numbers) for numbers in zip(*(each for each, _ in everyone), strict=True)]
        if slots is not None:
            check_room(slots, wanted, fewest)
        elif max(wanted) > fewest and session.grid.rank == 0:
            warnings.warn(
                f"update_slots: 'auto', num_microbatches: {fewest}: the update takes so long that "
                f"all forwards of a batch are late on a stage. Give num_microbatches={max(wanted)} "
                "or more",
                stacklevel=2,
            )
        session.stages.set_late_forwards([min(number, fewest) for number in wanted])
        self._is_fixed = True

    def saved(self) -> dict[str, Any]:
        late = self._session.schedule.late_forwards
        return {"late_forwards": list(late) if self._is_fixed else [], "split": self._split()}

    def _split(self) -> list[str | None]:
        """The layers at which stages begin, the first one left out."""
        return [program.first_layer_name for program in self._session.modes.first.programs[1:]]

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        mine, theirs = list(self._session.schedule.late_forwards), list(saved["late_forwards"])
        has_room = (
            len(theirs) == len(mine) and max(theirs) <= self._session.schedule.num_microbatches
        )
        fits = not theirs or has_room if self._is_measured else theirs == mine
        if not fits:
            raise ValueError(
                f"late_forwards: {mine}, the checkpoint has {theirs or 'not measured them yet'}: "
                "they must be equal. Give num_stages, num_microbatches and update_slots as when it "
                "was saved, or load the weights alone"
            )

    def load(
        self, saved: Mapping[str, Any] | None, kept: Kept, stages: Sequence[StageWeights]
    ) -> None:
        """Without a state those of before stay, or are measured."""
        if saved is None:
            return
        self.check_saved(saved)
        if saved["late_forwards"]:
            self._set(saved["late_forwards"])
            mine = self._split()
            theirs = list(saved.get("split", mine))  # earlier versions did not write it
            if theirs != mine and self._session.grid.rank == 0:
                warnings.warn(
                    f"late_forwards: the stages after the first begin at {mine}, the checkpoint's "
                    f"at {theirs}: other forwards of the layers between are late from here on. "
                    f"split={theirs} goes on with the same bits",
                    stacklevel=1,
                )
        elif self._is_measured:  # also what this run has measured since
            self._end_recording()
            self._session.stages.set_late_forwards([])
            self._is_fixed = False


def measured(records: Iterable[_C.ExecutedAction]) -> dict[int, Measured] | None:
    """What each stage took, by its number; None: no batch was recorded from beginning to end."""
    seconds: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
    complete: dict[tuple[int, int], float] = collections.defaultdict(float)  # by stage and run
    made: dict[int, dict[int, float]] = collections.defaultdict(dict)  # by stage and run
    for action in records:
        if action.kind == "U":
            made[action.stage][action.run] = action.end
            continue
        seconds[action.stage, action.kind].append(action.end - action.start)
        if action.kind != "F":
            here = action.stage, action.run
            complete[here] = max(complete[here], action.end)
    found = {}
    for stage, ends in made.items():
        updates = [ends[run] - complete[stage, run] for run in sorted(ends)[1:]]
        if not updates or (stage, "F") not in seconds:
            return None
        typical = {kind: statistics.median(of) for (at, kind), of in seconds.items() if at == stage}
        forward = typical.pop("F")
        found[stage] = Measured(min(updates), forward, sum(typical.values()))
    return found or None
