"""What commands write: files, whose places are checked before the work, reports and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .. import svg


def check_written(option: str, path: Path | None) -> None:
    """Raises ValueError if no file can be written there: what is to be written may take minutes."""
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{option}: {path}: there is no folder {folder}")
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder, it must be a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option}: {path}: no permission to write there")


def print_json(value: Any) -> None:
    """Prints a value as JSON, indented by one."""
    print(json.dumps(value, indent=1, allow_nan=False))


class Report(dict[str, Any]):
    """What a command has found, as JSON can hold it; its text is what the command prints."""

    def show(self, *, as_json: bool) -> None:
        """Prints it."""
        if as_json:
            print_json(self)
        else:
            print(self)

    def _repr_html_(self) -> str:
        first, rest = str(self).split("\n", 1)
        return svg.html(first, svg.printed(rest, folded=False))
