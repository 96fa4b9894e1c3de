"""The README's first example, with layers and a loss that note the lines that it passes.

    python -m tests.spine.training PATH [--import-only]

PATH gets the Python lines that ran after the import, by file, as JSON. With two processes, as
torchrun begins them, each has a path of its own: PATH.RANK.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import pipedream2bw as pd2

README = Path(__file__).resolve().parents[2] / "README.md"
PACKAGE = str(Path(pd2.__file__).parent)
passed: dict[str, set[int]] = collections.defaultdict(set)


def note(frame: FrameType, event: str, argument: Any) -> Any:
    file = frame.f_code.co_filename
    if not file.startswith(PACKAGE):
        return None
    if event == "line":
        passed[file].add(frame.f_lineno)
    return note


class Loss(nn.Module):
    """Runs in every stage's thread that the engine began, where it begins to note lines."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        note_here()
        return nn.functional.mse_loss(output, target)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note_here()
        return super().forward(x)


def note_here() -> None:
    """Notes the lines of a thread that C++ made: threading.settrace() does not know it."""
    if sys.gettrace() is note:
        return
    sys.settrace(note)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frame.f_trace = note
        frame = frame.f_back


def example() -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{README}: no example"
    return found[1]


def train() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    text = example().replace("nn.Linear(", "Layer(").replace("nn.functional.mse_loss", "Loss()")
    code = compile(text, README.name, "exec")
    threading.settrace(note)
    sys.settrace(note)
    exec(code, {"Layer": Layer, "Loss": Loss})
    sys.settrace(None)


def main(path: str, *options: str) -> None:
    if "--import-only" not in options:
        train()
    own = f"{path}.{os.environ['RANK']}" if "RANK" in os.environ else path
    lines = {str(Path(file).relative_to(PACKAGE)): sorted(passed[file]) for file in passed}
    Path(own).write_text(json.dumps(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
