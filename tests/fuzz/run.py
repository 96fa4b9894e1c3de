"""Gives a format many inputs, each made from its number alone, so that one can be given again."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from .formats import FORMATS, corpus_of

DEADLINE = 2.0
"""Seconds of the processor that an input may take: far more than any of these needs."""


class Result(NamedTuple):
    """What became of inputs."""

    num_read: int
    num_refused: int
    slowest: float


class Broken(AssertionError):  # noqa: N818
    """An input was neither read nor refused as it should be."""

    def __init__(self, name: str, number: str, data: bytes, problem: str) -> None:
        super().__init__(f"{name}, input {number}: {problem}: {data[:200]!r}")
        self.data = data


def give(name: str, data: bytes) -> bool:
    """Whether the input is read; otherwise it is refused.

    Raises:
        Exception: neither.
    """
    try:
        FORMATS[name].read(data)
    except UnicodeEncodeError:
        raise
    except ValueError as error:
        if not str(error):
            raise AssertionError("refused without a word") from error
        return False
    return True


def input_of(name: str, seed: int, number: int, corpus: list[bytes]) -> bytes:
    """The input of a number."""
    return FORMATS[name].make(random.Random(seed << 40 | number), corpus)


def run(name: str, numbers: range, seed: int = 0) -> Result:
    """Gives a format the inputs of these numbers.

    Raises:
        Broken: for the first that is neither read nor refused by ValueError, or takes too long.
    """
    corpus = corpus_of(name)
    num_read = 0
    slowest = 0.0
    for number in numbers:
        data = input_of(name, seed, number, corpus)
        begin = time.process_time()
        try:
            num_read += give(name, data)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            raise Broken(name, f"{seed}/{number}", data, problem) from error
        took = time.process_time() - begin
        if took > DEADLINE:
            raise Broken(name, f"{seed}/{number}", data, f"{took:.1f} s")
        slowest = max(slowest, took)
    return Result(num_read, len(numbers) - num_read, slowest)
