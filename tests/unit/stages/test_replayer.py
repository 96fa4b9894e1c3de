"""What a forward has to find again to give the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipedream2bw.stages.recompute import Replayer


def test_nothing_is_kept_for_a_forward_that_changes_nothing() -> None:
    buffers = {"a": torch.zeros(3), "b": torch.zeros(3)}
    replayer = Replayer(lambda: [(buffers, name) for name in buffers])
    x = torch.randn(3)
    for _ in range(2):
        with replayer.first([x], keep_inputs=True) as replay:
            x * 2 + buffers["a"]
        assert replay.nbytes() == 0
        assert replay.inputs[0] is x


class Sometimes(nn.Module):
    """Writes to its buffer where the input is large."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 10:
            self.scale.mul_(1.1)
        return x * self.scale


def test_writing_to_what_the_first_microbatch_did_not_write_to_is_an_error() -> None:
    module = Sometimes()
    replayer = Replayer(lambda: [(module._buffers, "scale")])
    with replayer.first([torch.zeros(3)], keep_inputs=True):
        module(torch.zeros(3))
    with (
        pytest.raises(RuntimeError, match=r"wrote to inputs \[\] and buffers \['scale'\]"),
        replayer.first([torch.zeros(3)], keep_inputs=True),
    ):
        module(torch.full((3,), 20.0))


def test_a_buffer_that_comes_to_be_is_taken_away_again() -> None:
    module = nn.Module()
    module.register_buffer("before", None)
    module.register_buffer("count", None)
    places = [(module._buffers, leaf) for leaf in module._buffers]
    replayer = Replayer(lambda: places)

    def forward() -> None:
        module.count = torch.ones(()) if module.count is None else module.count + 1

    for microbatch in (1, 2, 3):
        with replayer.first([], keep_inputs=True) as replay:
            forward()
        assert module.count == microbatch
        with replay.again():
            forward()
        assert module.count == microbatch


def test_an_input_that_was_written_to_since_is_an_error() -> None:
    x = torch.zeros(3)
    replayer = Replayer(list)
    with replayer.first([x], keep_inputs=True) as replay:
        pass
    x.add_(1)
    with pytest.raises(RuntimeError, match="an input was written to"), replay.again():
        pass


def test_buffers_of_a_module_that_changed_one_are_kept_though_they_are_equal_yet() -> None:
    norm = nn.BatchNorm1d(3)
    places = [(norm._buffers, name) for name in norm._buffers]
    replayer = Replayer(lambda: places)
    for x in (torch.zeros(4, 3), torch.randn(4, 3)):  # the mean stays 0 at first
        with replayer.first([x], keep_inputs=True) as replay:
            norm(x)
        after = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        with replay.again():
            norm(x)
        for name, buffer in norm.named_buffers():
            assert torch.equal(buffer, after[name]), name
