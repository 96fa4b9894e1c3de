"""What updates cost: step time with a long update, clipping and replicas over that without.

8 stages that sleep, m = 8, in a process each. The update sleeps for as long as a forward takes, on
every stage, as an optimizer's step would that needs no processor here.

    python benchmarks/updates.py [--rounds 5] [--smoke] [--json PATH]

2bw here and 1F1B of torch.distributed.pipelining. Without replicas all are in one set of processes,
in turns. Two replicas, with clipping and the long update, are 16 processes: these and the plain
ones start anew in every round, one pipeline at a time, and sleep twice as long, so that what so
many processes take from each other's cores is not what is measured. 2bw does so a second time, with
optimizer state of which each replica has a share, and with messages and collectives that are late:
by up to a tenth of a forward and backward, drawn for each, also of the plain one. Figures are the
medians of the rounds' ratios. Of 4 tensor-parallel stages of two shards each the norm is taken,
over that without, in turns: it is exchanged once a batch, as without shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from measuring.delays import delays_everywhere
from measuring.ranks import last_ranks_value, run_on_ranks
from measuring.report import Figure, arguments, describe, machine, report_ratios
from measuring.stages import Workload, sleep_until
from measuring.trainers import (
    LEARNING_RATE,
    MIN_STEPS,
    MakeOptimizer,
    Pipeline,
    TorchPipeline,
    Trainer,
    adamw,
    alternate_on_ranks,
    steady_times,
    steps_lasting,
)
from torch import nn

MOST_COST = 1.03
MAX_NORM = 1e-3  # always clips
WORKLOAD = Workload("sleep", rows=1, hidden=16, forward_seconds=10e-3, backward_seconds=20e-3)
LONG_WORKLOAD = dataclasses.replace(WORKLOAD, forward_seconds=20e-3, backward_seconds=40e-3)
SMOKE_WORKLOAD = Workload("sleep", rows=1, hidden=16, forward_seconds=1e-3, backward_seconds=2e-3)


class LongStep(torch.optim.AdamW):
    """Its step takes as long as the given time, without a processor's."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        end = time.perf_counter() + self.seconds
        result = super().step()
        sleep_until(end)
        return result


def long_step(seconds: float) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = LongStep(parameters, lr=LEARNING_RATE)
        optimizer.seconds = seconds
        return optimizer

    return make


def radam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One of torch's own, as sharing out its state asks for, whose step is no fused pass."""
    return torch.optim.RAdam(parameters, lr=LEARNING_RATE)


@contextlib.contextmanager
def long_steps_of_radam(seconds: float) -> Iterator[None]:
    """Inside, its step takes as long as the given time, without a processor's."""
    step = torch.optim.RAdam.step

    def longer(self: torch.optim.RAdam, closure: Any = None) -> Any:
        end = time.perf_counter() + seconds
        result = step(self)
        sleep_until(end)
        return result

    with mock.patch.object(torch.optim.RAdam, "step", longer):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    label: str
    is_long: bool
    clips: bool


CASES = (
    Case("plain", False, False),
    Case("clipping", False, True),
    Case("an update as long as a forward", True, False),
    Case("both", True, True),
)


def measure(
    rank: int, world_size: int, workload: Workload, rounds: int, seconds: float
) -> dict[str, list[float]] | None:
    """Runs on every rank; the last one returns the seconds per step of each round."""
    trainers: dict[str, Trainer] = {}
    steps: dict[str, int] = {}
    for case in CASES:
        make = long_step(workload.forward_seconds) if case.is_long else adamw
        norm = MAX_NORM if case.clips else None
        ours = Pipeline(
            workload, world_size, world_size, "2bw", make_optimizer=make, max_grad_norm=norm
        )
        theirs = TorchPipeline(
            workload, rank, world_size, world_size, make_optimizer=make, max_grad_norm=norm
        )
        trainers |= {f"2bw, {case.label}": ours, f"torch 1F1B, {case.label}": theirs}
    for label, trainer in trainers.items():
        warm = trainer.train(MIN_STEPS)
        steps[label] = last_ranks_value(steps_lasting(seconds, warm) if warm.losses else 0)
    measured = steady_times(alternate_on_ranks(trainers, steps, rounds))
    return measured if rank == world_size - 1 else None


def measure_shards(
    rank: int, world_size: int, workload: Workload, rounds: int, seconds: float
) -> dict[str, list[float]] | None:
    """As measure(), with two processes a stage."""
    d = world_size // 2
    trainers = {
        case.label: Pipeline(
            workload, d, 8, "2bw", max_grad_norm=MAX_NORM if case.clips else None, num_shards=2
        )
        for case in CASES[:2]
    }
    warm = [trainer.train(MIN_STEPS) for trainer in trainers.values()]
    is_last = rank == world_size - 1
    steps = last_ranks_value(steps_lasting(seconds, warm[0]) if is_last else 0)
    measured = steady_times(alternate_on_ranks(trainers, dict.fromkeys(trainers, steps), rounds))
    return measured if is_last else None


