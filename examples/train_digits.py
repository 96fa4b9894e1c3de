"""Trains a small convolutional network on scikit-learn's digits as a pipeline.

    python examples/train_digits.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_digits.py     one process per stage

Prints the share of held-out digits that the model recognises. Batch normalisation collects the
statistics of the microbatches, in their order. Set OMP_NUM_THREADS=1 if the stages share one
machine.
"""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import pipedream2bw as pd2

NUM_HELD_OUT = 360


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a pipeline to recognise digits.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--stages", type=int, default=max(2, world))
    parser.add_argument("--microbatches", type=int, default=4, help="per batch")
    parser.add_argument(
        "--schedule", default="2bw_fresh", choices=("2bw_fresh", "2bw", "1f1b", "gpipe")
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rows", type=int, default=64, help="images per batch")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    # A separate generator keeps the order of the batches equal on all ranks: dropout draws from the
    # default one, and only on the rank of its stage.
    shuffling = torch.Generator().manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=shuffling)
    held_out, training = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]

    with pd2.PipelineModule(
        convolutions(),
        nn.functional.cross_entropy,
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        schedule=options.schedule,
        example_args=(images[: options.rows],),
    ) as pipe:
        late = "2bw" in options.schedule
        optimizer = pd2.PipelineOptimizer(
            torch.optim.AdamW(pipe.parameters(), lr=2e-3),
            staleness=pd2.ErrorFeedback() if late else (),
        )
        for epoch in range(options.epochs):
            losses = []
            shuffled = training[torch.randperm(len(training), generator=shuffling)]
            for rows in shuffled.split(options.rows):
                if len(rows) < options.microbatches:
                    continue  # fewer rows than microbatches
                losses.append(pipe.train_step(images[rows], target=labels[rows]))
                optimizer.step()
            if pipe.rank == 0:
                mean = sum(map(float, losses)) / len(losses)
                print(f"epoch {epoch + 1}: mean loss {mean:.4f}", flush=True)
        pipe.eval()
        logits = pipe(images[held_out])
        if logits is not None:  # only the process of the last stage has the output
            correct = (logits.argmax(dim=1) == labels[held_out]).sum().item()
            print(
                f"held-out digits recognised: {correct} of {NUM_HELD_OUT} "
                f"({correct / NUM_HELD_OUT:.1%})",
                flush=True,
            )


def convolutions() -> nn.Sequential:
    """Builds a network that maps [rows, 1, 8, 8] to [rows, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 2 * 2, 10),
    )


if __name__ == "__main__":
    main()
