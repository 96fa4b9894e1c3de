"""Users' state survives JSON as it was, without pickle."""

from __future__ import annotations

import collections
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream2bw.checkpoint.encoding import decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=4) | st.integers(-3, 3) | st.tuples(st.integers(0, 2), st.booleans())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    document = json.loads(json.dumps(encode(value, "x", tensors), allow_nan=False))
    return decode(document, tensors)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_tensors_arrays_counters_and_states_of_generators_come_back() -> None:
    tensor = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(there_and_back({"a": [tensor]})["a"][0], tensor)
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    back = there_and_back((array, np.float32(0.5)))
    assert (back[0] == array).all()
    assert back[1] == 0.5
    counter = collections.Counter({30: 1, 80: 2})
    back = there_and_back(counter)
    assert isinstance(back, collections.Counter)
    assert back == counter
    state = random.Random(4).getstate()
    assert there_and_back(state) == state
    generator = np.random.RandomState(3)
    other = np.random.RandomState(4)
    other.set_state(there_and_back(generator.get_state()))
    assert generator.randint(1000) == other.randint(1000)


def test_two_tensors_never_get_one_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)}
    back = decode(encode(value, "x", tensors), tensors)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", lambda: 0, {"f": [print]}])
def test_anything_else_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"extra\.it.*checkpoints hold tensors"):
        encode(value, "extra.it", {})


@pytest.mark.parametrize(
    "document",
    [
        *({"$float": 1}, {"$float": "x"}, {"$float": []}, {"$float": "1", "a": 1}),
        *({"a": 1, "$float": "1"}, {"$tensor": "no"}, {"$tensor": []}, {"$array": "no"}),
        *({"$array": "half"}, {"$tuple": 1}, {"$tuple": {"a": 1}}, {"$dict": 1}, {"$dict": [1]}),
        *({"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$dict": [[1, 2], [1, 3]]}, {"$no": 1}),
        {"$counter": {"a": 1}},
    ],
)
def test_what_encode_never_makes_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"\$"):
        decode([document], {"half": torch.ones(2, dtype=torch.bfloat16)})


def test_what_lies_too_deep_to_be_read_again_is_not_saved() -> None:
    deep: Any = 1
    for _ in range(192):
        deep = [deep]
    assert decode(encode(deep, "x", {}), {}) == deep
    for levels in (1, 10**5):
        for _ in range(levels):
            deep = [deep]
        with pytest.raises(ValueError, match=r"x: .*(192 levels|recursion)"):
            encode(deep, "x", {})


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.array(["a"]), TypeError, r"x\.a\.0: an array of <U1 given"),
        (np.ones(2, ">f4"), TypeError, r"x\.a\.0: an array of >f4 given"),
        (10**5000, ValueError, r"x\.a\.0: .*4300 digits"),
    ],
    ids=["strings", "other byte order", "long integer"],
)
def test_what_cannot_be_written_is_refused_by_its_key(
    value: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        encode({"a": [value]}, "x", {})
