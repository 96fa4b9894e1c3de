"""Errors that carry data; their texts are for people, their attributes for programs.

The engine and the core throw the same kinds; csrc/bindings/errors.cpp makes these classes of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class _WithDataError(Exception):
    """An error whose attributes are keyword arguments: pickled and copied with them."""

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

    def __init__(
        self, message: str, *, rule: str, cell: tuple[int, str, int | None] | None
    ) -> None:
        super().__init__(message)
        self.rule = rule
        self.cell = None if cell is None else Cell(*cell)


class Deadlock(ScheduleError):  # noqa: N818
    """The ranks of a schedule would wait for each other forever."""


class DoesNotFit(_WithDataError, ValueError):  # noqa: N818
    """A model fits on no plan.

    Attributes:
        limit: the memory of every device, in bytes, with which there is a plan.
    """

    limit: float

    def __init__(self, message: str, *, limit: float) -> None:
        super().__init__(message)
        self.limit = limit
