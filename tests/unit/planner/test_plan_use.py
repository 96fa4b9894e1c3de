"""A pipeline is laid out as a plan says, and refuses what contradicts the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.planner.arranging import order_of
from tests.samples.plans import plan_for, plan_of, stage_plan

X, Y = torch.arange(32.0).reshape(8, 4).sin(), torch.arange(32.0).reshape(8, 4).cos()


def model(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), nn.Linear(4, 4))


def plan(**changes: Any) -> pd2.Plan:
    changes = {"num_microbatches": 4, "schedule": "1f1b", **changes}
    return plan_for(model(), changes.pop("cuts", ["2"]), (X,), **changes)


def build(**options: Any) -> pd2.PipelineModule:
    options = {"example_args": (X,), **options}
    return pd2.PipelineModule(options.pop("model", None) or model(), mse_loss, **options)


def test_the_plan_lays_the_pipeline_out(tmp_path: Path) -> None:
    made = plan(recomputed=[True, False])
    made.save(tmp_path / "plan.json")
    for given in (made, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        with build(plan=given) as pipe:
            assert pipe.schedule == "1f1b"
            assert (pipe.num_stages, pipe.num_microbatches, pipe.width) == (2, 4, 1)
            begins = [program.first_layer_name for program in pipe.session.modes.first.programs]
            assert begins == ["0", "2"]
            assert pipe.session.stages.options.recompute == [True, False]


def test_a_planned_pipeline_trains_as_one_laid_out_by_hand() -> None:
    by_hand = {
        "num_stages": 3,
        "num_microbatches": 4,
        "schedule": "1f1b",
        "split": ["1", "3"],
        "recompute": [False, True, False],
    }
    losses = []
    for options in ({"plan": plan(cuts=["1", "3"], recomputed=[False, True, False])}, by_hand):
        with build(**options) as pipe:
            opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            of_run = []
            for _ in range(4):
                of_run.append(pipe.train_step(X, target=Y))
                opt.step()
            losses.append([float(loss) for loss in of_run])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_stages_per_rank_and_names_of_blocks_come_from_the_plan() -> None:
    made = plan(
        cuts=["1", "2", "3"],
        schedule="interleaved",
        stages_per_rank=2,
        devices=[[0], [1], [0], [1]],
        recomputed=[("0",), (), ("2",), ()],
    )
    with build(plan=made) as pipe:
        assert pipe.session.schedule.placement == [0, 1, 0, 1]
        assert made.recompute == ["0", "2"]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_stages": 3}, r"num_stages: 3, of the plan: 2"),
    ({"num_microbatches": 2}, r"num_microbatches: 2, of the plan: 4"),
    ({"schedule": "2bw"}, r"schedule: '2bw', of the plan: '1f1b'"),
    ({"schedule": pd2.make_schedule("2bw", 2, 4)}, r"schedule: '2bw .*', of the plan: '1f1b "),
    ({"stages_per_rank": 2}, r"stages_per_rank: 2, of the plan: 1"),
    ({"split": ["1"]}, r"split: \['1'\], of the plan: \['2'\]"),
    ({"split": "auto"}, r"split: 'auto', of the plan: \['2'\]"),
    ({"width": 2}, r"width: 2, of the plan: 1"),
    ({"recompute": True}, r"recompute: True, of the plan: \[False, False\]"),
]


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS)
def test_what_contradicts_the_plan_is_named_with_both_values(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(plan=plan(), **given)


def test_what_says_the_same_as_the_plan_may_stay() -> None:
    same: dict[str, Any] = {
        "num_stages": 2,
        "num_microbatches": 4,
        "schedule": pd2.make_schedule("1f1b", 2, 4),
        "stages_per_rank": 1,
        "split": ("2",),
        "width": 1,
        "recompute": False,
    }
    with build(plan=plan(), **same) as pipe:
        assert pipe.num_stages == 2


def test_a_plan_of_another_model_says_what_differs() -> None:
    longer = nn.Sequential(*model(), nn.Tanh())
    with pytest.raises(ValueError, match=r"another model: it has 4 layers, Sequential has 5"):
        build(plan=plan(), model=longer)
    with pytest.raises(ValueError, match=r"shapes or dtypes .* fingerprint \w{12}, the model's: "):
        build(plan=plan(), model=model(width=5))
    renamed = plan()
    stages = (renamed.stages[0], dataclasses.replace(renamed.stages[1], begins_at="3"))
    with pytest.raises(ValueError, match=r"stage 1 begins at layer 2, which is '3' .* and '2' in"):
        build(plan=dataclasses.replace(renamed, stages=stages))


@pytest.mark.parametrize("wrong", [3, {"schedule": "2bw"}])
def test_something_else_than_a_plan_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"plan: \w+ given, it must be a Plan or the path of one"):
        build(plan=wrong)


def test_a_file_without_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json: format: "):
        build(plan=tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        build(plan=tmp_path / "none.json")


def test_replicas_of_a_plan_need_processes() -> None:
    with pytest.raises(ValueError, match=r"width: 2, processes: 1: .* --nproc-per-node 4"):
        build(plan=plan(width=2))


def test_processes_are_in_the_order_of_the_devices() -> None:
    def order(*devices: tuple[int, ...], **changes: Any) -> Any:
        stages = [stage_plan((i, i + 1), devices=each) for i, each in enumerate(devices)]
        return order_of(plan_of(stages, width=len(devices[0]), **changes))

    assert order((0, 2), (1, 3)) is None
    assert order((0, 1), (2, 3)) == [[0, 2], [1, 3]]
    assert order((1,), (0,)) == [[1, 0]]
    assert order((4,), (9,)) is None  # device 4 is process 0, 9 is 1
    assert order((9,), (4,)) == [[1, 0]]
    chunks = {"schedule": "interleaved", "stages_per_rank": 2, "num_microbatches": 2}
    assert order((1,), (0,), (1,), (0,), **chunks) == [[1, 0]]


def dry_profile(path: Path, *rows: int) -> pd2.Profile:
    profile = pd2.profile(
        model(),
        mse_loss,
        example_args=(X,),
        target=Y,
        microbatch_rows=rows,
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    profile.save(path)
    return profile


def auto(**options: Any) -> pd2.PipelineModule:
    return build(**{"num_stages": "auto", "example_target": Y, "devices": ["cpu"] * 3, **options})


def test_auto_uses_all_devices_and_keeps_to_what_is_given(tmp_path: Path) -> None:
    profile = dry_profile(tmp_path / "p.json", 1, 2)
    for options in ({"num_microbatches": 4}, {"num_microbatches": 8, "schedule": "1f1b"}, {}):
        for source in (profile, tmp_path / "p.json", str(tmp_path / "p.json")):
            with auto(profile=source, **options) as pipe:
                assert (pipe.num_stages, pipe.width) == (3, 1)
                assert pipe.schedule == options.get("schedule", "2bw")
                assert pipe.num_microbatches == options.get("num_microbatches", 4)
                opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
                losses = []
                for _ in range(4):
                    losses.append(pipe.train_step(X, target=Y))
                    opt.step()
                assert float(losses[-1]) < float(losses[0])


@pytest.mark.parametrize(
    ("given", "schedule"),
    [({}, "1f1b"), ({"schedule": "2bw"}, "2bw"), ({"update_slots": 1}, "2bw")],
)
def test_auto_has_no_delay_with_one_stage_unless_it_is_asked_for(
    given: dict[str, Any], schedule: str, tmp_path: Path
) -> None:
    with auto(profile=dry_profile(tmp_path / "p.json", 1, 2), devices=["cpu"], **given) as pipe:
        assert (pipe.num_stages, pipe.schedule) == (1, schedule)


def test_auto_measures_and_keeps_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with auto(devices=["cpu"] * 2, num_microbatches=4, profile=path) as pipe:
        assert pipe.num_stages == 2
    profile = pd2.Profile.load(path)
    assert profile.device.measured
    assert [item.rows for item in profile.microbatches] == [2]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"devices": None}, ValueError, r"num_stages: 'auto', devices: None, processes: 1"),
        ({"example_target": None}, ValueError, r"example_target: no tensor with rows"),
        ({"num_microbatches": 9}, ValueError, r"example_target: 8 rows, num_microbatches: 9"),
        ({"num_microbatches": 2}, ValueError, r"num_microbatches: 2, .*num_stages"),
        ({"split": ["1"]}, ValueError, r"split: \['1'\], num_stages: 'auto'"),
        ({"width": 0}, ValueError, r"width: 0, it must be at least 1"),
        ({"width": 2}, ValueError, r"width: 2, processes: 1"),
        ({"profile": 3}, TypeError, r"profile: 3 given, it must be a Profile or a path"),
        ({"schedule": "3bw"}, ValueError, r"3bw"),
        ({"schedule": pd2.make_schedule("2bw", 2, 4)}, ValueError, r"give a schedule's name"),
        ({"recompute": True}, ValueError, r"recompute: True, of the plan: \[False"),
        ({"model": nn.Linear(4, 4)}, ValueError, r"profile of another model"),
    ],
)
def test_auto_refuses_what_it_cannot_plan(
    options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    profile = dry_profile(tmp_path / "p.json", 1, 2, 4)
    with pytest.raises(kind, match=message):
        auto(**{"profile": profile, **options})


def test_a_plan_and_auto_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"num_stages: 'auto', of the plan: 2"):
        build(plan=plan(), num_stages="auto")
