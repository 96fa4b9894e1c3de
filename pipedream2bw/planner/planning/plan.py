"""Plans: how a model is to be trained, as the planner says and a file keeps."""

from __future__ import annotations

import dataclasses
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ... import _C, svg
from ...colours import MEMORY_COLOURS, TIME_COLOURS
from ...json_document import Document
from ...table import table
from ...units import BYTE_UNITS, format_bytes, format_seconds, unit_for

RECOMPUTE = ("none", "stages", "blocks")
"""What of the forwards may run again: nothing, all of each stage, or some blocks."""

MOST_MICROBATCHES = 10**8
"""The most of a batch: a schedule has some actions for each of them on every stage."""

_MOST_LISTED = 8  # numbers of microbatches, in words
_MOST_DEVICES = 4  # that are named
_MOST_COLUMNS = 100  # of a plan as text


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a :class:`Plan`.

    Attributes:
        begins_at: the name for ``split=`` of the layer that the stage begins at; "" for stage 0.
        layers: the profile's layers, from the first to the one after the last.
        devices: numbers of the devices that hold the stage, one for each replica, or as many
            adjacent ones as ``tensor_parallel`` says; with chimera the first pipeline's copy.
        forward, input_grad, weight_grad: predicted seconds of one microbatch, on the slowest of
            the devices. Where replicas have different numbers of microbatches, a device that has
            fewer than others counts as if it were as much faster, here and below.
        recompute: seconds of running forwards again, of one microbatch.
        message: seconds that a microbatch's values take to the stage that reads them, and their
            gradients back, each: if several stages do, to the one that they take longest to; 0 for
            the last stage.
        update, all_reduce: seconds of one batch.
        num_versions: of the weights; under pipedream more on earlier stages.
        weight_bytes: what is trained, in one version.
        frozen_bytes: what is not.
        gradient_bytes, state_bytes: masters, and the steps that a correction keeps, count as state;
            of one replica, where they share it.
        most_in_flight: microbatches between forward and backward at once.
        activation_bytes: of one microbatch: what is kept from its forward to its backward. If the
            whole stage is recomputed, it is there from that on.
        input_bytes: of one microbatch, if the whole stage is recomputed: what it received, else 0.
        message_bytes: what other stages sent for the microbatches that a device may be behind its
            host: three microbatches' values and gradients; 0 on the CPU.
        peak_bytes: all of that, of one copy of the stage, at its peak.
        memory_limit: bytes that each device has, of whatever stages it holds; less a calibration's
            offset.
        recomputed: whether the whole stage is, or the names of the modules that are.
    """

    begins_at: str
    layers: tuple[int, int]
    devices: tuple[int, ...]
    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    message: float
    update: float
    all_reduce: float
    num_versions: int
    weight_bytes: float
    frozen_bytes: float
    gradient_bytes: float
    state_bytes: float
    most_in_flight: int
    activation_bytes: float
    input_bytes: float
    message_bytes: float
    peak_bytes: float
    memory_limit: float
    recomputed: bool | tuple[str, ...]


def held_always(stage: StagePlan) -> float:
    """Bytes of one copy of a stage, whatever is in flight."""
    weights = stage.num_versions * stage.weight_bytes + stage.frozen_bytes
    return weights + stage.gradient_bytes + stage.state_bytes + stage.message_bytes


def held_in_flight(stage: StagePlan) -> float:
    """Bytes that are kept from forwards to backwards, at most."""
    return stage.most_in_flight * held_of_microbatch(stage)


def held_of_microbatch(stage: StagePlan) -> float:
    """Bytes that are kept from a microbatch's forward to its backward."""
    return stage.input_bytes if stage.recomputed is True else stage.activation_bytes


def held_again(stage: StagePlan) -> float:
    """Bytes of what a backward has run again, on top of the rest at the stage's peak."""
    return max(0.0, stage.peak_bytes - held_always(stage) - held_in_flight(stage))


def times_of(stage: StagePlan) -> dict[str, float]:
    """Seconds of one microbatch, by what they go into; messages count in both directions."""
    times = (stage.forward, stage.recompute, stage.input_grad, stage.weight_grad, 2 * stage.message)
    return dict(zip(TIME_COLOURS, times, strict=True))


def layers_in_words(stage: StagePlan) -> str:
    """Names the stage's layers by their numbers: "layers 2 to 5"."""
    first, end = stage.layers
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


