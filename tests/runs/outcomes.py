"""What calls raised on the ranks, and what they should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Outcome = tuple[str, str]
"""Type and text of what was raised, ("", "") if nothing was."""

Expected = Mapping[str, tuple[str, Sequence[str]]]
"""By name: the type (or several, "A|B") and words of the text."""


def attempt(call: Callable[[], Any]) -> Outcome:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def assert_raised(by_rank: Iterable[Mapping[str, Outcome]], expected: Expected) -> None:
    """Every rank raised all of it."""
    for rank, outcomes in enumerate(by_rank):
        for name, (kind, words) in expected.items():
            raised, text = outcomes[name]
            assert raised in kind.split("|"), (name, rank, raised, text)
            assert all(word in text for word in words), (name, rank, text)
