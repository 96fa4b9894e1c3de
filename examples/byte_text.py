"""Text as bytes: a file, a folder, or the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

MOST_BYTES = 64 * 2**20
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def load_text(path: Path | None) -> torch.Tensor:
    """Loads the bytes of ``path`` (a file, or a folder's text files), or of the standard library.

    Files are sorted, so every rank of one machine gets the same uint8 tensor.

    Raises:
        ValueError: there are fewer than 10,000 bytes of text.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            file
            for file in sorted(root.rglob("*.py"))
            if not NOT_LIBRARY & set(file.relative_to(root).parts)
        ]
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
        raise ValueError(f"{path or root}: {len(text)} bytes of text, at least 10000 are needed")
    return torch.frombuffer(text[:MOST_BYTES], dtype=torch.uint8)


def random_batches(
    text: torch.Tensor, rows: int, context: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (tokens, next tokens) without end, int64 [rows, context] each; the seed fixes them."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        window = text[starts + steps].long()
        yield window[:, :-1], window[:, 1:]
