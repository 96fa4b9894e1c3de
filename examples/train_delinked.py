"""Trains a GPT whose blocks share their weights, delinks the blocks, and trains on.

    python examples/train_delinked.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_delinked.py     one process per stage

M6-10T (arXiv 2110.03888, "Pseudo-to-Real") begins a large model so: while blocks share weights,
moments and gradients take the memory of one block, and each block begins with what it has learnt.
``pd2.load(expand=)`` gives every block the shared weights, moments and older versions. Prints the
held-out loss where the sharing ends, of both models, and the training losses of each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from byte_text import RandomBatches, load_text
from gpt import GPT, next_token_loss
from loss_curve import draw_losses, mean_of_last

import pipedream2bw as pd2


def gpt_of(options: argparse.Namespace, *, shares: bool) -> GPT:
    """The model; where blocks share weights, every one is the first one under another name."""
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(
        num_layers=options.layers, width=options.width, num_heads=4, context=options.context
    )
    for i in range(1, options.layers if shares else 0):
        model.blocks[i] = model.blocks[0]
    return model


def pipeline_of(
    model: GPT, options: argparse.Namespace, tokens: torch.Tensor
) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    pipe = pd2.PipelineModule(
        model,
        next_token_loss,
        num_stages=options.stages,
        num_microbatches=max(4, options.stages),
        schedule="2bw",  # which forwards "2bw_fresh" has late changes when blocks share no weights
        example_args=(tokens,),
    )
    adamw = torch.optim.AdamW(pipe.parameters(), lr=3e-3, betas=(0.95, 0.99))
    return pipe, pd2.PipelineOptimizer(adamw, staleness=pd2.ErrorFeedback())


def train(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, batches: RandomBatches, steps: int
) -> list[float]:
    losses = []
    for tokens, target in itertools.islice(batches, steps):
        losses.append(pipe.train_step(tokens, target=target))
        opt.step()
    return [float(loss) for loss in losses]


@torch.no_grad()
def loss_of(pipe: pd2.PipelineModule, tokens: torch.Tensor, target: torch.Tensor) -> float:
    return float(pipe.eval_step(tokens, target=target))


def common_folder(own: str) -> Path:
    """The folder of rank 0, on every rank."""
    names = [own]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return Path(names[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with shared blocks, then without.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's library")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png")
    add("--stages", type=int, default=max(2, world))
    add("--steps", type=int, default=150, help="with shared blocks, and again without")
    add("--rows", type=int, default=16, help="per batch")
    add("--context", type=int, default=64, help="bytes per row")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=4)
    options = parser.parse_args()

    text = load_text(options.data)
    batches = RandomBatches(text[: -len(text) // 10], options.rows, options.context, seed=0)
    held_out = RandomBatches(text[-len(text) // 10 :], 64, options.context, seed=1)
    tokens, target = next(held_out)

    pipe, opt = pipeline_of(gpt_of(options, shares=True), options, tokens)
    with tempfile.TemporaryDirectory() as own:
        folder = common_folder(own) if world > 1 else Path(own)
        with pipe:
            shared = train(pipe, opt, batches, options.steps)
            before = loss_of(pipe, tokens, target)
            pd2.save(folder, pipe, opt).wait()
        pipe, opt = pipeline_of(gpt_of(options, shares=False), options, tokens)
        expand = {f"blocks.{i}": "blocks.0" for i in range(1, options.layers)}
        pd2.load(folder, pipe, opt, expand=expand)
    with pipe:
        after = loss_of(pipe, tokens, target)
        apart = train(pipe, opt, batches, options.steps)
        end = loss_of(pipe, tokens, target)
        if pipe.rank == 0:
            draw_losses(shared + apart, options.out / "loss.png")
            print(f"shared blocks: loss: {shared[0]:.3f} -> {mean_of_last(shared):.3f}")
            print(f"delinked: held-out loss: {before:.5f} -> {after:.5f}")
            print(f"blocks apart: loss: {apart[0]:.3f} -> {mean_of_last(apart):.3f}")
            print(f"held-out loss: {after:.3f} -> {end:.3f}", flush=True)


if __name__ == "__main__":
    main()
