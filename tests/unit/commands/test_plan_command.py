"""``pipedream2bw plan``: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import pipedream2bw as pd2
from pipedream2bw.__main__ import main
from pipedream2bw._C import planned_schedules
from pipedream2bw.planner.commands.plan import parse_topology
from pipedream2bw.planner.planning.plan import Alternative
from pipedream2bw.planner.planning.planner import SCHEDULES
from tests.samples.plans import frozen_stage, plan_of, stage_plan

GIB = 2.0**30
MODULE = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.zeros(1, 64)
    return {"model": model, "loss_fn": nn.functional.mse_loss, "example_args": (x,), "target": x}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a module with a model is."""
    (tmp_path / "planned_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planned_model", raising=False)
    return tmp_path


NEEDED = ("--model", "planned_model:build", "--dry", "v100", "--memory", "16GiB")
ASKED = ("plan", *NEEDED, "--devices", "4", "--batch", "32")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a bad input gets: one line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("pipedream2bw")
    return captured.err


def by_hand() -> pd2.Plan:
    stages = [
        stage_plan((4 * i, 4 * i + 4), devices=(i, i + 2), message=0.25e-3 if i == 0 else 0.0)
        for i in range(2)
    ]
    first = dataclasses.replace(stages[0], recompute=1e-3, recomputed=("4.1", "4.2"))
    second = dataclasses.replace(stages[1], recomputed=())
    other = Alternative(
        schedule="1f1b",
        width=1,
        num_stages=4,
        stages_per_rank=1,
        microbatch_rows=2,
        num_microbatches=8,
        recompute="stages",
        seconds_per_batch=0.2,
        rows_per_second=80.0,
        price_per_hour=0.0,
        peak_bytes=3 * GIB,
        lost_by="the bubble is larger",
    )
    return plan_of(
        [first, second], width=2, num_microbatches=4, alternatives=(other,), price_per_hour=12.5
    )


