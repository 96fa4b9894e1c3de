"""Tensors in files of the safetensors format, written in one pass and read one by one.

A file is the length of its header (8 bytes, little-endian), the header (JSON: for each name the
dtype, the shape and where its bytes begin and end), and the bytes. The safetensors package reads
these files; it neither writes a tensor at a time, nor sums, nor reads through fsspec.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zlib
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import torch

from ..json_document import parse_json, shown

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

MOST_HEADER_BYTES = 100_000_000
"""As in the safetensors package."""

_CHUNK_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedFile:
    """A file of tensors, as a manifest lists it.

    Attributes:
        kind: what is in it: ``model``, ``older-1`` (the weights one version before), ...,
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
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        raise TypeError(
            f"{name}: a tensor of {tensor.dtype}, {tensor.layout}: checkpoints hold strided "
            f"tensors of {', '.join(str(dtype) for dtype in _NAMES)}"
        )


def write_tensors(
    file: IO[bytes], tensors: Mapping[str, torch.Tensor], kind: str = "model", rank: int = 0
) -> SavedFile:
    """Writes tensors, one after the other; those of a device come to the CPU one at a time.

    Args:
        kind, rank: see :class:`SavedFile`.

    Raises:
        TypeError: a file cannot hold one of them; nothing has been written.
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


def read_header(file: io.BufferedIOBase, size: int) -> tuple[dict[str, Entry], int]:
    """The tensors in a file of that size, and the sum of its header.

    Raises:
        ValueError: it is not a safetensors file, or not whole.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MOST_HEADER_BYTES):
        raise ValueError(f"{size} bytes, a header of {length}: the file is cut or none of tensors")
    text = file.read(length)
    try:
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError(f"{type(header).__name__}, not an object")
    except ValueError as error:
        raise ValueError(f"the header is damaged: {error}") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(name, fields, 8 + length) for name, fields in header.items()}
    place = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != place:
            raise ValueError(f"{name} begins at byte {entry.begin}, it must begin at {place}")
        place = entry.end
    if place != size:
        raise ValueError(f"{size} bytes, the header says {place}: the file is cut or too long")
    return entries, zlib.crc32(start + text)


def _entry(name: str, fields: Any, data: int) -> Entry:
    def is_size(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**63

    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name}: the header is damaged: {shown(fields)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name}: dtype {str(dtype)[:20]!r}, known: {', '.join(_DTYPES)}")
    for sizes, length in ((shape, None), (offsets, 2)):
        if not isinstance(sizes, list) or not all(map(is_size, sizes)):
            raise ValueError(f"{name}: the header is damaged: {shown(sizes)}")
        if length not in (None, len(sizes)):
            raise ValueError(f"{name}: {len(sizes)} offsets, there must be {length}")
    begin, end = offsets
    size = _DTYPES[dtype].itemsize
    for length in shape:
        if size * max(length, 1) >= 2**63:  # torch multiplies the others of an empty tensor too
            raise ValueError(f"{name}: shape {shown(shape)}, there are no tensors as large")
        size *= max(length, 1)
    size = 0 if 0 in shape else size
    if end - begin != size:
        raise ValueError(f"{name}: {end - begin} bytes, shape and dtype have {size}")
    return Entry(_DTYPES[dtype], tuple(shape), data + begin, data + end)


def read_tensor(file: io.BufferedIOBase, entry: Entry) -> tuple[torch.Tensor, int]:
    """A tensor of the file, and the sum of its bytes.

    Raises:
        ValueError: the file ends before.
    """
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    size = entry.end - entry.begin
    if size == 0:
        return tensor, 0
    data = tensor.flatten().view(torch.uint8).numpy().data
    file.seek(entry.begin)
    crc = 0
    for first in range(0, size, _CHUNK_BYTES):
        chunk = data[first : first + _CHUNK_BYTES]
        read = file.readinto(chunk)
        if read != len(chunk):
            raise ValueError(f"{size} bytes at {entry.begin}: the file ends before")
        crc = zlib.crc32(chunk, crc)
    return tensor, crc
