"""Tensors in files of the safetensors format, written in one pass and read one by one.

A file is the length of its header (8 bytes, little-endian), the header (JSON: for each name the
dtype, the shape and where its bytes begin and end), and the bytes. The safetensors package reads
these files; it neither writes a tensor at a time, nor sums, nor reads through fsspec.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import zlib
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..json_document import Field, parse_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

TENSORS = ".safetensors"
"""Ends the names of such files."""

OTHER_SUM = "its sum is another than when it was written"

_CHUNK_BYTES = 16 * 2**20
_MOST_HEADER_BYTES = 100_000_000
"""As the safetensors package has it."""
_MOST_TENSORS = 2**18
"""In a file: they are compared within seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedFile:
    """A file of tensors, as a manifest lists it.

    Attributes:
        kind: what is in it: ``model``, ``older-1`` (the weights one version before), ...,
            ``older-0`` (the newest, where they are no roundings of the masters in ``model``),
            ``optimizer``, ``rank``.
        rank: the process that wrote it.
        size: in bytes.
        data_size: that of its tensors alone.
        header_sum: CRC-32 of its header, length included; all other bytes are in a tensor's.
        tensors: CRC-32 of each tensor's bytes.
    """

    kind: str
    rank: int
    size: int
    data_size: int
    header_sum: int
    tensors: Mapping[str, int]


class Entry(NamedTuple):
    """A tensor in a file.

    Attributes:
        begin, end: where its bytes are in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def check_saveable(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError if a file cannot hold the tensor."""
    is_wrapper = is_traceable_wrapper_subclass(tensor)  # whose values are in other tensors
    if is_wrapper or tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        what = f" in a {type(tensor).__name__}" if is_wrapper else ""
        raise TypeError(
            f"{name}: a tensor of {tensor.dtype}, {tensor.layout}{what}: checkpoints hold strided "
            f"tensors of {', '.join(str(dtype) for dtype in _NAMES)}"
        )


def write_tensors(
    file: IO[bytes], tensors: Mapping[str, torch.Tensor], kind: str = "model", rank: int = 0
) -> SavedFile:
    """Writes tensors, one after the other; those of a device come to the CPU one at a time.

    Raises:
        TypeError: a file cannot hold one of them; nothing has been written.
        ValueError: there are too many.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers look there
    place = 0
    for name, tensor in tensors.items():
        check_saveable(name, tensor)
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor of 8 bytes is aligned
    _check_room(len(tensors), len(text))
    start = len(text).to_bytes(8, "little") + text
    file.write(start)
    sums = {}
    for name, tensor in tensors.items():
        sums[name] = 0
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        for first in range(0, len(data), _CHUNK_BYTES):
            chunk = data[first : first + _CHUNK_BYTES]
            file.write(chunk)
            sums[name] = zlib.crc32(chunk, sums[name])
    return SavedFile(
        kind=kind,
        rank=rank,
        size=len(start) + place,
        data_size=place,
        header_sum=zlib.crc32(start),
        tensors=sums,
    )


def read_header(file: io.BufferedIOBase, saved: SavedFile) -> dict[str, Entry]:
    """The tensors in a file; ValueError if its header is not the one that was written."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    _check_room(len(saved.tensors), length)
    text = file.read(min(length, saved.size))
    if zlib.crc32(start + text) != saved.header_sum:
        raise ValueError(f"the header: {OTHER_SUM}")
    header = Field(parse_json(text), "the header").entries()
    header.pop("__metadata__", None)
    return {name: _entry(field, 8 + length, saved.size) for name, field in header.items()}


def _check_room(num_tensors: int, header_bytes: int) -> None:
    for what, number, most in (
        ("tensors", num_tensors, _MOST_TENSORS),
        ("bytes of the header", header_bytes, _MOST_HEADER_BYTES),
    ):
        if number > most:
            raise ValueError(f"{what}: {number}, a file must have at most {most}")


def _entry(field: Field, data: int, size: int) -> Entry:
    """An entry of a header: ``data`` is where the tensors begin in the file of so many bytes."""
    dtype, dimensions, offsets = field.fields("dtype", "shape", "data_offsets")
    if dtype.read_as(str) not in _DTYPES:
        dtype.fail(f"one of {', '.join(_DTYPES)}")
    shape = tuple(each.read_as(int) for each in dimensions.items())
    begin, end = (data + each.read_as(int) for each in offsets.items(2))
    entry = Entry(_DTYPES[dtype.value], shape, begin, end)
    fits = data <= begin <= end <= size and min(shape, default=0) >= 0
    if not fits or end - begin != math.prod(shape) * entry.dtype.itemsize:
        field.fail(f"a tensor whose bytes are in the file of {size}")
    return entry


def read_tensor(
    file: io.BufferedIOBase, entry: Entry, *, keep: bool = True
) -> tuple[torch.Tensor, int]:
    """A tensor of the file, and the sum of its bytes.

    Args:
        keep: otherwise only the sum is of use, and little memory is needed.

    Raises:
        ValueError: the file ends before.
    """
    size = entry.end - entry.begin
    shape, dtype = (entry.shape, entry.dtype) if keep else (min(size, _CHUNK_BYTES), torch.uint8)
    tensor = torch.empty(shape, dtype=dtype)
    data = tensor.flatten().view(torch.uint8).numpy().data
    file.seek(entry.begin)
    crc = 0
    for first in range(0, size, _CHUNK_BYTES):
        begin = first if keep else 0
        chunk = data[begin : begin + min(_CHUNK_BYTES, size - first)]
        read = file.readinto(chunk)
        if read != len(chunk):
            raise ValueError(f"{size} bytes at {entry.begin}: the file ends before")
        crc = zlib.crc32(chunk, crc)
    return tensor, crc
