"""Small changes of inputs: of JSON trees, of lines of text, and of bytes.

What parsers stumble over is put in on purpose: numbers at the edges of their types, numbers of
thousands of digits, a million nested lists, names that come twice, halves of Unicode characters.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

_NUMBERS = (0, 1, 2, 3, 7, 100, 10**9, 10**20, 10**400, 0.5, 1e-320, 1e308, -0.0)
_EDGES = (2**31, 2**32, 2**53, 2**62, 2**63, 2**64)
_STRINGS = (
    "",
    "$tensor",
    "$dict",
    "x" * 1000,
    "\ud800",
    "\0",
    "nan",
    "1e999",
    "2bw",
    "a.b",
    "../a",
)
_OBJECTS = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[0]", '{"":0}', '{"$float":"nan"}'),
    *('{"$tuple":[1]}', '{"$tensor":"t"}', '{"$array":"t"}', '{"$dict":[[1,2]]}'),
    *('{"$counter":[["a",1]]}', '{"$float":1}', '{"$float":"x"}', '{"$tuple":1}', '{"$dict":1}'),
    *(
        '{"$array":"x"}',
        '{"$dict":[[[],1]]}',
        '{"$dict":[1]}',
        '{"$tensor":[]}',
        '{"$no":1}',
        '{"$tensor":"x"}',
    ),
    *('{"$float":"1","a":1}', '{"a":1,"$float":"1"}', '{"$counter":[[1,"a"]]}'),
)
_RAW = (
    *("NaN", "-Infinity", "1e999", "-1e999", "9" * 4300, "9" * 4301, "-0", "1E400", "01", "1."),
    *('{"a":1,"a":2}', '"\\ud800"', '"\\x"', "[" * 300 + "]" * 300, "[" * 950 + "]" * 950, ""),
    *('{"a":' * 240 + "1" + "}" * 240, "[[", "]", ",", "tru", "\t", "/**/", '"', "\\"),
)
"""What no tree of Python's makes ``json.dumps`` write."""

_BYTES = (
    *(b"\0", b"\xff", b"\xff" * 8, b"\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b"\r\n", b"-"),
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"#", b"2147483648", b"-2147483649", b"9" * 30),
)
_PLACE = "\x01raw\x01"
_WRITTEN_PLACE = json.dumps(_PLACE)


def any_number(random: Random) -> int | float:
    """A number from the edges of some type."""
    match random.randrange(3):
        case 0:
            return random.choice(_NUMBERS)
        case 1:
            return random.choice(_EDGES) * random.choice((1, -1)) + random.randrange(-2, 2)
        case _:
            return random.randrange(-3, 20)


def _near(random: Random, value: Any) -> Any:
    """Another value, often of the same kind."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and random.random() < 0.7:
        if random.random() < 0.5:
            return any_number(random)
        if isinstance(value, int):
            return value + random.choice((-1, 1))
        return value * random.choice((0.5, 1 + 1e-9, -1, 1e200)) if math.isfinite(value) else 1.0
    if isinstance(value, str) and random.random() < 0.7:
        at = random.randrange(len(value) + 1)
        return random.choice((value[:at], value + value, value[:at] + "\u00e9" + value[at:], ""))
    if random.random() < 0.3:
        return [value] * random.randrange(4)
    if random.random() < 0.4:
        return json.loads(random.choice(_OBJECTS))
    return random.choice(_STRINGS if random.random() < 0.5 else _NUMBERS)


def change_tree(random: Random, tree: Any) -> Any:
    """Changes one place of a JSON tree; gives the tree, which may be another object."""
    place, parent, key = tree, None, None
    while isinstance(place, (dict, list)) and place and random.random() < 0.9:
        parent = place
        key = (
            random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
        )
        place = place[key]
    if parent is None:
        return json.loads(random.choice(_OBJECTS)) if random.random() < 0.05 else tree
    kind = random.randrange(10)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        name = random.choice((*_STRINGS, "a", "0", "#", "$x"))
        if isinstance(parent, dict):
            parent[name] = parent.pop(key) if random.random() < 0.5 else place
        else:
            parent.insert(random.randrange(len(parent) + 1), place)
    elif kind == 2:
        parent[key] = _PLACE
    elif kind == 3:  # exchange with a neighbour
        other = random.choice(list(parent)) if isinstance(parent, dict) else 0
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = _near(random, place)
    return tree


def to_text(random: Random, tree: Any) -> bytes:
    """The tree as JSON, with something raw where the changes want it."""
    text = json.dumps(tree, separators=(",", ":"))
    if _WRITTEN_PLACE in text:
        raw = "[" * 10**6 if random.random() < 0.002 else random.choice(_RAW)
        text = text.replace(_WRITTEN_PLACE, raw)
    return text.encode()


def change_bytes(random: Random, data: bytes) -> bytes:
    """Flips, removes, repeats or puts in some bytes at one place."""
    at = random.randrange(len(data) + 1)
    end = min(len(data), at + random.choice((1, 1, 2, 8, 64)))
    match random.randrange(5):
        case 0:
            if at == len(data):
                return data
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:end] + data[at:]
        case 3:
            return data[:at]
        case _:
            return data[:at] + random.choice(_BYTES) + data[at:]


def change_lines(random: Random, text: bytes) -> bytes:
    """Changes a line, or a cell between commas, or a number of a text."""
    lines = text.split(b"\n")
    row = random.randrange(len(lines))
    cells = lines[row].split(b",")
    cell = random.randrange(len(cells))
    match random.randrange(9):
        case 0:
            lines.insert(row, random.choice(lines))
        case 1:
            del lines[row]
        case 2:
            other = random.randrange(len(lines))
            lines[row], lines[other] = lines[other], lines[row]
        case 3:
            cells.insert(cell, random.choice(cells))
        case 4:
            del cells[cell]
        case 5:
            other = random.randrange(len(cells))
            cells[cell], cells[other] = cells[other], cells[cell]
        case 6:
            cells[cell] = random.choice(random.choice(lines).split(b","))
        case _:
            digits = [at for at, byte in enumerate(cells[cell]) if 48 <= byte < 58]
            if digits:
                at = random.choice(digits)
                new = str(any_number(random)).encode() if random.random() < 0.3 else b"%d" % at
                cells[cell] = cells[cell][:at] + new + cells[cell][at + 1 :]
            elif cells[cell]:
                cells[cell] += random.choice((b"F", b"B", b"I", b"W", b"U", b":", b"-", b" "))
    if lines and row < len(lines) and len(cells) and lines[row].split(b",") != cells:
        lines[row] = b",".join(cells) if random.random() < 0.95 else b"-"
    return b"\n".join(lines)
