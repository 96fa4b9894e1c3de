"""Simulated schedules: closed forms, text, pictures, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2

ONE_F_ONE_B = """name: by hand
stages: 2
microbatches: 2
delay: 0
placement: 0,1
versions: 1,1
[prologue]
0F0,0F1,0B0,0B1,0U1
1F0,1B0,1F1,1B1,1U1
[steady]
0F0,0F1,0B0,0B1,0U1
1F0,1B0,1F1,1B1,1U1
[epilogue]
-
-
"""


@pytest.mark.parametrize("name", ["2bw", "2bw_eager", "2bw_split"])
def test_two_bw_has_no_bubbles(name: str) -> None:
    simulation = pd2.simulate(name, num_stages=4, num_microbatches=8)
    assert simulation.period == 8 * 3.0
    assert simulation.bubbles == pytest.approx([0.0] * 4)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_flush_idles_d_minus_1_of_m_plus_d_minus_1(name: str) -> None:
    simulation = pd2.simulate(name, num_stages=4, num_microbatches=8, forward=2, backward=3)
    assert simulation.period == (8 + 3) * 5.0
    assert simulation.bubbles == pytest.approx([3 / 11] * 4)


def test_chimera_idles_d_minus_2_slots_where_backwards_are_as_long_as_forwards() -> None:
    costs = {"num_stages": 4, "num_microbatches": 8, "forward": 1.0, "backward": 1.0}
    simulation = pd2.simulate("chimera", **costs)
    assert simulation.period == 2 * 8 + 4 - 2
    assert simulation.bubbles == pytest.approx([2 / 18] * 4)
    assert len(simulation.most_in_flight) == 8  # two copies of four stages


def test_microbatches_of_two_pipelines_are_numbered_through_the_batch() -> None:
    events = pd2.simulate("chimera", num_stages=2, num_microbatches=4, num_batches=1).events
    done = {(event.stage, event.microbatch) for event in events if event.kind == "B"}
    first = {(stage, microbatch) for stage in (0, 1) for microbatch in (0, 1)}
    assert done == first | {(stage, microbatch) for stage in (2, 3) for microbatch in (2, 3)}


def test_a_text_of_two_pipelines_has_the_models_sizes() -> None:
    text = str(pd2.make_schedule("chimera", 4, 8))
    named = pd2.simulate("chimera", num_stages=4, num_microbatches=8)
    assert pd2.simulate(text, num_stages=4, num_microbatches=8) == named
    message = "num_stages: 8, of the given schedule: 4: they must be equal"
    with pytest.raises(ValueError, match=re.escape(message)):
        pd2.simulate(text, num_stages=8, num_microbatches=8)


def test_values_may_be_given_for_each_stage_and_each_edge() -> None:
    simulation = pd2.simulate(
        "gpipe",
        num_stages=3,
        num_microbatches=1,
        forward=[1, 2, 3],
        input_grad=[4, 5, 6],
        weight_grad=(0.25, 0.5, 0.75),
        update=0.125,
        all_reduce=[0.5, 0, 0],
        latency=[10, 20],
        bandwidth=[0, 100],
        message_bytes=50,
        num_batches=1,
    )
    ends = {(event.stage, event.kind): event.end for event in simulation.events}
    assert ends[2, "F"] == 1 + 10 + 2 + 20.5 + 3
    assert ends[2, "B"] == 36.5 + 6.75
    assert ends[0, "U"] == 43.25 + 20.5 + 5.5 + 10 + 4.25 + 0.625
    assert simulation.makespan == ends[0, "U"]


def test_peaks_are_versions_gradients_state_and_what_is_in_flight() -> None:
    simulation = pd2.simulate(
        "2bw",
        num_stages=3,
        num_microbatches=4,
        weight_bytes=1000,
        gradient_bytes=100,
        state_bytes=[10, 20, 30],
        activation_bytes=1,
    )
    assert simulation.most_in_flight == [3, 2, 1]
    assert simulation.peak_bytes == [2113, 2122, 2131]


def test_events_are_all_actions_with_their_versions() -> None:
    events = pd2.simulate("2bw", num_stages=2, num_microbatches=3, num_batches=4).events
    assert len(events) == 2 * 4 * (3 + 3 + 1)
    for event in events:
        assert event.replica == 0
        made = event.batch + 1
        assert event.version == (made if event.kind == "U" else max(event.batch - 1, 0))
        assert event.microbatch == 2 or event.kind != "U"
    assert {event.kind for event in events} == {"F", "B", "U"}


def test_a_schedule_of_ones_own_is_simulated_like_its_name(tmp_path: Path) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text(ONE_F_ONE_B)
    named = pd2.simulate("1f1b", num_stages=2, num_microbatches=2, latency=0.5)
    assert pd2.simulate(ONE_F_ONE_B, latency=0.5) == named
    assert pd2.simulate(path, latency=0.5) == named
    assert pd2.simulate(pd2.load_schedule(path), latency=0.5) == named
    assert pd2.simulate(ONE_F_ONE_B, num_stages=2, num_microbatches=2, latency=0.5) == named


def test_several_stages_of_a_rank_take_turns() -> None:
    simulation = pd2.simulate(
        "interleaved", num_stages=8, num_microbatches=8, stages_per_rank=2, latency=0
    )
    assert len(simulation.bubbles) == len(simulation.peak_bytes) == 4
    assert simulation.bubbles == pytest.approx([3 / (2 * 8 + 3)] * 4)
    assert len(simulation.most_in_flight) == 8
    assert {(event.stage, event.rank) for event in simulation.events} == {
        (stage, stage % 4) for stage in range(8)
    }


def test_the_result_cannot_be_changed() -> None:
    simulation = pd2.simulate("2bw", num_stages=2, num_microbatches=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        simulation.period = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "3bw"}, r'schedule: "3bw": the known schedules are 2bw, '),
        ({"num_microbatches": 2}, r"num_microbatches: 2, num_stages: 3: 2bw needs"),
        ({"num_stages": None}, r"num_stages missing, schedule: '2bw'"),
        ({"num_stages": 0}, r"num_stages: 0, it must be at least 1"),
        ({"num_batches": 0}, r"num_batches: 0, it must be at least 1"),
        ({"stages_per_rank": 3}, r"stages_per_rank: 3, schedule: 2bw"),
        ({"forward": [1, 2]}, r"forward: 2 values, num_stages: 3: .* each stage"),
        ({"latency": [1, 2, 3]}, r"latency: 3 values, num_stages: 3: .* neighbouring stages"),
        ({"forward": -1}, r"forward\[0\]: -1: a cost must be finite and >= 0"),
        ({"backward": [1, 2, -3]}, r"backward\[2\]: -3.0: a cost must be finite and >= 0"),
        ({"backward": math.nan}, r"backward\[0\]: nan"),
        ({"update": [0, math.inf, 0]}, r"update\[1\]: inf"),
        ({"bandwidth": [1, -1]}, r"bandwidth\[1\]: -1: a bandwidth must be >= 0"),
        ({"input_grad": 1}, r"backward: None, input_grad: 1, weight_grad: None: give backward"),
        (
            {"backward": 2, "input_grad": 1, "weight_grad": 1},
            r"backward: 2, input_grad: 1, weight_grad: 1: give backward alone",
        ),
        (
            {"schedule": ONE_F_ONE_B, "num_microbatches": 2},
            r"num_stages: 3, of the given schedule: 2",
        ),
        (
            {"schedule": ONE_F_ONE_B, "num_stages": 2, "num_microbatches": 3},
            r"num_microbatches: 3, of the given schedule: 2",
        ),
        (
            {"schedule": ONE_F_ONE_B, "num_stages": 2, "num_microbatches": 2, "stages_per_rank": 2},
            r"stages_per_rank: 2, it must be left out .* placement is \[0, 1\]",
        ),
        (
            {"schedule": ONE_F_ONE_B.replace("0F1,0B0,", "0B0,"), "num_stages": None},
            r"every action exactly once",
        ),
    ],
)
def test_bad_input_names_the_rule_and_both_values(options: dict[str, Any], message: str) -> None:
    given = {"schedule": "2bw", "num_stages": 3, "num_microbatches": 3, **options}
    schedule = given.pop("schedule")
    with pytest.raises(ValueError, match=message):
        pd2.simulate(schedule, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pd2.simulate(3), "schedule: 3 given"),  # type: ignore[arg-type]
        (
            lambda: pd2.simulate("2bw", num_stages="2", num_microbatches=2),  # type: ignore[arg-type]
            "num_stages: '2' given, it must be an int",
        ),
    ],
)
def test_the_wrong_kind_is_a_type_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_simulation_can_be_drawn_with_its_split_backwards(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    simulation = pd2.simulate("zero_bubble", num_stages=3, num_microbatches=4, num_batches=2)
    path = tmp_path / "timeline.svg"
    pd2.draw_timeline(simulation.events, path)
    svg = path.read_text(encoding="utf-8")
    assert {"stage 0", "stage 2", "seconds", "W: weight gradient"} <= set(
        re.findall(r"<!-- (.*?) -->", svg)
    )
    first_batch = [event for event in simulation.events if event.batch == 0]
    pd2.draw_timeline(first_batch, path)  # one version: three shades
    fills = re.findall(r"fill: (#\w+)", path.read_text(encoding="utf-8"))
    assert sum(fills.count(fill) >= 12 for fill in set(fills) - {"#ffffff", "#000000"}) == 3
