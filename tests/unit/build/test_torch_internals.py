"""What the package relies on in torch is there, is listed, and is missed at import."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from pipedream2bw import _torch_internals
from pipedream2bw._torch_internals import AT_IMPORT, check_torch_internals
from tests.samples.torch_internals import IN_HEADERS, LATER, OF_OBJECTS

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "pipedream2bw"


def found(name: str) -> Any:
    parts = name.split(".")
    value: Any = torch
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:number]))
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", [*AT_IMPORT, *LATER])
def test_the_name_is_in_torch(name: str) -> None:
    found(name)


def guard_of_rows() -> Any:
    """What torch notes where code looks at an open size."""
    example = torch.zeros(3, 1)
    torch._dynamo.mark_dynamic(example, 0)
    found = []

    def note(module: Any, inputs: list[Any]) -> Any:
        found.extend(inputs[0].node.shape_env.guards)
        return module.forward

    torch.compile(lambda x: x + 1 if x.shape[0] > 2 else x, backend=note)(example)
    return found[0]


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    return {
        "guard": guard_of_rows(),
        "module": nn.Linear(1, 1),
        "operator": torch.ops.aten.add.Tensor,
        "optimizer": optimizer,
        "function": torch.compiler.disable(lambda: None),
        "world": distributed_c10d._world,
    }


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_the_object_has_the_attribute(name: str, objects: dict[str, Any]) -> None:
    kind, *attributes = name.split(".")
    value = objects[kind]
    for attribute in attributes:
        value = getattr(value, attribute)


@pytest.mark.parametrize("name", IN_HEADERS)
def test_the_header_has_the_name_and_the_engine_uses_it(name: str) -> None:
    folder, _ = IN_HEADERS[name]
    headers = Path(torch.__file__).parent / "include" / folder
    word = re.compile(rf"\b{name}\b")
    assert any(word.search(path.read_text("utf-8")) for path in headers.glob("*.h*"))
    ours = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    assert any(word.search(path.read_text("utf-8")) for path in ours)


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def names_used(path: Path) -> Iterator[str]:
    """Names of torch with a private part, as a file imports or reads them."""
    tree = ast.parse(path.read_text("utf-8"))
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            if node.module.split(".")[0] == "torch":
                for alias in node.names:
                    known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch" and alias.asname:
                    known[alias.asname] = alias.name
    for node in ast.walk(tree):  # local names of modules, as in c10d = dist.distributed_c10d
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = dotted(node.value, known)
            if value is not None and any(map(is_private, value.split("."))):
                yield value
    yield from (name for name in known.values() if any(map(is_private, name.split("."))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value = dotted(node, known)
            if value is not None and any(map(is_private, value.split("."))):
                yield value


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        value = dotted(node.value, known)
        return None if value is None else f"{value}.{node.attr}"
    return None


def test_every_private_name_of_torch_that_is_used_is_listed() -> None:
    listed = {*AT_IMPORT, *LATER}
    unlisted = set()
    for path in PACKAGE.rglob("*.py"):
        for name in names_used(path):
            # Parts of what is listed, and what is read of it.
            if not any(
                name == each or each.startswith(f"{name}.") or name.startswith(f"{each}.")
                for each in listed
            ):
                unlisted.add(f"{path.relative_to(ROOT)}: {name}")
    assert not unlisted


def test_every_private_attribute_that_lint_allows_is_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    allowed = re.search(r"extend-ignore-names = \[(.*?)^\]", text, re.S | re.M)
    assert allowed is not None
    listed = {part for name in (*AT_IMPORT, *LATER, *OF_OBJECTS) for part in name.split(".")}
    assert set(re.findall(r'^    "(\w+)"', allowed.group(1), re.M)) <= listed | {"_ops"}


def test_the_document_lists_every_name() -> None:
    document = (ROOT / "docs" / "torch_internals.md").read_text("utf-8")
    rows = AT_IMPORT | LATER | OF_OBJECTS
    rows |= {name: why for name, (_, why) in IN_HEADERS.items()}
    for name, why in rows.items():
        assert f"| `{name}` | {why} |" in document, f"| `{name}` | {why} |"
    assert document.count("\n| `") == len(rows)


def test_a_missing_name_is_named_at_import() -> None:
    source = "import torch; del torch._C._current_graph_task_id; import pipedream2bw"
    result = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "has no torch._C._current_graph_task_id, which pipedream2bw relies on" in result.stderr


def test_the_check_takes_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(timeit.repeat(check_torch_internals, number=1, repeat=20)) < 1e-3
    monkeypatch.setitem(_torch_internals.AT_IMPORT, "torch.no_such_name", "nothing")
    with pytest.raises(ImportError, match=r"has no torch\.no_such_name.*\(nothing\)"):
        check_torch_internals()