def device_list(devices: Sequence[int]) -> str:
    """Names the devices that hold a stage, or the first few of them."""
    more = ", ..." if len(devices) > _MOST_DEVICES else ""
    return ", ".join(map(str, devices[:_MOST_DEVICES])) + more


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOutline:
    """What plans and alternatives say: their sizes, and what they take.

    Attributes:
        schedule: its name.
        width: replicas w of every stage.
        num_stages: the depth d.
        stages_per_rank: v; a replica takes ``num_stages // stages_per_rank`` devices.
        tensor_parallel: devices t that share each of these places: times and bytes are of one.
        microbatch_rows: b.
        num_microbatches: m, of every replica's batch; or of each replica's part of one batch.
        seconds_per_batch: predicted, in the steady state.
        rows_per_second: of all replicas.
        price_per_hour: of all devices that are used, now.
        peak_bytes: of the device that holds the most.
    """

    schedule: str
    width: int
    num_stages: int
    stages_per_rank: int
    tensor_parallel: int = 1
    microbatch_rows: int
    num_microbatches: int | tuple[int, ...]
    seconds_per_batch: float
    rows_per_second: float
    price_per_hour: float
    peak_bytes: float

    @property
    def most_microbatches(self) -> int:
        """Microbatches of the replica that has the most."""
        numbers = self.num_microbatches
        return max(numbers) if isinstance(numbers, tuple) else numbers

    @property
    def microbatches_in_words(self) -> str:
        """The microbatches of a replica, for people: "4", "4, 2", or of many "2 to 4"."""
        numbers = self.num_microbatches
        if not isinstance(numbers, tuple):
            return str(numbers)
        few = len(numbers) <= _MOST_LISTED
        return ", ".join(map(str, numbers)) if few else f"{min(numbers)} to {max(numbers)}"

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes for ``PipelineModule(mesh=)``: replicas, ranks, and devices that share one."""
        ranks = self.num_stages // self.stages_per_rank
        return {"dp": self.width, "pp": ranks, "tp": self.tensor_parallel}

    @property
    def late_in_words(self) -> str:
        """The share of forwards that are late, where only some are."""
        share = self.shape.mean_delay
        return f", {100 * share:.0f} % late" if 0 < share < 1 else ""

    @property
    def shape(self) -> _C.PlannedShape:
        """What the schedule has on its stages and ranks; it is not made, since it may be long.

        Of several numbers of microbatches the largest counts.
        """
        return _C.planned_shape(
            self.schedule, self.num_stages, self.most_microbatches, self.stages_per_rank
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative(PlanOutline):
    """A plan that came after the best one.

    Attributes:
        recompute: "none", "stages" or "blocks".
        lost_by: a sentence.
    """

    recompute: str
    lost_by: str


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanOutline, Document):
    """How a model is to be trained on given devices, and what that will take; see ``plan()``.

    Attributes:
        batch: rows of all replicas, ``microbatch_rows`` of each of their microbatches.
        stages: one for each stage.
        bubble: share of the time in which the busiest rank does nothing, 0 to 1.
        start_hour: hours from now, when to begin: later than 0 only where ``plan()`` was allowed
            to wait for low prices.
        total_price: of ``plan()``'s ``num_batches`` from then on; 0 if it was given none.
        shard_state: whether state is that of ``PipelineOptimizer(shard_state=True)``: what stages
            say of state and update is 1/w of it. A replica's share is larger by a sixteenth at
            most, or 512 elements; with optimizers other than SGD, Adam and AdamW, which cut no
            parameter, by the largest parameter at most.
        gradient_dtype: "bfloat16" if gradients are of ``PipelineModule(gradient_dtype=)``.
        bound_by: what keeps it from being faster; a sentence.
        alternatives: the next best plans, at most five: of the same ``tensor_parallel``, and the
            best one of each other degree.
        profile_fingerprint: of the profiled model.
    """

    FORMAT = "pipedream2bw.plan"
    VERSION = 1
    HAS_SUM = True

    batch: int
    stages: tuple[StagePlan, ...]
    bubble: float
    start_hour: float
    total_price: float
    shard_state: bool = False
    gradient_dtype: str | None = None
    bound_by: str
    alternatives: tuple[Alternative, ...]
    profile_fingerprint: str

    @property
    def num_devices(self) -> int:
        """Devices that are used."""
        return math.prod(self.mesh.values())

    @property
    def split(self) -> list[str]:
        """The value for ``PipelineModule(split=)``."""
        return [stage.begins_at for stage in self.stages[1:]]

    @property
    def recompute(self) -> bool | list[bool] | list[str]:
        """The value for ``PipelineModule(recompute=)``."""
        ways = [stage.recomputed for stage in self.stages]
        if all(isinstance(way, bool) for way in ways):
            return [way is True for way in ways]
        return [name for way in ways if isinstance(way, tuple) for name in way] or False

    @property
    def options(self) -> dict[str, Any]:
        """The options of :class:`PipelineModule` that say what the plan does, where plan= cannot.

        With ``tensor_parallel`` above 1 the script cuts the model's layers over the mesh's "tp".
        The mesh numbers processes as the plan numbers devices.

        Raises:
            ValueError: no order of the mesh's dimensions puts the stages on their devices.
        """
        names = ("num_stages", "num_microbatches", "schedule", "stages_per_rank", "split")
        return {
            **{name: getattr(self, name) for name in (*names, "recompute", "gradient_dtype")},
            "mesh": {name: self.mesh[name] for name in self._mesh_order()},
        }

    def _mesh_order(self) -> tuple[str, str, str]:
        ranks = self.stages[: self.num_stages // self.stages_per_rank]
        used = sorted({device for stage in ranks for device in stage.devices})
        t, w = self.tensor_parallel, self.width
        orders = {("dp", "pp", "tp"): (t, len(ranks) * t), ("pp", "dp", "tp"): (w * t, t)}
        for order, (of_rank, of_replica) in orders.items():
            if all(
                used.index(device) == of_rank * rank + of_replica * (place // t) + place % t
                for rank, stage in enumerate(ranks)
                for place, device in enumerate(stage.devices)
            ):
                return order
        raise ValueError(
            f"options: stage 0 is on devices {list(ranks[0].devices)}, the mesh {self.mesh} would "
            "number others: give PipelineModule a DeviceMesh of the stages' devices"
        )

    @property
    def sizes_in_words(self) -> str:
        """Its schedule, replicas, stages and microbatches."""
        chunks = f", {self.stages_per_rank} on a device" if self.stages_per_rank > 1 else ""
        replicas = "1 replica" if self.width == 1 else f"{self.width} replicas"
        rows = "1 row" if self.microbatch_rows == 1 else f"{self.microbatch_rows} rows"
        stages = "1 stage" if self.num_stages == 1 else f"{self.num_stages} stages"
        if self.tensor_parallel > 1:
            stages += f" on {self.tensor_parallel} devices each"
        return (
            f"{self.schedule}{self.late_in_words}: {replicas} of {stages}{chunks}, "
            f"{self.microbatches_in_words} microbatches of {rows}"
        )

    @property
    def speed_in_words(self) -> str:
        """Its time, its rows a second and its bubble."""
        return (
            f"{format_seconds(self.seconds_per_batch)} a batch, {self.rows_per_second:.4g} rows/s, "
            f"bubble {100 * self.bubble:.1f} %"
        )

    @property
    def in_words(self) -> str:
        """A line that says sizes, speed and bubble."""
        return f"{self.sizes_in_words}; {self.speed_in_words}"

    def __repr__(self) -> str:
        return f"Plan({self.in_words})"

    def __str__(self) -> str:
        """What it is and what limits it, its times and memory, and the next best plans."""
        bound_by = f"bound by: {self.bound_by}"
        said = [self.speed_in_words, self.sizes_in_words, bound_by, *_terms(self)]
        tables = [_times(self), _memory(self)]
        if self.alternatives:
            tables.append(_alternatives(self))
        head = [textwrap.fill(line, _MOST_COLUMNS) for line in said]
        return "\n\n".join(["\n".join(head), *tables])

    def _repr_html_(self) -> str:
        times = [
            svg.Bar(name=f"stage {i}: {layers_in_words(stage)}", parts=parts, text=total)
            for i, stage in enumerate(self.stages)
            for parts in [times_of(stage)]
            for total in [format_seconds(sum(parts.values()))]
        ]
        memory = []
        for rank, stages in enumerate(self.shape.stages_of_ranks):
            parts, limit = bytes_of_rank(self, stages), limit_of_rank(self, rank)
            has_limit = limit < math.inf
            text = format_bytes(sum(parts.values()))
            text += f" of {format_bytes(limit)}" if has_limit else ""
            name, mark = rank_name(self, rank, stages), limit if has_limit else None
            memory.append(svg.Bar(name=name, parts=parts, text=text, mark=mark))
        return svg.html(
            self.in_words,
            svg.note("Time of one microbatch:"),
            svg.bars(times, TIME_COLOURS),
            svg.note("Memory of each device at its peak; a red line is its limit:"),
            svg.bars(memory, MEMORY_COLOURS),
            svg.note(f"Bound by: {self.bound_by}"),
            svg.printed(str(self)),
        )


MEMORY_KINDS = ("weights", "gradients", "optimizer state", "activations", "messages")
"""Kept inputs of recomputed stages count as activations."""


def bytes_of_rank(plan: Plan, stages: Sequence[int]) -> dict[str, float]:
    """Returns the bytes of a device that holds the stages of a rank at its peak, by kind.

    One of its stages runs forwards again at a time; in a V both keep what ran again until its W,
    and what both have in flight at once counts.
    """
    shape = plan.shape
    rank = shape.stages_of_ranks.index(list(stages))
    held = [plan.stages[stage % plan.num_stages] for stage in stages]
    each = list(map(held_of_microbatch, held))
    in_flight = max(
        sum(count * kept for count, kept in zip(counts, each, strict=True))
        for counts in shape.in_flight_of_ranks[rank]
    )
    together = sum if shape.recomputes_together else max
    values = (
        sum(each.num_versions * each.weight_bytes + each.frozen_bytes for each in held),
        sum(each.gradient_bytes for each in held),
        sum(each.state_bytes for each in held),
        in_flight + together(map(held_again, held)),
        sum(each.message_bytes for each in held),
    )
    return dict(zip(MEMORY_KINDS, values, strict=True))


def limit_of_rank(plan: Plan, rank: int) -> float:
    """Bytes that its device has; infinite if that was not limited (JSON has no infinity)."""
    limit = plan.stages[rank].memory_limit
    return math.inf if limit == sys.float_info.max else limit


def rank_name(plan: Plan, rank: int, stages: Sequence[int]) -> str:
    """Names the devices that hold a rank's stages, and the stages unless it has just its own."""
    devices = plan.stages[rank].devices
    name = f"device{'s' * (len(devices) > 1)} {device_list(devices)}"
    if list(stages) == [rank]:
        return name
    return f"{name}: stages {', '.join(str(stage % plan.num_stages) for stage in stages)}"


