"""How the types of the extension are made: what pybind11 says, and what the overlay says of it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "csrc" / "bindings" / "make_stub.py"
STUB = '''"""Made by a generator."""
class Row(tuple):
    def __new__(cls, first): ...
class Stage:
    def __init__(self, *, index: int, hook: typing.Callable = None) -> None: ...
    def step(self, number: int, *args) -> int: ...
def find(name: str) -> Stage: ...
'''


@pytest.fixture(scope="module")
def make_stub() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_stub", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_overlay_gives_types_to_what_it_names_and_leaves_all_else(
    make_stub: ModuleType,
) -> None:
    overlay = '''"""What is left open."""
import torch
class Row(NamedTuple):
    first: int
class Stage:
    def __init__(self, hook: Callable[[int], None] | None): ...
    def step(self, *args: object): ...
def find() -> Stage | None: ...
'''
    made = make_stub.laid_over(STUB, overlay)
    assert (
        made
        == ast.unparse(
            ast.parse(
                '''"""Made by a generator."""
import torch
class Row(NamedTuple):
    first: int
class Stage:
    def __init__(self, *, index: int, hook: Callable[[int], None] | None = None) -> None: ...
    def step(self, number: int, *args: object) -> int: ...
def find(name: str) -> Stage | None: ...
'''
            )
        )
        + "\n"
    )


@pytest.mark.parametrize(
    ("overlay", "name"),
    [
        ("class Stages: ...", "Stages"),
        ("class Stage:\n    def steps(self): ...", "Stage.steps"),
        ("class Stage:\n    def step(self, count: int): ...", "Stage.step.count"),
        ("def find(names: str): ...", "find.names"),
    ],
)
def test_an_overlay_of_what_is_not_there_is_refused(
    make_stub: ModuleType, overlay: str, name: str
) -> None:
    with pytest.raises(SystemExit, match=rf"overlay.pyi: {name}: the extension has no such name"):
        make_stub.laid_over(STUB, f'"""What is left open."""\n{overlay}')
