"""Trains a small byte-level GPT as a pipeline, generates text and compares the schedules.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --demo    one process per stage
    python examples/train_gpt.py --stages 4                                  one thread per stage

Or by a plan (run this in the folder of this file; the plan is for the model's default sizes):

    pipedream2bw plan --model gpt:for_planning --devices 2 --memory 4GiB --batch 16 -o plan.json
    torchrun --standalone --nproc-per-node 2 train_gpt.py --plan plan.json

With ``--checkpoint FOLDER`` the run is saved now and then, and started again it goes on from there:

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint run

The text is the source code of Python's standard library unless ``--data`` names a file or a folder.
Writes loss.png, timeline.png, sample.txt and throughput.md into ``--out``. Set OMP_NUM_THREADS=1
if the stages share the cores of one machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_text import RandomBatches, load_text
from compare_schedules import agreed, compare, record_timeline, train_one_batch
from gpt import GPT, next_byte_loss
from loss_curve import draw_losses
from tqdm.auto import tqdm

import pipedream2bw as pd2

PROMPT = b'def read_lines(path):\n    """'
LAST_LEARNING_RATE = 0.05  # of the highest
STEPS_PER_LOOK = 10  # batches between two readings of the clock


def main() -> None:
    options = parse_options()
    text = load_text(options.data)
    example, _ = next(RandomBatches(text, options.rows, options.context, seed=0))

    def build(schedule: str) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        torch.manual_seed(options.seed)  # the same weights on every rank
        model = GPT(
            num_layers=options.layers,
            width=options.width,
            num_heads=options.heads,
            context=options.context,
        )
        pipe = pd2.PipelineModule(
            model,
            next_byte_loss,
            example_args=(example,),
            **layout(schedule, options),
        )
        adamw = torch.optim.AdamW(
            pipe.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.1
        )
        late = "2bw" in schedule
        return pipe, pd2.PipelineOptimizer(adamw, staleness=pd2.ErrorFeedback() if late else ())

    pipe, optimizer = build(options.schedule)
    is_root = pipe.rank == 0
    # Each replica gets its own batches.
    batches = RandomBatches(text, options.rows, options.context, options.seed + pipe.replica)
    tokens_per_batch = options.rows * options.context * options.replicas
    if is_root:
        print(pipe)
        print(f"{len(text):,} bytes of text, {tokens_per_batch:,} bytes per batch\n", flush=True)
    with pipe:
        losses = train(pipe, optimizer, batches, options, tokens_per_batch)
        events = {options.schedule: record_timeline(pipe, optimizer, batches)}
        sample = write_text(pipe, options.context, options.sample_bytes)
    table = ""
    if options.compare_seconds > 0:
        if is_root:
            print("\ncomparing the schedules ...", flush=True)
        comparison = compare(build, batches, seconds=options.compare_seconds)
        events = comparison.events
        table = comparison.table(tokens_per_batch)
    if is_root:
        options.out.mkdir(parents=True, exist_ok=True)
        draw_losses(losses, options.out / "loss.png")
        pd2.draw_timeline(events, options.out / "timeline.png")
        (options.out / "sample.txt").write_bytes(sample)
        report(losses, sample, table, options.out)


def layout(schedule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the pipeline's sizes and schedule: from the plan, or from the options."""
    if options.plan is not None:
        return {"plan": options.plan}
    return {
        "num_stages": options.stages,
        "num_microbatches": options.microbatches,
        "schedule": schedule,
        "width": options.replicas,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small byte-level GPT as a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    world = int(os.environ.get("WORLD_SIZE", "1"))
    add("--demo", action="store_true", help="train for 75 s, compare the schedules for 35 s")
    add("--data", type=Path, help="a text file or a folder of them; default: Python's library")
    add("--out", type=Path, default=Path("out"), help="folder for the results")
    add("--plan", type=Path, help="JSON of `pipedream2bw plan`, instead of the next four options")
    add("--schedule", default="2bw", choices=("2bw", "1f1b", "gpipe"))
    add("--stages", type=int, default=0, help="0: processes / replicas, or 2 in one process")
    add("--replicas", type=int, default=1, help="replicas of the pipeline, under torchrun only")
    add("--microbatches", type=int, default=0, help="per batch; 0: as many as stages, at least 2")
    add("--steps", type=int, default=0, help="batches to train; 0: only --seconds limits training")
    add("--seconds", type=float, default=0.0, help="time to train; 0: only --steps limits training")
    add("--compare-seconds", type=float, default=0.0, help="time to compare schedules; 0: none")
    add("--rows", type=int, default=16, help="rows per batch and replica")
    add("--context", type=int, default=64, help="bytes per row")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--checkpoint", type=Path, help="folder to save to; a run that has saved there goes on")
    add("--save-every", type=batches_or_time, default="auto", help="batches, or such as 10min")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--sample-bytes", type=int, default=400, help="bytes of text to generate at the end")
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
        options.seconds = options.seconds or 75.0
        options.compare_seconds = options.compare_seconds or 35.0
    if not options.steps and not options.seconds:
        options.steps = 1000
    options.stages = options.stages or (world // options.replicas if world > 1 else 2)
    options.microbatches = options.microbatches or max(2, options.stages)
    return options


def batches_or_time(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


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


def write_text(pipe: pd2.PipelineModule, context: int, num_bytes: int) -> bytes:
    """Continues PROMPT with the model and returns the same text on every rank.

    Each byte takes one forward through the pipeline on the newest weights. Attention is causal: the
    last byte does not see what follows it, so short texts are padded with zeros.
    """
    pipe.eval()
    text = list(PROMPT[-context:])
    generator = torch.Generator().manual_seed(0)
    speaker = torch.tensor(pipe.rank if pipe.gives_output else -1)
    if dist.is_initialized():
        dist.all_reduce(speaker, dist.ReduceOp.MAX)
    for _ in range(num_bytes):
        window = text[-context:]
        tokens = torch.zeros(1, context, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(window)
        logits = pipe(tokens)  # None in processes without the last stage
        following = torch.zeros(1, dtype=torch.int64)
        if logits is not None:
            odds = torch.softmax(logits[0, len(window) - 1].float() / 0.7, dim=0)
            following = torch.multinomial(odds, 1, generator=generator)
        if dist.is_initialized():
            dist.broadcast(following, src=int(speaker))
        text.append(int(following))
    pipe.train()
    return bytes(text)


def report(losses: list[float], sample: bytes, table: str, out: Path) -> None:
    shown = sample.decode("utf-8", errors="replace")
    tail = losses[-20:]
    print(f"\nthe trained model continues {PROMPT.decode()!r}:\n{'-' * 72}")
    print(
        "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    )
    print("-" * 72)
    if losses:  # else all had been trained before
        print(f"loss: {losses[0]:.3f} -> {sum(tail) / len(tail):.3f} nats per byte")
    print(f"written: {', '.join(str(out / n) for n in ('loss.png', 'timeline.png', 'sample.txt'))}")
    if table:
        (out / "throughput.md").write_text(table + "\n", encoding="utf-8")
        print("\n" + table)


if __name__ == "__main__":
    main()
