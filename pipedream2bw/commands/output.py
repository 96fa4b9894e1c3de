"""What commands write: files, whose places are checked before the work, and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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
