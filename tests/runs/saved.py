"""The folders of a run's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path


def saved(folder: str | os.PathLike[str], step: int) -> Path:
    """The folder of the one save of a batch."""
    (found,) = Path(folder).glob(f"step-{step:08d}-*")
    return found
