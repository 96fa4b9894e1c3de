"""Trains a byte-level GPT with Muon for its matrices and AdamW for the rest, and error feedback.

    python examples/train_muon.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_muon.py     one process per stage

Under ``2bw_fresh`` a few forwards of each batch read weights that are one step old. The steps are
corrected by the error that this makes (``pd2.ErrorFeedback``), unless ``--no-remedy``.
``--schedule 1f1b`` trains without a delay, to compare. Draws loss.png into ``--out``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from byte_text import RandomBatches, load_text
from gpt import GPT, next_token_loss
from loss_curve import draw_losses, mean_of_last

import pipedream2bw as pd2


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with Muon and AdamW together.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's library")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png")
    add("--schedule", default="2bw_fresh", choices=("2bw_fresh", "2bw", "1f1b"))
    add("--no-remedy", action="store_true", help="without error feedback")
    add("--stages", type=int, default=max(2, world))
    add("--steps", type=int, default=200)
    add("--rows", type=int, default=16, help="per batch")
    add("--context", type=int, default=64, help="bytes per row")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(
        num_layers=options.layers, width=options.width, num_heads=4, context=options.context
    )
    batches = RandomBatches(load_text(options.data), options.rows, options.context, seed=0)
    tokens, _ = next(batches)
    with pd2.PipelineModule(
        model,
        next_token_loss,
        num_stages=options.stages,
        num_microbatches=2 * options.stages,
        schedule=options.schedule,
        example_args=(tokens,),
    ) as pipe:
        # Matrices inside the blocks are Muon's; as its authors do, embedding and head are not.
        matrices, others = [], []
        for name, parameter in pipe.named_parameters():
            inside = name.startswith("blocks.") and parameter.dim() == 2
            (matrices if inside else others).append(parameter)
        # As groups: a rank may have none of them, and torch accepts an empty group, but no empty
        # list.
        muon = torch.optim.Muon([{"params": matrices}], lr=0.02, weight_decay=0.0)
        adamw = torch.optim.AdamW([{"params": others}], lr=3e-3, betas=(0.95, 0.99))
        remedies = [] if options.no_remedy else [pd2.ErrorFeedback()]
        optimizer = pd2.PipelineOptimizer(muon, adamw, staleness=remedies)
        losses = []
        for _ in range(options.steps):
            tokens, target = next(batches)
            losses.append(pipe.train_step(tokens, target=target))
            optimizer.step()
        values = [float(loss) for loss in losses]
        if pipe.rank == 0:
            draw_losses(values, options.out / "loss.png")
            print(f"loss: {values[0]:.3f} -> {mean_of_last(values):.3f}", flush=True)


if __name__ == "__main__":
    main()
