"""Errors that carry data; their texts are for people, their attributes for programs.

The engine and the core throw the same kinds; csrc/bindings/fault.cpp makes these classes of them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any, NamedTuple, TypeVar

_Raised = TypeVar("_Raised", bound=Exception)


@dataclasses.dataclass(eq=False, repr=False)
class _WithDataError(Exception):
    """An error whose attributes are keyword arguments: pickled and copied with them."""

    text: dataclasses.InitVar[str]

    def __post_init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class, whose keywords pickle does not know.
        return _without_init, (type(self), self.args), self.__dict__


def _without_init(cls: type[Exception], args: tuple[Any, ...]) -> Exception:
    return cls.__new__(cls, *args)


class Cell(NamedTuple):
    """A place in a schedule's lists.

    Attributes:
        rank: whose lists.
        list: "prologue", "steady" or "epilogue".
        position: of the action in the list, from 0; None: an action is missing in the list.
    """

    rank: int
    list: str
    position: int | None


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ScheduleError(_WithDataError, ValueError):
    """A schedule is illegal; the text shows its grid with the offending cells marked.

    Attributes:
        rule: "sizes", "placement", "numbering", "exactly once", "after forward", "microbatch
            order", "update order", "weight versions" or "deadlock"; csrc/core/schedule/validate.h
            states them in this order.
        cell: the first action that breaks the rule; None where no single one does.
    """

    rule: str
    cell: Cell | None

    def __post_init__(self, text: str) -> None:
        super().__post_init__(text)
        if self.cell is not None:
            self.cell = Cell(*self.cell)  # the core gives a tuple


class Deadlock(ScheduleError):  # noqa: N818
    """The ranks of a schedule would wait for each other forever."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class DoesNotFit(_WithDataError, ValueError):  # noqa: N818
    """A model fits on no plan.

    Attributes:
        limit: the memory of every device, in bytes, with which there is a plan.
    """

    limit: float


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class StageError(_WithDataError, RuntimeError):
    """A failure in a running pipeline; every rank raises the first one.

    What the user's code raises discards a batch, where all stages can do without it: the pipeline
    is then open, drained, and as it was before that batch; its delay begins anew, so that the next
    batch reads the newest weights. Any other failure ends the pipeline, and every later call raises
    it again.

    The rank that failed chains the exception itself as ``__cause__``; the others chain a
    :class:`RemoteTraceback`. What is not known, or does not apply, is None.

    Attributes:
        rank: the process that failed, among all.
        stage: the model's stage.
        replica: whose stage it is.
        batch: the number of the train_step; None in an evaluation.
        microbatch: its number in the batch.
        action: "forward", "backward", "input gradient", "weight gradient", "update", "loss", or
            the operation that all ranks began together, such as "train_step".
        cause: the first failure, its type and message.
        discarded: the numbers of the train_steps that were taken back, of the batch that failed and
            of later ones (none if an evaluation failed): the next train_steps have these numbers.
            None: the pipeline has ended.
    """

    rank: int | None = None
    stage: int | None = None
    replica: int | None = None
    batch: int | None = None
    microbatch: int | None = None
    action: str | None = None
    cause: str | None = None
    discarded: tuple[int, ...] | None = None


class PeerLost(StageError):  # noqa: N818
    """A rank is gone: its process ended, it left the pipeline, or its connection broke.

    Attributes:
        rank: the one that is gone; the other attributes say what waited for it.
    """


class PeerTimeout(StageError):  # noqa: N818
    """A rank did not answer within ``timeout`` seconds.

    Attributes:
        rank: the one that is silent; the other attributes say what waited for it.
    """


class WrongLossError(StageError, ValueError):
    """The last stage's ``loss_fn``, or a metric, gave something else than one number."""


class WrongLossTypeError(StageError, TypeError):
    """The last stage's ``loss_fn``, or a metric, gave neither a tensor nor a number."""


class WrongHookError(StageError, ValueError):
    """A gradient hook gave a tensor of another shape or dtype than its bucket's."""


class WrongHookTypeError(StageError, TypeError):
    """A gradient hook gave no future, or one of something else than a tensor."""


class DamagedCheckpoint(ValueError):  # noqa: N818
    """A checkpoint is not what was written: names the file, and what is wrong with it."""


class RemoteTraceback(Exception):  # noqa: N818
    """The formatted traceback of an exception that this process does not have."""

    def __str__(self) -> str:
        return f'\n"""\n{str(self.args[0]).strip()}\n"""'


def traceback_of(error: BaseException) -> str:
    """The traceback that an error chains as a :class:`RemoteTraceback`, "" if it chains none."""
    cause = error.__cause__
    return str(cause.args[0]) if isinstance(cause, RemoteTraceback) else ""


def type_of(error: StageError) -> str:
    """The name of an error's class; of a class that others made, of ours that it is."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def reworded(error: _Raised, text: str) -> _Raised:
    """Returns a copy of an error with another text: its data and what it chains stay."""
    other = copy.copy(error)
    other.args = (text,)
    other.__cause__ = error.__cause__
    return other


def to_document(error: StageError) -> str:
    """An error's class, text, data and traceback as JSON, by which one rank tells it to others."""
    return json.dumps(
        {
            "type": type_of(error),
            "text": str(error),
            "traceback": traceback_of(error),
            "data": {name: getattr(error, name) for name in StageError.__annotations__},
        }
    )


def from_document(document: str) -> StageError:
    """The error that :func:`to_document` told, with a :class:`RemoteTraceback` chained."""
    told = json.loads(document)
    error: StageError = globals()[told["type"]](told["text"], **told["data"])
    if told["traceback"]:
        error.__cause__ = RemoteTraceback(told["traceback"])
    return error
