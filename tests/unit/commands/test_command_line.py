"""The command line, run in process and once as a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2
from pipedream2bw.__main__ import main

SMALL = ["--stages", "2", "--microbatches", "2"]


def small_run(forward: float = 1.0) -> list[pd2.Event]:
    """What ``draw --schedule 2bw`` with the sizes above simulates."""
    run = pd2.simulate("2bw", num_stages=2, num_microbatches=2, forward=forward)
    return run.events


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, lines: int = 1) -> str:
    """What a bad input gets: one line, or a grid of actions below it."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == lines
    assert captured.err.startswith("pipedream2bw")
    return captured.err


def test_a_schedule_by_name_is_drawn_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "draw", "--schedule", "2bw", *SMALL, "--width", "80")
    assert out == pd2.draw_text(small_run(), width=80, unit="forwards") + "\n"


def test_times_and_sizes_reach_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        *("draw", "--schedule", "interleaved_2bw", "--stages", "4", "--microbatches", "6"),
        *("--stages-per-rank", "2", "--batches", "2", "--forward", "2", "--backward", "5"),
        *("--latency", "0.25", "--update", "1.5", "--recompute", "3"),
        *("--width", "300"),
    )
    sizes: dict[str, Any] = {"num_stages": 4, "num_microbatches": 6, "stages_per_rank": 2}
    times: dict[str, Any] = {"forward": 2.0, "backward": 5.0, "recompute": 3.0}
    times |= {"latency": 0.25, "update": 1.5}
    run = pd2.simulate("interleaved_2bw", **sizes, **times, num_batches=2)
    assert out == pd2.draw_text(run.events, width=300) + "\n"


def test_a_backward_may_be_given_in_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(
        capsys,
        *("draw", "--schedule", "2bw_split", *SMALL, "--width", "200", "--batches", "2"),
        *("--forward", "1", "--input-grad", "3", "--weight-grad", "0.5"),
    )
    run = pd2.simulate(
        "2bw_split",
        num_stages=2,
        num_microbatches=2,
        forward=1.0,
        input_grad=3.0,
        weight_grad=0.5,
        num_batches=2,
    )
    assert out == pd2.draw_text(run.events, width=200) + "\n"


def test_times_are_in_forwards_unless_the_forward_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = ("draw", "--schedule", "2bw", *SMALL, "--width", "80")
    assert "0.5 forwards" in printed(capsys, *draw)
    # The backward is twice as long whatever the forward is.
    in_seconds = printed(capsys, *draw, "--forward", "0.01")
    assert "a column: 5 ms" in in_seconds
    assert in_seconds.splitlines()[:2] == printed(capsys, *draw).splitlines()[:2]


def test_a_schedule_file_is_drawn_as_its_schedule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text(str(pd2.make_schedule("2bw", 2, 2)), encoding="utf-8")
    by_name = printed(capsys, "draw", "--schedule", "2bw", *SMALL, "--width", "80")
    assert printed(capsys, "draw", "--schedule-file", str(path), "--width", "80") == by_name
    assert printed(capsys, "draw", "--schedule-file", str(path), *SMALL, "--width", "80") == by_name

    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n", encoding="utf-8")
    by_name = printed(capsys, "draw", "--schedule", "1f1b", *SMALL, "--width", "80")
    assert printed(capsys, "draw", "--schedule-file", str(path), "--width", "80") == by_name


def test_recorded_events_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    events = small_run(forward=0.7)
    pd2.write_events(events, tmp_path / "run.json")
    out = printed(capsys, "draw", "--events", str(tmp_path / "run.json"), "--width", "70")
    assert out == pd2.draw_text(events, width=70) + "\n"


