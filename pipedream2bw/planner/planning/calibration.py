"""A margin of memory learnt from runs: how much more devices took than a plan said."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence

from ... import _C
from ...checks import check_number
from ...json_document import Document, given_or_loaded
from ...rules import instance
from ...runtime.stage_memory import StageMemory
from ..profiling.profile import Profile
from .plan import Plan, bytes_of_rank


@dataclasses.dataclass(frozen=True)
class Calibration(Document):
    """A margin for predictions of memory (as Pipette, DATE 2024, learns one).

    Weights, gradients and optimizer state are known exactly. A device takes ``activations`` times
    the activations that were predicted, and ``offset`` bytes in addition.

    Attributes:
        activations: a factor.
        offset: bytes of a device: messages, padding, buffers, temporaries; where a process was
            measured from outside, libraries too.
    """

    FORMAT = "pipedream2bw.calibration"
    VERSION = 1

    activations: float
    offset: float

    def __post_init__(self) -> None:
        check_number("activations", self.activations, below=math.inf)
        check_number("offset", self.offset, at_least=0, below=math.inf)

    def peak_bytes(self, plan: Plan) -> list[float]:
        """Corrects a plan that was made without it: bytes of its devices, by rank of a replica."""
        return [
            exact + self.activations * activations + self.offset
            for exact, activations in _predicted(plan)
        ]

    def applied_to(self, profile: Profile) -> Profile:
        """The profile with the activations that layers really keep; ``offset`` is not in it."""
        microbatches = tuple(
            dataclasses.replace(
                item,
                activation_bytes=tuple(
                    round(self.activations * size) for size in item.activation_bytes
                ),
            )
            for item in profile.microbatches
        )
        return dataclasses.replace(profile, microbatches=microbatches)

    def memory_left(self, memory: float, name: str = "memory") -> float:
        """Bytes of a device for what a profile predicts.

        Raises:
            ValueError: none are left; calls the device's bytes by the name.
        """
        if not memory > self.offset:
            raise ValueError(
                f"{name}: {memory:.0f} bytes, the calibration's offset: {self.offset:.0f} bytes: "
                "it must be more, or nothing is left for the model"
            )
        return memory - self.offset


def calibrate(
    plan: Plan | str | os.PathLike[str], measured: Mapping[int, StageMemory | float]
) -> Calibration:
    """Learns the margin from a run of a plan: none of its devices was above what it then says.

    From reports the factor of the activations is the largest of any device. From bytes alone it is
    the slope of a straight line through them, if devices differ in their predicted activations,
    else 1.

    Args:
        plan: what was run, or the path where it was saved.
        measured: by stage what ``pipe.memory_report()`` gives, of one process or of all together;
            or peak bytes, say of ``torch.cuda.max_memory_allocated()``, by a device's first stage.

    Raises:
        ValueError: a stage that the plan has not, bytes that are not positive, or of no device all
            stages' reports.
        TypeError: neither all are reports nor all are numbers, or no plan or mapping is given.
        OSError: the plan cannot be read.
    """
    plan = given_or_loaded("plan", plan, Plan)
    instance("a dict of stages' reports or bytes", Mapping).check("measured", measured)
    predicted = _predicted(plan)
    ranks = plan.shape.stages_of_ranks
    known = {stage for stages in ranks for stage in stages}
    for stage in measured:
        if stage not in known:
            raise ValueError(f"measured: stage {stage}, the plan has {sorted(known)}")
    if measured and all(isinstance(item, StageMemory) for item in measured.values()):
        reports = {k: item for k, item in measured.items() if isinstance(item, StageMemory)}
        whole = {r: stages for r, stages in enumerate(ranks) if reports.keys() >= set(stages)}
        always = {
            r: sum(reports[k].total - reports[k].activations for k in stages)
            for r, stages in whole.items()
        }
        kept = {
            r: _kept_at_once(plan.shape, r, [reports[k].activations for k in stages])
            for r, stages in whole.items()
        }
        peaks = {r: float(always[r] + kept[r]) for r in whole}
        factors = [
            kept[rank] / predicted[rank][1]
            for rank in whole
            if predicted[rank][1] > 0 and kept[rank] > 0
        ]
        factor = max(factors, default=1.0)
    else:
        peaks = _peaks_of_ranks(ranks, measured)
        activations = [predicted[rank][1] for rank in peaks]
        factor = _slope(activations, [peak - predicted[rank][0] for rank, peak in peaks.items()])
    if not peaks:
        raise ValueError(f"measured: stages {sorted(measured)}, devices hold {ranks}: give all")
    above = [
        peak - predicted[rank][0] - factor * predicted[rank][1] for rank, peak in peaks.items()
    ]
    return Calibration(factor, max(0.0, *above))


def _kept_at_once(shape: _C.PlannedShape, rank: int, activations: Sequence[int]) -> float:
    """Returns the bytes that a rank's stages keep together, from what each keeps at its peak."""
    counts = shape.in_flight_of_ranks[rank]
    mosts = [max(each[i] for each in counts) for i in range(len(activations))]
    return max(
        sum(kept * count / most for kept, count, most in zip(activations, each, mosts, strict=True))
        for each in counts
    )


def _peaks_of_ranks(
    ranks: Sequence[Sequence[int]], measured: Mapping[int, StageMemory | float]
) -> dict[int, float]:
    """Returns the peaks in bytes of the ranks that were measured."""
    peaks: dict[int, float] = {}
    for stage, size in measured.items():
        if isinstance(size, (StageMemory, bool)) or not isinstance(size, (int, float)):
            raise TypeError(
                f"measured[{stage}]: {type(size).__name__} given, all must be reports of stages, "
                "or all bytes of devices"
            )
        check_number(f"measured[{stage}]", size, below=math.inf)
        rank = next(rank for rank, stages in enumerate(ranks) if stage in stages)
        peaks[rank] = max(peaks.get(rank, 0.0), float(size))
    return peaks


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    if len(x) < 2 or max(x) - min(x) <= 0.01 * max(x):
        return 1.0
    slope = statistics.linear_regression(x, y).slope
    return slope if slope > 0 else 1.0


def _predicted(plan: Plan) -> list[tuple[float, float]]:
    """Returns by rank of a replica the bytes that are known exactly, and the activations."""
    kinds = [bytes_of_rank(plan, stages) for stages in plan.shape.stages_of_ranks]
    return [(sum(each.values()) - each["activations"], each["activations"]) for each in kinds]
