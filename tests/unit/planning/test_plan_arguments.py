"""What is wrong with an argument of the planner is named at once, with the rule and the values."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2
from tests.runs.timed import at_most_three_times
from tests.samples.plans import plan_of, stage_plan
from tests.unit.planning.test_planner import made_plan, made_profile

HUGE = 10**400

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"devices": 10**10}, ValueError, "devices: 10000000000, it must be at most 65536"),
    ({"devices": [1, 2]}, TypeError, r"devices: \[1, 2\] given, it must be a number, DeviceTypes"),
    ({"memory": HUGE}, ValueError, "memory: 10+ given, it is too large"),
    ({"batch": 2**31}, ValueError, "batch: 2147483648, it must be at most 100000000"),
    ({"largest_batch": HUGE}, ValueError, "largest_batch: 10+, it must be at most 1000"),
    ({"largest_batch": 31, "batch": 32}, ValueError, "largest_batch: 31, batch: 32: it must be at"),
    ({"schedules": []}, ValueError, "schedules: none, give at least one of 2bw, "),
    ({"schedules": None}, TypeError, "schedules: None given, it must be names, of 2bw, "),
    ({"schedules": [1]}, TypeError, r"schedules: \[1\] given, it must be names"),
    ({"schedules": ["2wb"]}, ValueError, "schedules: '2wb', known: 2bw, "),
    ({"schedules": ["2bw_split"]}, ValueError, "schedules: '2bw_split', known: 2bw, "),
    ({"schedules": "2bw", "num_stages": 100}, ValueError, "num_stages: 100, the .* cut into: 8"),
    (
        {"schedules": ["chimera"], "devices": 1},
        ValueError,
        "schedules: chimera, devices: 1, ",
    ),
    ({"schedules": "chimera", "num_stages": 3}, ValueError, "chimera, num_stages: 3, devices: 4"),
    (
        {"schedules": "interleaved", "num_stages": 5},
        ValueError,
        "schedules: interleaved, stages_per_rank: 2, 4, num_stages: 5, devices: 4",
    ),
    (
        {"schedules": ["interleaved"], "stages_per_rank": []},
        ValueError,
        "stages_per_rank: none, schedules: interleaved",
    ),
    ({"stages_per_rank": [1]}, ValueError, "stages_per_rank: 1, it must be at least 2"),
    ({"stages_per_rank": ["a"]}, TypeError, "stages_per_rank: 'a' given, it must be an int"),
    ({"stages_per_rank": [2.5]}, TypeError, "stages_per_rank: 2.5 given, it must be an int"),
    ({"stages_per_rank": None}, TypeError, "stages_per_rank: None given, it must be whole"),
    ({"stages_per_rank": 2**30}, ValueError, "stages_per_rank: 1073741824, largest_batch: 32"),
    ({"recompute": [True]}, TypeError, r"recompute: \[True\] given, it must be names, of none,"),
    ({"recompute": ["all"]}, ValueError, "recompute: 'all', known: none, stages, blocks"),
    ({"objective": None}, TypeError, "objective: None given, it must be a name"),
    ({"objective": "speed"}, ValueError, "objective: 'speed', known: throughput, cost, memory"),
    ({"slack": "a"}, TypeError, "slack: 'a' given, it must be a number"),
    ({"slack": float("nan")}, ValueError, "slack: nan, it must be >= 0 and finite"),
    ({"num_batches": HUGE}, ValueError, "num_batches: 10+, it must be at most"),
    ({"start_within": "3"}, TypeError, "start_within: '3' given, it must be a number"),
    ({"start_within": float("inf")}, ValueError, "start_within: inf, it must be >= 0 and finite"),
    ({"optimizer": ["adamw"]}, TypeError, r"optimizer: \['adamw'\] given, it must be a name"),
    ({"split_master": "yes"}, TypeError, "split_master: 'yes' given, it must be a bool"),
    ({"width": 8}, ValueError, "width: 8, devices: 4: each replica needs a device"),
    ({"width": 2**40}, ValueError, "width: 1099511627776, devices: 4"),
    ({"width": 4, "batch": 3}, ValueError, "width: 4, largest_batch: 3: each replica needs a row"),
    ({"width": 2, "num_stages": 4, "schedules": "2bw"}, ValueError, "width: 2, num_stages: 4, dev"),
    ({"num_stages": 2**40}, ValueError, "num_stages: 1099511627776, the profile's model can be"),
    ({"calibration": 3}, TypeError, "calibration: int given, it must be a Calibration or the path"),
]


@pytest.mark.parametrize(("given", "kind", "message"), WRONG)
@at_most_three_times
def test_the_argument_is_named(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=message) as error:
        made_plan(**given)
    assert len(str(error.value)) < 600
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "interleaved", "zero_bubble", "chimera"])
def test_a_width_and_depth_are_refused_where_the_search_has_none(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(width: int | None, num_stages: int | None) -> str:
        sizes = {"width": width, "num_stages": num_stages, "batch": 96, "largest_batch": 960}
        try:
            made_plan(schedules=schedule, memory="1GB", recompute="none", **sizes)
        except ValueError as error:
            return str(error)
        return ""

    grid = [(w, d) for w in (None, 1, 2, 3, 4) for d in (None, *range(1, 9))]
    checked = [told(*sizes) for sizes in grid]
    monkeypatch.setattr(
        "pipedream2bw.planner.planning.planner.check_grid", lambda *given, **sizes: None
    )
    searched = [told(*sizes) for sizes in grid]
    assert [bool(each) for each in checked] == [bool(each) for each in searched]
    assert all(not each or each.startswith(f"schedules: {schedule}") for each in checked)
    assert 0 < sum(map(bool, checked)) < len(grid)


def test_one_name_is_a_list_of_one_and_a_path_is_what_it_holds(tmp_path: Path) -> None:
    made_profile([1e-3] * 8).save(tmp_path / "profile.json")
    calibration = pd2.Calibration(1.0, 1e6)
    calibration.save(tmp_path / "calibration.json")
    limits = {"devices": 4, "memory": "60MB", "batch": 32}
    given = {"schedules": "interleaved", "recompute": "none", "stages_per_rank": 2}
    lists = {name: [value] for name, value in given.items()}
    one = pd2.plan(
        str(tmp_path / "profile.json"),
        **limits,
        **given,
        calibration=tmp_path / "calibration.json",
    )
    assert one == made_plan(**lists, calibration=calibration)
    with pytest.raises(FileNotFoundError):
        pd2.plan("none.json", **limits)
    with pytest.raises(TypeError, match="profile: NoneType given, it must be a Profile"):
        pd2.plan(None, **limits)  # type: ignore[arg-type]


DEVICES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": 3}, TypeError, "device type: name: 3 given"),
    ({"count": 10**9}, ValueError, "device type a: count: 1000000000, it must be at most 65536"),
    ({"throughput": "2"}, TypeError, "device type a: throughput: '2' given, it must be a number"),
    ({"throughput": 0}, ValueError, "device type a: throughput: 0, it must be > 0"),
    ({"price_per_hour": "3"}, TypeError, "device type a: price_per_hour: '3' given"),
    ({"price_per_hour": None}, TypeError, "price_per_hour: None given, it must be a number or a"),
    ({"price_per_hour": [1, 2]}, TypeError, r"price_per_hour: \[1, 2\] given"),
    ({"price_per_hour": [(0, "x")]}, TypeError, r"price_per_hour: \[\(0, 'x'\)\] given"),
    ({"price_per_hour": -1}, ValueError, "price_per_hour at hour 0.0: -1, it must be >= 0"),
    ({"price_per_hour": float("nan")}, ValueError, "price_per_hour at hour 0.0: nan, it must be"),
    ({"price_per_hour": []}, ValueError, r"price_per_hour: \[\], the first price must be of hour"),
    ({"price_per_hour": [(1, 2)]}, ValueError, "the first price must be of hour 0"),
    ({"price_per_hour": [(0, 2), (0, 3)]}, ValueError, "hour 0 after 0, hours must rise"),
]


@pytest.mark.parametrize(("given", "kind", "message"), DEVICES)
def test_what_is_wrong_with_a_device_type_is_named(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pd2.DeviceType(**{"name": "a", "count": 4, **given})


def servers(**changes: Any) -> pd2.Cluster:
    links = {"devices_per_server": 2, "inside": 1e9, "outside": 1e9}
    return pd2.Cluster.servers(4, **{**links, **changes})


CLUSTERS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: servers(devices_per_server=10**12), ValueError, "devices_per_server: 1000000000000,"),
    (
        lambda: pd2.Cluster.mesh(2**17, 1, row=1, column=1),
        ValueError,
        "rows: 131072, it must be at most 65536",
    ),
    (
        lambda: pd2.Cluster.mesh(2, 2, row=1, column=1, devices=2),
        ValueError,
        "rows: 2, columns: 2, devices: 2: rows . columns must be the number of devices",
    ),
    (
        lambda: dataclasses.replace(servers(), topology="matrix"),
        ValueError,
        "links: 2, topology: 'matrix', devices: 4: it must have 16",
    ),
    (lambda: servers(inside=0), ValueError, "inside bandwidth: 0 given, it must be > 0"),
    (
        lambda: pd2.Cluster.measured(4, 4),  # type: ignore[arg-type]
        TypeError,
        "latency: 4 given, it must be a list of lists",
    ),
    (
        lambda: pd2.Cluster.measured([[0.0]], [1.0]),  # type: ignore[list-item]
        TypeError,
        r"bandwidth: \[1.0\] given, it must be a list of lists",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), CLUSTERS)
def test_what_is_wrong_with_a_cluster_is_named(
    make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make()


def of_microbatch(**changes: Any) -> Callable[[pd2.Profile], pd2.Profile]:
    def change(profile: pd2.Profile) -> pd2.Profile:
        first, second = profile.microbatches
        changed = dataclasses.replace(second, **changes)
        return dataclasses.replace(profile, microbatches=(first, changed))

    return change


def of_layer(**changes: Any) -> Callable[[pd2.Profile], pd2.Profile]:
    def change(profile: pd2.Profile) -> pd2.Profile:
        first, *others = profile.layers
        return dataclasses.replace(profile, layers=(dataclasses.replace(first, **changes), *others))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_microbatch(rows=2**40), r"rows: 10995\d+, .* most 2147"),
        (of_microbatch(edges=((0, 1, 2**70),)), r"edges\[0\]\[2\]: 118\d+"),
        (of_microbatch(activation_bytes=(HUGE,) * 8), r"activation_bytes\[0\]: 10+, it must"),
        (of_microbatch(forward=(HUGE,) * 8), r"forward\[0\]: 10+, it must be >= 0 and finite"),
        (of_layer(parameter_bytes=HUGE), r"parameter_bytes: 10+, it must"),
    ],
)
def test_what_is_too_large_in_a_profile_is_named(
    change: Callable[[pd2.Profile], pd2.Profile], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        change(made_profile([1e-3] * 8))


def test_pictures_and_calibrations_take_the_path_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of([stage_plan((0, 1))])
    plan.save(tmp_path / "plan.json")
    assert pd2.calibrate(tmp_path / "plan.json", {0: 1e12}) == pd2.calibrate(plan, {0: 1e12})
    with pytest.raises(TypeError, match="measured: list given, it must be a dict"):
        pd2.calibrate(plan, [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan: NoneType given, it must be a Plan or the path"):
        pd2.calibrate(None, {0: 1.0})  # type: ignore[arg-type]
    pytest.importorskip("matplotlib")
    pd2.draw_plan(str(tmp_path / "plan.json"), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").exists()
    with pytest.raises(TypeError, match="plan: int given, it must be a Plan or the path of one"):
        pd2.draw_plan(3)  # type: ignore[arg-type]
