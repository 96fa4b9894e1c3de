"""What docs/schedules.md says of V-shaped schedules is what the simulator and generator say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipedream2bw as pd2

DOCUMENT = (Path(__file__).parents[3] / "docs/schedules.md").read_text("utf-8")


def simulated(name: str, p: int, input_grad: float, hop: float) -> tuple[float, float]:
    """Time over the ideal, and activations of the fullest rank in those of a microbatch."""
    m = 2 * p
    found = pd2.simulate(
        name,
        num_stages=2 * p,
        num_microbatches=m,
        stages_per_rank=2,
        forward=1.0,
        input_grad=input_grad,
        weight_grad=2 - input_grad,
        latency=hop * 6,
        activation_bytes=0.5,
        num_batches=4,
    )
    return found.period / (m * 6), max(found.peak_bytes)


def rows_of_the_table() -> dict[str, list[list[float]]]:
    """By schedule: activations, and times with equal and with unequal parts of the backward."""
    rows = {}
    for line in DOCUMENT.splitlines():
        found = re.fullmatch(r"\| `(2bw_v\w*)` \|( \d, \d, \d, \d \|)(.*)\|", line)
        if found:
            cells = found[3].split("|")
            rows[found[1]] = [[float(x) for x in cell.split(",")] for cell in cells]
    return rows


@pytest.mark.parametrize("name", ["2bw_v", "2bw_v_two_thirds", "2bw_v_half", "2bw_v_min"])
def test_hops_and_activations_are_those_of_the_documents_table(name: str) -> None:
    activations, *times = rows_of_the_table()[name]
    assert [simulated(name, p, 1, 0)[1] for p in (8, 16, 32)] == activations
    for input_grad, of_hops in zip((1.0, 1.2), times, strict=True):
        for hop, time in zip((0.0, 0.05, 0.1), of_hops, strict=True):
            assert simulated(name, 8, input_grad, hop)[0] == pytest.approx(time, abs=0.0051)


def test_two_thirds_stands_hops_up_to_the_unequal_backward_that_is_said() -> None:
    said = re.search(r"`2bw_v_two_thirds` .* hops of up to ([\d.]+) .* if I ≤ ([\d.]+) F", DOCUMENT)
    assert said is not None
    hop, most = map(float, said.groups())
    for p in (4, 8):
        assert simulated("2bw_v_two_thirds", p, most, hop)[0] == pytest.approx(1)
        assert simulated("2bw_v_two_thirds", p, most + 0.1, hop)[0] == pytest.approx(
            1.067, abs=0.01
        )
        assert simulated("2bw_v", p, most + 0.3, hop)[0] == pytest.approx(1)


@pytest.mark.parametrize("p", range(2, 10))
def test_half_takes_batches_of_p_microbatches_and_of_one_less_if_p_is_odd(p: int) -> None:
    assert re.search(r"`2bw_v_half` \| ≥ p, p . 1 if p is odd \|", DOCUMENT)
    least = p - p % 2
    pd2.make_schedule("2bw_v_half", 2 * p, least, 2)
    with pytest.raises(ValueError, match=f"num_microbatches: {least - 1}"):
        pd2.make_schedule("2bw_v_half", 2 * p, least - 1, 2)
