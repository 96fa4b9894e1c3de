"""Errors keep their data and text wherever they are taken: pickled, copied, told to other ranks."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from pipedream2bw import _C, errors
from pipedream2bw.errors import (
    RemoteTraceback,
    StageError,
    from_document,
    to_document,
    traceback_of,
)

DATA: dict[str, Any] = {
    "rank": 3,
    "stage": 1,
    "replica": 0,
    "batch": 5,
    "microbatch": 2,
    "action": "forward",
    "cause": "ZeroDivisionError: on purpose",
}
TEXT = "stage 1, batch 5: \N{SNOWMAN}"
KINDS = [
    StageError,
    errors.PeerLost,
    errors.PeerTimeout,
    errors.WrongLossError,
    errors.WrongLossTypeError,
    errors.WrongHookError,
    errors.WrongHookTypeError,
]


def through_pickle(protocol: int) -> Callable[[Any], Any]:
    return lambda error: pickle.loads(pickle.dumps(error, protocol))


def through_the_engine(error: StageError) -> StageError | None:
    fault = _C.Fault(rank=7)
    fault.raise_(error)
    return fault.error


WAYS = {
    **{f"pickle {protocol}": through_pickle(protocol) for protocol in range(2, 6)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "document": lambda error: from_document(to_document(error)),
    "engine": through_the_engine,
    "words": lambda error: errors.reworded(error, str(error)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("data", [DATA, dict.fromkeys(DATA) | {"cause": "it"}], ids=["all", "none"])
def test_a_stage_error_keeps_type_text_and_data(
    kind: type[StageError], way: str, data: dict[str, Any]
) -> None:
    error = kind(TEXT, **data)
    other = WAYS[way](error)
    assert type(other) is kind
    assert str(other) == TEXT
    assert other.args == (TEXT,)
    assert vars(other) == data | {"discarded": None}
    assert isinstance(other, RuntimeError)


@pytest.mark.parametrize("way", ["document", "engine", "words"])
def test_the_traceback_goes_along(way: str) -> None:
    error = StageError(TEXT, **DATA)
    error.__cause__ = RemoteTraceback("Traceback ...\nZeroDivisionError: on purpose\n")
    other = WAYS[way](error)
    assert traceback_of(other) == traceback_of(error) != ""
    assert "Traceback ...\nZeroDivisionError" in "".join(traceback.format_exception(other))


def test_wrong_losses_and_hooks_are_the_builtin_errors_too() -> None:
    assert issubclass(errors.WrongLossError, ValueError)
    assert issubclass(errors.WrongLossTypeError, TypeError)
    assert issubclass(errors.WrongHookError, ValueError)
    assert issubclass(errors.WrongHookTypeError, TypeError)


def test_an_error_of_another_type_goes_as_the_one_that_it_is_a_kind_of() -> None:
    class Own(errors.PeerLost):
        pass

    other = through_the_engine(Own(TEXT, **DATA))
    assert type(other) is errors.PeerLost


def test_the_first_failure_counts() -> None:
    fault = _C.Fault()
    assert (fault.raised, fault.error, fault.kept) == (False, None, -1)
    fault.raise_(errors.PeerLost("first", rank=2))
    fault.raise_(errors.PeerTimeout("second"))
    assert fault.raised
    assert (str(fault.error), getattr(fault.error, "rank", None)) == ("first", 2)
