"""Plans made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pipedream2bw import _C
from pipedream2bw.planner.planning.plan import (
    Plan,
    StagePlan,
    bytes_of_rank,
    held_always,
    held_in_flight,
)


def stage_plan(layers: tuple[int, int], **changes: Any) -> StagePlan:
    fields: dict[str, Any] = {
        "begins_at": "" if layers[0] == 0 else f"layer{layers[0]}",
        "layers": layers,
        "devices": (0,),
        "forward": 1e-3,
        "input_grad": 1e-3,
        "weight_grad": 0.5e-3,
        "recompute": 0.0,
        "message": 0.25e-3,
        "update": 1e-4,
        "all_reduce": 0.0,
        "num_versions": 2,
        "weight_bytes": 2.0**30,
        "frozen_bytes": 0.0,
        "gradient_bytes": 2.0**30,
        "state_bytes": 2.0**31,
        "most_in_flight": 1,
        "activation_bytes": 2.0**29,
        "input_bytes": 0.0,
        "message_bytes": 0.0,
        "memory_limit": 16 * 2.0**30,
        "recomputed": False,
    }
    return StagePlan(**{"peak_bytes": 0.0, **fields, **changes})


def frozen_stage(layers: tuple[int, int], size: float, **changes: Any) -> StagePlan:
    """A stage that takes so many bytes, whatever the schedule."""
    nothing = dict.fromkeys(
        ("weight_bytes", "gradient_bytes", "state_bytes", "activation_bytes"), 0.0
    )
    return stage_plan(layers, frozen_bytes=size, **{**nothing, **changes})


def with_peak(stage: StagePlan, most_recomputed: int = 1) -> StagePlan:
    """With the peak that its other fields make."""
    again = most_recomputed * stage.activation_bytes if stage.recomputed is True else 0.0
    peak = held_always(stage) + held_in_flight(stage) + again
    return dataclasses.replace(stage, peak_bytes=peak)


def plan_of(
    stages: Sequence[StagePlan],
    *,
    num_microbatches: int | tuple[int, ...] | None = None,
    **changes: Any,
) -> Plan:
    """With what follows from the schedule: versions, microbatches in flight and peaks."""
    m = len(stages) if num_microbatches is None else num_microbatches
    most = max(m) if isinstance(m, tuple) else m
    schedule, v = changes.get("schedule", "2bw"), changes.get("stages_per_rank", 1)
    shape = _C.planned_shape(schedule, len(stages), most, v)
    stages = [
        with_peak(
            dataclasses.replace(
                stage,
                num_versions=shape.num_versions[index],
                most_in_flight=shape.most_in_flight[index],
            ),
            shape.most_recomputed[index],
        )
        for index, stage in enumerate(stages)
    ]
    held: Any = SimpleNamespace(stages=stages, num_stages=len(stages), shape=shape)
    ranks = shape.stages_of_ranks
    fields: dict[str, Any] = {
        "schedule": schedule,
        "num_stages": len(stages),
        "num_microbatches": m,
        "stages_per_rank": v,
        "width": 1,
        "microbatch_rows": 2,
        "stages": tuple(stages),
        "seconds_per_batch": 3e-3 * most,
        "bubble": 0.05,
        "price_per_hour": 0.0,
        "start_hour": 0.0,
        "total_price": 0.0,
        "peak_bytes": max(sum(bytes_of_rank(held, each).values()) for each in ranks),
        "bound_by": "stage 0 computes all the time",
        "alternatives": (),
        "profile_fingerprint": "0" * 64,
    }
    fields |= changes
    of_all = sum(m) if isinstance(m, tuple) else fields["width"] * m
    fields.setdefault("batch", fields["microbatch_rows"] * of_all)
    fields.setdefault("rows_per_second", fields["batch"] / fields["seconds_per_batch"])
    return Plan(**fields)


def plan_for(
    model: Any, cuts: Sequence[str], args: Sequence[Any], *, width: int = 1, **changes: Any
) -> Plan:
    """Of a model whose stages begin at these layers; device k of a replica has stage k."""
    from pipedream2bw.capture.capture import capture_finely
    from pipedream2bw.capture.captured import names_of_layers
    from pipedream2bw.capture.chain import as_root
    from pipedream2bw.model.fingerprint import describe_parameters, fingerprint_of

    root = as_root(model)
    names = names_of_layers(capture_finely(root, (tuple(args), {}), ()))
    firsts = [0, *(names.index(cut) for cut in cuts)]
    d = len(firsts)
    devices = changes.pop("devices", [[r * d + k for r in range(width)] for k in range(d)])
    recomputed = changes.pop("recomputed", [False] * d)
    stages = [
        stage_plan(
            (first, end),
            begins_at=names[first] if first else "",
            devices=tuple(devices[k]),
            recomputed=recomputed[k],
        )
        for k, (first, end) in enumerate(zip(firsts, [*firsts[1:], len(names)], strict=True))
    ]
    fingerprint = fingerprint_of(describe_parameters(root), names)
    return plan_of(stages, width=width, profile_fingerprint=fingerprint, **changes)
