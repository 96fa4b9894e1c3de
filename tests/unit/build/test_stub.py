"""_C.pyi, by which mypy checks what Python passes to C++, says what the extension takes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipedream2bw import _C

STUB = Path(__file__).resolve().parents[3] / "pipedream2bw" / "_C.pyi"


def stub_functions() -> Iterator[tuple[str, Any, ast.FunctionDef]]:
    """Each function and method of the stub: its name, and what the extension has of that name."""
    for node in ast.parse(STUB.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, getattr(_C, node.name), node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    made = getattr(getattr(_C, node.name), method.name)
                    yield f"{node.name}.{method.name}", made, method


def parameters(documentation: str) -> list[str]:
    """Names and "*" from the signature that pybind11 writes: "f(self: X, *, a: int) -> Y"."""
    signature = documentation.split("\n")[0].rpartition(" -> ")[0].partition("(")[2]
    return re.findall(r"(?:^|, )(\*(?=, )|\w+(?=: ))", signature)


def names_in(body: list[ast.stmt]) -> list[str]:
    """The public functions, classes, methods and fields of a piece of the stub."""
    names = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            names.append(node.name)
    return names


def test_the_stub_has_the_names_of_the_extension() -> None:
    stub = ast.parse(STUB.read_text("utf-8"))
    assert set(names_in(stub.body)) == {name for name in vars(_C) if not name.startswith("_")}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            made, names = getattr(_C, node.name), names_in(node.body)
            assert set(names) == {name for name in vars(made) if not name.startswith("_")}
            if issubclass(made, tuple):
                assert made._fields == tuple(names)


def test_parameters_of_the_stub_have_the_extensions_names_and_order() -> None:
    seen = 0
    for name, made, stub in stub_functions():
        if isinstance(made, property) or stub.name in ("__enter__", "__exit__"):
            continue
        given = [argument.arg for argument in stub.args.args]
        given += ["*"] if stub.args.kwonlyargs else []
        given += [argument.arg for argument in stub.args.kwonlyargs]
        has = parameters(made.__doc__)
        unnamed = [argument for argument in has if argument.startswith("arg")]
        if not unnamed:
            assert given == has, name
            seen += 1
        assert len(given) == len(has), name
    assert seen > 50
