"""Files of tensors: read by the safetensors package, and refused where a byte is wrong."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from pipedream2bw.checkpoint.tensor_file import (
    check_saveable,
    read_header,
    read_tensor,
    write_tensors,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int16]
DTYPES += [torch.uint8, torch.bool, torch.int8, torch.int32, torch.float8_e4m3fn]


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    result = write_tensors(file, tensors)
    data = file.getvalue()
    assert result.size == len(data)
    entries, header_sum = read_header(io.BytesIO(data), len(data))
    assert result.header_sum == header_sum
    assert result.tensors == {n: read_tensor(io.BytesIO(data), entries[n])[1] for n in entries}
    assert list(result.tensors) == list(tensors)
    return data


def read(data: bytes) -> dict[str, torch.Tensor]:
    file = io.BytesIO(data)
    entries, _ = read_header(file, len(data))
    return {name: read_tensor(file, entry)[0] for name, entry in entries.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    made = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=5)):
        if name == "__metadata__":
            continue
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        tensor = torch.randint(0, 2, (*shape, 8), dtype=torch.uint8)
        dtype = draw(st.sampled_from(DTYPES))
        whole = tensor if dtype == torch.bool else tensor.repeat_interleave(1, dim=-1)
        made[name] = whole.to(torch.bool) if dtype == torch.bool else whole.view(dtype)
        if made[name].dim() > 1 and draw(st.booleans()):
            made[name] = made[name].transpose(0, 1)
    return made


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_what_is_written_is_read_and_is_what_the_safetensors_package_reads(
    given_tensors: dict[str, torch.Tensor],
) -> None:
    data = written(given_tensors)
    for found in (read(data), load(data)):
        assert set(found) == set(given_tensors)
        for name, tensor in given_tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert bits(found[name]) == bits(tensor)


def test_what_the_safetensors_package_writes_is_read() -> None:
    given_tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "empty": torch.empty(0, 2)}
    found = read(save(given_tensors, {"format": "pt"}))
    assert all(torch.equal(found[name], tensor) for name, tensor in given_tensors.items())


def test_a_file_that_is_cut_or_too_long_is_refused() -> None:
    data = written({"a": torch.randn(7), "b": torch.randn(2, 3)})
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"cut|damaged"):
            read_header(io.BytesIO(data[:length]), length)
    with pytest.raises(ValueError, match="too long"):
        read(data + b"\0")


def test_every_flipped_bit_is_found() -> None:
    given_tensors = {"a": torch.randn(5), "b": torch.randn(2, 2).to(torch.bfloat16)}
    file = io.BytesIO()
    result = write_tensors(file, given_tensors)
    data = file.getvalue()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            entries, header_sum = read_header(io.BytesIO(changed), len(changed))
            sums = {
                name: read_tensor(io.BytesIO(changed), entry)[1] for name, entry in entries.items()
            }
        except ValueError:
            continue
        assert sums == {n: read_tensor(io.BytesIO(changed), entries[n])[1] for n in entries}
        assert sums != result.tensors or header_sum != result.header_sum


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2**62, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": [2**62] * 10000, "data_offsets": [0, 8]}},
        {"a": []},
        [],
        7,
    ],
)
def test_a_header_that_lies_is_refused(header: object) -> None:
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(ValueError, match=r"a: |a begins|header"):
        read(data)


def test_a_header_of_a_gigantic_length_is_refused_at_once() -> None:
    for length in (2**63, 2**64 - 1, 2**40, 100_000_001):
        data = length.to_bytes(8, "little") + b"{}"
        with pytest.raises(ValueError, match="cut"):
            read(data)


def test_random_bytes_are_refused_or_read() -> None:
    draw = random.Random(0)
    whole = written({"a": torch.randn(3), "b": torch.arange(4)})
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            read(bytes(data[: draw.randrange(len(data) + 1)]))
        except ValueError:
            continue


class OnDevice(torch.Tensor):
    """Refuses what a tensor of a GPU refuses, until it is copied to the CPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        return result


def test_tensors_of_a_device_are_written() -> None:
    weight = torch.randn(3, 4)
    on_device = weight.t().as_subclass(OnDevice)
    with pytest.raises(TypeError, match="device type"):
        on_device.contiguous().numpy()
    assert torch.equal(read(written({"w": on_device}))["w"], weight.t())


def test_nothing_is_written_of_tensors_of_which_a_file_cannot_hold_one() -> None:
    file = io.BytesIO()
    with pytest.raises(TypeError, match=r"b: a tensor of torch.complex128.*torch.complex64"):
        write_tensors(file, {"a": torch.ones(2), "b": torch.zeros(2, dtype=torch.complex128)})
    assert file.getvalue() == b""


def test_a_tensor_that_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra\.mask: a tensor of torch.float32, torch.sparse"):
        check_saveable("extra.mask", torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"w: a tensor of torch.complex128"):
        check_saveable("w", torch.zeros(1, dtype=torch.complex128))
