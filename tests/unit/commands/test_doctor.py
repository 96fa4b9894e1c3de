"""``pipedream2bw doctor``: what it finds, and what it warns of."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from pipedream2bw.__main__ import main
from pipedream2bw.commands import doctor


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["doctor", *arguments]) == code
    return capsys.readouterr().out


def test_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys)
    assert f"torch          {torch.__version__}\n" in out
    assert "backends       gloo" in out
    assert out.startswith("training works here\n")


def test_is_json_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(report(capsys, "--json"))
    assert found["torch"] == torch.__version__
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["problems"] == []


def test_names_packages_that_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "no_such_package", "flying")
    assert "note: no_such_package is not installed; it is needed for flying\n" in report(capsys)


def test_little_shared_memory_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = os.statvfs("/")
    little: Any = os.statvfs_result((*sizes[:1], 4096, 16384, 100, 100, *sizes[5:]))
    monkeypatch.setattr(doctor.os, "statvfs", lambda path: little)
    out = report(capsys, code=1)
    assert (
        "problem: /dev/shm has 400.00 KiB left, under 256.00 MiB: in a container raise --shm-size"
        in out
    )
    assert "training works here" not in out


def test_shared_memory_may_be_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", "/no/such/folder")
    out = report(capsys, code=1)
    assert "problem: /no/such/folder does not exist: processes exchange messages over gloo" in out
