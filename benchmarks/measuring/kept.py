"""Results that are kept as they come, so that a long measurement goes on where it was cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Kept:
    """Results by key, in a file of JSON lines if there is a path; a line is written at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            whole, _, cut_off = path.read_text().rpartition("\n")
            if cut_off:  # in the middle of a line
                path.write_text(whole + "\n" if whole else "")
            for line in whole.splitlines():
                kept = json.loads(line)
                self._found[kept["key"]] = kept["result"]

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def add(self, key: str, result: dict[str, Any]) -> None:
        self._found[key] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "result": result}) + "\n")
