"""A table of throughputs has the best plan of each type and number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2
from pipedream2bw.planner.planning.throughputs import Throughput, Throughputs, throughputs
from tests.unit.commands.test_plan_command import folder, printed, refused
from tests.unit.planning.test_planner import made_profile

__all__ = ["folder"]  # a fixture
PROFILE = made_profile([1e-3] * 8)
TYPE = pd2.DeviceType("x", 2)
ASKED = (
    *("plan", "--model", "planned_model:build", "--dry", "v100", "--memory", "16GiB"),
    *("--batch", "32", "--table"),
)


def test_each_row_is_the_best_plan_for_its_devices() -> None:
    types = [
        pd2.DeviceType("fast", 6, price_per_hour=3.0),
        pd2.DeviceType("slow", 2, throughput=0.5, price_per_hour=1.0),
    ]
    table = throughputs(PROFILE, types, memory="60MB", batch=32)
    assert [(row.type, row.devices) for row in table.rows] == [
        *(("fast", count) for count in (1, 2, 4, 6)),
        *(("slow", count) for count in (1, 2)),
    ]
    for row in table.rows:
        (each,) = [kind for kind in types if kind.name == row.type]
        alone = pd2.DeviceType("x", row.devices, None, each.throughput, each.price_per_hour)
        made = pd2.plan(PROFILE, devices=[alone], memory="60MB", batch=32)
        assert row.rows_per_second == made.rows_per_second
        assert row.price_per_hour == made.price_per_hour
        assert row.mesh == made.mesh
    assert table.row("fast", 1).rows_per_second == pytest.approx(
        2 * table.row("slow", 1).rows_per_second, rel=1e-3
    )


def test_devices_that_the_model_does_not_fit_do_nothing(tmp_path: Path) -> None:
    table = throughputs(PROFILE, [pd2.DeviceType("small", 4)], memory="16MB", batch=32)
    assert table.row("small", 1).rows_per_second == 0
    assert "fits on no plan" in table.row("small", 1).lacks
    assert table.row("small", 4).rows_per_second > 0
    table.save(tmp_path / "table.json")
    assert Throughputs.load(tmp_path / "table.json") == table
    with pytest.raises(ValueError, match="type: 'large' x 1, rows of the table: small x 1, small"):
        table.row("large", 1)


def test_degrees_that_divide_the_devices_are_tried() -> None:
    def rows(count: int, *degrees: int) -> tuple[Throughput, ...]:
        options = {"memory": "1GB", "batch": 32, "summed": "*", "tensor_parallel": degrees}
        return throughputs(PROFILE, [pd2.DeviceType("x", count)], **options).rows

    assert [row.devices for row in rows(3, 1, 2)] == [1, 2, 3]
    one, two, three, four = *rows(3, 2, 4), rows(4, 4)[-1]
    for row in (one, three):
        assert (row.rows_per_second, row.schedule, row.mesh) == (0, "", {})
        assert (
            row.lacks == f"tensor_parallel: (2, 4), devices: {row.devices}: no degree divides them"
        )
    for row, degree in ((two, 2), (four, 4)):
        assert row.rows_per_second > 0
        assert (row.mesh["tp"], row.lacks) == (degree, "")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"types": []}, ValueError, r"types: \[\]: there must be some, of different names"),
        ({"types": [TYPE, TYPE]}, ValueError, r"types: \['x', 'x'\]: there must be some, of diff"),
        ({"types": ["v100"]}, TypeError, r"types: \['v100'\] given, it must be a list of DeviceTy"),
        ({"types": "v100"}, TypeError, "types: 'v100' given, it must be a list of DeviceTypes"),
        ({"types": 8}, TypeError, "types: 8 given, it must be a list of DeviceTypes"),
        ({"profile": "gpt.json"}, TypeError, "profile: 'gpt.json' given, it must be a Profile"),
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel: 0, it must be at least 1"),
        ({"tensor_parallel": []}, ValueError, "tensor_parallel: none, give at least one degree"),
        ({"tensor_parallel": "2"}, TypeError, "tensor_parallel: '2' given, it must be whole numb"),
    ],
)
def test_the_rule_of_an_argument_is_told(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments = {"profile": PROFILE, "types": [TYPE], "memory": "1GB", "batch": 32, **given}
    with pytest.raises(kind, match=message):
        throughputs(**arguments)


def test_types_of_other_speed_have_degrees_of_their_own(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    types = ("--type", "v100:2", "--type", "t4:2,throughput=0.25")
    degrees = ("--tensor-parallel", "1,2", "--summed", "*")
    assert "t4" in printed(capsys, *ASKED, *types, *degrees)


def test_degrees_need_not_divide_the_devices_on_the_command_line(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    degrees = ("--type", "v100:3", "--summed", "*", "--tensor-parallel")
    text = printed(capsys, *ASKED, *degrees, "2")
    assert "v100 x 3: tensor_parallel: [2], devices: 3: no degree divides them" in text
    assert "tensor_parallel: 0, it must be at least 1" in refused(capsys, *ASKED, *degrees, "0")


def test_the_command_prints_and_writes_a_table(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    types = ("--type", "v100:2,price=2.5", "--type", "t4:4,throughput=0.25,memory=8GiB")
    links = ("--topology", "servers:2,inside=10GB/s,outside=1GB/s")
    text = printed(capsys, *ASKED, *types, *links, "-o", "table.json")
    assert text.splitlines()[0] == "rows a second of the best plan"
    table = Throughputs.load(folder / "table.json")
    assert text == f"{table}\n"
    assert [(row.type, row.devices) for row in table.rows] == [
        *(("v100", count) for count in (1, 2)),
        *(("t4", count) for count in (1, 2, 4)),
    ]
    assert printed(capsys, *ASKED, *types, *links, "--json") == table.to_json()
    both = tuple(each for each in ASKED if each != "--table")
    assert "devices" in printed(capsys, *both, *types, *links)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--type", "t4:4"), "--type: t4:4, the profile's device: 'V100 SXM2 16GB': it has no tim"),
        (("--type", "t4"), "--type: 't4', it must be NAME:COUNT"),
        (("--type", "t4:4,speed=2"), "--type: 'speed', known: throughput, memory, price"),
        (("--type", "t4:4,price=x"), "--type: 'price=x', it must be a number"),
        (("--type", "v100:4", "--price", "1"), "--price: 1.0, --type: v100:4: it says price="),
        (("--devices", "4"), "--table: True, --type: None"),
        (("--type", "t4:4", "--type", "t4:2"), "types: ['t4', 't4']: there must be some, of diff"),
        (
            ("--type", "v100:8", "--topology", "mesh:2x4,row=9GB/s,column=9GB/s"),
            "--table: True, --topology: mesh:2x4",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert message in refused(capsys, *ASKED, *given)
