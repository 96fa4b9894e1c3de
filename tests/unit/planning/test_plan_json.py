"""Plans are read back with every field checked, against its type and against the others."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw._C import planned_schedules, planned_shape
from tests.samples.plans import plan_of, stage_plan
from tests.unit.planning.test_planner import made_plan, made_profile


def test_a_saved_plan_is_read_back_equal(tmp_path: Path) -> None:
    plan = made_plan()
    plan.save(tmp_path / "plan.json")
    assert pd2.Plan.load(tmp_path / "plan.json") == plan
    assert plan.split == [stage.begins_at for stage in plan.stages[1:]]
    assert plan.num_devices <= 4
    assert len(plan.alternatives) == 5


def paths_in(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every field and item of a JSON document."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))[:2]
    else:
        return [where]
    inner = [path for key, item in items for path in paths_in(item, (*where, key))]
    return [where, *inner] if where else inner


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def test_every_damaged_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made_plan(recompute=["blocks", "none"], memory="18MB").save(path)
    document = json.loads(path.read_text())
    names = paths_in(document)
    assert len(names) > 80
    for place in names:
        path.write_text(json.dumps(replaced(document, place, {"no": "such thing"})))
        name = [part for part in place if isinstance(part, str)][-1]
        with pytest.raises(ValueError, match=re.escape(name)):
            pd2.Plan.load(path)
        if isinstance(place[-1], str):
            changed = copy.deepcopy(document)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            del holder[place[-1]]
            path.write_text(json.dumps(changed))
            with pytest.raises(ValueError, match=rf"\b{place[-1]}\b.*(missing|must be)"):
                pd2.Plan.load(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), 2, "version: 2, it must be 1"),
        (("format",), "pipedream2bw.profile", "format: 'pipedream2bw.profile'"),
        (("schedule",), "2wb", 'schedule: "2wb"'),
        (("width",), 0, "width: 0, it must be at least 1"),
        (("batch",), 33, "batch: 33, width"),
        (("bubble",), 1.5, "bubble: 1.5, it must be a share"),
        (("seconds_per_batch",), -1.0, "seconds_per_batch: -1.0"),
        (("rows_per_second",), 1.0, "rows_per_second: 1.0, batch / seconds_per_batch"),
        (("stages", 1, "layers"), [0, 4], r"stages\[1\].layers: \(0, 4\)"),
        (("stages", 1, "layers"), [4, 4], r"stages\[1\].layers: \(4, 4\)"),
        (("stages", 1, "begins_at"), "", r"stages\[1\].begins_at: ''"),
        (("stages", 0, "devices"), [-1], r"stages\[0\].devices: \(-1,\)"),
        (("stages", 0, "forward"), -1.0, r"stages\[0\].forward: -1.0"),
        (("stages", 0, "peak_bytes"), None, r"stages\[0\].peak_bytes: None, it must be a number"),
        (("stages",), [], "stages: 0, num_stages"),
    ],
)
def test_nonsense_in_a_plan_is_named(
    tmp_path: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    path = tmp_path / "plan.json"
    made_plan(schedules=["2bw"], memory="30MB").save(path)
    document = json.loads(path.read_text())
    assert document["num_stages"] > 1
    path.write_text(json.dumps(replaced(document, place, value)))
    with pytest.raises(ValueError, match=message):
        pd2.Plan.load(path)


Place = tuple[Any, ...]
OTHERS: list[tuple[dict[Place, Any], str]] = [
    ({("stages", 0, "num_versions"): 7}, r"stages\[0\].num_versions: 7, .* 2bw: 2"),
    ({("stages", 1, "most_in_flight"): 999}, r"stages\[1\].most_in_flight: 999, .* 2bw: 3"),
    ({("schedule",): "1f1b"}, r"num_versions: 2, with the schedule 1f1b: 1"),
    ({("schedule",): "2bw_eager"}, r"most_in_flight: 4, with the schedule 2bw_eager: 7"),
    ({("schedule",): "pipedream"}, r'schedule: "pipedream", plans have one of 2bw, 2bw_eager'),
    ({("peak_bytes",): 1.0}, r"^\S*plan.json: peak_bytes: 1.0, of the device that holds the most"),
    (
        {("stages", 0, "peak_bytes"): 1e15},
        r"stages\[0\].peak_bytes: 1000000000000000.0, all of its weights",
    ),
    ({("stages", 1, "activation_bytes"): 1e30}, r"stages\[1\].peak_bytes: .*together: 3\S*e\+30"),
    ({("stages", 1, "message_bytes"): 1e30}, r"stages\[1\].peak_bytes: .*together: 1\S*e\+30"),
    ({("stages", 0, "memory_limit"): 0.0}, r"stages\[0\].memory_limit: 0.0, it must be > 0"),
    ({("stages", 0, "memory_limit"): 1e6}, r"stages\[0\].memory_limit: 1000000.0, peak of rank 0"),
    ({("stages", 1, "recompute"): 5.0}, r"stages\[1\].recompute: 5.0, recomputed: False"),
    ({("stages", 1, "input_bytes"): 5.0}, r"stages\[1\].input_bytes: 5.0, recomputed: False"),
    (
        {("stages", 1, "begins_at"): "x", ("stages", 3, "begins_at"): "x"},
        r"stages\[3\].begins_at: 'x', stages\[1\] begins there",
    ),
    (
        {("stages", i, "recomputed"): ["layers.0"] for i in range(4)},
        r"stages\[1\].recomputed: 'layers.0', which stages\[0\].recomputed has",
    ),
    ({("profile_fingerprint",): ""}, r"profile_fingerprint: '', it must be 64"),
    ({("num_microbatches",): 10**9}, r"num_microbatches: 1000000000, it must be at most 100000000"),
    ({("num_microbatches",): 2**31}, r"num_microbatches: 2147483648, it must be at most 1000000"),
    ({("num_microbatches",): 10**6}, r"batch: 32, .* num_microbatches: 1000000"),
    ({("num_microbatches",): [32, 4]}, r"num_microbatches: \[32, 4\], width: 1"),
    ({("num_microbatches",): [0]}, r"num_microbatches\[0\]: 0, it must be at least 1"),
    ({("num_microbatches",): [2.5]}, r"num_microbatches\[0\]: 2.5, it must be a whole number"),
    ({("num_microbatches",): [31]}, r"batch: 32, width: 1, .* num_microbatches: 31: together"),
    (
        {("num_microbatches",): [32, 3], ("width",): 2, ("batch",): 35},
        r"num_microbatches: 3, num_stages: 4: 2bw needs",
    ),
    ({("width",): 10**400}, r"width: 10+, it must be at most 2147483647"),
    ({("num_stages",): 10**12}, r"num_stages: 1000000000000, it must be at most 1000000"),
    ({("num_microbatches",): 2, ("batch",): 2}, r"num_microbatches: 2, num_stages: 4: 2bw needs"),
]


@pytest.mark.parametrize(("changes", "message"), OTHERS)
def test_fields_must_agree_with_each_other(
    tmp_path: Path, changes: dict[Place, Any], message: str
) -> None:
    path = tmp_path / "plan.json"
    plan = made_plan(
        schedules=["2bw"], num_stages=4, width=1, memory="40MB", recompute=["none"], batch=32
    )
    assert plan.microbatch_rows == 1
    plan.save(path)
    document = json.loads(path.read_text())
    for place, value in changes.items():
        document = replaced(document, place, value)
    path.write_text(json.dumps(document))
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        pd2.Plan.load(path)
    assert time.monotonic() - began < 1


def test_a_plan_has_five_alternatives_at_most() -> None:
    plan = made_plan()
    assert len(plan.alternatives) == 5
    with pytest.raises(ValueError, match="alternatives: 15, there are at most 5"):
        dataclasses.replace(plan, alternatives=plan.alternatives * 3)


@pytest.mark.parametrize("recompute", ["none", "stages", "blocks"])
@pytest.mark.parametrize("schedule", planned_schedules())
def test_every_kind_of_plan_agrees_with_itself(schedule: str, recompute: str) -> None:
    """Plans are checked as they are made, so that planner and checks compute the same."""
    found = 0
    for num_stages in (1, 2, 4, 8):
        for memory in ("16MB", "24MB", "48MB", "1GB"):
            sizes = {"num_stages": num_stages, "memory": memory, "devices": 8}
            try:
                made_plan(schedules=[schedule], recompute=[recompute], **sizes)
            except ValueError as error:
                told = str(error)
            else:
                told = ""
                found += 1
            assert (
                not told or "fits on no plan" in told or "no width" in told or "schedules: " in told
            )
    assert found or (recompute == "blocks" and ("_v" in schedule or schedule[0] in "cv"))


@given(st.sampled_from(planned_schedules()), st.integers(1, 9), st.integers(1, 20), st.data())
@settings(max_examples=300, deadline=None)
def test_a_shape_is_what_the_schedule_does(
    schedule: str, ranks: int, num_microbatches: int, data: Any
) -> None:
    v = data.draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    v = 2 if "_v" in schedule or schedule.startswith("v_") else v
    d = ranks * v
    try:
        made = pd2.make_schedule(schedule, d, num_microbatches, v)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            planned_shape(schedule, d, num_microbatches, v)
        return
    shape = planned_shape(schedule, d, num_microbatches, v)
    assert shape.num_versions == (2 if schedule.startswith("2bw") else 1)
    assert shape.most_in_flight == [made.max_in_flight(stage) for stage in range(d)]
    placed = [
        [stage for stage, rank in enumerate(made.placement) if rank == each]
        for each in range(max(made.placement) + 1)
    ]
    assert shape.stages_of_ranks == placed
    if schedule == "interleaved" or schedule == "chimera":  # each stage's own most counts
        return
    kept = [1.0 + 0.37 * (7 * stage % 5) for stage in range(d)]
    held = [
        max(
            sum(count * kept[stage] for count, stage in zip(counts, stages, strict=True))
            for counts in all_counts
        )
        for all_counts, stages in zip(shape.in_flight_of_ranks, placed, strict=True)
    ]
    simulation = pd2.simulate(made, activation_bytes=kept, num_batches=made.most_batches_behind + 2)
    assert held == pytest.approx(simulation.peak_bytes)


def test_many_microbatches_need_no_schedule() -> None:
    plan = plan_of([stage_plan((0, 1), memory_limit=1e300)], num_microbatches=10**8)
    assert plan.num_microbatches == 10**8
    made = pd2.plan(made_profile([1e-3] * 8), devices=8, memory="1GB", batch=10**7)
    assert made.batch == 10**7
