"""The command line of train_gpt.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pipedream2bw as pd2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small GPT as a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    world = int(os.environ.get("WORLD_SIZE", "1"))
    add("--demo", action="store_true", help="train for 60 s, compare the schedules for 15 s")
    add("--data", type=Path, help="a text file or a folder; default: Python's documentation")
    add("--out", type=Path, default=Path("out"), help="folder for the results")
    add("--plan", type=Path, help="JSON of `pipedream2bw plan`, instead of the next four options")
    add("--schedule", default="2bw_fresh", choices=("2bw_fresh", "2bw", "1f1b", "gpipe"))
    add("--stages", type=int, default=0, help="0: processes / replicas, or 2 in one process")
    add("--replicas", type=int, default=1, help="replicas of the pipeline, under torchrun only")
    add("--microbatches", type=int, default=0, help="per batch; 0: two for each stage")
    add("--steps", type=int, default=0, help="batches to train; 0: only --seconds limits training")
    add("--seconds", type=float, default=0.0, help="time to train; 0: only --steps limits training")
    add("--compare-seconds", type=float, default=0.0, help="time to compare schedules; 0: none")
    add("--rows", type=int, default=16, help="rows per batch and replica")
    add("--context", type=int, default=64, help="tokens per row")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--checkpoint", type=Path, help="folder to save to; a run that has saved there goes on")
    add("--save-every", type=batches_or_time, default="auto", help="batches, or such as 10min")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--sample-tokens", type=int, default=120, help="tokens of text to generate at the end")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.plan is not None:
        if options.demo or options.compare_seconds:
            parser.error("--plan: a plan has one schedule, so there is nothing to compare")
        plan = pd2.Plan.load(options.plan)
        options.schedule, options.replicas = plan.schedule, plan.width
        options.stages, options.microbatches = plan.num_stages, plan.num_microbatches
        options.rows = plan.batch // plan.width
    if options.demo:
        options.seconds = options.seconds or 60.0
        options.compare_seconds = options.compare_seconds or 15.0
    if not options.steps and not options.seconds:
        options.steps = 1000
    options.stages = options.stages or (world // options.replicas if world > 1 else 2)
    options.microbatches = options.microbatches or 2 * options.stages
    return options


def batches_or_time(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
