"""A training loop that shows how far it is, saves now and then, and goes on where it was."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import torch
from byte_text import RandomBatches
from compare_schedules import agreed, train_one_batch
from tqdm.auto import tqdm

import pipedream2bw as pd2

LAST_LEARNING_RATE = 0.05  # of the highest
STEPS_PER_LOOK = 10  # batches between two readings of the clock


@dataclasses.dataclass
class Progress:
    """How far training has come, in all lives of the run."""

    step: int = 0
    done: float = 0.0  # share of the training, the same on every rank
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def train(
    pipe: pd2.PipelineModule,
    optimizer: pd2.PipelineOptimizer,
    batches: RandomBatches,
    options: argparse.Namespace,
    tokens_per_batch: int,
) -> list[float]:
    """Trains for ``options.steps`` or ``options.seconds``; returns the losses of this life."""
    progress = Progress()
    warm_up = min(50, max(1, options.steps // 10)) if options.steps else 50

    def learning_rate(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (1 - (1 - LAST_LEARNING_RATE) * progress.done)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    saver = None
    if options.checkpoint is not None:
        saver = pd2.Checkpointer(
            options.checkpoint,
            pipe,
            optimizer,
            data=batches,
            schedulers=[scheduler],
            extra={"progress": progress},
            every=options.save_every,
        )
        saver.resume()
    bar = tqdm(
        total=options.steps or None,
        initial=progress.step,
        disable=pipe.rank != 0,
        unit="batch",
        bar_format="{l_bar}{bar}| {n_fmt} batches [{elapsed}<{remaining}{postfix}]",
    )
    losses: list[float] = []
    late: pd2.Loss | None = None
    start = time.perf_counter() - progress.seconds
    while progress.done < 1:
        loss = train_one_batch(pipe, optimizer, batches)
        scheduler.step()
        progress.step += 1
        if late is not None:
            losses.append(late.item())  # one batch late, which costs nothing
        late = loss
        progress.seconds = time.perf_counter() - start
        if progress.step % STEPS_PER_LOOK == 0 or progress.step == options.steps:
            of_steps = progress.step / options.steps if options.steps else 0.0
            of_time = progress.seconds / options.seconds if options.seconds else 0.0
            progress.done = agreed(max(of_steps, of_time))
            recent = losses[-20:]
            bar.total = round(progress.step / progress.done)
            bar.set_postfix_str(
                f"loss {sum(recent) / max(1, len(recent)):.3f}, "
                f"{progress.step * tokens_per_batch / progress.seconds:,.0f} tokens/s",
                refresh=False,
            )
        if bar.total:
            bar.total = max(bar.total, progress.step)
        bar.update()
        if saver is not None:
            saver.step()
    bar.close()
    if late is not None:
        losses.append(late.item())
    if saver is not None:
        saver.close()
    return losses
