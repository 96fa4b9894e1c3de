"""Trains a small vision transformer on scikit-learn's digits as a pipeline.

    python examples/train_vit.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_vit.py     one process per stage

Prints the share of held-out digits that the model recognises, and draws loss.png into ``--out``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from loss_curve import draw_losses, mean_of_last
from sklearn.datasets import load_digits
from torch import nn

import pipedream2bw as pd2

NUM_HELD_OUT = 360


class Patches(nn.Module):
    """An image as a row of patches, after a token for the class: [rows, 1 + 16, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.convolution(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(images.shape[0], -1, -1)
        return torch.cat([class_token, patches], dim=1) + self.position


class Classifier(nn.Module):
    """Reads the token for the class: [rows, 1 + 16, width] -> [rows, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x[:, 0]))


def vision_transformer(width: int, num_layers: int) -> nn.Sequential:
    """Builds a network that maps [rows, 1, 8, 8] to [rows, 10]."""
    blocks = [
        nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        for _ in range(num_layers)
    ]
    return nn.Sequential(Patches(width), *blocks, Classifier(width))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a vision transformer as a pipeline.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png")
    parser.add_argument("--stages", type=int, default=max(2, world))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64, help="images per batch")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights, and the same order of the images, on every rank
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    held_out, training = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    with pd2.PipelineModule(
        vision_transformer(32, options.layers),
        nn.functional.cross_entropy,
        num_stages=options.stages,
        num_microbatches=2 * options.stages,
        schedule="2bw_fresh",
        example_args=(images[: options.rows],),
    ) as pipe:
        # Training draws its dropout from generators of its own, so the order stays alike.
        adamw = torch.optim.AdamW(pipe.parameters(), lr=3e-3, betas=(0.95, 0.99))
        optimizer = pd2.PipelineOptimizer(adamw, staleness=pd2.ErrorFeedback())
        losses = []
        for _ in range(options.epochs):
            for rows in training[torch.randperm(len(training))].split(options.rows):
                losses.append(pipe.train_step(images[rows], target=labels[rows]))
                optimizer.step()
        values = [float(loss) for loss in losses]
        if pipe.rank == 0:
            draw_losses(values, options.out / "loss.png", "nats per image")
            print(f"loss: {values[0]:.3f} -> {mean_of_last(values):.3f}")
        pipe.eval()
        logits = pipe(images[held_out])
        if logits is not None:  # only the process of the last stage has the output
            correct = (logits.argmax(dim=1) == labels[held_out]).sum().item()
            share = correct / NUM_HELD_OUT
            print(
                f"held-out digits recognised: {correct} of {NUM_HELD_OUT} ({share:.1%})", flush=True
            )


if __name__ == "__main__":
    main()
