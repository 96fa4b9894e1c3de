"""Records the README's picture: python docs/images/timeline.py

Four stage threads whose work is to sleep, 40 ms a forward and 80 ms a backward, so that the picture
shows the schedules and not the machine. Of several runs the shortest is drawn, as the one that the
machine's other work disturbed least.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipedream2bw as pd2

FORWARD_SECONDS, BACKWARD_SECONDS = 0.040, 0.080
NUM_STAGES = NUM_MICROBATCHES = 4
NUM_BATCHES = 3
NUM_RUNS = 5


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class SleepingStage(nn.Module):
    """A tiny layer that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Sleep.apply(x.requires_grad_()))


def record(schedule: str) -> list[pd2.Event]:
    """What the stages do in a few batches, from an empty pipeline to a drained one."""
    rows = torch.ones(NUM_MICROBATCHES, 4)
    pipe = pd2.PipelineModule(
        [SleepingStage() for _ in range(NUM_STAGES)],
        nn.functional.mse_loss,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        example_args=(rows,),
    )
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    with pipe, pipe.timeline() as timeline:
        for _ in range(NUM_BATCHES):
            pipe.train_step(rows, target=rows)
            optimizer.step()
    return timeline.rows


def seconds(events: list[pd2.Event]) -> float:
    """From the first action's start to the last one's end."""
    return max(event.end for event in events) - min(event.start for event in events)


def main() -> None:
    """Runs the three schedules several times and draws the shortest run of each."""
    runs = [{name: record(name) for name in ("gpipe", "1f1b", "2bw")} for _ in range(NUM_RUNS)]
    events = {name: min((run[name] for run in runs), key=seconds) for name in runs[0]}
    pd2.draw_timeline(
        events,
        Path(__file__).with_suffix(".png"),
        title=f"{NUM_BATCHES} batches of {NUM_MICROBATCHES} microbatches, from empty to drained",
    )


if __name__ == "__main__":
    main()
