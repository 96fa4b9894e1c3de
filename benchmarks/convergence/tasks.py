"""What the study trains: a byte-level GPT and the digits, with batches that a seed decides."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from byte_text import RandomBatches, load_text
from gpt import GPT, next_token_loss

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and its data.

    ``learning_rates`` are tried by optimizer; ``is_inner`` says by name which matrices Muon takes:
    not what embeds the input, nor the last layer.
    """

    name: str
    unit: str
    build: Callable[[], nn.Module]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: Callable[[int], Batches]
    held_out: tuple[torch.Tensor, torch.Tensor]
    is_inner: Callable[[str], bool]
    learning_rates: dict[str, tuple[float, ...]]


def byte_gpt(
    rows: int = 8, context: int = 32, *, layers: int = 2, width: int = 64, num_held_out: int = 512
) -> Task:
    """The model of examples/train_gpt.py, smaller, on the sources of Python's library."""
    text = load_text(None)
    training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    return Task(
        name="byte GPT",
        unit="nats per byte",
        build=lambda: GPT(num_layers=layers, width=width, num_heads=4, context=context),
        loss_fn=next_token_loss,
        batches=lambda seed: RandomBatches(training, rows, context, seed),
        held_out=next(RandomBatches(held_out, num_held_out, context, seed=0)),
        is_inner=lambda name: name.startswith("blocks."),
        learning_rates={
            "SGD": (0.1, 0.3, 1.0),
            "AdamW": (1e-3, 3e-3, 1e-2),
            "Muon": (1e-3, 3e-3, 1e-2),
        },
    )


def digits(rows: int = 64, num_held_out: int = 360) -> Task:
    """scikit-learn's digits, by three linear layers."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16  # [1797, 64]
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:num_held_out], order[num_held_out:]

    def batches(seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        while True:
            shuffled = training[torch.randperm(len(training), generator=generator)]
            for chosen in shuffled.split(rows):
                if len(chosen) == rows:
                    yield images[chosen], labels[chosen]

    def build() -> nn.Module:
        sizes = (64, 128, 128, 10)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return Task(
        name="digits",
        unit="nats per digit",
        build=build,
        loss_fn=nn.functional.cross_entropy,
        batches=batches,
        held_out=(images[held_out], labels[held_out]),
        is_inner=lambda name: name.startswith("2."),
        learning_rates={
            "SGD": (0.1, 0.3, 1.0),
            "AdamW": (3e-3, 1e-2, 3e-2),
            "Muon": (3e-3, 1e-2, 3e-2),
        },
    )
