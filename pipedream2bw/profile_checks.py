"""What must hold in a profile, whether it was measured or read from a file."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .profile import (
        MicrobatchProfile,
        Profile,
        ProfiledLayer,
        ProfiledLinks,
        SharedParameter,
    )

_MOST_BYTES = 2**63 - 1
_MOST_ROWS = 2**31 - 1


def check_profile(profile: Profile) -> None:
    """Raises ValueError that names a field, its value and the rule that it breaks."""
    n = len(profile.layers)
    if not profile.layers:
        raise ValueError("layers: 0, it must be at least 1")
    if not profile.microbatches:
        raise ValueError("microbatches: 0, it must be at least 1")
    _at_least(0, "device.memory_bytes", [profile.device.memory_bytes], _MOST_BYTES)
    for index, layer in enumerate(profile.layers):
        _check_layer(f"layers[{index}]", index, layer)
    if profile.layers[-1].can_cut_after:
        raise ValueError(
            f"layers[{n - 1}].can_cut_after: True, it must be False for the last of {n} layers"
        )
    for index, shared in enumerate(profile.shared_parameters):
        _check_shared(f"shared_parameters[{index}]", n, shared)
    before = 0
    for index, item in enumerate(profile.microbatches):
        where = f"microbatches[{index}]"
        if item.rows <= before:
            raise ValueError(f"{where}.rows: {item.rows}, it must be more than {before}")
        _at_least(1, f"{where}.rows", [item.rows], _MOST_ROWS)
        before = item.rows
        _check_microbatch(where, n, item)
    _at_least(0, "seconds_per_action", [profile.seconds_per_action])
    for kind, seconds in profile.seconds_per_update_byte.items():
        _at_least(0, f"seconds_per_update_byte.{kind}", [seconds])
    if profile.links is not None:
        _check_links(profile.links)
    for index, (ranks, size, seconds) in enumerate(profile.all_reduce):
        _at_least(2, f"all_reduce[{index}][0]", [ranks], _MOST_ROWS)
        _at_least(1, f"all_reduce[{index}][1]", [size], _MOST_BYTES)
        _at_least(0, f"all_reduce[{index}][2]", [seconds])


def _check_layer(where: str, index: int, layer: ProfiledLayer) -> None:
    _at_least(0, f"{where}.parameter_bytes", [layer.parameter_bytes], _MOST_BYTES)
    if not 0 <= layer.trained_bytes <= layer.parameter_bytes:
        raise ValueError(
            f"{where}.trained_bytes: {layer.trained_bytes}, it must be from 0 to parameter_bytes, "
            f"{layer.parameter_bytes}"
        )
    if layer.repeats is not None and not 0 <= layer.repeats < index:
        raise ValueError(f"{where}.repeats: {layer.repeats}, it must be a layer before {index}")


def _check_microbatch(where: str, num_layers: int, item: MicrobatchProfile) -> None:
    for name in ("forward", "input_grad", "weight_grad", "activation_bytes", "spread"):
        values = getattr(item, name)
        if len(values) != num_layers:
            raise ValueError(f"{where}.{name}: {len(values)} items, layers: {num_layers}")
        most = _MOST_BYTES if name == "activation_bytes" else sys.float_info.max
        _at_least(0, f"{where}.{name}", values, most)
    for index, (producer, consumer, size) in enumerate(item.edges):
        if not 0 <= producer < consumer < num_layers:
            raise ValueError(
                f"{where}.edges[{index}]: from layer {producer} to {consumer}, layers: "
                f"{num_layers}: the producer must come before the consumer"
            )
        _at_least(0, f"{where}.edges[{index}]", [producer, consumer, size], _MOST_BYTES)
    for index, (size, layers) in enumerate(item.kept):
        _at_least(0, f"{where}.kept[{index}]", [size], _MOST_BYTES)
        _check_holders(f"{where}.kept[{index}]", num_layers, layers)


def _check_shared(where: str, num_layers: int, item: SharedParameter) -> None:
    _at_least(0, f"{where}.parameter_bytes", [item.parameter_bytes], _MOST_BYTES)
    if not 0 <= item.trained_bytes <= item.parameter_bytes:
        raise ValueError(
            f"{where}.trained_bytes: {item.trained_bytes}, it must be from 0 to parameter_bytes, "
            f"{item.parameter_bytes}"
        )
    _check_holders(where, num_layers, item.layers)


def _check_holders(where: str, num_layers: int, layers: Sequence[int]) -> None:
    rising = all(before < after for before, after in itertools.pairwise(layers))
    if len(layers) < 2 or not rising or not 0 <= layers[0] < layers[-1] < num_layers:
        raise ValueError(
            f"{where}: layers {list(layers)}, layers: {num_layers}: it needs two or more of them, "
            "increasing"
        )


def _check_links(links: ProfiledLinks) -> None:
    n = len(links.latency)
    for name, matrix in (("latency", links.latency), ("bandwidth", links.bandwidth)):
        if len(matrix) != n or any(len(row) != n for row in matrix):
            sizes = [len(row) for row in matrix]
            raise ValueError(f"links.{name}: rows of {sizes} items, ranks: {n}")
    for i, row in enumerate(links.latency):
        _at_least(0, f"links.latency[{i}]", row)
    for i, row in enumerate(links.bandwidth):
        for j, value in enumerate(row):
            if i == j and value != math.inf:
                raise ValueError(f"links.bandwidth[{i}][{i}]: {value}, it must be infinite")
            if i != j and not 0 < value < math.inf:
                raise ValueError(f"links.bandwidth[{i}][{j}]: {value}, it must be > 0 and finite")


def _at_least(
    least: int, where: str, values: Iterable[float], most: float = sys.float_info.max
) -> None:
    for index, value in enumerate(values):
        if not least <= value <= most:
            rule = "and finite" if most == sys.float_info.max else f"and at most {most}"
            raise ValueError(f"{where}, item {index}: {value}, it must be >= {least} {rule}")
