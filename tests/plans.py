"""Plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipedream2bw.plans import Plan, StagePlan


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
        "memory_limit": 16 * 2.0**30,
        "recomputed": False,
    }
    fields |= changes
    if "peak_bytes" not in fields:
        fields["peak_bytes"] = (
            fields["num_versions"] * fields["weight_bytes"]
            + fields["frozen_bytes"]
            + fields["gradient_bytes"]
            + fields["state_bytes"]
            + fields["most_in_flight"] * fields["activation_bytes"]
        )
    return StagePlan(**fields)


def plan_of(
    stages: Sequence[StagePlan], *, num_microbatches: int | None = None, **changes: Any
) -> Plan:
    m = len(stages) if num_microbatches is None else num_microbatches
    fields: dict[str, Any] = {
        "schedule": "2bw",
        "width": 1,
        "num_stages": len(stages),
        "stages_per_rank": 1,
        "microbatch_rows": 2,
        "num_microbatches": m,
        "stages": tuple(stages),
        "seconds_per_batch": 3e-3 * m,
        "bubble": 0.05,
        "price_per_hour": 0.0,
        "start_hour": 0.0,
        "total_price": 0.0,
        "peak_bytes": max(stage.peak_bytes for stage in stages),
        "bound_by": "stage 0 computes all the time",
        "alternatives": (),
        "gains": {"GiB of memory": 0.0, "GB/s of links": 1e-3},
        "profile_fingerprint": "0" * 64,
    }
    fields |= changes
    fields.setdefault("batch", fields["width"] * fields["microbatch_rows"] * m)
    fields.setdefault("rows_per_second", fields["batch"] / fields["seconds_per_batch"])
    return Plan(**fields)


def plan_for(
    model: Any, cuts: Sequence[str], args: Sequence[Any], *, width: int = 1, **changes: Any
) -> Plan:
    """Of a model whose stages begin at these layers; device k of a replica has stage k."""
    from pipedream2bw.capture import as_root
    from pipedream2bw.profile import describe_parameters, fingerprint_of
    from pipedream2bw.profiler import layer_names

    root = as_root(model)
    names = layer_names(root, example_args=args)
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
