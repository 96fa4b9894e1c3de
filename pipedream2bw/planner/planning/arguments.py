"""The arguments of :func:`plan`, checked before a model is profiled as far as that can be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ... import _C
from ...checks import check_number, check_whole_number
from ...json_document import given_or_loaded
from ...optimizer.options import EXCLUSIONS as OPTIMIZER_EXCLUSIONS
from ...optimizer.options import OptimizerOptions
from ...optimizer.staleness import NesterovCorrection, Remedies
from ...options import EXCLUSIONS, Options
from ...rules import BOOL, DTYPES, among, check_values, instance, refuse
from ...units import parse_bytes
from ..profiling.profile import Profile
from .calibration import Calibration
from .cluster import Cluster
from .plan import MOST_MICROBATCHES, RECOMPUTE

_METHODS = {method.name: method for method in _C.schedule_methods()}
_MOST_BATCHES = 10**15
_OBJECTIVES = ("throughput", "cost", "memory")
_GIB = 2.0**30


SCHEDULES = (
    "2bw_fresh",
    "2bw",
    "2bw_v_two_thirds",
    "2bw_v_half",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "chimera",
)
"""The default choices: without gpipe, which keeps more than 1f1b, 2bw_eager, and pipedream."""


_OPTIONS = ("precision", "split_master", "gradient_dtype", "optimizer_device", "shard_state")


class PerTrainedByte(NamedTuple):
    """Bytes of one copy of a stage, for each byte of one version of what it trains.

    Attributes:
        gradient: of gradients.
        state: of optimizer state and masters, of all replicas together where they share it out.
        kept: of the last step, which a correction of late steps needs, beside that state.
        stepped: of float32 that the optimizer steps.
    """

    gradient: float
    state: float
    kept: float
    stepped: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Arguments of :func:`plan`, checked.

    Attributes:
        bytes_per_device: memory of a device.
        largest_batch: rows.
        schedules: their names.
        chunks: stages of a rank, to be tried.
        recompute: what may be recomputed.
        degrees: devices that share a stage, to be tried, rising.
        sharded, summed: patterns of layers' names.
        optimizer: as a profile names it.
        held: bytes that are held for each byte of trained weights.
        calibration: what an earlier run has shown.
        objective, width, num_stages: as given.
    """

    bytes_per_device: float
    largest_batch: int
    schedules: Sequence[str]
    chunks: list[int]
    recompute: Sequence[str]
    degrees: list[int]
    sharded: Sequence[str]
    summed: Sequence[str]
    optimizer: str
    held: PerTrainedByte
    calibration: Calibration | None
    objective: str
    width: int | None
    num_stages: int | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> PlanArguments:
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
        ways = checked_names("recompute", given["recompute"], RECOMPUTE)
        check_objective(
            given["objective"], given["slack"], given["num_batches"], given["start_within"]
        )
        degrees = degrees_to_try(given["tensor_parallel"])
        patterns = {name: patterns_of(name, given[name]) for name in ("sharded", "summed")}
        check_degrees(degrees, patterns, given["objective"])
        BOOL.check("unequal_replicas", given["unequal_replicas"])
        check_number("max_late_share", given["max_late_share"])
        if given["max_late_share"] > 1:
            raise ValueError(f"max_late_share: {given['max_late_share']}, it must be at most 1")
        optimizer, device = given["optimizer"], given["optimizer_device"]
        options = {name: given[name] for name in (*_OPTIONS, "staleness")}
        check_values(Options, options)
        check_values(OptimizerOptions, options)
        remedies = options["staleness"] = Remedies(given["staleness"])
        refuse(among((*EXCLUSIONS, *OPTIMIZER_EXCLUSIONS), options), options)
        if remedies.correction is not None and "pipedream" in names:
            raise ValueError(
                f"staleness: {remedies!r}, schedules: {', '.join(names)}: a correction is of a "
                "delay of 1 on every stage, which pipedream has not. Leave out one of them"
            )
        if isinstance(remedies.correction, NesterovCorrection) and "2bw_fresh" in names:
            raise ValueError(
                f"staleness: {remedies!r}, schedules: {', '.join(names)}: a NesterovCorrection is "
                "of steps whose gradients are all late, which those of 2bw_fresh are not. Leave "
                "out one of them"
            )
        held = per_trained_byte(
            optimizer, given["precision"], given["split_master"], given["gradient_dtype"]
        )
        if remedies.correction is None:
            held = held._replace(kept=0.0)
        if given["shard_state"]:
            names = with_one_pipeline(names, are_named=tuple(names) != SCHEDULES)
        if device is not None:
            optimizer, held = f"{optimizer} on host", held._replace(state=0.0, kept=0.0)
        return cls(
            bytes_per_device=bytes_per_device,
            largest_batch=largest,
            schedules=names,
            chunks=chunks,
            recompute=ways,
            degrees=degrees,
            sharded=patterns["sharded"],
            summed=patterns["summed"],
            optimizer=optimizer,
            held=held,
            calibration=calibration,
            **{name: given[name] for name in ("objective", "width", "num_stages")},
        )


