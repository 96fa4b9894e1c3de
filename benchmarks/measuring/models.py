"""Whole models that a planner has to cut: four usual kinds, and one whose layers are uneven."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import torch
from measuring.stages import TransformerBlock
from torch import nn


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained; rows are of a microbatch."""

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    rows: int
    num_tokens: int = 0  # inputs are whole numbers below it, if there are any

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and target."""
        generator = torch.Generator().manual_seed(0)
        rows = self.rows * num_microbatches
        if self.num_tokens:
            x = torch.randint(self.num_tokens, (rows, *self.input_shape), generator=generator)
        else:
            x = torch.randn((rows, *self.input_shape), generator=generator)
        return x, torch.randn((rows, *self.output_shape), generator=generator)


class GPT(nn.Module):
    """Tokens [rows, sequence] to logits [rows, sequence, tokens]."""

    def __init__(self, layers: int, hidden: int, sequence: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, hidden)
        self.position = nn.Parameter(torch.zeros(sequence, hidden))
        heads = max(1, hidden // 64)
        self.blocks = nn.ModuleList(TransformerBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Residual(nn.Module):
    """Two convolutions around which the input is led; halves the picture with ``stride`` 2."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        return (y + self.around(x)).relu()


class ResNet(nn.Module):
    """Pictures [rows, 3, size, size] to [rows, 10]; channels double where the size halves."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1)
        self.blocks = nn.ModuleList()
        for level in range(3):
            wide = channels * 2**level
            for index in range(blocks):
                narrow = wide // 2 if level and index == 0 else wide
                self.blocks.append(Residual(narrow, wide, 2 if level and index == 0 else 1))
        self.head = nn.Linear(4 * channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


class Skips(nn.Module):
    """As a U-Net: what each layer of the first half gives goes to its mirror image, too."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1)).relu()
        return x


class Uneven(nn.Module):
    """Parameters where the work is not: convolutions of few, then linear layers of many.

    Pictures [rows, 1, size, size] to [rows, hidden].
    """

    def __init__(self, size: int, channels: int, convolutions: int, hidden: int) -> None:
        super().__init__()
        wide = [1, *([channels] * convolutions)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1, 1) for a, b in itertools.pairwise(wide)
        )
        self.linears = nn.ModuleList(
            [nn.Linear(channels, hidden), *(nn.Linear(hidden, hidden) for _ in range(3))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            x = layer(x).tanh()
        x = x.mean((2, 3))
        for layer in self.linears:
            x = layer(x).tanh()
        return x


def mlp(hidden: int, layers: int) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(hidden, hidden), nn.Tanh()]
    return nn.Sequential(*parts)


MODELS = {
    "GPT": Model("GPT", partial(GPT, 6, 256, 64, 512), (64,), (64, 512), 4, num_tokens=512),
    "MLP": Model("MLP", partial(mlp, 768, 10), (768,), (768,), 96),
    "ResNet": Model("ResNet", partial(ResNet, 16, 2), (3, 32, 32), (10,), 8),
    "skips": Model("skips", partial(Skips, 6, 512), (512,), (512,), 96),
}
DEEP = Model("GPT", partial(GPT, 48, 256, 128, 512), (128,), (128, 512), 4, num_tokens=512)
UNEVEN = Model("uneven", partial(Uneven, 24, 24, 8, 768), (1, 24, 24), (768,), 8)
SMOKE_MODELS = {
    "threads": {"GPT": Model("GPT", partial(GPT, 2, 64, 8, 32), (8,), (8, 32), 2, num_tokens=32)},
    "processes": {"ResNet": Model("ResNet", partial(ResNet, 4, 1), (3, 8, 8), (10,), 2)},
}
SMOKE_DEEP = Model("GPT", partial(GPT, 4, 64, 8, 32), (8,), (8, 32), 4, num_tokens=32)
SMOKE_UNEVEN = Model("uneven", partial(Uneven, 8, 4, 3, 32), (1, 8, 8), (32,), 2)
