"""A plan as tables for the terminal."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

from ..planning.plan import MEMORY_KINDS, Plan, bytes_of_rank, limit_of_rank, stages_of_ranks

_MOST_DEVICES = 4  # that are listed


@dataclasses.dataclass(frozen=True)
class _Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_plan(plan: Plan) -> None:
    """Prints what a plan comes to and why, as tables by rich if that is installed."""
    tables = [_sizes(plan), _times(plan), _memory(plan)]
    if plan.alternatives:
        tables.append(_alternatives(plan))
    lines = [f"bound by: {plan.bound_by}", *_gains(plan), *_start(plan)]
    try:
        rich = importlib.import_module("rich.console")
        kind = importlib.import_module("rich.table").Table
    except ImportError:
        for table in tables:
            print("\n".join(_plain(table)), end="\n\n")
        print("\n".join(lines))
        print("(with borders: pip install rich)")
        return
    # Into a file or a pipe as wide as it needs to be.
    console = rich.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for table in tables:
        console.print(_rich(table, kind))
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _rich(table: _Table, kind: Any) -> Any:
    made = kind(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        made.add_row(*row)
    return made


def _plain(table: _Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = [table.title]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return lines


def _sizes(plan: Plan) -> _Table:
    row = {
        "schedule": plan.schedule,
        "replicas": str(plan.width),
        "stages": str(plan.num_stages),
        "on a device": str(plan.stages_per_rank),
        "devices": str(plan.num_devices),
        "microbatches": f"{plan.num_microbatches} of {plan.microbatch_rows} rows",
        "batch": f"{plan.batch} rows",
        "step": _seconds(plan.seconds_per_batch),
        "rows/s": f"{plan.rows_per_second:.4g}",
        "bubble": f"{100 * plan.bubble:.1f} %",
    }
    if plan.price_per_hour:
        row["price/h"] = f"{plan.price_per_hour:.2f}"
    return _Table("the plan", list(row), [list(row.values())])


def _times(plan: Plan) -> _Table:
    rows = []
    for index, stage in enumerate(plan.stages):
        again = "-"
        if stage.recompute:
            names = stage.recomputed
            again = _seconds(stage.recompute)
            again += f" ({len(names)} blocks)" if isinstance(names, tuple) else ""
        rows.append(
            [
                f"{index}",
                f"{stage.layers[0]} to {stage.layers[1] - 1}",
                stage.begins_at or "-",
                _devices(stage.devices),
                _seconds(stage.forward),
                _seconds(stage.input_grad + stage.weight_grad),
                again,
                _seconds(stage.message) if index < plan.num_stages - 1 else "-",
                _seconds(stage.update),
            ]
        )
    columns = ("stage", "layers", "begins at", "devices", "forward", "backward", "recompute")
    return _Table(
        "time of a microbatch; of an update per batch", [*columns, "message", "update"], rows
    )


def _memory(plan: Plan) -> _Table:
    rows = []
    for rank, stages in enumerate(stages_of_ranks(plan)):
        sums = list(bytes_of_rank(plan, stages).values())
        limit = limit_of_rank(plan, rank)
        rows.append(
            [
                _devices(plan.stages[rank].devices),
                ", ".join(str(stage % plan.num_stages) for stage in stages),
                *map(_bytes, sums),
                _bytes(sum(sums)),
                _bytes(limit) if limit < math.inf else "-",
                f"{100 * sum(sums) / limit:.0f} %" if 0 < limit < math.inf else "-",
            ]
        )
    columns = ("devices", "stages", *MEMORY_KINDS, "peak", "limit", "used")
    return _Table("memory of a device, at its peak", columns, rows)


def _alternatives(plan: Plan) -> _Table:
    rows = [
        [
            each.schedule,
            f"{each.width} x {each.num_stages}",
            f"{each.num_microbatches} of {each.microbatch_rows}",
            each.recompute,
            _seconds(each.seconds_per_batch),
            f"{each.rows_per_second:.4g}",
            _bytes(each.peak_bytes),
            each.lost_by,
        ]
        for each in plan.alternatives
    ]
    columns = ("schedule", "replicas x stages", "microbatches", "recompute", "step", "rows/s")
    return _Table("the next best", [*columns, "peak", "why not"], rows)


def _gains(plan: Plan) -> list[str]:
    return [
        f"one more {what}: " + (f"{_saved(what, saved)}" if saved else "no better")
        for what, saved in plan.gains.items()
    ]


def _saved(what: str, saved: float) -> str:
    """In seconds a batch, if ``what`` does not say in what."""
    return f"{saved:.3g} less" if what.endswith(")") else f"{_seconds(saved)} less a batch"


def _start(plan: Plan) -> list[str]:
    if not plan.total_price:
        return []
    return [f"all batches cost {plan.total_price:.4g}, begun {plan.start_hour:.4g} hours from now"]


def _devices(devices: Sequence[int]) -> str:
    more = ", ..." if len(devices) > _MOST_DEVICES else ""
    return ", ".join(map(str, devices[:_MOST_DEVICES])) + more


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _bytes(size: float) -> str:
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"