def checked_names(name: str, given: object, known: Sequence[str]) -> list[str]:
    """Lists the known names that are tried; one may be given by itself.

    Raises:
        TypeError: no names.
        ValueError: unknown ones, or none.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(each, str) for each in names):
        raise TypeError(f"{name}: {given!r} given, it must be names, of {', '.join(known)}")
    if not names:
        raise ValueError(f"{name}: none, give at least one of {', '.join(known)}")
    for each in names:
        if each not in known:
            raise ValueError(f"{name}: {each!r}, known: {', '.join(known)}")
    return list(names)


def chunks_to_try(given: object, largest_batch: int) -> list[int]:
    """Lists the numbers of stages per rank that are tried; one may be given by itself.

    Raises:
        TypeError: no whole numbers.
        ValueError: one is below 2, or too large for these microbatches.
    """
    numbers = numbers_to_try("stages_per_rank", given, at_least=2)
    for number in numbers:
        if number * largest_batch >= 2**31:
            raise ValueError(
                f"stages_per_rank: {number}, largest_batch: {largest_batch}: their product must be "
                f"below {2**31}"
            )
    return numbers


def numbers_to_try(name: str, given: object, *, at_least: int = 1) -> list[int]:
    """Lists whole numbers; one may be given by itself.

    Raises:
        TypeError, ValueError: no whole numbers, or one is too small.
    """
    numbers = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    if isinstance(numbers, str) or not isinstance(numbers, Sequence):
        raise TypeError(f"{name}: {given!r} given, it must be whole numbers, like (2, 4)")
    for number in numbers:
        check_whole_number(name, number, at_least=at_least)
    return list(numbers)


def patterns_of(name: str, given: object) -> list[str]:
    """Lists patterns of layers' names; one may be given by itself. Raises TypeError for others."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise TypeError(f"{name}: {given!r} given, it must be names of layers, like '*.up'")
    return list(patterns)


def degrees_to_try(given: object) -> list[int]:
    """Lists degrees of tensor parallelism, rising. Raises TypeError or ValueError for others."""
    degrees = sorted(set(numbers_to_try("tensor_parallel", given)))
    if not degrees:
        raise ValueError("tensor_parallel: none, give at least one degree, such as 1")
    return degrees


def check_degrees(
    degrees: Sequence[int], patterns: Mapping[str, Sequence[str]], objective: object
) -> None:
    """Raises ValueError unless the degrees of tensor parallelism can be compared."""
    if degrees[-1] > 1 and not any(patterns.values()):
        raise ValueError(
            f"tensor_parallel: {degrees[-1]}, sharded: none, summed: none: a degree above 1 needs "
            "layers that are cut. Name them as the profile does"
        )
    if len(degrees) > 1 and objective == "memory":
        raise ValueError(
            f"tensor_parallel: {', '.join(map(str, degrees))}, objective: 'memory': the slack is "
            "over the fastest plan of one degree. Give one"
        )


