"""What no save writes, with sums that are right, neither holds nor stops ``resume()``."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import MANIFEST
from tests.runs.saved import saved

X = torch.arange(64.0).reshape(8, 8).sin()
TIB = 2**40


@pytest.fixture
def run(tmp_path: Path) -> Iterator[pd2.Checkpointer]:
    """A run with checkpoints of batches 1 and 2 in the folder."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = pd2.PipelineModule(
        model, nn.functional.mse_loss, num_stages=2, num_microbatches=2, example_args=(X,)
    )
    opt = pd2.PipelineOptimizer(torch.optim.Adam(pipe.parameters()))
    with pipe, pd2.Checkpointer(tmp_path, pipe, opt, every=1, preempt=()) as ckpt:
        for _ in range(2):
            pipe.train_step(X, target=X)
            opt.step()
            ckpt.step()
        pipe.flush()
        for saving in ckpt.under_way:
            saving.wait()
        yield ckpt


def write_manifest(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((place / MANIFEST).read_bytes())
    del document["sum"]
    change(document)
    write_text(place, json.dumps(document))


def write_text(place: Path, text: str) -> None:
    rest = text[1:].encode()
    (place / MANIFEST).write_bytes(b'{"sum": "%08x",' % zlib.crc32(rest) + rest)


def write_tensors(
    place: Path, change: Callable[[dict[str, Any]], object], size: int = 0, length: int = 0
) -> None:
    """Changes the header of the optimizer's file, and what the manifest says of that file.

    Args:
        size: of the whole file, with a hole; 0: as it was.
        length: that the file claims for its header.
    """
    (path,) = place.glob("optimizer-*.safetensors")
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    start = (length or len(text)).to_bytes(8, "little") + text
    path.write_bytes(start + data[end:])
    if size:
        os.truncate(path, size)

    def tell(manifest: dict[str, Any]) -> None:
        of_file = manifest["files"][path.name]
        known = of_file["tensors"]
        of_file["tensors"] = {n: known.get(n, 0) for n in header if n != "__metadata__"}
        of_file |= {"header_sum": zlib.crc32(start), "size": path.stat().st_size}

    write_manifest(place, tell)


def entry(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **fields}


def large(header: dict[str, Any]) -> None:
    header["0.weight/x"] = entry(shape=[TIB], data_offsets=[0, 4 * TIB])


def many(header: dict[str, Any]) -> None:
    header.update((f"{number}.weight/x", entry()) for number in range(2**18))


def other(**fields: Any) -> Callable[[Path], None]:
    return lambda place: write_tensors(place, lambda h: h.update({"0.weight/x": entry(**fields)}))


def nested(place: Path) -> None:
    write_text(place, '{"files": ' + "[" * 10**5 + "]" * 10**5 + "}")


def nested_below_the_reader(place: Path) -> None:
    inner: Any = 0
    for _ in range(300):
        inner = [inner]
    write_manifest(place, lambda document: document.update(schedulers=inner))


IMPOSSIBLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "terabytes": (lambda place: write_tensors(place, large, 5 * TIB), "the others are holes"),
    "a header of terabytes": (
        lambda place: write_tensors(place, len, 2**36, 2**35),
        "bytes of the header: 34359738368, a file must have at most 100000000",
    ),
    "a manifest of terabytes": (
        lambda place: os.truncate(place / MANIFEST, 4 * TIB),
        "more than 268435456 bytes",
    ),
    "too many tensors": (
        lambda place: write_tensors(place, many),
        "tensors: 2621.., a file must have at most 262144",
    ),
    "nesting": (nested, "it is not JSON|lists and objects in each other"),
    "nesting below": (nested_below_the_reader, "lists and objects in each other: more than 200"),
    "a dtype": (other(dtype="F4"), "dtype: 'F4', it must be one of"),
    "a negative size": (other(shape=[-1]), "it must be a tensor whose bytes are in the file"),
    "bytes before": (other(shape=[1], data_offsets=[-4, 0]), "must be a tensor whose bytes are"),
    "bytes after": (other(shape=[1000], data_offsets=[10**6, 10**6 + 4000]), "whose bytes are"),
    "fewer bytes": (other(shape=[2], data_offsets=[0, 4]), "must be a tensor whose bytes are in"),
    "no sizes": (other(shape=None), "shape: None, it must be a list"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_resume_takes_the_older_checkpoint(
    name: str, run: pd2.Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, text = IMPOSSIBLE[name]
    place = saved(tmp_path, 2)
    change(place)
    start = time.monotonic()
    assert run.resume() == 1
    assert time.monotonic() - start < 20
    assert (place / "corrupt").exists()
    (told,) = [r.getMessage() for r in caplog.records if "next older" in r.getMessage()]
    assert place.name in told
    assert re.search(text, told), told
