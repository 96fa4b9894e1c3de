"""The formats that are read from files, each with how inputs are made and what must hold of them.

An input is either read or refused by a ValueError that says something. What was read, written
again, is read as the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.encoding import decode, encode
from pipedream2bw.checkpoint.manifest import Manifest, of_bytes, read_manifest
from pipedream2bw.json_document import Document, parse_document
from pipedream2bw.schedules.load import fingerprint, load_schedule

from .mutate import change_bytes, change_lines, change_tree, to_text

CORPUS = Path(__file__).parent / "corpus"
_TENSORS = {"t": torch.ones(2), "t.t": torch.ones(2), "x": torch.ones(2, dtype=torch.bfloat16)}


class Format(NamedTuple):
    """A format.

    Attributes:
        make: an input, from the format's corpus.
        read: reads an input and checks what was read; raises ValueError if it is refused.
    """

    make: Callable[[Random, list[bytes]], bytes]
    read: Callable[[bytes], None]


def corpus_of(name: str) -> list[bytes]:
    """The committed inputs of a format, all of which are read."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def _often(random: Random) -> int:
    return random.choice((1, 1, 1, 2, 3, 8))


def _changed_json(random: Random, text: bytes) -> bytes:
    if random.random() < 0.9:
        tree = json.loads(text)
        for _ in range(_often(random)):
            tree = change_tree(random, tree)
        text = to_text(random, tree)
    if random.random() < 0.15:
        text = change_bytes(random, text)
    return text


def _make_document(random: Random, corpus: list[bytes]) -> bytes:
    return _changed_json(random, random.choice(corpus))


def _read_document(kind: type[Document]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        found = parse_document(data, kind.FORMAT, kind.VERSION).read(kind)
        again = found.to_json().encode()
        assert parse_document(again, kind.FORMAT, kind.VERSION).read(kind) == found

    return read


def _make_manifest(random: Random, corpus: list[bytes]) -> bytes:
    data = random.choice(corpus)
    if random.random() < 0.03:
        return change_bytes(random, data)
    rest = _changed_json(random, b"{" + data.partition(b",")[2]).removeprefix(b"{")
    return f'{{"sum": "{zlib.crc32(rest):08x}",'.encode() + rest


class _Held:
    """A folder that holds a manifest and nothing else."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, *names: str) -> bytes:
        return self._data


def _read_manifest(data: bytes) -> None:
    found: Manifest = read_manifest(_Held(data), "step-00000040-a")  # type: ignore[arg-type]
    assert repr(of_bytes(found.to_json().encode())) == repr(found)
    for part in found.ranks:
        for document in (part.data, part.extra, part.generators):
            _read_state(document)


def _read_state(document: Any) -> None:
    value = decode(document, _TENSORS)
    tensors: dict[str, torch.Tensor] = {}
    again = encode(value, "t", tensors)
    assert encode(decode(again, tensors), "t", {}) == again


def _make_schedule(random: Random, corpus: list[bytes]) -> bytes:
    text = random.choice(corpus)
    for _ in range(_often(random)):
        text = change_lines(random, text)
    if random.random() < 0.2:
        text = change_bytes(random, text)
    return text


def _read_schedule(data: bytes) -> None:
    found = load_schedule(data.decode() + "\n")
    assert load_schedule(str(found)) == found
    assert fingerprint(found)
    assert all(found.max_in_flight(stage) >= 1 for stage in range(found.num_stages))


FORMATS = {
    "manifest": Format(_make_manifest, _read_manifest),
    "schedule": Format(_make_schedule, _read_schedule),
    "profile": Format(_make_document, _read_document(pd2.Profile)),
}
