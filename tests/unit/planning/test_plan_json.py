"""Plans are read back equal, and refused where they were changed; their parts agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw._C import planned_schedules, planned_shape
from tests.references.plan_checks import check_plan
from tests.samples.plans import plan_of, stage_plan
from tests.unit.planning.test_planner import made_plan, made_profile


def test_a_saved_plan_is_read_back_equal(tmp_path: Path) -> None:
    plan = made_plan()
    plan.save(tmp_path / "plan.json")
    assert pd2.Plan.load(tmp_path / "plan.json") == plan
    assert plan.split == [stage.begins_at for stage in plan.stages[1:]]
    assert plan.num_devices <= 4
    assert len(plan.alternatives) == 5


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made_plan(recompute=["blocks", "none"], memory="18MB").save(path)
    text = path.read_bytes()
    for place in range(0, len(text), 7):
        changed = bytearray(text)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"plan.json: "):
            pd2.Plan.load(path)
    path.write_text(json.dumps(json.loads(text), indent=2))
    with pytest.raises(ValueError, match="do not begin with a sum"):
        pd2.Plan.load(path)


@pytest.mark.parametrize("recompute", ["none", "stages", "blocks"])
@pytest.mark.parametrize("schedule", planned_schedules())
def test_every_kind_of_plan_agrees_with_itself(schedule: str, recompute: str) -> None:
    found = 0
    for num_stages in (1, 2, 4, 8):
        for memory in ("16MB", "24MB", "48MB", "1GB"):
            sizes = {"num_stages": num_stages, "memory": memory, "devices": 8}
            if schedule == "pipedream":  # of one microbatch
                sizes["batch"] = 2
            try:
                check_plan(made_plan(schedules=[schedule], recompute=[recompute], **sizes))
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
    assert shape.num_versions == made.num_versions[:d]
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
