"""Schedules of one's own: text, CSV and files, and what torch.distributed.pipelining reads."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as stock

import pipedream2bw as pd2
from tests.references.stock_orders import StageForOrder, dual_pipe_v, of_torch, zbv
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, make_pipeline
from tests.samples.models import TASKS


def compute_only(schedule: pd2.Schedule) -> list[list[str]]:
    return list(csv.reader(io.StringIO(schedule.to_csv())))


@pytest.mark.parametrize(("d", "v", "m"), [(4, 2, 4), (4, 2, 6), (6, 3, 4), (6, 2, 6), (8, 2, 8)])
def test_interleaved_is_torchs_action_by_action(d: int, v: int, m: int) -> None:
    p = d // v
    stages = [StageForOrder(chunk * p, d, p) for chunk in range(v)]
    theirs = stock.ScheduleInterleaved1F1B(stages, m, loss_fn=lambda a, b: a)  # type: ignore
    assert compute_only(pd2.make_schedule("interleaved", d, m, v)) == of_torch(
        theirs.pipeline_order
    )


@pytest.mark.parametrize(
    ("d", "v", "m"), [(4, 1, 8), (4, 2, 2), (4, 2, 4), (4, 2, 6), (6, 3, 4), (6, 2, 6), (8, 2, 8)]
)
def test_interleaved_zero_bubble_is_torchs_action_by_action(d: int, v: int, m: int) -> None:
    p = d // v
    stages = [StageForOrder(chunk * p, d, p) for chunk in range(v)]
    theirs = stock.ScheduleInterleavedZeroBubble(stages, m, loss_fn=lambda a, b: a)  # type: ignore
    assert compute_only(pd2.make_schedule("interleaved_zero_bubble", d, m, v)) == of_torch(
        theirs.pipeline_order
    )


@pytest.mark.parametrize(("d", "v", "m"), [(4, 2, 4), (6, 3, 2)])
def test_looped_bfs_does_torchs_actions_with_backwards_in_microbatch_order(
    d: int, v: int, m: int
) -> None:
    p = d // v
    stages = [StageForOrder(chunk * p, d, p) for chunk in range(v)]
    theirs = of_torch(
        stock.ScheduleLoopedBFS(stages, m, loss_fn=lambda a, b: a).pipeline_order  # type: ignore
    )
    for ours, row in zip(
        compute_only(pd2.make_schedule("looped_bfs", d, m, v)), theirs, strict=True
    ):
        assert sorted(ours) == sorted(row)
        assert [name for name in ours if "F" in name] == [name for name in row if "F" in name]


@pytest.mark.parametrize(("d", "m"), [(2, 3), (4, 4), (4, 7)])
def test_1f1b_is_torchs_action_by_action(d: int, m: int) -> None:
    theirs = of_torch(stock.Schedule1F1B(StageForOrder(0, d, d), m)._get_pipeline_order())  # type: ignore
    ours = compute_only(pd2.make_schedule("1f1b", d, m))
    assert ours[:-1] == theirs[:-1]
    # torch's order numbers the last rank's forwards from 1; its kinds are right.
    assert [name[1] for name in ours[-1]] == [name[1] for name in theirs[-1]]


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_torch_loads_our_csv_and_we_load_what_it_dumps(name: str, v: int, tmp_path: Path) -> None:
    d, m, p = 4, 4, 4 // v
    ours = pd2.make_schedule(name, d, m, v)
    path = tmp_path / "ours.csv"
    path.write_text(ours.to_csv())
    stages = [StageForOrder(chunk * p, d, p) for chunk in range(v)]
    runtime = stock.PipelineScheduleMulti(stages, m, loss_fn=lambda a, b: a)  # type: ignore
    runtime._load_csv(str(path))
    assert of_torch(runtime.pipeline_order) == compute_only(ours)
    dumped = tmp_path / "theirs.csv"
    runtime._dump_csv(str(dumped))
    loaded = pd2.load_schedule(dumped)
    assert compute_only(loaded) == compute_only(ours)
    assert loaded.placement == ours.placement


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 3), (2, 1), (4, 8), (4, 7), (4, 3)])
def test_torchs_zbv_loads_and_trains_as_the_unsplit_model(
    p: int, m: int, merged: bool, tmp_path: Path
) -> None:
    d = 2 * p
    theirs = zbv(p, m)
    if merged:  # I with its W next to it is a whole backward
        rows = theirs.pipeline_order.items()
        theirs.pipeline_order = {rank: stock._merge_bw(list(row)) for rank, row in rows}
    path = tmp_path / "zbv.csv"
    theirs._dump_csv(str(path), format="compute_only")
    schedule = pd2.load_schedule(path)
    assert schedule.placement == [*range(p), *reversed(range(p))]
    assert compute_only(schedule) == of_torch(theirs.pipeline_order)
    assert any("B" in name for row in compute_only(schedule) for name in row) == merged
    task = TASKS["skips" if d == 4 else "mlp"]
    batches = task.batches([2 * m] * 4)
    want = by_oracle(task, batches, m, schedule="zbv")
    assert_same(by_pipeline(task, batches, d, m, schedule=path), want)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 8)])
def test_torchs_dual_pipe_v_loads_and_trains_as_the_unsplit_model(
    p: int, m: int, tmp_path: Path
) -> None:
    d = 2 * p
    theirs = dual_pipe_v(p, m)
    path = tmp_path / "dual_pipe_v.csv"
    theirs._dump_csv(str(path), format="compute_only")
    assert f"(0F{d - 1};{d - 1}B{p - 1})OVERLAP_F_B" in path.read_text()
    schedule = pd2.load_schedule(path)
    assert schedule.placement == [*range(p), *reversed(range(p))]
    assert compute_only(schedule) == of_torch(theirs.pipeline_order)
    task = TASKS["skips" if d == 4 else "mlp"]
    batches = task.batches([2 * m] * 4)
    want = by_oracle(task, batches, m, schedule="zbv")
    assert_same(by_pipeline(task, batches, d, m, schedule=path), want)


def test_the_example_of_a_schedule_file_is_torchs_dual_pipe_v() -> None:
    schedule = pd2.load_schedule(Path("examples/schedules/dual_pipe_v.csv"))
    assert (schedule.num_stages, schedule.num_microbatches) == (8, 10)
    assert compute_only(schedule) == of_torch(dual_pipe_v(4, 10).pipeline_order)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_zbv_idles_as_little_as_torch_says(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    text = "\n".join(",".join(row) for row in of_torch(zbv(p, m).pipeline_order)) + "\n"
    simulation = pd2.simulate(text, forward=1.0, input_grad=1.0, weight_grad=1.0)
    assert simulation.period == 2 * 3 * m


def test_a_schedule_that_goes_on_has_no_csv() -> None:
    with pytest.raises(ValueError, match=r"2bw: rank 0 has 2 actions in its epilogue.*drain"):
        pd2.make_schedule("2bw", 2, 2).to_csv()


BY_HAND = """\
name: one ahead
stages: 2
microbatches: 3
delay: 1
placement: 0,1
versions: 2,2
[prologue]
0F0,0F1,0F2,0B0
1F0,1B0,1F1,1B1,1F2,1B2,1U2
[steady]
0F0,0B-2,0F1,0B-1,0U-1,0F2,0B0
1F0,1B0,1F1,1B1,1F2,1B2,1U2
[epilogue]
0B1,0B2,0U2
-
"""


@pytest.mark.parametrize("form", ["text", "path", "schedule"])
def test_a_schedule_of_ones_own_trains_as_it_says(form: str, tmp_path: Path) -> None:
    task, m = TASKS["skips"], 3
    batches = task.batches([2 * m] * 5)
    given: Any = BY_HAND
    if form == "path":
        given = tmp_path / "schedule.txt"
        given.write_text(BY_HAND)
    elif form == "schedule":
        given = pd2.load_schedule(BY_HAND)
    want = by_oracle(task, batches, m, schedule="2bw")
    assert_same(by_pipeline(task, batches, 2, m, schedule=given), want)
    with make_pipeline(task, 2, m, batches[0], schedule=given) as pipe:
        assert pipe.schedule == "one ahead"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("0F2,0B0\n1F0", "0F2,0B9\n1F0"), r"(?s)microbatch numbers.*found 0B9.*>0B9<"),
        (("0F1,0F2,0B0\n1F0,1B0", "0F1,0G2,0B0\n1F0,1B0"), r"line 8, column 9: .*\"0G2\""),
        (("[steady]\n0F0", "[steady]\n5F0"), r"expected a stage from 0 to 1, found 5F0"),
        (("microbatches: 3", "microbatches: 4"), r"num_microbatches: 3, of the given schedule: 4"),
        (("versions: 2,2", "versions: 1,2"), r"versions alive never above num_versions"),
    ],
)
def test_a_bad_schedule_is_refused(changed: tuple[str, str], message: str) -> None:
    assert changed[0] in BY_HAND
    task = TASKS["skips"]
    text = BY_HAND.replace(*changed)
    if "4" in changed[1]:
        text = str(pd2.make_schedule("2bw", 2, 4))
    with pytest.raises(ValueError, match=message):
        make_pipeline(task, 2, 3, task.batches([6])[0], schedule=text)


# The input gradients of a batch before the update of the batch before.
EARLY_INPUT_GRADIENTS = """\
name: early I
stages: 1
microbatches: 2
delay: 1
placement: 0
versions: 2
[prologue]
0F0,0I0,0F1,0W0,0I1
[steady]
0F0,0I0,0W-1,0U-1,0F1,0W0,0I1
[epilogue]
0W1,0U1
"""


def test_no_gradient_is_added_before_its_weight_half() -> None:
    task, m = TASKS["gpt"], 2
    batches = task.batches([2 * m] * 5)
    want = by_oracle(task, batches, m, schedule="2bw")
    assert_same(by_pipeline(task, batches, 1, m, schedule=EARLY_INPUT_GRADIENTS), want)


def test_forwards_of_the_batch_before_are_run() -> None:
    late = BY_HAND.replace("1F0,1B0,1F1,1B1,1F2,1B2,1U2\n[steady]", "1F0,1B0,1F1,1B1\n[steady]")
    late = late.replace(
        "1F0,1B0,1F1,1B1,1F2,1B2,1U2\n[epilogue]", "1F-1,1B-1,1U-1,1F0,1B0,1F1,1B1\n[epilogue]"
    )
    late = late.replace("\n-\n", "\n1F2,1B2,1U2\n")
    late = late.replace("0F2,0B0\n1F0", "0F2\n1F0").replace(
        "0F0,0B-2,0F1,0B-1,0U-1,0F2,0B0", "0F0,0B-3,0F1,0B-2,0F2,0B-1,0U-1"
    )
    late = late.replace("[epilogue]\n0B1", "[epilogue]\n0B0,0B1")
    assert pd2.load_schedule(late).forward_batches_behind == 1
    task, m = TASKS["skips"], 3
    batches = task.batches([2 * m] * 5)
    want = by_oracle(task, batches, m, schedule="2bw")
    assert_same(by_pipeline(task, batches, 2, m, schedule=late), want)


def test_sizes_that_a_method_forbids_are_refused() -> None:
    task = TASKS["skips"]
    for options, message in (
        ({"schedule": "interleaved", "stages_per_rank": 3}, r"num_stages: 2, stages_per_rank: 3"),
        ({"schedule": "2bw", "stages_per_rank": 2}, r"stages_per_rank: 2, schedule: 2bw"),
        ({"schedule": "pipedream"}, r"num_microbatches: 3: pipedream"),
        ({"schedule": BY_HAND, "stages_per_rank": 2}, r"stages_per_rank: 2, it must be left out"),
    ):
        with pytest.raises(ValueError, match=message):
            make_pipeline(task, 2, 3, task.batches([6])[0], **options)  # type: ignore[arg-type]
