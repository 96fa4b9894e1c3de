"""The bytes of a stage, by kind."""

from __future__ import annotations

import dataclasses

from .. import svg
from ..colours import MEMORY_COLOURS
from ..model.local_shards import parameter_at
from ..table import table
from ..units import BYTE_UNITS, format_bytes, unit_for
from .extension import Extensions
from .local_stages import LocalStage
from .stage_weights import StageWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that one stage holds (arXiv 2006.09503, section 3: 2bw keeps 2|W|/d of weights).

    Attributes:
        weights: all versions of the trainable parameters: number of versions * elements * size.
            A parameter that several stages hold takes memory, and counts, on each of them.
        masters: float32 weights that are stepped, with ``precision=``; with ``split_master`` what
            the rounding of the newest version took off.
        gradients: one buffer, float32 for half-precision parameters (``gradient_dtype``).
        kept_gradients: on a device, the most gradients of a backward that waited at once to be
            added to these together: up to 32 MiB, or one gradient that is larger; of 16-bit ones
            that are added to float32, up to 32 MiB more.
        optimizer_state: of the fused optimizers, and what extensions hold on the device, as a
            remedy for staleness does; 0 before the first step.
        anchors: what extensions hold in the host's memory; with ``replica_sync`` anchors and the
            outer optimizer's state.
        frozen_weights, buffers: one copy, shared by the versions; frozen weights by two pipelines
            of one process, too.
        replica_sums: room for what replicas receive of each other's gradients: two parts of
            ``bucket_cap_mb`` at most, with ``shard_state`` of twice as much.
        host_copies: with ``optimizer_device="cpu"``, newest weights and gradients of one batch in
            the host's memory, through which they go down and up.
        padding: what aligning every parameter to 64 bytes (512 on a device) adds to these.
        activations: the most bytes that microbatches in flight held for their backward at once,
            outside of graphs.
        graphs: what the device's graphs take up now (``graphs=``).
        message_buffers: what messages to and from other processes take up now, kept ones included.
        messages_behind: on a device, the most bytes of messages that the stage had forgotten, but
            its device not read: of three microbatches at most.
        most_in_flight: the most microbatches that were between forward and backward at once.
        most_live_versions: the most weight versions that were alive (newest, still read, or being
            written).
        on_host: of all these bytes, those that are in the host's memory instead of the stage's
            device's: anchors; with ``optimizer_device="cpu"`` masters, optimizer state and copies.
    """

    weights: int
    masters: int
    gradients: int
    kept_gradients: int
    optimizer_state: int
    anchors: int = 0
    replica_sums: int = 0
    host_copies: int
    frozen_weights: int
    buffers: int
    padding: int
    activations: int
    graphs: int = 0
    message_buffers: int
    messages_behind: int = 0
    most_in_flight: int
    most_live_versions: int
    on_host: int

    @property
    def total(self) -> int:
        """All bytes."""
        total: int = sum(dataclasses.astuple(self))
        return total - self.most_in_flight - self.most_live_versions - self.on_host

    @property
    def on_device(self) -> int:
        """Bytes where the stage works."""
        return self.total - self.on_host

    @property
    def kinds(self) -> dict[str, int]:
        """All bytes, in the few kinds that pictures of plans show, too."""
        kinds = {
            "weights": self.weights + self.frozen_weights + self.buffers,
            "gradients": self.gradients + self.kept_gradients,
            "optimizer state": self.optimizer_state + self.anchors,
            "activations": self.activations + self.graphs,
            "messages": self.message_buffers + self.messages_behind,
            "float32 masters": self.masters,
        }
        return {**kinds, "other": self.total - sum(kinds.values())}


class MemoryReport(dict[int, StageMemory]):
    """What :meth:`PipelineModule.memory_report` gives: by stage its bytes; a notebook draws it."""

    @property
    def in_words(self) -> str:
        """A line that says how much all stages hold, and which holds the most."""
        total = sum(stage.total for stage in self.values())
        most = max(self, key=lambda index: self[index].total)
        return f"{format_bytes(total)}; stage {most} has the most, {format_bytes(self[most].total)}"

    def __str__(self) -> str:
        unit, one = unit_for(max(stage.total for stage in self.values()), BYTE_UNITS)
        shown = [
            kind for kind in MEMORY_COLOURS if any(stage.kinds.get(kind) for stage in self.values())
        ]
        rows = [
            [
                f"{index}",
                *(f"{stage.kinds[kind] / one:.2f}" for kind in shown),
                f"{stage.total / one:.2f}",
                f"{stage.most_live_versions}",
                f"{stage.most_in_flight}",
            ]
            for index, stage in self.items()
        ]
        columns = ("stage", *shown, "all", "versions", "in flight")
        return f"memory: {self.in_words}\n\n{table(f'by kind, {unit}', columns, rows)}"

    def bars(self) -> str:
        """HTML with a bar for each stage."""
        rows = [
            svg.Bar(name=f"stage {index}", parts=stage.kinds, text=format_bytes(stage.total))
            for index, stage in self.items()
        ]
        return svg.bars(rows, MEMORY_COLOURS)

    def _repr_html_(self) -> str:
        return svg.html(f"Memory: {self.in_words}", self.bars(), svg.printed(str(self)))


def memory_of(stage: LocalStage, extensions: Extensions) -> StageMemory:
    """Reads what a stage of this process holds now, and the most that it has held."""
    weights, executor = stage.weights, stage.executor
    engine = weights.engine.bytes()
    beside = extensions.bytes_of(stage.index)
    return StageMemory(
        weights=engine.weights,
        masters=engine.masters,
        gradients=engine.gradients,
        kept_gradients=engine.kept_gradients,
        optimizer_state=engine.optimizer_state + beside.on_device,
        anchors=beside.on_host,
        replica_sums=engine.replica_sums,
        host_copies=engine.host_copies,
        frozen_weights=_frozen_bytes(weights) + beside.frozen_weights,
        buffers=sum(buffer.nbytes for buffer in weights.buffers),
        padding=engine.padding,
        activations=executor.most_bytes_in_flight(stage.index),
        graphs=executor.graph_report(stage.index).bytes,
        message_buffers=executor.message_buffer_bytes(stage.index),
        messages_behind=executor.most_bytes_behind(stage.index),
        most_in_flight=executor.most_in_flight(stage.index),
        most_live_versions=weights.engine.most_live_versions,
        on_host=engine.on_host + (beside.on_host if weights.device.type != "cpu" else 0),
    )


def _frozen_bytes(weights: StageWeights) -> int:
    """Bytes of frozen parameters; what a process's stages share on a device counts once."""
    shared = weights.taken.intersection(weights.frozen) if weights.is_shown else weights.frozen
    others = {parameter_at(weights.model, name).data_ptr() for name in shared}
    return sum(p.nbytes for p in weights.frozen.values() if p.data_ptr() not in others)
