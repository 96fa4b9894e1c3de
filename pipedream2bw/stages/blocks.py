"""Named modules that are recomputed one by one: their layers, and code that calls these as one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import fx, nn

from ..capture.attribute import Attribute
from ..capture.captured import Captured, layer_name, modules_around
from .codegen import LastUses, Write, Writer
from .recompute import Block


def blocks_of_layers(
    captured: Captured, root: nn.Module, names: Sequence[str], *, training: bool
) -> dict[fx.Node, str]:
    """Finds the layers in the named modules, each with the outermost named module around it.

    Raises:
        ValueError: there is no such module, or in training no layer known to be in it.
    """
    known = {name for name, _ in root.named_modules(remove_duplicate=False)}
    for name in names:
        if name not in known or not name:
            raise ValueError(f"recompute: {name!r} is no module of the model")
    blocks: dict[fx.Node, str] = {}
    for node in captured.layer_nodes:
        places = [*modules_around(node), layer_name(node)]
        for name in sorted(names, key=len):
            if any(place == name or place.startswith(f"{name}.") for place in places):
                blocks[node] = name
                break
    found = set(blocks.values())
    for name in names if training else ():
        if not any(name == block or name.startswith(f"{block}.") for block in found):
            raise ValueError(
                f"recompute: no layer of the captured model is in {name!r}: it computes nothing, "
                "or a module around it is called as a whole"
            )
    return blocks


def written_as_blocks(block_of: Mapping[fx.Node, str]) -> Write:
    """Writes a stage whose nodes are statements, and those of a block a function for its runner."""

    def write(writer: Writer, nodes: list[fx.Node], last_use: LastUses) -> Iterator[str]:
        numbers = itertools.count()
        for block, members in itertools.groupby(nodes, block_of.get):
            if block is None:
                yield from writer.statements(members, last_use)
            else:
                inside = list(members)
                make = functools.partial(Block, block, writer.attributes_of(inside))
                runner = writer.add_attribute(Attribute("made", block, make))
                yield from _block(writer, inside, last_use, f"block{next(numbers)}", runner)

    return write


def _block(
    writer: Writer, nodes: list[fx.Node], last_use: LastUses, function: str, runner: str
) -> Iterator[str]:
    inside = {node.name for node in nodes}
    used = dict.fromkeys(
        value.name
        for node in nodes
        for value in node.all_input_nodes
        if value.op != "get_attr" and value.name not in inside
    )
    dead = [name for node in nodes for name in last_use.get(node, ())]
    given = ", ".join(writer.variable(node.name) for node in nodes if node.name not in dead)
    arguments = [writer.variable(name) for name in used]
    # The caller holds the arguments: what dies inside is what was made inside.
    own = {node: [name for name in last_use.get(node, ()) if name in inside] for node in nodes}
    yield f"def {function}({', '.join(arguments)}):"
    for line in writer.statements(nodes, own):
        yield f"    {line}"
    yield f"    return [{given}]"
    yield f"[{given}] = {runner}({', '.join([function, *arguments])})"
    gone = [writer.variable(name) for name in dead if name not in inside]
    if gone:
        yield f"del {', '.join(gone)}"
