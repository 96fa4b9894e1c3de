"""Figures of torch.distributed.pipelining's schedules and of those here, from what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from measuring.report import Figure
from measuring.stages import Workload

import pipedream2bw as pd2

CHUNKS = 2


@dataclasses.dataclass(frozen=True)
class Pair:
    """A schedule of torch's and the one here that does the same; None: torch's own, as CSV."""

    torch_name: str
    name: str | None
    stages_per_rank: int
    is_split: bool = False

    @property
    def label(self) -> str:
        return self.name or "torch's ZBV"


PAIRS = (
    Pair("GPipe", "gpipe", 1),
    Pair("1F1B", "1f1b", 1),
    Pair("Interleaved1F1B", "interleaved", CHUNKS),
    Pair("InterleavedZeroBubble", "interleaved_zero_bubble", CHUNKS, is_split=True),
    Pair("ZBVZeroBubble", None, CHUNKS, is_split=True),
)
ASYNCHRONOUS = {"2bw": 1, "2bw_split": 1, "2bw_v_half": CHUNKS, "2bw_v_min": CHUNKS}
"""Stages a rank."""
BESIDE = "ZBVZeroBubble"
"""Torch's schedule of the same placement as the V's here."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """``workload`` is a rank's share; with several stages a rank each is a part of it."""

    name: str
    num_ranks: int
    num_microbatches: int
    workload: Workload
    # Throughput of those without a flush over torch's best schedule with one stage a rank, if any
    # is asked for.
    over_one_stage_a_rank: float | None = None
    latency: float = 0.0  # of F + B


WITH_LATENCY = {"2bw": None, "2bw_eager": 1.03, "2bw_split": None}
"""What the step time over the no-bubble limit m(F + B) may be; one schedule has to reach it."""
KIND_BOUNDS = (0.95, 1.5)
"""An action takes what it sleeps and the library's own work, but not another kind's sleep too."""


def seconds_of(workload: Workload) -> dict[str, float]:
    """How long each kind of action sleeps."""
    whole, weight = workload.backward_seconds, workload.weight_seconds
    return {"F": workload.forward_seconds, "I": whole - weight, "W": weight, "B": whole}


def predicted(setting: Setting, schedule: str | pd2.Schedule, stages_per_rank: int = 1) -> float:
    """Seconds of a batch of sleeping stages, by simulation."""
    seconds = seconds_of(setting.workload.chunk(stages_per_rank))
    sizes: dict[str, Any] = {}
    if isinstance(schedule, str):
        sizes["num_stages"] = setting.num_ranks * stages_per_rank
        sizes["num_microbatches"] = setting.num_microbatches
        sizes["stages_per_rank"] = stages_per_rank
    return pd2.simulate(
        schedule,
        **sizes,
        forward=seconds["F"],
        input_grad=seconds["I"],
        weight_grad=seconds["W"],
        latency=setting.latency * (seconds["F"] + seconds["B"]),
    ).period


@dataclasses.dataclass
class Measured:
    """On the ranks that have the losses: seconds per step by configuration and round."""

    steady: dict[str, list[float]]
    steps: dict[str, int]
    kinds: dict[str, dict[str, list[float]]]  # over what is asked for, by configuration and kind
    orders: dict[str, str]  # of schedules that have no name here


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def fastest(steady: dict[str, list[float]], pairs: list[Pair]) -> Pair:
    return min(pairs, key=lambda pair: statistics.median(steady[f"torch {pair.torch_name}"]))


def made_here(setting: Setting) -> dict[str, pd2.Schedule]:
    """Those without a flush."""
    return {
        name: pd2.make_schedule(name, setting.num_ranks * v, setting.num_microbatches, v)
        for name, v in ASYNCHRONOUS.items()
    }


def most_held(schedule: pd2.Schedule, num_ranks: int) -> float:
    """Activations of the fullest rank, in those that a rank has of one microbatch."""
    of_stage = num_ranks / len(schedule.placement)
    return max(pd2.simulate(schedule, activation_bytes=of_stage, num_batches=4).peak_bytes)


