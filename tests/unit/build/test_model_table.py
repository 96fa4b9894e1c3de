"""docs/models.md has the table of what the surveys of public models found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.models.table import table

ROOT = Path(__file__).resolve().parents[3]
SURVEYS = ("threads", "four", "eight", "processes", "bf16", "compiled")


def survey(*found: dict[str, Any], **options: Any) -> dict[str, Any]:
    return (
        {"stages": 2, "processes": False, "precision": None, "compile": False}
        | options
        | {
            "models": [
                {"route": "fx", "seconds": 1.25, "difference": 0.0, "stages": "", "reason": ""}
                | each
                for each in found
            ]
        }
    )


def test_a_row_has_what_each_survey_found_and_reasons_are_below() -> None:
    found = table(
        [
            survey(
                {"model": "a", "verdict": "bitwise", "stages": "layers.1"},
                {"model": "b", "verdict": "close", "difference": 3e-7},
                {"model": "c", "verdict": "refused", "reason": "ValueError: no\nmore"},
            ),
            survey(
                {"model": "b", "verdict": "WRONG", "difference": 0.5},
                {"model": "c", "verdict": "refused", "reason": "ValueError: no\nless"},
                {"model": "a", "verdict": "bitwise"},
                processes=True,
                precision="bf16",
            ),
        ]
    )
    assert found.splitlines() == [
        "| model | captured by | s | 2 threads | 2 processes, bf16 | stages begin at |",
        "|---|---|---:|---:|---:|---|",
        "| a | fx | 1.2 | 0 | 0 | `layers.1` |",
        "| b | fx | 1.2 | 3e-07 | WRONG |  |",
        "| c | fx | 1.2 | refused | refused |  |",
        "",
        "- c, refused (2 threads; 2 processes, bf16): ValueError: no",
    ]


def test_the_document_has_the_table_of_the_results() -> None:
    results = ROOT / "benchmarks/results/models"
    found = table([json.loads((results / f"{name}.json").read_text()) for name in SURVEYS])
    assert (ROOT / "docs/models.md").read_text().endswith("\n" + found)
