"""One stage of a plan, and the bytes that it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ...checks import check_number, check_whole_number
from ...colours import TIME_COLOURS

_MOST_DEVICES = 4  # that are named


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a :class:`Plan`.

    Attributes:
        begins_at: the name for ``split=`` of the layer that the stage begins at; "" for stage 0.
        layers: the profile's layers, from the first to the one after the last.
        devices: numbers of the devices that hold the stage, one for each replica; with chimera the
            first pipeline's copy.
        forward, input_grad, weight_grad: predicted seconds of one microbatch, on the slowest of
            the devices. Where replicas have different numbers of microbatches, a device that has
            fewer than others counts as if it were as much faster, here and below.
        recompute: seconds of running forwards again, of one microbatch.
        message: seconds that a microbatch's values take to the stage that reads them, and their
            gradients back, each: if several stages do, to the one that they take longest to; 0 for
            the last stage.
        update, all_reduce: seconds of one batch.
        num_versions: of the weights.
        weight_bytes: what is trained, in one version.
        frozen_bytes: what is not.
        gradient_bytes, state_bytes: masters count as state; of one replica, where they share it.
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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "float":
                least = None if field.name == "memory_limit" else 0
                check_number(field.name, getattr(self, field.name), at_least=least, below=math.inf)
        if not 0 <= self.layers[0] < self.layers[1]:
            raise ValueError(f"layers: {self.layers}, a stage needs 0 <= first < end")
        if not self.devices or min(self.devices) < 0 or len({*self.devices}) < len(self.devices):
            raise ValueError(f"devices: {self.devices}, they must be different numbers >= 0")
        check_whole_number("num_versions", self.num_versions)
        check_whole_number("most_in_flight", self.most_in_flight)


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