def figures_of_pairs(setting: Setting, measured: Measured) -> list[Figure]:
    steady = measured.steady
    orders = {label: pd2.load_schedule(text) for label, text in measured.orders.items()}
    figures = [
        Figure(
            setting.name,
            f"{pair.label}: step time over torch's {pair.torch_name}",
            ratios(steady[f"ours {pair.label}"], steady[f"torch {pair.torch_name}"]),
            at_most=1.0,
            ideal=1.0,
        )
        for pair in PAIRS
    ]
    for name in ASYNCHRONOUS:
        figures.append(
            Figure(
                setting.name,
                f"{name}: throughput over torch's {BESIDE}",
                ratios(steady[f"torch {BESIDE}"], steady[f"ours {name}"]),
            )
        )
    for label, schedule in {**orders, **made_here(setting)}.items():
        figures.append(
            Figure(
                setting.name,
                f"{label}: microbatches whose activations the fullest rank has, by its order",
                [most_held(schedule, setting.num_ranks)],
            )
        )
    rivals = {
        "one stage a rank": [pair for pair in PAIRS if pair.stages_per_rank == 1],
        "whole backwards": [pair for pair in PAIRS if not pair.is_split],
        "backwards in halves": [pair for pair in PAIRS if pair.is_split],
    }
    for what, pairs in rivals.items():
        best = fastest(steady, pairs)
        for name, stages_per_rank in ASYNCHRONOUS.items():
            ideal = None
            if setting.workload.kind == "sleep":
                theirs = predicted(setting, best.name or orders[best.label], best.stages_per_rank)
                ideal = theirs / predicted(setting, name, stages_per_rank)
            one_stage = setting.over_one_stage_a_rank if what == "one stage a rank" else None
            figures.append(
                Figure(
                    setting.name,
                    f"{name}: throughput over torch's best of {what}, {best.torch_name}",
                    ratios(steady[f"torch {best.torch_name}"], steady[f"ours {name}"]),
                    at_least=one_stage,
                    ideal=ideal,
                )
            )
    return figures


def figures_of_latency(setting: Setting, measured: Measured) -> list[Figure]:
    work = setting.workload.forward_seconds + setting.workload.backward_seconds
    limit = setting.num_microbatches * work
    without = dataclasses.replace(setting, latency=0.0)
    figures = []
    for name, at_most in WITH_LATENCY.items():
        delay = f"with messages of {1e3 * setting.latency * work:.1f} ms"
        for case, label, target, what in (
            (without, f"ours {name}", None, ""),
            (setting, f"ours {name} delayed", at_most, f", {delay}"),
        ):
            figures.append(
                Figure(
                    setting.name,
                    f"{name}: step time over m(F + B){what}",
                    [taken / limit for taken in measured.steady[label]],
                    at_most=target,
                    ideal=predicted(case, name) / limit,
                )
            )
        figures.append(
            Figure(
                setting.name,
                f"{name}: step time {delay} over without",
                ratios(measured.steady[f"ours {name} delayed"], measured.steady[f"ours {name}"]),
                ideal=predicted(setting, name) / predicted(without, name),
            )
        )
    return figures


def figures_of_kinds(setting: Setting, measured: list[Measured]) -> list[Figure]:
    """How long actions took over what they sleep: medians of the ranks."""
    figures = []
    for label, kinds in measured[-1].kinds.items():
        for kind in sorted(kinds):
            by_rank = [rank.kinds[label][kind] for rank in measured if kind in rank.kinds[label]]
            figures.append(
                Figure(
                    setting.name,
                    f"{label}: {kind} over what it sleeps",
                    [statistics.median(values) for values in by_rank],
                    at_least=KIND_BOUNDS[0],
                    at_most=KIND_BOUNDS[1],
                )
            )
    return figures
