"""Trains a small GPT as a pipeline, generates text and compares the schedules.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --demo    one process per stage
    python examples/train_gpt.py --stages 4                                  one thread per stage

Or by a plan (run this in the folder of this file; the plan is for the model's default sizes):

    pipedream2bw plan --model gpt:for_planning --devices 2 --memory 4GiB --batch 16 -o plan.json
    torchrun --standalone --nproc-per-node 2 train_gpt.py --plan plan.json

With ``--checkpoint FOLDER`` the run is saved now and then, and started again it goes on from there:

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --checkpoint run

The text is English, sentences of the documentation in Python's standard library, unless ``--data``
names a file or a folder. Tokens are frequent words, and bytes.
Writes loss.png, timeline.png, sample.txt and throughput.md into ``--out``. Set OMP_NUM_THREADS=1
if the stages share the cores of one machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from byte_text import RandomBatches
from compare_schedules import compare, record_timeline
from generate_text import PROMPT, write_text
from gpt import GPT, next_token_loss
from gpt_options import parse_options
from loss_curve import draw_losses, mean_of_last
from train_and_save import train
from word_text import load_words

import pipedream2bw as pd2


def main() -> None:
    options = parse_options()
    text = load_words(options.data)
    example, _ = next(RandomBatches(text.tokens, options.rows, options.context, seed=0))

    def build(schedule: str) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        torch.manual_seed(options.seed)  # the same weights on every rank
        model = GPT(
            num_layers=options.layers,
            width=options.width,
            num_heads=options.heads,
            context=options.context,
            num_tokens=text.num_tokens,
        )
        pipe = pd2.PipelineModule(
            model,
            next_token_loss,
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
    batches = RandomBatches(text.tokens, options.rows, options.context, options.seed + pipe.replica)
    tokens_per_batch = options.rows * options.context * options.replicas
    if is_root:
        print(pipe)
        tokens = f"{len(text.tokens):,} tokens of text, {tokens_per_batch:,} in each batch"
        print(f"{tokens}, {text.num_tokens:,} different ones\n", flush=True)
    with pipe:
        losses = train(pipe, optimizer, batches, options, tokens_per_batch)
        events = {options.schedule: record_timeline(pipe, optimizer, batches)}
        sample = write_text(pipe, text, options.context, options.sample_tokens)
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


def report(losses: list[float], sample: bytes, table: str, out: Path) -> None:
    shown = sample.decode("utf-8", errors="replace")
    print(f"\nthe trained model continues {PROMPT.decode()!r}:\n{'-' * 72}")
    print(
        "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    )
    print("-" * 72)
    if losses:  # else all had been trained before
        print(f"loss: {losses[0]:.3f} -> {mean_of_last(losses):.3f} nats per token")
    if table:
        (out / "throughput.md").write_text(table + "\n", encoding="utf-8")
        print("\n" + table)
    names = ["loss.png", "timeline.png", "sample.txt", *(["throughput.md"] if table else [])]
    print(f"\nwritten, pictures first: {', '.join(str(out / name) for name in names)}")


if __name__ == "__main__":
    main()
