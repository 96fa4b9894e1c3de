"""What commands check before they work, their exit codes, and their JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import pipedream2bw as pd2
from pipedream2bw.__main__ import EXIT_CODES, main
from pipedream2bw.commands.output import check_written
from tests.unit.commands.test_plan_command import by_hand, refused

MISSING_MODEL = ("--model", "no_such_module:build")
PLAN = ("plan", "--devices", "4", "--batch", "32", "--memory", "16GiB", *MISSING_MODEL)
PROFILE = ("profile", *MISSING_MODEL, "-o", "profile.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


LATER: list[tuple[tuple[str, ...], str]] = [
    ((*PLAN, "-o", "none/plan.json"), "-o: none/plan.json: there is no folder none"),
    ((*PLAN, "-o", "."), "-o: . is a folder"),
    ((*PLAN, "--picture", "none/plan.png"), "--picture: none/plan.png: there is no folder none"),
    ((*PLAN, "--topology", "ring:4"), "--topology: 'ring'"),
    ((*PLAN, "--memory", "16GBs"), "16GBs"),
    ((*PLAN, "--schedules", "3bw"), "3bw"),
    ((*PLAN, "--recompute", "all"), "all"),
    ((*PLAN, "--objective", "fun"), "fun"),
    ((*PLAN, "--optimizer", "lion"), "lion"),
    ((*PLAN, "--calibration", "none.json"), "none.json"),
    ((*PLAN, "--batch", "0"), "batch: 0"),
    ((*PLAN, "--largest-batch", "1", "--batch", "4"), "largest_batch: 1, batch: 4"),
    ((*PLAN, "--width", "0"), "width: 0"),
    ((*PLAN, "--width", "3", "--devices", "2"), "width: 3, devices: 2"),
    ((*PLAN, "--num-stages", "0"), "num_stages: 0"),
    ((*PLAN, "--rows", "0"), "microbatch_rows: 0"),
    ((*PROFILE, "--rows", "0"), "microbatch_rows: 0"),
    ((*PROFILE, "--seconds", "-1"), "seconds: -1"),
    ((*PROFILE, "--parallel", "0"), "parallel: 0"),
    ((*PROFILE[:-1], "none/profile.json"), "-o: none/profile.json: there is no folder none"),
]


@pytest.mark.parametrize(("arguments", "message"), LATER)
def test_what_can_be_checked_is_checked_before_the_model_is_looked_for(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    told = refused(capsys, *arguments)
    assert message in told
    assert "no_such_module" not in told


@pytest.mark.parametrize("arguments", [PLAN, PROFILE])
def test_then_the_model_is(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert "no_such_module" in refused(capsys, *arguments)


@pytest.mark.parametrize("key", ["model", "loss_fn", "example_args", "target"])
def test_a_missing_key_is_named_before_the_model_is_profiled(
    key: str, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"model": "object()", "loss_fn": "print", "example_args": "()", "target": "None"}
    del keys[key]
    built = ", ".join(f"{name!r}: {value}" for name, value in keys.items())
    (folder / "half_a_model.py").write_text(f"def build():\n    return {{{built}}}\n")
    monkeypatch.delitem(sys.modules, "half_a_model", raising=False)
    for command in (PLAN, PROFILE):
        asked = [each.replace("no_such_module", "half_a_model") for each in command]
        assert f"returned no {key!r}" in refused(capsys, *asked)


def test_draw_looks_for_matplotlib_and_its_folder_before_it_simulates(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = ("draw", "--schedule-file", "none.txt")
    assert "there is no folder" in refused(capsys, *none, "-o", "none/run.txt")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib" in refused(capsys, *none, "-o", "run.png")
    assert "none.txt" in refused(capsys, *none, "-o", "run.txt")


def test_a_folder_without_permission_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # which root always has
    with pytest.raises(ValueError, match=r"plan\.json: no permission to write there"):
        check_written("-o", folder / "plan.json")


def test_an_error_of_the_models_own_code_has_a_code_of_its_own(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "failing_model.py").write_text("def build():\n    raise KeyError('width')\n")
    monkeypatch.delitem(sys.modules, "failing_model", raising=False)
    asked = [each.replace("no_such_module", "failing_model") for each in PLAN]
    assert main(asked) == 3
    assert "KeyError: 'width'" in capsys.readouterr().err


def test_the_help_and_the_documents_list_the_exit_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert EXIT_CODES in capsys.readouterr().out
    document = (Path(__file__).parents[3] / "docs/reference/commands.md").read_text("utf-8")
    for line in EXIT_CODES.splitlines()[1:]:
        code, meaning = line.split(maxsplit=1)
        assert f"| {code} | {meaning} |" in document


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_a_plan_is_printed_as_the_json_that_is_saved(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    by_hand().save("plan.json")
    assert as_json(capsys, "show", "plan.json", "--json") == json.loads(
        (folder / "plan.json").read_text()
    )


def test_schedules_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "schedules", "--json")
    assert [each["name"] for each in found] == list(pd2.schedule_names())
    (v_shaped,) = (each for each in found if each["name"] == "2bw_v")
    assert v_shaped["is_v"]
    assert all(isinstance(rule, str) for rule in v_shaped["rules"])


def test_what_the_models_own_code_raises_and_prints_is_told_apart(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "failing_model.py").write_text(
        "def build():\n    print('building')\n    raise ValueError('my own')\n"
    )
    monkeypatch.delitem(sys.modules, "failing_model", raising=False)
    asked = [each.replace("no_such_module", "failing_model") for each in PLAN]
    assert main(asked) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ValueError: my own" in captured.err
    assert "building" in captured.err
