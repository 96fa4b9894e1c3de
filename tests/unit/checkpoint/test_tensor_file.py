"""Files of tensors: read by the safetensors package, and refused where a byte is wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from pipedream2bw.checkpoint.tensor_file import (
    SavedFile,
    check_saveable,
    read_header,
    read_tensor,
    write_tensors,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int16]
DTYPES += [torch.uint8, torch.bool, torch.int8, torch.int32, torch.float8_e4m3fn]


def written(tensors: dict[str, torch.Tensor]) -> tuple[bytes, SavedFile]:
    file = io.BytesIO()
    result = write_tensors(file, tensors)
    data = file.getvalue()
    assert result.size == len(data)
    entries = read_header(io.BytesIO(data), result)
    assert result.tensors == {n: read_tensor(io.BytesIO(data), entries[n])[1] for n in entries}
    assert list(result.tensors) == list(tensors)
    return data, result


def read(data: bytes, saved: SavedFile) -> dict[str, torch.Tensor]:
    file = io.BytesIO(data)
    entries = read_header(file, saved)
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
    data, saved = written(given_tensors)
    for found in (read(data, saved), load(data)):
        assert set(found) == set(given_tensors)
        for name, tensor in given_tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert bits(found[name]) == bits(tensor)


def test_a_file_that_is_cut_is_refused() -> None:
    data, saved = written({"a": torch.randn(7), "b": torch.randn(2, 3)})
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"ends before|the header: its sum is another"):
            read(data[:length], saved)


def test_every_flipped_bit_is_found() -> None:
    given_tensors = {"a": torch.randn(5), "b": torch.randn(2, 2).to(torch.bfloat16)}
    file = io.BytesIO()
    result = write_tensors(file, given_tensors)
    data = file.getvalue()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            entries = read_header(io.BytesIO(changed), result)
        except ValueError:
            continue
        sums = {n: read_tensor(io.BytesIO(changed), entry)[1] for n, entry in entries.items()}
        assert sums != result.tensors


def test_a_header_of_a_gigantic_length_is_refused_at_once() -> None:
    data, saved = written({"a": torch.randn(7)})
    for length in (2**63, 2**64 - 1, 2**40, 100_000_001):
        with pytest.raises(ValueError, match=f"bytes of the header: {length}, a file must have"):
            read(length.to_bytes(8, "little") + data[8:], saved)


def test_more_tensors_than_are_read_are_not_written() -> None:
    file = io.BytesIO()
    tensor = torch.zeros(0)
    with pytest.raises(ValueError, match="tensors: 262145, a file must have at most 262144"):
        write_tensors(file, {str(number): tensor for number in range(2**18 + 1)})
    assert not file.getvalue()


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
    assert torch.equal(read(*written({"w": on_device}))["w"], weight.t())


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
