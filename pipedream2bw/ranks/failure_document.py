"""The first failure as the text by which one rank tells it to the others."""

from __future__ import annotations

import json

from .. import errors
from ..errors import RemoteTraceback, StageError, traceback_of, type_of


def to_document(error: StageError) -> str:
    """An error's class, text, data and traceback, as JSON."""
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
    error: StageError = getattr(errors, told["type"])(told["text"], **told["data"])
    if told["traceback"]:
        error.__cause__ = RemoteTraceback(told["traceback"])
    return error