# ---------------------------------------------------------------- as text


def _terms(plan: Plan) -> list[str]:
    """What not every plan has."""
    terms = []
    if plan.shard_state:
        terms.append(f"optimizer state: 1/{plan.width} on each replica")
    if plan.gradient_dtype is not None:
        terms.append(f"gradients: {plan.gradient_dtype}")
    if plan.price_per_hour:
        terms.append(f"price: {plan.price_per_hour:.2f} for an hour")
    if plan.total_price:
        begin = f"begun {plan.start_hour:.4g} hours from now"
        terms.append(f"all batches cost {plan.total_price:.4g}, {begin}")
    return terms


def _times(plan: Plan) -> str:
    rows = []
    for index, stage in enumerate(plan.stages):
        again = "-"
        if stage.recompute:
            names = stage.recomputed
            again = format_seconds(stage.recompute)
            again += f" ({len(names)} blocks)" if isinstance(names, tuple) else ""
        rows.append(
            [
                f"{index}",
                f"{stage.layers[0]} to {stage.layers[1] - 1}",
                stage.begins_at or "-",
                device_list(stage.devices),
                format_seconds(stage.forward),
                format_seconds(stage.input_grad + stage.weight_grad),
                again,
                format_seconds(stage.message) if index < plan.num_stages - 1 else "-",
                format_seconds(stage.update),
            ]
        )
    columns = ("stage", "layers", "begins at", "devices", "forward", "backward", "recompute")
    return table(
        "time of a microbatch; of an update per batch", [*columns, "message", "update"], rows
    )


