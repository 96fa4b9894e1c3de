"""The partitioner as Python sees it; csrc/core's own tests cover its rules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream2bw import _C

Model = tuple[list[_C.LayerCost], list[bool], list[_C.Value]]


@st.composite
def models(draw: st.DrawFn) -> Model:
    num_layers = draw(st.integers(1, 9))
    small = st.integers(0, 9).map(float)
    layers = [
        _C.LayerCost(forward=draw(small), input_grad=draw(small), weight_grad=draw(small))
        for _ in range(num_layers)
    ]
    pairs = list(itertools.combinations(range(num_layers), 2))
    values = [
        _C.Value(producer=producer, consumers=[consumer], seconds=draw(small))
        for producer, consumer in (draw(st.lists(st.sampled_from(pairs))) if pairs else [])
    ]
    return layers, [draw(st.booleans()) for _ in layers[1:]], values


def seconds(layers: list[_C.LayerCost], values: list[_C.Value], first: int, end: int) -> float:
    """The seconds of a stage of these layers, for the values that leave and enter it too."""
    stage = range(first, end)
    crossing = [x for x in values if (x.producer in stage) != (x.consumers[0] in stage)]
    held = layers[first:end]
    compute = sum(layer.forward + layer.input_grad + layer.weight_grad for layer in held)
    return compute + sum(value.seconds for value in crossing)


@settings(max_examples=60, deadline=None)
@given(models(), st.data())
def test_the_slowest_stage_is_as_fast_as_in_any_split(model: Model, data: st.DataObject) -> None:
    layers, can_cut, values = model
    allowed = [layer for layer in range(1, len(layers)) if can_cut[layer - 1]]
    num_stages = data.draw(st.integers(1, len(allowed) + 1))

    def slowest(first_layers: tuple[int, ...]) -> float:
        bounds = itertools.pairwise((*first_layers, len(layers)))
        return max(seconds(layers, values, first, end) for first, end in bounds)

    found = _C.split_stages(layers, num_stages, can_cut, values)
    splits = [(0, *cuts) for cuts in itertools.combinations(allowed, num_stages - 1)]
    assert tuple(found) in splits
    assert slowest(tuple(found)) == min(map(slowest, splits))


def test_fields_are_given_by_name_and_have_defaults() -> None:
    cost = _C.LayerCost(forward=2)
    assert (cost.forward, cost.input_grad, cost.trained_bytes) == (2, 0, 0)
    for wrong in ({"froward": 2}, {"forward": "2"}):
        with pytest.raises(TypeError):
            _C.LayerCost(**wrong)
