"""The search over ways to train on many devices: its bounds, its choice, its stages."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper import scale
from benchmarks.paper.devices import H100_CLUSTER, Constants
from benchmarks.paper.scale import CONSTANTS, SCHEDULES
from benchmarks.paper.scale_costs import TWO_VERSIONS, Candidate, balanced, costs
from benchmarks.paper.shapes import Gpt

SMALL = Gpt("small", layers=10, hidden=1024, heads=8, sequence=1024)


BATCH = 32
ROOT = Path(__file__).resolve().parents[3]


@settings(deadline=None)
@given(layers=st.integers(1, 60), stages=st.integers(1, 60), head=st.floats(0, 3, allow_nan=False))
def test_stages_are_as_even_as_whole_blocks_allow(layers: int, stages: int, head: float) -> None:
    stages = min(stages, layers)
    blocks = balanced(layers, stages, head)
    assert len(blocks) == stages
    assert sum(blocks) == layers
    assert min(blocks) >= 0
    slowest = max([*blocks[:-1], blocks[-1] + head])
    # Of every number of blocks that the last stage might have, none is better.
    for last in range(layers + 1 if stages > 1 else 0):
        others = -(-(layers - last) // (stages - 1))
        assert slowest <= max(others, last + head) + 1e-9


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_are_below_what_is_simulated(schedule: str) -> None:
    found = list(scale.candidates(SMALL, 8, schedule, H100_CLUSTER, BATCH))
    assert len(found) > 20
    for candidate in found:
        of = costs(candidate, H100_CLUSTER, CONSTANTS)
        result = scale.simulate(candidate, of)
        assert scale.least_seconds(candidate, of) <= result.seconds * (1 + 1e-9)
        assert scale.least_bytes(candidate, of) <= result.peak_bytes * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slowness", [1, 200])
def test_the_best_is_the_best_of_all_that_fit(schedule: str, slowness: int) -> None:
    """Slow links make the order of the bounds another one than that of the seconds."""
    peaks = []
    for memory in (80e9, 1.5e9, 0.7e9):
        cluster = dataclasses.replace(
            H100_CLUSTER,
            memory=memory,
            inside=H100_CLUSTER.inside / slowness,
            pair=H100_CLUSTER.pair / slowness,
            latency=H100_CLUSTER.latency * slowness,
        )
        simulated = [
            scale.simulate(candidate, costs(candidate, cluster, CONSTANTS))
            for candidate in scale.candidates(SMALL, 8, schedule, cluster, BATCH)
        ]
        fitting = [result for result in simulated if result.peak_bytes <= memory]
        best = scale.best(SMALL, 8, schedule, cluster, CONSTANTS, BATCH)
        if not fitting:
            assert best is None
            continue
        assert best is not None
        assert best.peak_bytes <= memory
        assert best.seconds == min(result.seconds for result in fitting)
        peaks.append(best.peak_bytes)
    assert len(peaks) >= 2
    assert peaks[0] > peaks[-1]


def test_candidates_are_what_the_rules_allow() -> None:
    for schedule in SCHEDULES:
        for candidate in scale.candidates(SMALL, 16, schedule, H100_CLUSTER, BATCH):
            assert candidate.tensor * candidate.width * candidate.ranks == 16
            assert candidate.width * candidate.rows * candidate.microbatches == BATCH
            assert candidate.num_stages <= SMALL.layers
            assert schedule != "2bw" or candidate.microbatches >= candidate.ranks
            assert schedule != "interleaved" or candidate.microbatches % candidate.ranks == 0


def test_all_blocks_operations_are_in_the_stages() -> None:
    """The seconds of a microbatch on one device are the model's operations."""
    [candidate] = itertools.islice(scale.candidates(SMALL, 1, "1f1b", H100_CLUSTER, BATCH), 1)
    constants = Constants(efficiency=1.0, launch=0.0)
    of = costs(candidate, H100_CLUSTER, constants)
    seconds = sum(of.forward + of.input_grad + of.weight_grad)
    flops = SMALL.train_flops(candidate.rows, recompute=False)
    assert seconds * H100_CLUSTER.flops == pytest.approx(flops)