def _memory(plan: Plan) -> str:
    """In one unit, which the title names: with a unit in each cell the table would be too wide."""
    unit, one = unit_for(plan.peak_bytes, BYTE_UNITS)
    rows = []
    for rank, stages in enumerate(plan.shape.stages_of_ranks):
        sums = list(bytes_of_rank(plan, stages).values())
        limit = limit_of_rank(plan, rank)
        rows.append(
            [
                device_list(plan.stages[rank].devices),
                ", ".join(str(stage % plan.num_stages) for stage in stages),
                *(f"{size / one:.2f}" for size in sums),
                f"{sum(sums) / one:.2f}",
                format_bytes(limit) if limit < math.inf else "-",
                f"{100 * sum(sums) / limit:.0f} %" if 0 < limit < math.inf else "-",
            ]
        )
    columns = ("devices", "stages", *MEMORY_KINDS, "peak", "limit", "used")
    return table(f"memory of a device at its peak, {unit}", columns, rows)


def _alternatives(plan: Plan) -> str:
    rows = [
        [
            f"{number}",
            each.schedule + each.late_in_words,
            " x ".join(map(str, each.mesh.values()))
            + (f", {each.num_stages} stages" if each.stages_per_rank > 1 else ""),
            f"{each.microbatches_in_words} of {each.microbatch_rows}",
            each.recompute,
            format_seconds(each.seconds_per_batch),
            f"{each.rows_per_second:.4g}",
            format_bytes(each.peak_bytes),
        ]
        for number, each in enumerate(plan.alternatives, 1)
    ]
    columns = ("", "schedule", "dp x pp x tp", "microbatches", "recompute", "step", "rows/s")
    reasons = [
        textwrap.fill(f"{number}: {each.lost_by}", _MOST_COLUMNS, subsequent_indent="   ")
        for number, each in enumerate(plan.alternatives, 1)
    ]
    return "\n".join([table("the next best", [*columns, "peak"], rows), *reasons])
