"""README and guide are short, and so are their sentences and those of docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.build.test_rooms import ROOT

README = ROOT / "README.md"
GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
PLAIN = (
    "docs/trainer.md",
    "docs/checkpoints.md",
    "docs/schedules.md",
    "docs/which_optimizer.md",
    "docs/exactness.md",
    "docs/tutorial.md",
    "docs/gpu.md",
    "docs/extending.md",
    "docs/gradient_hooks.md",
    "docs/replica_sync.md",
    "docs/torch_compile.md",
    "docs/wheels.md",
    "docs/scale.md",
    "docs/related.md",
    "docs/models.md",
    "docs/design/engine.md",
    "examples/README.md",
    "examples/tour.md",
    "docs/planner.md",
)
"""Further pages whose sentences are counted; they may be as long as they need."""
PAGES = [README, *GUIDE, *(ROOT / name for name in PLAIN)]
MOST_WORDS = 25


def texts(page: str) -> Iterator[str]:
    """Paragraphs, items and cells without code, links' targets and pictures."""
    page = re.sub(r"(?s:```.*?```)|(?<=\n\n)(?: {4}.*\n+)+", "", page)
    page = re.sub(r"`[^`]*`", "code", page)
    page = re.sub(r"\]\([^)]*\)", "]", page).replace("*", "")
    paragraph: list[str] = []
    for line in [*page.splitlines(), ""]:
        if not line or line[0] in "|#" or line.lstrip().startswith("- "):
            yield " ".join(paragraph)
            paragraph = []
        if line.startswith("|"):
            yield from line.split("|")
        elif line:
            paragraph.append(line.lstrip("#- "))


def long_sentences(page: str) -> list[str]:
    sentences = [s for text in texts(page) for s in re.split(r"(?<=[.!?])\s+", text)]
    return [s for s in sentences if len(re.findall(r"\w[\w'.,-]*", s)) > MOST_WORDS]


def test_a_long_sentence_is_found() -> None:
    long = " ".join(["word"] * 26)
    page = f"# A title\n\nShort. {long}.\n{long} and\n`{long}` end.\n\n| {long} |\n\n    {long}\n"
    assert len(long_sentences(page)) == 3
    assert len(long_sentences(f"Code:\n\n    {long}\n    {long}\n\n**Bold.** {long}.\n")) == 1
    assert long_sentences("\n".join([" ".join(["word"] * 25) + "."] * 2)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_long(page: Path) -> None:
    assert long_sentences(page.read_text("utf-8")) == []


def test_pages_are_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 130
    assert {p.name: n for p in GUIDE if (n := len(p.read_text("utf-8").splitlines())) > 120} == {}


@pytest.mark.parametrize("page", GUIDE, ids=lambda path: path.name)
def test_a_page_of_the_guide_begins_with_code(page: Path) -> None:
    assert re.match(r"# .+\n\n```python\n", page.read_text("utf-8"))


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def long_clauses(docstring: str) -> list[str]:
    """What is long between two ends of a sentence, semicolons or colons; no code, no formula."""
    text = re.sub(r"(?m)^(>>>|\.\.\.) .*$|(?<=\n\n)(?: {4}.* = .*\n+)+", "", docstring)
    text = re.sub(r"``[^`]*``", "code", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*[\w*, ]+: )", text)
    clauses = [c for part in parts for c in re.split(r"(?<=[.!?;:])\s+", " ".join(part.split()))]
    return [c for c in clauses if len(re.findall(r"\w[\w'.,-]*", c)) > MOST_WORDS]


def test_a_long_clause_of_a_docstring_is_found() -> None:
    long = " ".join(["word"] * 26)
    assert len(long_clauses(f"Short.\n\n{long}.\n\nArgs:\n    x: {long}\n")) == 2
    assert long_clauses(f"Short; ``{long}``:\n\n    x = {long}\n\n>>> {long}\n") == []


@pytest.mark.parametrize("room", sorted({p.parent for p in (ROOT / "pipedream2bw").rglob("*.py")}))
def test_no_clause_of_a_docstring_is_long(room: Path) -> None:
    for path in sorted(room.glob("*.py")):
        for docstring in docstrings(path.read_text("utf-8")):
            assert long_clauses(docstring) == [], path.name