def test_all_blocks_bytes_are_in_the_stages() -> None:
    candidate = Candidate(SMALL, "2bw", 2, 1, 4, 1, 3, False, BATCH)
    of = costs(candidate, H100_CLUSTER, CONSTANTS)
    copy = SMALL.vocabulary * SMALL.hidden  # of the embedding, for the head
    assert sum(of.weight_bytes) == pytest.approx(2 * (SMALL.parameters + copy) / 2)
    logits = 3 * SMALL.sequence * SMALL.vocabulary
    blocks = SMALL.layers * 34 * 3 * SMALL.sequence * SMALL.hidden
    assert sum(of.activation_bytes) == pytest.approx((blocks + 6 * logits) / 2)
    assert sum(of.input_bytes) == 0
    again = costs(dataclasses.replace(candidate, recompute=True), H100_CLUSTER, CONSTANTS)
    inputs = SMALL.layers * 2 * 3 * SMALL.sequence * SMALL.hidden
    assert sum(again.input_bytes) == pytest.approx((inputs + 4 * logits) / 2)
    assert max(again.activation_bytes) < max(of.activation_bytes)
    assert again.activation_bytes[0] == pytest.approx(blocks / SMALL.layers / 2)


def test_the_page_shows_the_results() -> None:
    report = json.loads((ROOT / "benchmarks/results/scale.json").read_text())
    found = {(row["model"], row["devices"], row["schedule"]): row for row in report["best"]}
    page = (ROOT / "docs/scale.md").read_text()
    rows = re.findall(r"^\| (7B|70B|1T) \| ([\d,]+) \|(.*)\|$", page, flags=re.MULTILINE)
    assert len(rows) == 9 + 8
    for model, devices, cells in rows:
        results = [found.get((model, int(devices.replace(",", "")), name)) for name in SCHEDULES]
        shown = [cell.strip() for cell in cells.split("|")]
        if len(shown) == len(SCHEDULES):
            assert shown == [settings_of(row) for row in results]
            continue
        assert shown[:-1] == [rate_of(row) for row in results]
        rates = {row["schedule"]: row["tokens_per_device"] for row in results if row is not None}
        ours = max(rate for name, rate in rates.items() if name in TWO_VERSIONS)
        others = max(rate for name, rate in rates.items() if name not in TWO_VERSIONS)
        assert float(shown[-1]) == round(ours / others, 2)


def test_the_page_shows_the_largest_model_with_and_without_recomputation() -> None:
    report = json.loads((ROOT / "benchmarks/results/scale.json").read_text())
    found = {(row["schedule"], row["recompute"]): row for row in report["recomputation"]}
    page = (ROOT / "docs/scale.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(SCHEDULES)
    for name, cells in rows:
        kept, again = found[name, False], found[name, True]
        shown = [
            text
            for row in (kept, again)
            for text in (
                f"{row['tokens_per_device']:.1f}",
                f"{row['gb']:.0f}" if row["fits"] else f"**{row['gb']:.0f}**",
            )
        ]
        assert cells.split(" | ") == shown
        assert all(row["fits"] == (row["gb"] <= H100_CLUSTER.memory / 1e9) for row in (kept, again))


def rate_of(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none"
    rate = row["tokens_per_device"]
    return f"{rate:.1f} ({row['gb']:.0f})" if rate < 100 else f"{rate:,.0f} ({row['gb']:.0f})"


def settings_of(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none"
    chunks = f" v={row['stages_per_rank']}" if row["stages_per_rank"] > 1 else ""
    again = " R" if row["recompute"] else ""
    return f"t={row['tensor']} w={row['width']} d={row['ranks']}{chunks} b={row['rows']}{again}"
