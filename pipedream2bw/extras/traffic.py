"""What a pipeline's stages move: the bytes of their actions by kind, and what limits them.

Training is often bound by what it moves instead of by what it computes (arXiv 2007.00072, "Data
Movement Is All You Need"); the roofline is that of Williams, Waterman and Patterson, CACM 52(4),
2009.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from .. import svg
from ..capture.device_figures import DeviceFigures
from ..colours import TRAFFIC_COLOURS
from ..table import table

_KINDS = ("weights", "activations", "gradients", "optimizer", "messages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionTraffic:
    """What one action of a stage moves and computes.

    Attributes:
        weights: bytes of parameters and buffers: read by every microbatch, and by the update with
            what it writes; float32 masters are weights, too.
        activations: bytes of what forwards read and write: arguments, targets, results between
            layers, and in the backward what was saved of them.
        gradients: bytes of gradients of activations and of weights, and of adding these up.
        optimizer: bytes of the optimizer's state.
        messages: bytes that go to other stages, or to other replicas, and that come from them.
        flops: floating-point operations, a multiply-add is two: of products of matrices,
            convolutions and attention, as ``torch.utils.flop_counter`` counts.
        operators: how many operators move something.
        least_seconds: the operators' times at the device's peaks, each the longer of arithmetic
            and memory. Messages are not in it.
        memory_bound: the part of ``least_seconds`` of operators whose memory takes longer.
        median_seconds: what the action took in a timeline that was given; None without.
    """

    weights: int = 0
    activations: int = 0
    gradients: int = 0
    optimizer: int = 0
    messages: int = 0
    flops: int = 0
    operators: int = 0
    least_seconds: float = 0.0
    memory_bound: float = 0.0
    median_seconds: float | None = None

    @property
    def moved(self) -> int:
        """Bytes between memory and processor: all but messages."""
        return self.weights + self.activations + self.gradients + self.optimizer

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: floating-point operations for each byte moved."""
        return self.flops / self.moved if self.moved else 0.0

    @property
    def share_of_roofline(self) -> float | None:
        """``least_seconds / median_seconds``; None without a timeline."""
        return self.least_seconds / self.median_seconds if self.median_seconds else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTraffic:
    """What one stage moves.

    Attributes:
        forward: of a microbatch.
        backward: of a microbatch, both halves if the schedule divides it, with the forward that is
            run again where the stage recomputes.
        update: of a batch.
        saved_by_first: bytes of gradients that a batch's first backward does not move: it writes
            where the later ones read and add.
        num_microbatches: of a batch.
    """

    forward: ActionTraffic
    backward: ActionTraffic
    update: ActionTraffic
    saved_by_first: int
    num_microbatches: int

    @property
    def actions(self) -> dict[str, ActionTraffic]:
        """The actions by their letters in schedules: F, B, U."""
        return {"F": self.forward, "B": self.backward, "U": self.update}

    @property
    def of_batch(self) -> ActionTraffic:
        """All actions of a batch together."""
        times = {"F": self.num_microbatches, "B": self.num_microbatches, "U": 1}
        summed = {
            field: sum(times[kind] * getattr(each, field) for kind, each in self.actions.items())
            for field in (*_KINDS, "flops", "operators", "least_seconds")
        }
        summed["gradients"] -= self.saved_by_first
        bound = sum(
            times[kind] * each.memory_bound * each.least_seconds
            for kind, each in self.actions.items()
        )
        measured = [each.median_seconds for each in self.actions.values()]
        seconds = [s * times[k] for s, k in zip(measured, times, strict=True) if s is not None]
        return ActionTraffic(
            **summed,
            memory_bound=bound / summed["least_seconds"] if summed["least_seconds"] else 0.0,
            median_seconds=sum(seconds) if len(seconds) == len(measured) else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficReport:
    """What :func:`traffic_report` found; ``print`` shows it as a table.

    Attributes:
        stages: the stages of this process; with two pipelines stage d + i is the second one's copy
            of stage i.
        microbatch_rows: rows of the microbatch that was counted.
        dtype: that of the weights, of which the peak in ``figures`` is used.
        figures: the device's peaks, given or measured.
    """

    stages: Mapping[int, StageTraffic]
    microbatch_rows: int
    dtype: torch.dtype
    figures: DeviceFigures

    def __str__(self) -> str:
        is_measured = any(
            action.median_seconds is not None
            for stage in self.stages.values()
            for action in stage.actions.values()
        )
        columns = ["stage", "action", *_KINDS, "GFLOP", "FLOP/B", "least ms", "memory"]
        columns += ["ms", "of roofline"] if is_measured else []
        rows = [
            _row(str(index), kind, action, is_measured)
            for index, stage in self.stages.items()
            for kind, action in (*stage.actions.items(), ("batch", stage.of_batch))
        ]
        peaks = self.figures.flops_per_second
        peak = peaks.get(self.dtype, peaks[torch.float32])
        title = (
            f"MB moved by microbatches of {self.microbatch_rows} rows; memory: its share of the "
            f"least time\non {self.figures.name}: {peak / 1e9:.4g} GFLOP/s, "
            f"{self.figures.bytes_per_second / 1e9:.4g} GB/s, "
            f"{peak / self.figures.bytes_per_second:.3g} FLOP/B"
        )
        return table(title, columns, rows)

    def _repr_html_(self) -> str:
        rows = []
        for index, stage in self.stages.items():
            batch = stage.of_batch
            text = f"{batch.intensity:.1f} FLOP/byte, {batch.memory_bound:.0%} memory-bound"
            parts = {kind: getattr(batch, kind) for kind in _KINDS}
            rows.append(svg.Bar(name=f"stage {index}", parts=parts, text=text))
        title = f"Bytes moved by a batch, on {self.figures.name}"
        return svg.html(title, svg.bars(rows, TRAFFIC_COLOURS))


def _row(stage: str, kind: str, action: ActionTraffic, is_measured: bool) -> list[str]:
    cells = [stage, kind, *(f"{getattr(action, name) / 1e6:.3f}" for name in _KINDS)]
    cells += [f"{action.flops / 1e9:.3f}", f"{action.intensity:.2f}"]
    cells += [f"{action.least_seconds * 1e3:.3f}", f"{action.memory_bound:.0%}"]
    if is_measured:
        seconds, share = action.median_seconds, action.share_of_roofline
        cells += ["" if seconds is None else f"{seconds * 1e3:.3f}"]
        cells += ["" if share is None else f"{share:.0%}"]
    return cells
