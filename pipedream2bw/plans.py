"""How a model is to be trained, as the planner says and a file keeps."""

from __future__ import annotations

import dataclasses
import os

from .plan_checks import check_plan
from .plan_json import check_number, read_json, write_json
from .planned_shape import PlannedShape, check_sizes
from .settings import check_whole_number

FORMAT = "pipedream2bw.plan"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage of a :class:`Plan`.

    Attributes:
        begins_at: the name for ``split=`` of the layer that the stage begins at; "" for stage 0.
        layers: the profile's layers, from the first to the one after the last.
        devices: numbers of the devices that hold the stage, one for each replica; with chimera the
            first pipeline's copy.
        forward, input_grad, weight_grad: predicted seconds of one microbatch, on the slowest of
            the devices.
        recompute: seconds of running forwards again, of one microbatch.
        message: seconds that a microbatch's values take to the stage that reads them, and their
            gradients back, each: if several stages do, to the one that they take longest to; 0 for
            the last stage.
        update, all_reduce: seconds of one batch.
        num_versions: of the weights.
        weight_bytes: what is trained, in one version.
        frozen_bytes: what is not.
        gradient_bytes, state_bytes: masters count as state.
        most_in_flight: microbatches between forward and backward at once.
        activation_bytes: of one microbatch: what is kept from its forward to its backward. If the
            whole stage is recomputed, it is there from that on.
        input_bytes: of one microbatch, if the whole stage is recomputed: what it received, else 0.
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
    peak_bytes: float
    memory_limit: float
    recomputed: bool | tuple[str, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "float":
                positive = field.name == "memory_limit"
                check_number(field.name, getattr(self, field.name), positive=positive)
        if not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers: {self.layers}, a stage needs 0 <= first < end")
        if not self.devices or min(self.devices) < 0 or len({*self.devices}) < len(self.devices):
            raise ValueError(f"devices: {self.devices}, they must be different numbers >= 0")
        check_whole_number("num_versions", self.num_versions)
        check_whole_number("most_in_flight", self.most_in_flight)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A plan that came after the best one.

    Attributes:
        schedule, width, num_stages, stages_per_rank, microbatch_rows, num_microbatches: as in
            :class:`Plan`.
        recompute: "none", "stages" or "blocks".
        seconds_per_batch, rows_per_second, price_per_hour, peak_bytes: likewise.
        lost_by: a sentence.
    """

    schedule: str
    width: int
    num_stages: int
    stages_per_rank: int
    microbatch_rows: int
    num_microbatches: int
    recompute: str
    seconds_per_batch: float
    rows_per_second: float
    price_per_hour: float
    peak_bytes: float
    lost_by: str

    def __post_init__(self) -> None:
        check_sizes(self)
        _check_numbers(self)
        if self.recompute not in ("none", "stages", "blocks"):
            raise ValueError(f"recompute: {self.recompute!r}, known: 'none', 'stages', 'blocks'")
        check_number("peak_bytes", self.peak_bytes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is to be trained on given devices, and what that will take; see ``plan()``.

    Attributes:
        schedule: its name.
        width: replicas w of every stage.
        num_stages: the depth d.
        stages_per_rank: v; a replica takes ``num_stages // stages_per_rank`` devices.
        microbatch_rows: b.
        num_microbatches: m, of one replica's batch.
        batch: rows of all replicas, ``width * microbatch_rows * num_microbatches``.
        stages: one for each stage.
        seconds_per_batch: predicted, in the steady state.
        rows_per_second: of all replicas.
        bubble: share of that time in which the busiest rank does nothing, 0 to 1.
        price_per_hour: of all devices that are used, now.
        start_hour: hours from now, when to begin: later than 0 only where ``plan()`` was allowed
            to wait for low prices.
        total_price: of ``plan()``'s ``num_batches`` from then on; 0 if it was given none.
        peak_bytes: of the device that holds the most.
        bound_by: what keeps it from being faster; a sentence.
        alternatives: the next best plans, at most five.
        gains: what one more GiB of memory, or GB/s of a kind of link, would save: seconds per
            batch; planned for "cost" its price, as the key says; for "memory" there are none.
        profile_fingerprint: of the profiled model.
    """

    schedule: str
    width: int
    num_stages: int
    stages_per_rank: int
    microbatch_rows: int
    num_microbatches: int
    batch: int
    stages: tuple[StagePlan, ...]
    seconds_per_batch: float
    rows_per_second: float
    bubble: float
    price_per_hour: float
    start_hour: float
    total_price: float
    peak_bytes: float
    bound_by: str
    alternatives: tuple[Alternative, ...]
    gains: dict[str, float]
    profile_fingerprint: str

    def __post_init__(self) -> None:
        check_sizes(self)
        rows = self.width * self.microbatch_rows * self.num_microbatches
        if self.batch != rows:
            raise ValueError(
                f"batch: {self.batch}, width * microbatch_rows * num_microbatches: {rows}: they "
                "must be equal"
            )
        shape = _check_numbers(self)
        predicted = self.batch / self.seconds_per_batch
        if not abs(self.rows_per_second - predicted) <= 1e-6 * predicted:
            raise ValueError(
                f"rows_per_second: {self.rows_per_second}, batch / seconds_per_batch: {predicted}: "
                "they must be equal"
            )
        if not 0 <= self.bubble <= 1:
            raise ValueError(f"bubble: {self.bubble}, it must be a share, 0 to 1")
        for name in ("start_hour", "total_price", "peak_bytes"):
            check_number(name, getattr(self, name))
        for name, seconds in self.gains.items():
            check_number(f"gains[{name}]", seconds)
        check_plan(self, shape)

    @property
    def num_devices(self) -> int:
        """Devices that are used."""
        return self.width * self.num_stages // self.stages_per_rank

    @property
    def split(self) -> list[str]:
        """What ``PipelineModule(split=)`` takes."""
        return [stage.begins_at for stage in self.stages[1:]]

    @property
    def recompute(self) -> bool | list[bool] | list[str]:
        """What ``PipelineModule(recompute=)`` takes."""
        if all(isinstance(stage.recomputed, bool) for stage in self.stages):
            return [bool(stage.recomputed) for stage in self.stages]
        names = [
            name
            for stage in self.stages
            if not isinstance(stage.recomputed, bool)
            for name in stage.recomputed
        ]
        return names or False

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        write_json(self, path, kind=FORMAT, version=VERSION)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what :meth:`save` wrote.

        Raises:
            ValueError: no JSON, another format or version, or a field that is missing, unknown,
                of another type, or does not fit the others: names it and both values.
            OSError: the file cannot be read.
        """
        return read_json(cls, path, kind=FORMAT, version=VERSION)


def _check_numbers(checked: Plan | Alternative) -> PlannedShape:
    """Also that the schedule has such sizes."""
    shape = PlannedShape.of(checked)
    check_number("seconds_per_batch", checked.seconds_per_batch, positive=True)
    check_number("rows_per_second", checked.rows_per_second, positive=True)
    check_number("price_per_hour", checked.price_per_hour)
    return shape
