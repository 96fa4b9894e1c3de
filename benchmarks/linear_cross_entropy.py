"""Memory and time of pd2.linear_cross_entropy beside torch's linear and cross_entropy.

Forward and backward of the last layer of a language model: 8,192 tokens, 131,072 classes, 8 chunks,
float32. Memory is the peak of what a pass allocates (the growth of VmHWM in a fresh process), the
gradients of the inputs included, which both have to make. Time is that of passes in turns, in one
process.

    python benchmarks/linear_cross_entropy.py [--smoke] [--rounds 5] [--json PATH]
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from measuring.memory import resident_bytes
from measuring.ranks import run_on_ranks
from measuring.report import Figure, arguments, describe, machine, report_ratios
from torch.nn import functional

import pipedream2bw as pd2

MOST_MEMORY, MOST_TIME = 0.25, 1.05
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Size:
    tokens: int
    classes: int
    features: int

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, the layer's weight and targets."""
        torch.manual_seed(0)
        return (
            torch.randn(self.tokens, self.features, requires_grad=True),
            torch.randn(self.classes, self.features).div_(self.features**0.5).requires_grad_(),
            torch.randint(self.classes, (self.tokens,)),
        )


SIZE = Size(tokens=8192, classes=131072, features=256)
SMOKE_SIZE = Size(tokens=64, classes=512, features=16)


def of_torch(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), target)


WAYS: dict[str, Loss] = {"torch": of_torch, "chunked": pd2.linear_cross_entropy}


def train_once(way: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    """One forward and backward; gives the loss."""
    inputs[0].grad = inputs[1].grad = None
    loss = WAYS[way](*inputs)
    loss.backward()
    return loss.item()


def grown(rank: int, world_size: int, way: str, size: Size) -> tuple[int, float]:
    """Runs in a fresh process: bytes that a pass allocates at most, and its loss."""
    train_once(way, SMOKE_SIZE.draw())
    inputs = size.draw()
    before = resident_bytes("VmRSS")
    loss = train_once(way, inputs)
    return max(1, resident_bytes("VmHWM") - before), loss


def times(rank: int, world_size: int, size: Size, rounds: int) -> dict[str, list[float]]:
    """Seconds of passes in turns."""
    inputs = size.draw()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):  # the first one also makes the allocator's pages
        for way, seconds in found.items():
            start = time.perf_counter()
            train_once(way, inputs)
            if number > 0:
                seconds.append(time.perf_counter() - start)
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    size = SMOKE_SIZE if options.smoke else SIZE
    rounds = 1 if options.smoke else options.rounds
    where = machine()
    print(describe(where), flush=True)
    peaks, losses = {}, {}
    for way in WAYS:
        ((peaks[way], losses[way]),) = run_on_ranks(1, grown, way, size)
        print(f"{way:8} peak {peaks[way]:>15,} bytes, loss {losses[way]:.6f}", flush=True)
    assert abs(losses["chunked"] / losses["torch"] - 1) < 1e-5, losses
    (seconds,) = run_on_ranks(1, times, size, rounds)
    setting = f"{size.tokens} tokens, {size.classes} classes"
    ratios = [
        mine / theirs for mine, theirs in zip(seconds["chunked"], seconds["torch"], strict=True)
    ]
    report_ratios(
        options,
        where,
        [
            Figure(
                setting,
                "peak memory over torch's",
                [peaks["chunked"] / peaks["torch"]],
                at_most=MOST_MEMORY,
            ),
            Figure(setting, "time over torch's", ratios, at_most=MOST_TIME),
        ],
        [
            *(Figure(setting, f"{way}: GiB", [peak / 2**30]) for way, peak in peaks.items()),
            *(Figure(setting, f"{way}: s", values) for way, values in seconds.items()),
        ],
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
