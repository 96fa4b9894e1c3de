"""A GPT of GPT-2's size over real text, in stages, and how long its training takes."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from .building import ROOT
from .device import Device


def _example(name: str) -> types.ModuleType:
    """By its path: some packages install a module ``examples``, which would be found instead."""
    spec = importlib.util.spec_from_file_location(
        f"examples.{name}", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Block: Callable[[int, int], nn.Module] = _example("gpt").Block
byte_text = _example("byte_text")


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model, of a microbatch, and of a training. ``blocks``: of each stage, by depth."""

    blocks: Mapping[int, tuple[int, ...]]
    width: int
    num_heads: int
    context: int
    vocabulary: int
    rows: int
    num_microbatches: int
    steps: int
    warm_up: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.num_microbatches * self.rows * self.context


ON_A_GPU = Size(
    blocks={1: (12,), 2: (9, 3), 4: (4, 4, 4, 0)},  # the head is as much work as five of them
    width=768,
    num_heads=12,
    context=1024,
    vocabulary=50304,
    rows=4,
    num_microbatches=4,
    steps=100,
    warm_up=20,
)
ELSEWHERE = Size(
    blocks={1: (3,), 2: (2, 1), 4: (1, 1, 1, 0)},
    width=16,
    num_heads=2,
    context=8,
    vocabulary=300,
    rows=1,
    num_microbatches=4,
    steps=11,
    warm_up=2,
)
READ_LATE = 2
"""Steps until a loss is read: by then the host need not wait for it."""
SETTLED, FIRST_STEPS = 4, 10
"""Between these two steps is measured how many fit into the time."""


def size_on(device: Device) -> Size:
    return ON_A_GPU if device.is_gpu else ELSEWHERE


class Embedding(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.zeros(size.context, size.width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.token(tokens) + self.position
        return x


class Head(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.linear = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.norm(x))
        return logits


def stages(size: Size, depth: int, device: torch.device) -> list[nn.Sequential]:
    """The whole model, in float32, with the same weights in every call."""
    torch.manual_seed(0)
    split = size.blocks[depth]
    with device:
        layers: list[nn.Module] = [Embedding(size)]
        layers += [Block(size.width, size.num_heads) for _ in range(sum(split))]
        layers.append(Head(size))
    for parameter in nn.ModuleList(layers).parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    ends = [1 + sum(split[: stage + 1]) for stage in range(depth)]
    ends[-1] = len(layers)
    return [
        nn.Sequential(*layers[first:end]) for first, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy in nats per byte, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def make_batches(size: Size) -> torch.Tensor:
    """[steps, rows, context + 1] of the sources of Python's standard library, a byte a token."""
    batches = byte_text.RandomBatches(
        byte_text.load_text(None), size.rows * size.num_microbatches, size.context, seed=0
    )
    drawn = [next(batches) for _ in range(size.steps)]
    return torch.stack([torch.cat([tokens, after[:, -1:]], dim=1) for tokens, after in drawn])


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def on_device(windows: torch.Tensor, device: torch.device) -> Batches:
    """Tokens and those that come after them, of each step."""
    windows = windows.to(device)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in windows]


@dataclasses.dataclass
class Trained:
    """What became of a training.

    Attributes:
        peak: the most bytes of torch's allocator after the warm-up.
    """

    losses: list[float]
    seconds_a_step: float
    peak: int

    def tokens_a_second(self, size: Size) -> float:
        return size.tokens / self.seconds_a_step


def train(
    step: Callable[[torch.Tensor, torch.Tensor], Any],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    size: Size,
    end: float,
) -> Trained:
    """As many steps as fit until ``end``, by ``time.time()``; all ranks take as many.

    Args:
        step: gives what ``float`` makes the loss of.
    """
    losses: list[float] = []
    read_at: list[float] = []
    unread: collections.deque[Any] = collections.deque()

    def read() -> None:
        losses.append(float(unread.popleft()))
        read_at.append(time.perf_counter())

    start, steps, number = time.time(), len(batches), 0
    while number < steps:
        if number == min(size.warm_up, steps - 1):
            torch.accelerator.reset_peak_memory_stats()
        if number == SETTLED:  # what is loaded at a first use is there
            start = time.time()
        unread.append(step(*batches[number]))
        number += 1
        if len(unread) > READ_LATE:
            read()
        if number == FIRST_STEPS:
            each = (time.time() - start) / (FIRST_STEPS - SETTLED)
            steps = _fewest(min(steps, number + max(int((end - time.time()) / each), 1)))
    while unread:
        read()
    first = min(size.warm_up, len(read_at) // 2)
    seconds = (read_at[-1] - read_at[first]) / max(len(read_at) - 1 - first, 1)
    return Trained(losses, seconds, torch.accelerator.max_memory_allocated())


def _fewest(steps: int) -> int:
    """Of all ranks, where there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return steps
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, steps)
    return min(counts)