def test_a_model_is_planned_printed_saved_and_drawn(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    pytest.importorskip("matplotlib")
    out = printed(capsys, *ASKED, "-o", "plan.json", "--picture", "plan.png")
    plan = pd2.Plan.load(folder / "plan.json")
    assert plan.num_devices <= 4
    assert plan.batch == 32
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert plan.bound_by in out
    assert printed(capsys, "show", "plan.json") == out
    # The same from a saved profile.
    assert main(["profile", *NEEDED[:4], "-o", "profile.json"]) == 0
    capsys.readouterr()
    again = printed(capsys, "plan", "--profile", "profile.json", *NEEDED[4:], *ASKED[-4:])
    assert again == out


def test_memory_schedules_and_topology_reach_the_planner(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    printed(
        capsys,
        *(*ASKED, "--schedules", "1f1b,gpipe", "--optimizer", "sgd", "-o", "plan.json"),
        *("--topology", "servers:2,inside=100GB/s,outside=1kB/s,outside_latency=1s"),
    )
    plan = pd2.Plan.load("plan.json")
    assert plan.schedule in ("1f1b", "gpipe")
    assert all(stage.state_bytes == 0 for stage in plan.stages)
    # Nothing is worth a second's latency.
    assert {device // 2 for stage in plan.stages for device in stage.devices} == {0}
    tight = refused(capsys, *ASKED[:5], "--memory", "20kB", "--devices", "4", "--batch", "32")
    assert "memory" in tight


def test_types_with_memory_of_their_own_need_no_other(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    types = ("--type", "v100:2,memory=1GiB", "--type", "t4:1,throughput=0.5,memory=2GiB")
    asked = ("plan", *NEEDED[:4], "--batch", "32", *types)
    told = printed(capsys, *asked)
    assert told == printed(capsys, *asked, "--memory", "1kB")
    assert printed(capsys, *asked, "--table").splitlines()[0] == "rows a second of the best plan"


def test_every_option_reaches_the_planner(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pd2.Calibration(1.0, 2.0**30).save(folder / "calibration.json")
    printed(
        capsys,
        *(*ASKED, "--schedules", "2bw, 1f1b", "--recompute", "stages", "-o", "plan.json"),
        *("--width", "2", "--num-stages", "2", "--calibration", "calibration.json"),
    )
    plan = pd2.Plan.load("plan.json")
    assert plan.schedule in ("2bw", "1f1b")
    assert (plan.width, plan.num_stages, plan.recompute) == (2, 2, [True, True])
    assert {stage.memory_limit for stage in plan.stages} == {15 * GIB}
    told = refused(capsys, *ASKED, "--precision", "bf16")
    assert "precision: 'bf16', trained parameters of the profiled model: torch.float32" in told


def test_shares_and_gradients_of_16_bits_are_asked_for_and_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--width", "2", "--num-stages", "2", "--schedules", "2bw")
    whole = printed(capsys, *ASKED, *sizes)
    shared = printed(capsys, *ASKED, *sizes, "--shard-state")
    assert "1/2 on each replica" in shared
    assert "a replica" not in whole
    told = refused(capsys, *ASKED, "--gradient-dtype", "bf16")
    assert "'bf16', it must be a dtype of torch, like bfloat16" in told
    told = refused(capsys, *ASKED, "--gradient-dtype", "bfloat16")
    assert "gradient_dtype: torch.bfloat16, precision: None: it must be 'bf16'" in told


def test_the_least_price_or_memory_is_found_on_the_command_line(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    servers = ("--topology", "servers:2,inside=100GB/s,outside=100GB/s")
    mesh = ("--topology", "mesh:2x2,row=100GB/s,column=100GB/s")
    for topology in ((), servers, mesh):
        priced = (*ASKED, "--objective", "cost", "--price", "2.5", "-o", "plan.json", *topology)
        assert "price: " in printed(capsys, *priced)
        plan = pd2.Plan.load("plan.json")
        assert plan.price_per_hour == 2.5 * plan.num_devices
    assert "prices: none: give DeviceTypes with one, or --price" in refused(
        capsys, *ASKED, "--objective", "cost"
    )
    peaks = []
    for slack in ("0", "10"):
        printed(capsys, *ASKED, "--objective", "memory", "--slack", slack, "-o", "plan.json")
        peaks.append(pd2.Plan.load("plan.json").peak_bytes)
    assert peaks[1] < peaks[0]


def test_the_help_tells_what_is_chosen_among(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = "".join(capsys.readouterr().out.split())
    assert f"of{','.join(planned_schedules())};default:{','.join(SCHEDULES)}" in out


def test_a_saved_plan_is_drawn_and_takes_no_options_of_another_one(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    pytest.importorskip("matplotlib")
    by_hand().save("plan.json")
    printed(capsys, "show", "plan.json", "--picture", "plan.svg")
    assert Path("plan.svg").read_bytes().startswith(b"<?xml")
    told = refused(capsys, "show", "plan.json", "--optimizer", "adamw")
    assert "unrecognized arguments: --optimizer adamw" in told


@pytest.mark.parametrize("option", [("--rows", "1"), ("--dry", "v100")])
def test_a_saved_profile_takes_no_options_of_a_measurement(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    told = refused(capsys, "plan", "--profile", "p.json", *ASKED[5:], *option)
    assert f"{option[0]}: " in told
    assert "--profile: p.json: a profile is measured already" in told


def test_a_missing_matplotlib_is_noticed_before_a_model_is_profiled(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked = [each.replace("planned_model", "missing_module") for each in ASKED]
    assert "needs matplotlib" in refused(capsys, *asked, "--picture", "plan.png")
    assert "missing_module" in refused(capsys, *asked)


def test_a_plan_as_text_tells_times_memory_reason_and_alternatives() -> None:
    out = str(by_hand())
    for words in (
        *("2bw", "4 microbatches of 2 rows", "12 ms a batch", "bubble 5.0 %", "12.50 for an hour"),
        *("0 to 3", "4 to 7", "layer4", "0, 2", "1, 3", "1 ms (2 blocks)", "250 us", "100 us"),
        *("at its peak, GiB", "2.00", "1.00", "0.50", "5.50", "16.00 GiB", "34 %"),
        *("1f1b", "1 x 4", "8 of 2", "stages", "200 ms", "3.00 GiB", "1: the bubble is larger"),
        "bound by: stage 0 computes all the time",
    ):
        assert words in out, words
    assert max(map(len, out.splitlines())) <= 100


def test_a_devices_memory_is_that_of_all_its_stages() -> None:
    parts = [frozen_stage((i, i + 1), (5 + i) * GIB, devices=(i % 2,)) for i in range(4)]
    plan = plan_of(parts, schedule="interleaved", stages_per_rank=2, num_microbatches=2)
    rows = str(plan).partition("at its peak")[2].splitlines()
    for row, stages, peak in ((rows[2], "0, 2", "12.00"), (rows[3], "1, 3", "14.00")):
        assert stages in row
        assert peak in row  # 5 + 7 and 6 + 8


BAD: list[tuple[tuple[str, ...], str]] = [
    (("plan", "--profile", "p.json"), "arguments are required: --batch"),
    (
        ("plan", "--devices", "2", "--memory", "1GiB", "--batch", "4"),
        "--model --profile is required",
    ),
    ((*ASKED, "--profile", "p.json"), "--profile: not allowed with argument --model"),
    (("plan", *NEEDED, "--devices", "4", "--batch", "none"), "--batch: invalid int value"),
    ((*ASKED, "--memory", "16GBs"), "16GBs"),
    (("plan", *NEEDED[:4], *ASKED[-4:]), "--memory: None, --type: None: give it, or each its"),
    (
        ("plan", *NEEDED[:4], "--batch", "4", "--type", "v100:2,memory=1GiB", "--type", "t4:1"),
        "--memory: None, --type: ['v100:2,memory=1GiB', 't4:1']: give it, or each its memory=",
    ),
    ((*ASKED, "--picture", "plan.gif"), "--picture: plan.gif, suffix: '.gif'"),
    ((*ASKED, "--dry", "v1000"), "--dry: 'v1000', known: "),
    ((*ASKED, "--rows", "1,x"), "--rows/--microbatch-rows: '1,x'"),
    ((*ASKED, "--schedules", "3bw"), "3bw"),
    ((*ASKED, "--objective", "fun"), "fun"),
    ((*ASKED, "--optimizer", "none"), "none"),
    ((*ASKED, "--devices", "0"), "devices: 0"),
    ((*ASKED, "--topology", "ring:4"), "--topology: 'ring', known: servers, mesh"),
    ((*ASKED, "--topology", "servers:2,inside=1GB/s"), "--topology: outside is missing"),
    ((*ASKED, "--topology", "servers:2,inside=1GB/s,outside=1GBs"), "1GBs"),
    ((*ASKED, "--topology", "servers:2,inside=0GB/s,outside=1GB/s"), "0GB/s"),
    ((*ASKED, "--topology", "servers:a,inside=1GB/s,outside=1GB/s"), "servers:DEVICES"),
    ((*ASKED, "--topology", "mesh:4,row=1GB/s,column=1GB/s"), "mesh:ROWSxCOLUMNS"),
    ((*ASKED, "--topology", "mesh:3x2,row=1GB/s,column=1GB/s"), "3 x 2 = 6 devices, --devices: 4"),
    ((*ASKED, "--topology", "servers:2,speed=1"), "--topology: 'speed', known: inside"),
    (("show", "none.json"), "none.json"),
    (("show", "planned_model.py"), "not JSON"),
    (("show", "plan.json", "--picture", "plan.gif"), "--picture: plan.gif, suffix: '.gif'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_gets_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert message in refused(capsys, *arguments)


def test_topologies_are_clusters() -> None:
    servers = parse_topology("servers:4,inside=8Gbit/s,outside=1GB/s,inside_latency=2s", 8)
    assert (servers.topology, servers.sizes, servers.num_devices) == ("servers", (4,), 8)
    assert servers.links == ((2.0, 1e9), (0.0, 1e9))
    mesh = parse_topology("mesh:2x3,row=2GB/s,column=1GB/s,column_latency=1s", 6)
    assert (mesh.topology, mesh.sizes, mesh.num_devices) == ("mesh", (2, 3), 6)
    assert mesh.links == ((0.0, 2e9), (1.0, 1e9))