@pytest.mark.parametrize(
    ("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_pictures_are_written_by_suffix(
    suffix: str, beginning: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    assert printed(capsys, "draw", "--schedule", "2bw", *SMALL, "-o", str(path)) == ""
    assert path.read_bytes().startswith(beginning)


def test_a_picture_says_what_its_times_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    printed(capsys, "draw", "--schedule", "2bw", *SMALL, "-o", str(path))
    assert "<!-- forwards of a microbatch -->" in path.read_text(encoding="utf-8")
    printed(capsys, "draw", "--schedule", "2bw", *SMALL, "--forward", "1", "-o", str(path))
    assert "<!-- seconds -->" in path.read_text(encoding="utf-8")


def test_a_format_counts_more_than_the_suffix(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draw = ("draw", "--schedule", "2bw", *SMALL)
    for form in ("text", "trace", "events"):
        path = tmp_path / f"{form}.png"
        assert printed(capsys, *draw, "--format", form, "-o", str(path)) == ""
    assert (tmp_path / "text.png").read_text(encoding="utf-8").startswith("stage 0 |F0")
    assert "traceEvents" in json.loads((tmp_path / "trace.png").read_text())
    assert pd2.read_events(tmp_path / "events.png") == small_run()
    pytest.importorskip("matplotlib")
    assert printed(capsys, *draw, "--format", "pdf", "-o", str(tmp_path / "picture")) == ""
    assert (tmp_path / "picture").read_bytes().startswith(b"%PDF")


def test_an_illegal_schedule_is_shown_with_its_grid_and_the_place_marked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1B1,1F1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=">1B1<") as raised:
        pd2.load_schedule(path)
    expected = f"pipedream2bw: {str(raised.value).rstrip()}\n"
    assert (
        refused(capsys, "draw", "--schedule-file", str(path), lines=expected.count("\n"))
        == expected
    )


def test_a_typo_in_a_schedule_is_named_by_file_line_and_column(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "schedule.txt"
    text = str(pd2.make_schedule("2bw", 2, 2))
    path.write_text(text.replace("1F0,1B0,1F1", "1F0,1b0,1F1", 1), encoding="utf-8")
    line = path.read_text().splitlines().index("1F0,1b0,1F1,1B1,1U1") + 1
    shown = refused(capsys, "draw", "--schedule-file", str(path))
    assert f"{path}: line {line}, column 5: " in shown
    assert '"1b0"' in shown


def test_traces_and_texts_are_written_by_suffix(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, text = tmp_path / "run.json", tmp_path / "run.txt"
    assert printed(capsys, "draw", "--schedule", "2bw", *SMALL, "-o", str(trace)) == ""
    pd2.write_trace(small_run(), tmp_path / "expected.json")
    assert json.loads(trace.read_text()) == json.loads((tmp_path / "expected.json").read_text())

    wide = ("--width", "70", "-o", str(text))
    assert printed(capsys, "draw", "--schedule", "2bw", *SMALL, *wide) == ""
    drawn = pd2.draw_text(small_run(), width=70, unit="forwards")
    assert text.read_text(encoding="utf-8") == drawn + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("paint", "invalid choice: 'paint'"),
        ("draw", "--schedule --schedule-file --events is required"),
        ("draw --schedule 3bw --stages 2 --microbatches 2", 'schedule: "3bw": the known schedules'),
        ("draw --schedule 2bw --stages 2", "num_microbatches missing, schedule: '2bw'"),
        (
            "draw --schedule 2bw --stages 4 --microbatches 2",
            "num_microbatches: 2, num_stages: 4: 2bw needs num_microbatches >= num_stages",
        ),
        (
            "draw --schedule 2bw --stages 2 --microbatches x",
            "--microbatches/--num-microbatches: invalid int value: 'x",
        ),
        ("draw --schedule 2bw --stages 0 --microbatches 2", "num_stages: 0, it must be at least 1"),
        (
            "draw --schedule looped_bfs --stages 4 --microbatches 2 --stages-per-rank 0",
            "stages_per_rank: 0, it must be at least 1",
        ),
        ("draw --schedule 2bw --stages 2 --microbatches 2 --batches 0", "num_batches: 0, it must"),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 --forward -1",
            "forward[0]: -1: a cost must be",
        ),
        ("draw --schedule 2bw --stages 2 --microbatches 2 --backward nan", "nan: a cost must be"),
        ("draw --schedule 2bw --stages 2 --microbatches 2 --width 9", "width: 9, the rows' names"),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 -o run.gif",
            "-o: run.gif, suffix: '.gif': it must be one of .txt, .png,",
        ),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 -o run.png --width 100",
            "--width: 100, format: png: only text",
        ),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 --format svg",
            "--format: svg, -o is missing: only text goes to the terminal",
        ),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 --format gif",
            "--format: invalid choice: 'gif'",
        ),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 --backward 2 --input-grad 1",
            "backward: 2.0, input_grad: 1.0, weight_grad: None: give backward alone",
        ),
        (
            "draw --schedule 2bw --stages 2 --microbatches 2 --latency -1",
            "latency[0]: -1: a cost must be finite",
        ),
        ("draw --events run.json --latency 1", "--latency: 1.0, --events: run.json: a recorded"),
        ("draw --schedule 2bw --events run.json", "--events: not allowed with argument --schedule"),
        ("draw --events run.json --stages 4", "--stages: 4, --events: run.json: a recorded run"),
        (
            "draw --events run.json --stages-per-rank 1",
            "--stages-per-rank: 1, --events: run.json: a recorded run",
        ),
        ("draw --events missing.json", "missing.json"),
        ("draw --events bad", "bad: it is not JSON"),
        ("draw --events empty.json", "events: 0, a picture needs at least 1"),
        ("draw --events empty.json -o x.json", "events: 0, a trace needs at least 1"),
        ("draw --events empty.json -o x.png", "events: none to draw"),
        ("draw --schedule-file missing", "missing"),
        (
            "draw --schedule-file bad",
            'line 1, column 1: expected an action like 2F0, found "hello"',
        ),
        ("draw --schedule-file good --stages 3", "num_stages: 3, of the given schedule: 1"),
        ("draw --schedule-file good -o missing/x.txt", "missing/x.txt"),
        ("schedules --stages 3", "unrecognized arguments: --stages 3"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("hello", encoding="utf-8")
    Path("good").write_text("0F0,0B0", encoding="utf-8")
    pd2.write_events([], "empty.json")
    before = sorted(Path.cwd().iterdir())
    assert message in refused(capsys, *arguments.split())
    assert sorted(Path.cwd().iterdir()) == before


def test_the_list_has_every_schedule_with_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "schedules")
    assert max(map(len, shown.splitlines())) <= 100
    _, _, *lines = re.sub(r"\n +", " ", shown).splitlines()
    rules = {name: rule.strip() for name, rule in (line.split(maxsplit=1) for line in lines)}
    assert list(rules) == pd2.schedule_names()
    assert rules["2bw"] == "num_microbatches >= num_stages; stages_per_rank = 1"
    assert rules["2bw_eager"].startswith("num_microbatches >= 2 * num_stages - 1; ")
    assert rules["pipedream"].startswith("num_microbatches = 1; ")
    assert rules["interleaved_2bw"] == (
        "num_microbatches a multiple of the ranks; "
        "stages_per_rank * num_microbatches > (stages_per_rank + 1) * ranks - 2; "
        "any stages_per_rank"
    )
    assert rules["looped_bfs"] == "any num_microbatches; any stages_per_rank"
    assert rules["chimera"] == "num_stages even; num_microbatches even; stages_per_rank = 1"


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipedream2bw", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(pd2.__file__).parent.parent,
        env={**os.environ, "COLUMNS": "60"},
        timeout=120,
    )


def test_the_module_runs_as_a_process() -> None:
    bad = run_module("draw", "--schedule", "2bw", "--stages", "2", "--microbatches", "1")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == (
        "pipedream2bw: num_microbatches: 1, num_stages: 2: 2bw needs num_microbatches >= "
        "num_stages\n"
    )


def test_without_a_command_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "exit codes:" in printed(capsys)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pipedream2bw {pd2.__version__}\n"


def test_the_guide_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/guide/inspect.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ pipedream2bw (.*?)\n(.*?)```", page, re.S)
    assert len(blocks) == 1
    for command, picture in blocks:
        assert printed(capsys, *command.split(), "--width", "100") == picture
