"""Writes the types of the extension, by which mypy checks what Python passes to C++.

    python csrc/bindings/make_stub.py pipedream2bw/_C.pyi

pybind11-stubgen reads them from the signatures that pybind11 writes into docstrings; overlay.pyi
says the rest. A class that names its bases there takes the generated one's place. A function there
gives types to the parameters that it names, and to the result if it names that.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
OVERLAY = Path(__file__).with_name("overlay.pyi")
# pybind11 would convert more, but a caller is to pass a number.
NUMBERS = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
}


def generated() -> str:
    """The stub as pybind11-stubgen makes it; it ends with an error at a type without a name."""
    command = [sys.executable, "-m", "pybind11_stubgen", "pipedream2bw._C", "--exit-code"]
    # The defaults that are structs: the stub has ... for them.
    command += ["--ignore-invalid-expressions", "<pipedream2bw._C.*"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "-o", folder], check=True)
        stub = Path(folder, "pipedream2bw", "_C.pyi").read_text("utf-8")
    for converted, number in NUMBERS.items():
        stub = stub.replace(converted, number)
    return stub


def laid_over(stub: str, overlay: str) -> str:
    """The stub with what the overlay says.

    Raises:
        SystemExit: the overlay names what the stub does not have.
    """
    tree, over = ast.parse(stub), ast.parse(overlay)
    imports = [node for node in over.body if isinstance(node, ast.Import | ast.ImportFrom)]
    _lay_over(tree, [node for node in over.body[1:] if node not in imports], "")
    tree.body[1:1] = [*imports]
    return ast.unparse(tree) + "\n"


def _lay_over(below: ast.Module | ast.ClassDef, over: list[ast.stmt], path: str) -> None:
    places = {getattr(node, "name", ""): place for place, node in enumerate(below.body)}
    for node in over:
        assert isinstance(node, ast.ClassDef | ast.FunctionDef), ast.unparse(node)
        place = _found(places, node.name, path)
        made = below.body[place]
        if isinstance(node, ast.FunctionDef):
            assert isinstance(made, ast.FunctionDef), node.name
            _give_types(made, node, f"{path}{node.name}.")
        elif node.bases:
            below.body[place] = node
        else:
            assert isinstance(made, ast.ClassDef), node.name
            _lay_over(made, node.body, f"{path}{node.name}.")


def _give_types(made: ast.FunctionDef, said: ast.FunctionDef, path: str) -> None:
    parameters = {parameter.arg: parameter for parameter in _parameters(made)}
    for parameter in _parameters(said):
        if parameter.annotation is not None:
            _found(parameters, parameter.arg, path).annotation = parameter.annotation
    made.returns = said.returns or made.returns


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.args, *given.kwonlyargs, *filter(None, [given.vararg])]


def _found(named: dict[str, T], name: str, path: str) -> T:
    if name not in named:
        raise SystemExit(f"{OVERLAY.name}: {path}{name}: the extension has no such name")
    return named[name]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(laid_over(generated(), OVERLAY.read_text("utf-8")), "utf-8")
