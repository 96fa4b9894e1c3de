"""Trains the stages of a network for digits apart, the early one by synthetic labels.

    python examples/train_stages_apart.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_stages_apart.py     a process per stage

At the cut every digit has a synthetic label, a random point that never changes. The first stage
learns to bring the images of a digit there, by a loss of its own (``pd2.add_loss``), and hands on
what it computes detached. So no gradient crosses the cut, and the second stage learns the digits
from what it is given. Prints the share of scikit-learn's held-out digits that the network
recognises, and with ``--together`` that of the same network trained as a whole.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import pipedream2bw as pd2

NUM_HELD_OUT, DIGITS, WIDTH = 360, 10, 128


class First(nn.Module):
    """Maps images [rows, 64] to [rows, WIDTH]; digits [rows] are for its own loss.

    Args:
        apart: whether it learns by its own loss; else by the gradient that comes back.
    """

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.apart = apart
        generator = torch.Generator().manual_seed(1)
        signs = torch.randint(0, 2, (DIGITS, WIDTH), generator=generator)
        self.register_buffer("synthetic", 0.8 * (2.0 * signs - 1))

    def forward(self, images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        at_cut = self.body(images)
        if not self.apart:
            return at_cut
        own_loss = nn.functional.mse_loss(at_cut, self.synthetic[digits])
        # Detached before the loss is added: the backward of the stage begins at add_loss.
        return pd2.add_loss(at_cut.detach(), own_loss)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains stages by losses of their own.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rows", type=int, default=64, help="images per batch")
    parser.add_argument("--together", action="store_true", help="train it as a whole instead")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    shuffling = torch.Generator().manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16  # [1797, 64]
    digits = torch.tensor(data.target)
    order = torch.randperm(len(digits), generator=shuffling)
    held_out, training = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, DIGITS))

    with pd2.PipelineModule(
        [First(apart=not options.together), second],
        nn.functional.cross_entropy,
        num_microbatches=4,
        schedule="2bw_fresh",
        example_args=(images[:4], digits[:4]),
    ) as pipe:
        adamw = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
        opt = pd2.PipelineOptimizer(adamw, staleness=pd2.ErrorFeedback())
        for _ in range(options.epochs):
            shuffled = training[torch.randperm(len(training), generator=shuffling)]
            for rows in shuffled.split(options.rows)[:-1]:
                pipe.train_step(images[rows], digits[rows], target=digits[rows])
                opt.step()
        pipe.eval()
        logits = pipe(images[held_out], torch.zeros_like(digits[held_out]))
        if logits is not None:  # only the process of the last stage has the output
            correct = (logits.argmax(dim=1) == digits[held_out]).sum().item()
            print(
                f"held-out digits recognised: {correct} of {NUM_HELD_OUT} "
                f"({correct / NUM_HELD_OUT:.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
