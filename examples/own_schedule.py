"""Trains by a schedule of one's own: a file that says what every rank does, action by action.

    python examples/own_schedule.py                       DualPipeV's order, by PyTorch
    python examples/own_schedule.py --schedule-file PATH  any other, of stages in one process

Prints what the schedule costs in a simulation beside ``2bw`` with as many stages and microbatches,
trains a small network by it, and draws loss.png, and schedule.png: what the stages really did.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from loss_curve import draw_losses
from torch import nn

import pipedream2bw as pd2

DUAL_PIPE_V = Path(__file__).parent / "schedules" / "dual_pipe_v.csv"
BACKWARD = 2.0  # forwards' time


def compare(schedule: pd2.Schedule) -> str:
    """A table of the times and activations that a simulation gives."""
    microbatches = schedule.total_microbatches
    ranks = len(set(schedule.placement))
    lines = ["schedule    time of a batch over the least    activations of the fullest rank"]
    for each in (schedule, pd2.make_schedule("2bw", ranks, microbatches)):
        share = ranks / each.depth  # a rank has as much work, with one stage or several
        found = pd2.simulate(each, forward=share, backward=BACKWARD * share, activation_bytes=share)
        least = microbatches * (1 + BACKWARD)
        lines.append(f"{each.name:10} {found.period / least:31.3f} {max(found.peak_bytes):34.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains by a schedule of one's own.")
    parser.add_argument("--schedule-file", type=Path, default=DUAL_PIPE_V)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    schedule = pd2.load_schedule(options.schedule_file)
    print(compare(schedule))
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(options.width, options.width), nn.Tanh())
        for _ in range(schedule.depth)
    ]
    rows = 4 * schedule.total_microbatches
    teacher = nn.Linear(options.width, options.width)
    with pd2.PipelineModule(
        stages,
        nn.functional.mse_loss,
        schedule=schedule,
        num_stages=schedule.depth,
        num_microbatches=schedule.total_microbatches,
        example_args=(torch.zeros(rows, options.width),),
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9))

        def train_step() -> pd2.Loss:
            x = torch.randn(rows, options.width)
            loss = pipe.train_step(x, target=teacher(x).detach().tanh())
            optimizer.step()
            return loss

        losses = [float(train_step()) for _ in range(options.steps)]
        with pipe.timeline() as events:
            for _ in range(3):
                train_step()
            pipe.flush()
        options.out.mkdir(parents=True, exist_ok=True)
        draw_losses(losses, options.out / "loss.png", "mean square")
        pd2.draw_timeline(events.gather(), options.out / "schedule.png")
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
