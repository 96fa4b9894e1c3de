"""Python source for one stage: a function from its input values to its output values.

The graph of the captured model is only walked when the stage is built. For each microbatch
straight-line code runs. Its modules, parameters and functions are closure variables, so that a call
costs little more than the operators in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import keyword
import linecache
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_unflatten

from .. import _C
from ..capture.attribute import Attribute, nodes_with_attributes

StageFunction = Callable[[Sequence[Any]], list[Any]]

LastUses = Mapping[fx.Node, list[str]]
"""By node the names of the values that nothing after it needs."""

Write = Callable[["Writer", list[fx.Node], LastUses], Iterable[str]]

_serial = itertools.count()


@dataclasses.dataclass(frozen=True)
class StageSource:
    """The code of a stage, and the attributes of the model that ``make`` binds it to."""

    text: str
    attributes: tuple[Attribute, ...]
    make: Callable[..., StageFunction]


def generate(
    title: str,
    *,
    nodes: Iterable[fx.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    attribute_of: Callable[[fx.Node], Attribute],
    cloned_inputs: Iterable[str] = (),
    sizes: Mapping[str, tuple[str, int]] | None = None,
    draws_of: Callable[[fx.Node], tuple[int, int] | None] = lambda node: None,
    write: Write | None = None,
) -> StageSource:
    """Writes and compiles the function of the stage that computes ``nodes``.

    Args:
        title: the stage, in tracebacks.
        inputs, outputs: names of nodes; an output node among ``nodes`` gives its value under its
            own name.
        attribute_of: returns what a get_attr or call_module node refers to.
        cloned_inputs: inputs that are copied first, as the stage writes to them in place.
        sizes: values that are sizes of an input: name -> (input, dimension).
        draws_of: gives the number of a node's first draw of random numbers and how many it may
            make; None: it makes none.
        write: writes the nodes, if not as statements one after another.
    """
    nodes, writer = list(nodes), Writer(attribute_of, draws_of)
    last_use = _last_uses(nodes, set(outputs))
    variable = writer.variable
    body: list[str] = []
    if inputs:
        body.append(f"{', '.join(map(variable, inputs))}, = inputs")
    for name in cloned_inputs:
        body.append(f"{variable(name)} = {variable(name)}.clone()")
    for name, (value, dimension) in (sizes or {}).items():
        body.append(f"{variable(name)} = {variable(value)}.size({dimension})")
    body += (write or Writer.statements)(writer, nodes, last_use)
    body.append(f"return [{', '.join(map(variable, outputs))}]")
    lines = [
        f"def make({writer.parameters()}):",
        "    def stage(inputs):",
        *(f"        {line}" for line in body),
        "    return stage",
    ]
    return writer.compiled(title, "\n".join(lines) + "\n")


class Writer:
    """Writes nodes as statements, and keeps the names of what these refer to."""

    def __init__(
        self,
        attribute_of: Callable[[fx.Node], Attribute],
        draws_of: Callable[[fx.Node], tuple[int, int] | None],
    ) -> None:
        self._attribute_of = attribute_of
        self._draws_of = draws_of
        self._attributes: dict[tuple[str, str, Any], tuple[str, Attribute]] = {}
        self._globals: dict[str, Any] = {}
        self._global_names: dict[int, str] = {}
        self._variables: dict[str, str] = {}

    def parameters(self) -> str:
        """The names of the attributes that have been referred to."""
        return ", ".join(name for name, _ in self._attributes.values())

    def statements(self, nodes: Iterable[fx.Node], last_use: LastUses) -> Iterator[str]:
        """The lines that compute the nodes."""
        for node in nodes:
            draws = self._draws_of(node)
            if draws is not None:
                yield f"{self._constant(_C.number_draws)}{draws}"
            yield f"{self.variable(node.name)} = {self._expression(node)}"
            dead = [self.variable(name) for name in last_use.get(node, ())]
            if dead:
                # Frees activations that autograd does not keep.
                yield f"del {', '.join(dead)}"

    def compiled(self, title: str, text: str) -> StageSource:
        # A file name of its own, known to linecache, so that tracebacks show the generated lines.
        filename = f"<pipedream2bw {title} #{next(_serial)}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        exec(compile(text, filename, "exec"), self._globals)
        make = self._globals["make"]
        weakref.finalize(make, linecache.cache.pop, filename, None).atexit = False
        attributes = tuple(attribute for _, attribute in self._attributes.values())
        return StageSource(text, attributes, make)

    def _expression(self, node: fx.Node) -> str:
        if node.op == "output":
            return self._output(node)
        if node.op == "call_module":
            return f"{self._attribute(node)}({self._call_arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            receiver = self._argument(node.args[0])
            rest = self._call_arguments(node.args[1:], node.kwargs)
            return f"{receiver}.{node.target}({rest})"
        assert node.op == "call_function", node.op
        if node.target is getattr and len(node.args) == 2 and not node.kwargs:
            return f"{self._argument(node.args[0])}.{node.args[1]}"
        function = self._constant(node.target)
        return f"{function}({self._call_arguments(node.args, node.kwargs)})"

    def _output(self, node: fx.Node) -> str:
        spec = node.meta.get("out_spec")
        if spec is None:
            return self._argument(node.args[0])
        leaves: list[Any] = list(node.args[0])  # type: ignore[arg-type]
        if spec.is_leaf():
            return self._argument(leaves[0])
        return f"{self._constant(tree_unflatten)}({self._argument(leaves)}, {self._constant(spec)})"

    def _call_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        parts = [self._argument(item) for item in args]
        for key, item in kwargs.items():
            if key.isidentifier() and not keyword.iskeyword(key):
                parts.append(f"{key}={self._argument(item)}")
            else:
                parts.append(f"**{{{key!r}: {self._argument(item)}}}")
        return ", ".join(parts)

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return self._attribute(value)
            return self.variable(value.name)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(type(value))}({', '.join(map(self._argument, value))})"
        if isinstance(value, tuple):
            return f"({''.join(self._argument(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, dict):
            pairs = (f"{self._argument(k)}: {self._argument(v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"{self._constant(slice)}({', '.join(map(self._argument, parts))})"
        if value is None or value is Ellipsis or type(value) in (bool, int, str):
            return repr(value)
        return self._constant(value)

    def variable(self, name: str) -> str:
        """The variable of a value."""
        # The prefix keeps values apart from functions, constants and attributes.
        if name not in self._variables:
            readable = f"v_{name}" if name.isidentifier() else f"v{len(self._variables)}"
            self._variables[name] = readable
        return self._variables[name]

    def _constant(self, value: Any) -> str:
        if isinstance(value, torch.device):
            return self.add_attribute(Attribute("device", str(value), value))
        known = self._global_names.get(id(value))
        if known is None:
            label = getattr(value, "__name__", type(value).__name__)
            label = "".join(char if char.isalnum() else "_" for char in str(label))
            known = f"g{len(self._global_names)}_{label}"
            self._global_names[id(value)] = known
            self._globals[known] = value
        return known

    def _attribute(self, node: fx.Node) -> str:
        attribute = self._attribute_of(node)
        name = self.add_attribute(attribute)
        # A buffer is bound as its owner's dictionary.
        return (
            f"{name}[{attribute.target.rpartition('.')[2]!r}]"
            if attribute.kind == "buffer"
            else name
        )

    def attributes_of(self, nodes: Iterable[fx.Node]) -> list[Attribute]:
        """What the nodes refer to in the model."""
        referring = itertools.chain.from_iterable(map(nodes_with_attributes, nodes))
        return [self._attribute_of(node) for node in dict.fromkeys(referring)]

    def add_attribute(self, attribute: Attribute) -> str:
        """The name of an attribute; what is made for the stage is made for each place anew."""
        part = id(attribute.value) if attribute.kind == "made" else None
        key = (attribute.kind, attribute.target, part)
        if key not in self._attributes:
            label = "".join(char if char.isalnum() else "_" for char in attribute.target)
            self._attributes[key] = f"a{len(self._attributes)}_{label}", attribute
        return self._attributes[key][0]


def _last_uses(nodes: list[fx.Node], outputs: set[str]) -> LastUses:
    uses: dict[fx.Node, list[str]] = {}
    seen = set(outputs)
    for node in reversed(nodes):
        names = [
            used.name
            for used in dict.fromkeys(node.all_input_nodes)
            if used.op != "get_attr" and used.name not in seen
        ]
        if node.name not in seen:
            names.append(node.name)  # computed for nobody: in-place writes, asserts
            seen.add(node.name)
        seen.update(names)
        if names:
            uses[node] = names
    return uses
