"""What launching costs the host, and whether a device ever waits for it.

How long the host of one stage takes is measured in the engine on the CPU, with transformer blocks
so narrow that next to nothing is computed: Python, torch's dispatcher, autograd and the engine. Of
each action the operators are counted that a device would run (those that only view are none), and
for each of them ``DRIVER_SECONDS`` is added for what the driver takes, which no CPU shows.

What a device takes is computed from a device's figures (a dry profile). `pd2.simulate` then gives a
batch's time with and without what hosts take: under 2bw, with a stage's updates on a stream of
their own, no wait for a host may be on the way. The least rows of a microbatch with which that is
so are found, too; with fewer the host launches more slowly than the device works, and
`graphs="auto"` is the remedy. It takes a minute, on a machine that does nothing else: what the host
takes is measured.

    python benchmarks/launches.py [--rounds 7] [--smoke] [--json PATH]
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Any

import torch
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import TransformerBlock
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pipedream2bw as pd2

NUM_STAGES = 8
NUM_MICROBATCHES = 16
DEVICE = pd2.KNOWN_DEVICES["h100"]
DRIVER_SECONDS = 3e-6
"""For a launch: assumed. ``make gpu-check`` measures all of it on a GPU."""
UPDATE_LAUNCHES = 4
"""A step's table and kernel, and the norms' two kernels.

That a stage's update reads its norm, once, in a thread beside the launches of actions, is left out:
``reads`` of ``pd2.LaunchCosts`` is 0.
"""
MOST_ROWS = 64
MOST_LONGER = 1.0001


@dataclasses.dataclass(frozen=True)
class Shape:
    """Blocks of a GPT. hidden: a multiple of 64."""

    name: str
    hidden: int
    sequence: int
    blocks: int
    rows: int


SHAPES = (
    Shape("GPT 2.2B, 8 stages", hidden=1920, sequence=512, blocks=6, rows=4),
    Shape("Llama 7B's width, 8 stages", hidden=4096, sequence=2048, blocks=4, rows=1),
    Shape("GPT-2 small, 8 stages", hidden=768, sequence=1024, blocks=2, rows=8),
)
SMOKE_SHAPES = (Shape("GPT, narrow", hidden=128, sequence=32, blocks=1, rows=2),)


@dataclasses.dataclass(frozen=True)
class Host:
    """Of one action of each kind: seconds of the host on a CPU, and operators."""

    seconds: dict[str, float]
    operators: dict[str, int]

    @property
    def per_launch(self) -> float:
        """Of a launch, in the action in which it takes longest."""
        found = max(self.seconds[kind] / self.operators[kind] for kind in "FB")
        return found + DRIVER_SECONDS


class _Counting(TorchDispatchMode):
    """Counts the operators that a device would run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def stage(blocks: int, hidden: int, heads: int) -> nn.Module:
    return nn.Sequential(*(TransformerBlock(hidden, heads) for _ in range(blocks)))


def operators_of(blocks: int) -> dict[str, int]:
    """Of a stage between others: its input needs a gradient."""
    narrow = stage(blocks, 8, 2)
    for parameter in narrow.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.zeros(1, 4, 8, requires_grad=True)
    with _Counting() as forward:
        output = narrow(x)
    with _Counting() as backward:
        torch.autograd.backward(output, torch.ones_like(output))
    return {"F": forward.count, "B": backward.count}


def measure(blocks: int, batches: int) -> Host:
    """Medians over the actions of so many batches, in the engine."""
    x = torch.randn(NUM_MICROBATCHES, 4, 8)
    with pd2.PipelineModule(
        stage(blocks, 8, 2),
        nn.functional.mse_loss,
        num_stages=1,
        num_microbatches=NUM_MICROBATCHES,
        example_args=(x,),
        schedule="1f1b",
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), fused=True))
        for warm in (True, False):
            with pipe.timeline() as timeline:
                for _ in range(2 if warm else batches):
                    pipe.train_step(x, target=x)
                    opt.step()
    taken = {
        kind: [event.end - event.start for event in timeline.rows if event.kind == kind]
        for kind in "FB"
    }
    medians = {kind: statistics.median(of_kind) for kind, of_kind in taken.items()}
    return Host(medians, operators_of(blocks))


