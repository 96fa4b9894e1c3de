"""Text as bytes: a file, a folder, or the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch

MOST_BYTES = 64 * 2**20
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def load_text(path: Path | None) -> torch.Tensor:
    """Loads the bytes of ``path`` (a file, or a folder's text files), or of the standard library.

    Files are sorted, so every rank of one machine gets the same uint8 tensor.

    Raises:
        ValueError: there are fewer than 10,000 bytes of text.
    """
    return torch.frombuffer(read_text(path), dtype=torch.uint8)


def library_files() -> list[Path]:
    """The sources of Python's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if not NOT_LIBRARY & set(file.relative_to(root).parts)
    ]


def read_text(path: Path | None) -> bytearray:
    """The bytes that :func:`load_text` loads."""
    if path is None:
        files = library_files()
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        files = [path]
    text = bytearray()
    for file in files:
        content = file.read_bytes()
        if b"\0" not in content:  # git's test for text
            text += content + b"\n"
        if len(text) > MOST_BYTES:
            break
    if len(text) < 10_000:
        place = path or sysconfig.get_path("stdlib")
        raise ValueError(f"{place}: {len(text)} bytes of text, at least 10000 are needed")
    return text[:MOST_BYTES]


class RandomBatches:
    """Gives (tokens, next tokens) without end, int64 [rows, context] each; the seed fixes them."""

    def __init__(self, text: torch.Tensor, rows: int, context: int, seed: int) -> None:
        self._text = text
        self._rows = rows
        self._steps = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> RandomBatches:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        last = len(self._text) - len(self._steps) + 1
        starts = torch.randint(last, (self._rows, 1), generator=self._generator)
        window = self._text[starts + self._steps].long()
        return window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """What the next batches are drawn from."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
