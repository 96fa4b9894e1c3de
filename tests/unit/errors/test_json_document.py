"""JSON that says one thing is read; what does not is refused, whatever its size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipedream2bw.json_document import MOST_LEVELS, Field, check_nesting, parse_json


def nested(levels: int) -> Any:
    value: Any = []
    for level in range(levels - 1):
        value = {"a": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "a: it is there twice"),
        (b'{"b": {"a": 1, "a": 1}}', "a: it is there twice"),
        (b"[1e999]", "1e999: it must be a finite number"),
        (b"[-1e999]", "-1e999: it must be a finite number"),
        (b"[NaN]", "JSON has no NaN"),
        (b"9" * 5000, "4300"),
        (b"[" * 10**6, "it is not JSON"),
        (b"[" * 10**6 + b"]" * 10**6, "it is not JSON"),
        (b'{"a":' * 600 + b"1" + b"}" * 600, "200 levels"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_what_says_no_one_thing_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


@pytest.mark.parametrize("levels", [MOST_LEVELS, MOST_LEVELS + 1, MOST_LEVELS + 2])
def test_levels_are_counted(levels: int) -> None:
    document = nested(levels)
    if levels <= MOST_LEVELS:
        assert parse_json(json.dumps(document).encode()) == document
        return
    with pytest.raises(ValueError, match=f"more than {MOST_LEVELS} levels"):
        check_nesting(document)


def test_an_error_is_short_whatever_is_given() -> None:
    for value in ({"x" * 10**6: 1}, {str(i): i for i in range(10**5)}, [0] * 10**6, "x" * 10**6):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            Field(value).fields("a", "b")
        assert len(str(caught.value)) < 600
