"""Which parameters are noted as shards, how parts are put together, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.checkpoint.parts import files_of, part_of_these
from pipedream2bw.model.local_shards import Part, put_together, shard_dimensions


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def test_patterns_name_shards() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    assert shard_dimensions(model) is None
    assert pd2.use_local_shards(model, {"0.*": ("tp", 0), "1.weight": ("tp", 1)}) is model
    assert shard_dimensions(model) == {"0.weight": 0, "0.bias": 0, "1.weight": 1}
    inside = {"0.0.weight": 0, "0.0.bias": 0, "0.1.weight": 1}
    assert shard_dimensions(nn.Sequential(model)) == inside
    assert shard_dimensions(nn.Sequential(model, nn.Linear(2, 2))) is None  # of which none knows
    assert shard_dimensions(pd2.use_local_shards(nn.Sequential(nn.Linear(2, 4)))) == {}


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_a_tied_parameter_is_a_shard_under_all_its_names(name: str) -> None:
    model = pd2.use_local_shards(tied(), {name: ("tp", 1)})
    assert shard_dimensions(model) == {"0.weight": 1, "1.weight": 1}


@pytest.mark.parametrize(
    ("shards", "kind", "message"),
    [
        ({"up.weight": ("tp", 0)}, ValueError, "'up.weight' fits 0 parameters"),
        ({"0.bias": ("tp", 1)}, ValueError, "dimension 1 given, parameter 0.bias has 1: it must"),
        ({"0.weight": ("tp", -1)}, ValueError, "it must be 0 to 1"),
        ({"*weight": ("tp", 0), "0.w*": ("tp", 1)}, ValueError, "cut in dimension 0: give one"),
        ({"0.weight": ("dp", 0)}, TypeError, "('dp', 0) given, it must be ('tp'"),
        ({"0.weight": ("tp",)}, TypeError, "('tp',) given, it must be"),
        ({"0.weight": "tp"}, TypeError, "'tp' given, it must be"),
        ({"0.weight": ("tp", 0.0)}, TypeError, "('tp', 0.0) given, it must be"),
    ],
)
def test_wrong_shards(shards: Any, kind: type[Exception], message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 4))
    with pytest.raises(kind, match=re.escape(message)):
        pd2.use_local_shards(model, shards)
    assert shard_dimensions(model) is None


def test_parts_of_other_parts() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    saved = list(whole.chunk(2, 0))
    for part, want in (
        (Part(1, 3, 2), whole[:, 4:]),
        (Part(1, 2, 0), whole[:, :3]),  # of as many parts, cut in another dimension
        (Part(0, 4, 1), whole[1:2]),
        (None, whole),
    ):
        assert len(files_of("w", ("a", "b"), part)) == 2
        assert torch.equal(part_of_these("w", saved, 0, whole.shape, part), want)
    assert files_of("w", ("a", "b"), Part(0, 2, 1)) == {"@1-of-2/w": "b"}
    step = torch.tensor(3.0)
    assert torch.equal(part_of_these("step", [step, step], 0, whole.shape, Part(0, 4, 1)), step)
    with pytest.raises(ValueError, match=r"rows: shape \[2\] .* 4 cannot go on with it, 2 can"):
        part_of_these("rows", [torch.ones(2)] * 2, 0, whole.shape, Part(0, 4, 1))


def test_what_is_no_shard_must_be_equal() -> None:
    of_shards = [{"w": torch.ones(2), "b": torch.full((1,), float(i))} for i in range(2)]
    cut = {"w": Part(0, 2, 0), "b": Part(0, 2, 0)}
    assert [len(value) for value in put_together(of_shards, cut).values()] == [4, 2]
    with pytest.raises(ValueError, match="b: process 1 of a stage has other values"):
        put_together(of_shards, {"w": cut["w"]})
