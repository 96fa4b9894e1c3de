"""The table of docs/models.md, from what survey.py found in several ways.

    python benchmarks/models/table.py threads.json processes.json bf16.json four.json ...

The first file tells how a model was captured and where its stages begin. What went wrong, was
refused or could not be built is listed below the table, with its reason.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def heading(survey: dict[str, Any]) -> str:
    """Of a column: how the models of a survey were trained."""
    kind = "processes" if survey["processes"] else "threads"
    more = [survey["precision"]] if survey["precision"] else []
    more += ["compiled"] if survey["compile"] else []
    return ", ".join([f"{survey['stages']} {kind}", *more])


def cell(outcome: dict[str, Any] | None) -> str:
    """The difference from the unsplit model, or the verdict where there is none."""
    if outcome is None:
        return ""
    if outcome["verdict"] in ("bitwise", "close"):
        return f"{outcome['difference']:.0e}" if outcome["difference"] else "0"
    return str(outcome["verdict"])


def table(surveys: list[dict[str, Any]]) -> str:
    """In Markdown, with the reasons below."""
    first = surveys[0]
    by_name = [{found["model"]: found for found in survey["models"]} for survey in surveys]
    unknown = {name for names in by_name for name in names} - set(by_name[0])
    if unknown:
        raise ValueError(f"the first survey has no {', '.join(sorted(unknown))}, others have")
    columns = ["model", "captured by", "s", *map(heading, surveys), "stages begin at"]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|---|---|---:|" + "---:|" * len(surveys) + "---|",
    ]
    for found in first["models"]:
        cells = [cell(names.get(found["model"])) for names in by_name]
        begins = f"`{found['stages']}`" if found["stages"] else ""
        row = [found["model"], found["route"], f"{found['seconds']:.1f}", *cells, begins]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", *reasons(surveys)]
    return "\n".join(lines) + "\n"


def reasons(surveys: list[dict[str, Any]]) -> list[str]:
    """Lists each reason once, with the models and the surveys that have it."""
    whose: dict[tuple[str, str, str], list[str]] = {}
    for survey in surveys:
        for found in survey["models"]:
            if found["reason"]:
                first_line = found["reason"].partition("\n")[0]
                key = (found["model"], found["verdict"], first_line)
                whose.setdefault(key, []).append(heading(survey))
    return [
        f"- {model}, {verdict} ({'; '.join(where)}): {reason}"
        for (model, verdict, reason), where in whose.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("surveys", type=Path, nargs="+", help="written by survey.py --json")
    options = parser.parse_args()
    print(table([json.loads(path.read_text()) for path in options.surveys]), end="")


if __name__ == "__main__":
    main()
