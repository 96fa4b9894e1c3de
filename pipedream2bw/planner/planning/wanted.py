"""What a plan is to be like: all that can be checked before the model's profile is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ... import _C
from ...checks import check_bool, check_whole_number
from ...json_document import given_or_loaded
from ...optimizer.options import EXCLUSIONS as OPTIMIZER_EXCLUSIONS
from ...optimizer.options import OptimizerOptions
from ...options import EXCLUSIONS, Options
from ...rules import among, check_values, refuse
from ...units import parse_bytes
from .arguments import (
    check_objective,
    checked_names,
    chunks_to_try,
    with_one_pipeline,
)
from .calibration import Calibration
from .held_bytes import PerTrainedByte, per_trained_byte
from .plan import MOST_MICROBATCHES

SCHEDULES = (
    "2bw",
    "2bw_v_two_thirds",
    "2bw_v_half",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "chimera",
)
"""The default choices: without gpipe, which keeps more than 1f1b, and 2bw_eager."""


_OPTIONS = ("precision", "split_master", "gradient_dtype", "optimizer_device", "shard_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """Arguments of :func:`plan`, checked.

    Attributes:
        bytes_per_device: memory of a device.
        largest_batch: rows.
        schedules: their names.
        chunks: stages of a rank, to be tried.
        recompute: what may be recomputed.
        optimizer: as a profile names it.
        held: bytes that are held for each byte of trained weights.
        calibration: what an earlier run has shown.
    """

    bytes_per_device: float
    largest_batch: int
    schedules: Sequence[str]
    chunks: list[int]
    recompute: Sequence[str]
    optimizer: str
    held: PerTrainedByte
    calibration: Calibration | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Wanted:
        """Checks all that does not depend on the profile or the devices.

        Args:
            arguments: of :func:`plan`, all of them, by name.

        Raises:
            ValueError, TypeError, OSError: naming the argument and the rule.
        """
        given = dict(arguments)
        calibration = given["calibration"]
        if calibration is not None:
            calibration = given_or_loaded("calibration", calibration, Calibration)
        bytes_per_device = parse_bytes("memory", given["memory"])
        largest = given["batch"] if given["largest_batch"] is None else given["largest_batch"]
        for name, rows in (("batch", given["batch"]), ("largest_batch", largest)):
            check_whole_number(name, rows, at_most=MOST_MICROBATCHES)
        if largest < given["batch"]:
            raise ValueError(
                f"largest_batch: {largest}, batch: {given['batch']}: it must be at least the batch"
            )
        names = checked_names("schedules", given["schedules"], _C.planned_schedules())
        chunks = chunks_to_try(given["stages_per_rank"], largest)
        ways = checked_names("recompute", given["recompute"], ("none", "stages", "blocks"))
        check_objective(
            given["objective"], given["slack"], given["num_batches"], given["start_within"]
        )
        check_bool("unequal_replicas", given["unequal_replicas"])
        optimizer, device = given["optimizer"], given["optimizer_device"]
        options = {name: given[name] for name in _OPTIONS}
        check_values(Options, options)
        check_values(OptimizerOptions, options)
        refuse(among((*EXCLUSIONS, *OPTIMIZER_EXCLUSIONS), options), options)
        held = per_trained_byte(
            optimizer, given["precision"], given["split_master"], given["gradient_dtype"]
        )
        if given["shard_state"]:
            names = with_one_pipeline(names, are_named=tuple(names) != SCHEDULES)
        if device is not None:
            optimizer, held = f"{optimizer} on host", held._replace(state=0.0)
        return cls(
            bytes_per_device=bytes_per_device,
            largest_batch=largest,
            schedules=names,
            chunks=chunks,
            recompute=ways,
            optimizer=optimizer,
            held=held,
            calibration=calibration,
        )