def measure_alone(
    rank: int, world_size: int, workload: Workload, num_stages: int, case: Case, steps: int
) -> dict[str, float] | None:
    """As many replicas as there are ranks for. Runs on every rank; the last one returns seconds."""
    width = world_size // num_stages
    make = long_step(workload.forward_seconds) if case.is_long else adamw
    norm = MAX_NORM if case.clips else None
    m = num_stages
    ours = Pipeline(
        workload, num_stages, m, "2bw", make_optimizer=make, max_grad_norm=norm, width=width
    )
    block = ours.train(steps)
    ours.close()
    theirs = TorchPipeline(
        workload, rank, num_stages, m, make_optimizer=make, max_grad_norm=norm, width=width
    )
    stock = theirs.train(steps)
    if rank < world_size - 1:
        return None
    return {
        "2bw": block.steady_seconds_per_step,
        "torch 1F1B": stock.steady_seconds_per_step,
    }


def measure_late(
    rank: int, world_size: int, workload: Workload, num_stages: int, case: Case, steps: int
) -> float | None:
    """As measure_alone(), but 2bw alone, with shared state, if replicas have it, and delays."""
    width = world_size // num_stages
    longest = 0.1 * (workload.forward_seconds + workload.backward_seconds)
    seconds = workload.forward_seconds if case.is_long else 0.0
    with delays_everywhere(longest), long_steps_of_radam(seconds):
        ours = Pipeline(
            workload,
            num_stages,
            num_stages,
            "2bw",
            make_optimizer=radam,
            max_grad_norm=MAX_NORM if case.clips else None,
            width=width,
            shard_state=width > 1,
        )
        block = ours.train(steps)
        ours.close()
    return block.steady_seconds_per_step if rank == world_size - 1 else None


def late_replicas(workload: Workload, num_stages: int, rounds: int, steps: int) -> Figure:
    """Two replicas that share out state, and everything else, over one replica; all are late."""
    ratios = []
    for _ in range(rounds):
        plain, full = (
            run_on_ranks(width * num_stages, measure_late, workload, num_stages, case, steps)[-1]
            for width, case in ((1, CASES[0]), (2, CASES[-1]))
        )
        assert plain is not None
        assert full is not None
        ratios.append(full / plain)
    label = f"2bw, late: both, two replicas, shared state, over plain on {num_stages} ranks"
    return Figure(f"{2 * num_stages} ranks", label, ratios, at_most=MOST_COST)


def replicas(workload: Workload, num_stages: int, rounds: int, steps: int) -> list[Figure]:
    """Two replicas and everything else, over one replica and nothing else."""
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(rounds):
        for which, (width, case) in enumerate(((1, CASES[0]), (2, CASES[-1]))):
            arguments = (workload, num_stages, case, steps)
            of_all = run_on_ranks(width * num_stages, measure_alone, *arguments)[-1]
            for name, seconds in of_all.items():
                taken.setdefault(name, ([], []))[which].append(seconds)
    return [
        Figure(
            f"{2 * num_stages} ranks",
            f"{name}: both, and two replicas, over plain on {num_stages} ranks",
            [full / plain for plain, full in zip(*of_name, strict=True)],
            at_most=MOST_COST if name == "2bw" else None,
        )
        for name, of_name in taken.items()
    ]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=5).parse_args()
    rounds, seconds = (1, 0.05) if options.smoke else (options.rounds, 1.5)
    workload, p = (SMOKE_WORKLOAD, 2) if options.smoke else (WORKLOAD, 8)
    longer = SMOKE_WORKLOAD if options.smoke else LONG_WORKLOAD
    where = machine()
    print(describe(where), flush=True)
    measured = run_on_ranks(p, measure, workload, rounds, seconds)[-1]
    assert measured is not None
    setting = f"{p} ranks"
    times = [
        Figure(setting, f"{label}: ms a step", [1e3 * value for value in values])
        for label, values in measured.items()
    ]
    figures = []
    for name, at_most in (("2bw", MOST_COST), ("torch 1F1B", None)):
        plain = measured[f"{name}, {CASES[0].label}"]
        for case in CASES[1:]:
            taken = measured[f"{name}, {case.label}"]
            ratios = [value / base for value, base in zip(taken, plain, strict=True)]
            figures.append(
                Figure(setting, f"{name}: {case.label} over plain", ratios, at_most=at_most)
            )
    of_shards = run_on_ranks(p, measure_shards, workload, rounds, seconds)[-1]
    plain, clipping = (of_shards[case.label] for case in CASES[:2])
    ratios = [value / base for value, base in zip(clipping, plain, strict=True)]
    label = "2bw, stages of two shards: clipping over plain"
    figures.append(Figure(setting, label, ratios, at_most=MOST_COST))
    steps = MIN_STEPS + (0 if options.smoke else 8)
    figures += replicas(longer, p, rounds, steps)
    figures.append(late_replicas(longer, p, rounds, steps))
    report_ratios(options, where, figures, times, rounds=rounds)


if __name__ == "__main__":
    main()