def check_objective(
    objective: object, slack: object, num_batches: object, start_within: object
) -> None:
    """Raises ValueError or TypeError unless the objective and what belongs to it fit together."""
    instance("a name", str).check("objective", objective)
    if objective not in _OBJECTIVES:
        raise ValueError(f"objective: {objective!r}, known: {', '.join(_OBJECTIVES)}")
    check_number("slack", slack, at_least=0, below=math.inf)
    if num_batches is not None:
        check_whole_number("num_batches", num_batches, at_most=_MOST_BATCHES)
    check_number("start_within", start_within, at_least=0, below=math.inf)
    if start_within and (objective != "cost" or num_batches is None):
        raise ValueError(
            f"start_within: {start_within} hours, objective: {objective!r}, num_batches: "
            f"{num_batches}: when to begin needs 'cost' and the batches to be trained"
        )


def with_one_pipeline(names: Sequence[str], *, are_named: bool) -> list[str]:
    """Lists the schedules under which replicas can share out their optimizers' state.

    Args:
        are_named: the caller wants these; else those with two pipelines are left out.

    Raises:
        ValueError: some that are wanted have two.
    """
    with_two = [name for name in names if _METHODS[name].is_bidirectional]
    if with_two and are_named:
        raise ValueError(
            f"shard_state: True, schedules: {', '.join(with_two)}, pipelines: 2: it must have 1"
        )
    return [name for name in names if name not in with_two]


def per_trained_byte(
    optimizer: object, precision: object, split_master: object, gradient_dtype: object
) -> PerTrainedByte:
    """Returns the bytes for arguments of :func:`plan`, of which all but the first are checked.

    Raises:
        TypeError, ValueError: naming the argument and the rule.
    """
    states = {"sgd": 0.0, "momentum": 1.0, "adamw": 2.0}
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer: {optimizer!r} given, it must be a name")
    if optimizer not in states:
        raise ValueError(f"optimizer: {optimizer!r}, known: {', '.join(states)}")
    if precision in (None, "fp32"):
        return PerTrainedByte(gradient=1.0, state=states[optimizer], kept=1.0, stepped=1.0)
    # Float32 beside weights of 16 bits: twice the bytes; a split master has the other 16 bits.
    return PerTrainedByte(
        gradient=2.0 if gradient_dtype is None else 1.0,
        state=2 * states[optimizer] + (1 if split_master else 2),
        kept=2.0 if split_master else 0.0,  # whole masters are the weights before the correction
        stepped=2.0,
    )


def check_precision(profile: Profile, precision: str | None) -> None:
    """Raises ValueError if the profile is of a model in another dtype than stages compute in.

    Some parameters may be in another one, as BatchNorm's are.
    """
    dtypes = profile.trained_dtypes
    if precision is None or not dtypes:
        return
    dtype = str(DTYPES[precision])
    convert = {"bf16": "bfloat16", "fp16": "half", "fp32": "float"}[precision]
    if dtype not in dtypes:
        raise ValueError(
            f"precision: {precision!r}, trained parameters of the profiled model: "
            f"{', '.join(sorted(dtypes))}: it must be profiled in {dtype}: profile "
            f"model.{convert}()"
        )


def check_update_time(profile: Profile, optimizer: str) -> None:
    """Raises ValueError if a profile lacks the optimizer's time: if measured, or "... on host"."""
    known = profile.seconds_per_update_byte
    if optimizer in known or not (profile.device.measured or optimizer.endswith(" on host")):
        return
    rule = "a measured profile must have the optimizer's"
    if not profile.device.measured:
        rule = (
            "a dry profile has it if its DeviceFigures have host_bytes_per_second and "
            "copy_bytes_per_second"
        )
    raise ValueError(
        f"optimizer: {optimizer!r}, the profile's seconds_per_update_byte: "
        f"{', '.join(known) or 'none'}: {rule}"
    )


