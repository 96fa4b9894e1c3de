"""The rooms of the source, and what each may use: imports and includes go one way."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "pipedream2bw"
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests"

MAY_INCLUDE = {
    "core": (),
    "core/schedule": ("core",),
    "planner/simulate": ("core/schedule",),
    "planner/partition": ("core",),
    "planner/plan": ("planner/partition", "planner/simulate"),
    "kernels": (),
    "kernels/cpu": ("kernels",),
    "kernels/grid": ("kernels",),
    "kernels/cuda": ("kernels/grid",),
    "transport": (),
    "engine": ("core", "transport"),
    "engine/channels": ("engine",),
    "engine/weights": ("engine", "kernels/cpu", "kernels/grid"),
    "engine/gradients": ("engine/weights", "engine/channels"),
    "engine/stage": ("engine/gradients",),
    "engine/update": ("engine/stage",),
    "engine/loss": ("engine",),
    "engine/run": ("engine/update", "engine/loss", "core/schedule"),
    "bindings": ("engine/run", "planner/plan"),
    "delays": ("engine/channels", "bindings"),
    "checked_device": ("engine/run",),
}
"""By folder below csrc, or below tests: the folders that its files may include from, and with them
all that those may."""

MOST_LINES_OF_A_FUNCTION = 80
MOST_POSITIONAL_PARAMETERS_OF_A_CONSTRUCTOR = 4

PYTHON = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_build_info.py")
NO_FILES_OF_OURS = {"pipedream2bw._C", "pipedream2bw._build_info"}  # the build makes them
CXX = sorted(
    path
    for root in (CSRC, TESTS / "delays", TESTS / "checked_device")
    for kind in ("*.h", "*.cpp", "*.cu", "*.cuh")
    for path in root.rglob(kind)
)


def in_includes(path: Path) -> Path:
    """How includes name a C++ file, or a folder of them."""
    return path.relative_to(CSRC if path.is_relative_to(CSRC) else TESTS)


def all_below(folder: str) -> set[str]:
    return {folder}.union(*(all_below(used) for used in MAY_INCLUDE[folder]))


def test_every_include_goes_to_a_room_below() -> None:
    wrong = []
    for path in CXX:
        folder = in_includes(path.parent).as_posix()
        allowed = all_below(folder)
        for included in re.findall(r'^#include "(.+)"', path.read_text("utf-8"), re.M):
            if Path(included).parent.as_posix() not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} includes {included}")
    assert not wrong
    assert {in_includes(path.parent).as_posix() for path in CXX} == set(MAY_INCLUDE)


KNOW_CUDA = {
    "engine/cuda_streams.cpp",
    "engine/channels/cuda_memory_sharing.cpp",
    "engine/run/cuda_graph.cpp",
    "engine/weights/cuda_passes.cpp",
}
"""The only files beside kernels that torch's headers for CUDA may be in: all others know streams
and events of any device."""


def test_few_files_know_cuda() -> None:
    known = {
        in_includes(path).as_posix()
        for path in CXX
        if re.search(r"#include [<\"](c10|ATen)/cuda/", path.read_text("utf-8"))
    }
    assert known == KNOW_CUDA


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """The package's modules that a file imports, anywhere in it, for types alone too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parts, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in modules:
                    yield name
                elif base in modules and name not in NO_FILES_OF_OURS:
                    yield base


def test_no_import_goes_in_a_circle() -> None:
    modules = {module_of(path) for path in PYTHON}
    graph = {module_of(path): set(imported(path, modules)) - {module_of(path)} for path in PYTHON}
    assert sum(map(len, graph.values())) > len(graph)  # the imports were found
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def code_lines(function: ast.FunctionDef) -> int:
    """Lines of the body: neither of the parameters nor of the docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return 1 + body[-1].end_lineno - body[0].lineno if body else 0


def cxx_functions(path: Path) -> Iterator[tuple[str, int]]:
    """The functions of a file, with their lines.

    As clang-format sets them: a definition begins and ends in the first column, or in the third in
    a class, and nothing between does.
    """
    begins = {0: 0, 2: 0}
    for number, line in enumerate(path.read_text("utf-8").split("\n")):
        indent = len(line) - len(line.lstrip())
        if (
            re.match(r"\s*(//|#|\}  //|(public|private|protected):|$)", line)
            or indent not in begins
        ):
            continue
        if line.strip() not in ("}", "};"):
            begins[indent] = number
        elif not (indent == 0 and line == "};"):  # which ends a type
            yield f"{path.relative_to(ROOT)}:{begins[indent] + 1}", number - begins[indent] - 1


def test_no_function_is_longer_than_one_can_read() -> None:
    sizes = {name: code_lines(node) for path in PYTHON for name, node in functions(path)}
    in_cxx = [function for path in CXX for function in cxx_functions(path)]
    assert len(in_cxx) > len(CXX)  # they were found
    sizes.update(in_cxx)
    assert {name for name, size in sizes.items() if size > MOST_LINES_OF_A_FUNCTION} == set()


def test_no_constructor_takes_many_arguments_by_position() -> None:
    wrong = []
    for path in PYTHON:
        for name, node in functions(path):
            given = [*node.args.posonlyargs, *node.args.args][1:]
            if node.name == "__init__" and len(given) > MOST_POSITIONAL_PARAMETERS_OF_A_CONSTRUCTOR:
                wrong.append(f"{name}: {len(given)} arguments by position")
    assert not wrong


def cxx_constructors(path: Path) -> Iterator[tuple[str, int]]:
    """The constructors that a file's classes declare, with the number of their parameters."""
    text = re.sub(r"//[^\n]*", "", path.read_text("utf-8"))
    for name in set(re.findall(r"\b(?:class|struct)\s+(\w+)[^;{}()]*\{", text)):
        # On a line of its own, unlike calls, and followed by the members' values or nothing.
        for begin in re.finditer(rf"^ *(?:explicit )?{name}\(", text, re.MULTILINE):
            depth, end, commas = 1, begin.end(), 0
            while depth:
                depth += {**dict.fromkeys("([{<", 1), **dict.fromkeys(")]}>", -1)}.get(text[end], 0)
                commas += depth == 1 and text[end] == ","
                end += 1
            yield f"{path.relative_to(ROOT)}: {name}", commas + (text[begin.end()] != ")")


def test_no_constructor_of_a_cxx_class_takes_many_arguments() -> None:
    found = [constructor for path in CXX for constructor in cxx_constructors(path)]
    assert len(found) > 100
    most = MOST_POSITIONAL_PARAMETERS_OF_A_CONSTRUCTOR
    assert [constructor for constructor in found if constructor[1] > most] == []