@functools.cache
def device_seconds(shape: Shape, rows: int) -> tuple[float, float]:
    """A forward's and a backward's."""
    with torch.device("meta"):
        model = stage(shape.blocks, shape.hidden, shape.hidden // 64).to(torch.bfloat16)
    x = torch.zeros(rows, shape.sequence, shape.hidden, dtype=torch.bfloat16)
    profile = pd2.profile(
        model,
        nn.functional.mse_loss,
        example_args=(x,),
        target=x,
        microbatch_rows=(rows,),
        dry=DEVICE,
    )
    (found,) = profile.microbatches
    return sum(found.forward), sum(found.input_grad) + sum(found.weight_grad)


def period(shape: Shape, rows: int, launches: pd2.LaunchCosts | None = None) -> float:
    """Seconds of a batch in the steady state; by default of devices whose hosts take no time."""
    forward, backward = device_seconds(shape, rows)
    simulation = pd2.simulate(
        "2bw",
        num_stages=NUM_STAGES,
        num_microbatches=NUM_MICROBATCHES,
        forward=forward,
        backward=backward,
        update=forward / 4,
        launch_costs=launches,
    )
    return simulation.period


def longer(shape: Shape, rows: int, host: Host, *, one_stream: bool = False) -> float:
    """A batch's time over that of devices that wait for no host."""
    launches = pd2.LaunchCosts(
        seconds=host.per_launch,
        forward=host.operators["F"],
        backward=host.operators["B"],
        update=UPDATE_LAUNCHES,
        one_stream=one_stream,
    )
    return period(shape, rows, launches) / period(shape, rows)


def least_rows(shape: Shape, host: Host) -> int:
    """The least with which no device waits for a host; one more than tried if there are none."""
    rows = 1
    while rows <= MOST_ROWS and longer(shape, rows, host) > MOST_LONGER:
        rows += 1
    return rows


def figures_of(shape: Shape, hosts: list[Host]) -> list[Figure]:
    setting = f"{shape.name}: {shape.blocks} blocks, {shape.rows} x {shape.sequence} tokens"
    forward, backward = device_seconds(shape, shape.rows)
    own = [longer(shape, shape.rows, host) for host in hosts]
    one = [longer(shape, shape.rows, host, one_stream=True) for host in hosts]
    operators = hosts[0].operators
    return [
        Figure(
            setting,
            f"ms of the host, forward ({operators['F']} launches)",
            [1e3 * h.per_launch * operators["F"] for h in hosts],
        ),
        Figure(setting, "ms of the device, forward", [1e3 * forward]),
        Figure(
            setting,
            f"ms of the host, backward ({operators['B']} launches)",
            [1e3 * h.per_launch * operators["B"] for h in hosts],
        ),
        Figure(setting, "ms of the device, backward", [1e3 * backward]),
        Figure(
            setting, "a batch's time over that without hosts", own, at_most=MOST_LONGER, ideal=1.0
        ),
        Figure(setting, "the same with updates on the stream of the actions", one),
        Figure(
            setting,
            "least rows with which no device waits for a host",
            [float(least_rows(shape, h)) for h in hosts],
        ),
    ]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=7).parse_args()
    rounds, batches = (1, 2) if options.smoke else (options.rounds, 30)
    torch.set_num_threads(1)
    where = machine()
    print(describe(where), flush=True)
    print(
        f"2bw, {NUM_STAGES} stages, {NUM_MICROBATCHES} microbatches; {DEVICE.name} computed, "
        f"{1e6 * DRIVER_SECONDS:g} us a launch for its driver assumed\n",
        flush=True,
    )
    figures = []
    for shape in SMOKE_SHAPES if options.smoke else SHAPES:
        figures += figures_of(shape, [measure(shape.blocks, batches) for _ in range(rounds)])
    print_table(figures, judged=True)
    write_json(options.json, where, figures, rounds=rounds, driver_seconds=DRIVER_SECONDS)


if __name__ == "__main__":
    main()
