"""What a pipeline raises when one of its stages has failed."""

from __future__ import annotations

import re


class WrongLossError(RuntimeError, ValueError):
    """The last stage's ``loss_fn``, or a metric, gave something else than one number."""


class WrongLossTypeError(RuntimeError, TypeError):
    """The last stage's ``loss_fn``, or a metric, gave neither a tensor nor a number."""


def failure(cause: str) -> RuntimeError:
    """The error of every rank; ``cause`` is the first failure's text, the same on all."""
    last_line = cause.rstrip().rpartition("\n")[2]
    found = re.match(r"(ValueError|TypeError): (loss_fn|metrics\[.*\]) returned ", last_line)
    if found is None:
        return RuntimeError(cause)
    return (WrongLossError if found[1] == "ValueError" else WrongLossTypeError)(cause)
