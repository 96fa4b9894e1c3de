"""Prints a plan as tables for the terminal."""

from __future__ import annotations

import math

from ...table import table
from ...units import format_bytes, format_seconds
from ..planning.plan import MEMORY_KINDS, Plan, bytes_of_rank, limit_of_rank
from ..planning.stage_plan import device_list


def print_plan(plan: Plan) -> None:
    """Prints a plan's sizes, times and memory, what limits it, and the next best plans."""
    tables = [_sizes(plan), _times(plan), _memory(plan)]
    if plan.alternatives:
        tables.append(_alternatives(plan))
    print(*tables, sep="\n\n", end="\n\n")
    print(f"bound by: {plan.bound_by}")
    if plan.total_price:
        print(
            f"all batches cost {plan.total_price:.4g}, begun {plan.start_hour:.4g} hours from now"
        )


def _sizes(plan: Plan) -> str:
    row = {
        "schedule": plan.schedule,
        "replicas": str(plan.width),
        "stages": str(plan.num_stages),
        "on a device": str(plan.stages_per_rank),
        "devices": str(plan.num_devices),
        "microbatches": f"{plan.microbatches_in_words} of {plan.microbatch_rows} rows",
        "batch": f"{plan.batch} rows",
        "step": format_seconds(plan.seconds_per_batch),
        "rows/s": f"{plan.rows_per_second:.4g}",
        "bubble": f"{100 * plan.bubble:.1f} %",
    }
    if plan.shard_state:
        row["state"] = f"1/{plan.width} a replica"
    if plan.gradient_dtype is not None:
        row["gradients"] = plan.gradient_dtype
    if plan.price_per_hour:
        row["price/h"] = f"{plan.price_per_hour:.2f}"
    return table("the plan", list(row), [list(row.values())])


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
    rows = []
    for rank, stages in enumerate(plan.shape.stages_of_ranks):
        sums = list(bytes_of_rank(plan, stages).values())
        limit = limit_of_rank(plan, rank)
        rows.append(
            [
                device_list(plan.stages[rank].devices),
                ", ".join(str(stage % plan.num_stages) for stage in stages),
                *map(format_bytes, sums),
                format_bytes(sum(sums)),
                format_bytes(limit) if limit < math.inf else "-",
                f"{100 * sum(sums) / limit:.0f} %" if 0 < limit < math.inf else "-",
            ]
        )
    columns = ("devices", "stages", *MEMORY_KINDS, "peak", "limit", "used")
    return table("memory of a device, at its peak", columns, rows)


def _alternatives(plan: Plan) -> str:
    rows = [
        [
            each.schedule,
            f"{each.width} x {each.num_stages}",
            f"{each.microbatches_in_words} of {each.microbatch_rows}",
            each.recompute,
            format_seconds(each.seconds_per_batch),
            f"{each.rows_per_second:.4g}",
            format_bytes(each.peak_bytes),
            each.lost_by,
        ]
        for each in plan.alternatives
    ]
    columns = ("schedule", "replicas x stages", "microbatches", "recompute", "step", "rows/s")
    return table("the next best", [*columns, "peak", "why not"], rows)
