"""Which parameters are noted as shards, and what is refused."""

from __future__ import annotations

import re

import pytest
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.model.local_shards import shard_dimensions


def test_patterns_name_shards() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    assert shard_dimensions(model) is None
    assert pd2.use_local_shards(model, {"0.*": ("tp", 0), "1.weight": ("tp", 1)}) is model
    assert shard_dimensions(model) == {"0.weight": 0, "0.bias": 0, "1.weight": 1}
    assert shard_dimensions(nn.Sequential(model)) == {
        "0.0.weight": 0,
        "0.0.bias": 0,
        "0.1.weight": 1,
    }
    again = nn.Sequential(nn.Linear(2, 4))
    assert shard_dimensions(pd2.use_local_shards(again)) == {}


@pytest.mark.parametrize(
    ("pattern", "shard", "message"),
    [
        ("up.weight", ("tp", 0), "it must be a pattern that fits a parameter"),
        ("0.weight", ("dp", 0), "('dp', 0) given, it must be a pattern"),
        ("0.bias", ("tp", 1), "dimension 1 given, parameter 0.bias has 1 dimensions"),
    ],
)
def test_wrong_shards(pattern: str, shard: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pd2.use_local_shards(nn.Sequential(nn.Linear(2, 4)), {pattern: shard})