def check_grid(arguments: PlanArguments, cluster: Cluster, *, num_pieces: int) -> None:
    """Raises ValueError if no plan for these devices can have what is asked for.

    Args:
        num_pieces: that the model can be cut into.
    """
    if arguments.objective == "cost" and not any(
        price > 0 for each in cluster.types for _, price in each.prices()
    ):
        raise ValueError(
            "objective: 'cost' given, prices: none: give DeviceTypes with one, or --price"
        )
    width, num_stages, num_devices = arguments.width, arguments.num_stages, cluster.num_devices
    for name, number in (("width", width), ("num_stages", num_stages)):
        if number is not None:
            check_whole_number(name, number)
    replicas = width or 1
    if replicas > num_devices:
        raise ValueError(f"width: {width}, devices: {num_devices}: each replica needs a device")
    if replicas > arguments.largest_batch:
        raise ValueError(
            f"width: {width}, largest_batch: {arguments.largest_batch}: each replica needs a row"
        )
    if num_stages is not None and num_stages > num_pieces:
        raise ValueError(
            f"num_stages: {num_stages}, the profile's model can be cut into: {num_pieces}: every "
            "stage needs a piece"
        )
    schedules, stages_per_rank = arguments.schedules, arguments.chunks
    with_chunks = [
        name for name in schedules if _METHODS[name].has_chunks and not _METHODS[name].is_v
    ]
    if len(with_chunks) == len(schedules) and not stages_per_rank:
        raise ValueError(
            f"stages_per_rank: none, schedules: {', '.join(schedules)}: these need several stages "
            "on a rank. Give numbers to try, like (2, 4)"
        )
    most = min(num_devices // replicas, num_pieces)
    if any(_has(_METHODS[name], stages_per_rank, num_stages, most) for name in schedules):
        return
    told = [f"schedules: {', '.join(schedules)}"]
    if with_chunks:
        told.append(f"stages_per_rank: {', '.join(map(str, stages_per_rank))}")
    told += [f"{name}: {n}" for name, n in (("width", width), ("num_stages", num_stages)) if n]
    raise ValueError(
        f"{', '.join(told)}, devices: {num_devices}, pieces of the model: {num_pieces}: no plan "
        "has all of this. A replica needs a device for each stage, or for stages_per_rank stages. "
        "Two pipelines and a V need an even number of stages"
    )


def _has(
    method: _C.ScheduleMethod,
    stages_per_rank: Sequence[int],
    num_stages: int | None,
    most_ranks: int,
) -> bool:
    """Returns whether the schedule has this number of stages, or any, on at most these ranks."""
    if method.is_bidirectional:
        wanted = num_stages or 2
        return wanted % 2 == 0 and wanted <= most_ranks
    if method.is_v:
        wanted = num_stages or 4
        return wanted % 2 == 0 and 2 <= wanted // 2 <= most_ranks
    if num_stages is None or num_stages == 1:
        return True
    if method.has_chunks:
        return any(
            num_stages % v == 0 and 2 <= num_stages // v <= most_ranks for v in stages_per_rank
        )
    return num_stages <= most_ranks


def memory_of_types(
    cluster: Cluster, memory: float, calibration: Calibration | None
) -> list[float]:
    """Lists the bytes that a plan may use of a device of each type.

    Raises:
        ValueError: the calibration's offset leaves nothing of one.
    """
    left = []
    for each in cluster.types:
        name, own = "memory", memory
        if each.memory is not None:
            name = f"device type {each.name}: memory"
            own = parse_bytes(name, each.memory)
        left.append(own if calibration is None else calibration.memory_left(own, name))
    return left


def own_memories(cluster: Cluster) -> str:
    """Words that name the types whose memory ``plan(memory=)`` does not set; empty without any."""
    own = [
        f"{each.name!r} ({parse_bytes('memory', each.memory) / _GIB:.6g} GiB)"
        for each in cluster.types
        if each.memory is not None
    ]
    if not own:
        return ""
    return f"; types with a memory of their own, DeviceType(memory=): {', '.join(own)}"
