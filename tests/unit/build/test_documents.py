"""The documents name files, headings and rooms that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipedream2bw as pd2
from tests.unit.build.test_rooms import CSRC, MAY_INCLUDE, PACKAGE, ROOT

FOLDERS = ("docs", "benchmarks", "examples")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in ROOT.glob(f"{f}/**/*.md"))])


def prose(document: Path) -> str:
    """The text without its blocks of code."""
    return re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.S)


def anchors(document: Path) -> set[str]:
    """What links to the headings end with, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)]+)\)", prose(document)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_names_of_files_lead_somewhere(document: Path) -> None:
    assert list(broken_links(document)) == []
    named = re.findall(r"`([\w./]+/[\w./]+\.(?:py|cpp|h|cu|md|json|toml))`", prose(document))
    places = (ROOT, PACKAGE, CSRC, document.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_room_has_a_section_of_the_design() -> None:
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs/design").glob("*.md"))
    headings = re.findall(r"^## (.+)$", text, re.M)
    described = {
        name.strip() for heading in headings for name in heading.partition(" (")[0].split(",")
    }
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms | {folder for folder in MAY_INCLUDE if "kernels/" not in folder} <= described


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    described = set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", pages, re.M))
    raised = {name for name, value in vars(pd2.errors).items() if _is_an_error(value)}
    assert set(pd2.__all__) - {"errors"} <= described
    assert {f"pipedream2bw.errors.{name}" for name in raised} <= described


def _is_an_error(value: object) -> bool:
    is_raised = isinstance(value, type) and issubclass(value, BaseException)
    return is_raised and value.__module__ == pd2.errors.__name__ and value.__name__[0] != "_"


def test_every_document_has_a_place_on_the_site() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    trees = "\n".join(re.findall(r"```\{toctree\}(.*?)```", index, re.S))
    places = re.findall(r"^(?:.*<)?([\w./-]+)>?$", trees, re.M)
    listed = {(ROOT / "docs" / f"{place}.md").resolve() for place in places}
    assert {path for path in DOCUMENTS if "results" not in path.parts} - listed == {
        ROOT / "docs/index.md"
    }
