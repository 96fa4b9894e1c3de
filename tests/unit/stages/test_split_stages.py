"""The partitioner as Python sees it; csrc/core's own tests cover its rules."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream2bw import _C

Model = tuple[list[_C.LayerCost], list[_C.Edge], int]


@st.composite
def models(draw: st.DrawFn) -> Model:
    num_layers = draw(st.integers(1, 9))
    small = st.integers(0, 9).map(float)
    layers = [
        _C.LayerCost(
            forward=draw(small),
            input_grad=draw(small),
            weight_grad=draw(small),
            activation_bytes=draw(small),
            parameter_bytes=5.0,
            trained_bytes=draw(st.sampled_from([0.0, 5.0])),
        )
        for _ in range(num_layers)
    ]
    pairs = list(itertools.combinations(range(num_layers), 2))
    edges = [
        _C.Edge(producer=producer, consumer=consumer, bytes=3)
        for producer, consumer in (draw(st.lists(st.sampled_from(pairs))) if pairs else [])
    ]
    return layers, edges, draw(st.integers(1, num_layers))


def use(
    layers: list[_C.LayerCost], edges: list[_C.Edge], first: int, end: int
) -> tuple[float, float]:
    """Seconds and bytes of a stage with 2 versions and 3 microbatches in flight."""
    stage = range(first, end)
    enter = {x.producer for x in edges if x.producer not in stage and x.consumer in stage}
    leave = {x.producer for x in edges if x.producer in stage and x.consumer not in stage}
    held = layers[first:end]
    seconds = sum(layer.forward + layer.input_grad + layer.weight_grad for layer in held)
    trained = sum(layer.trained_bytes for layer in held)
    frozen = sum(layer.parameter_bytes for layer in held) - trained
    activations = sum(layer.activation_bytes for layer in held)
    messages = (len(enter) + len(leave)) * 2 * (3 * 0.5 + 1)
    return seconds + messages, 2 * trained + frozen + 3 * activations


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(10, 400))
def test_the_split_is_the_best_of_all_within_the_memory(model: Model, limit: int) -> None:
    layers, edges, num_stages = model
    rules = [_C.StageMemoryRule(trained=2, activations=3, limit=limit)] * num_stages
    best = least = math.inf
    for cuts in itertools.combinations(range(1, len(layers)), num_stages - 1):
        bounds = itertools.pairwise((0, *cuts, len(layers)))
        uses = [use(layers, edges, first, end) for first, end in bounds]
        most = max(bytes for _, bytes in uses)
        least = min(least, most)
        if most <= limit:
            best = min(best, max(seconds for seconds, _ in uses))
    split = _C.split_stages(layers, edges, rules, seconds_per_byte=0.5, seconds_per_value=1)
    assert (split.slowest if split else math.inf) == best
    assert _C.smallest_memory_limit(layers, edges, rules) == least
    if split:
        bounds = itertools.pairwise((*split.first_layers, len(layers)))
        assert max(use(layers, edges, first, end)[0] for first, end in bounds) == best


def test_further_values_cuts_and_recompute_arrive() -> None:
    layers = [_C.LayerCost(forward=1)] * 4
    rules = [_C.StageMemoryRule()] * 2

    def found(rules: list[_C.StageMemoryRule], **options: Any) -> tuple[list[int], float]:
        split = _C.split_stages(layers, [], rules, **options)
        assert split is not None
        return split.first_layers, split.slowest

    assert found(rules) == ([0, 2], 2)
    assert found(rules, recompute=True) == ([0, 2], 4)
    assert found(rules, can_cut=[True, False, False]) == ([0, 1], 3)
    values = [_C.Value(producer=1, consumers=[2, 3], seconds=5)]
    assert found(rules, values=values) == ([0, 1], 3)
    assert found([rules[0], _C.StageMemoryRule(slowness=3)]) == ([0, 3], 3)


def test_nonsense_names_the_rule_and_the_values() -> None:
    layers = [_C.LayerCost(forward=1)] * 2
    rule = _C.StageMemoryRule()
    with pytest.raises(ValueError, match=r"stages: 3, layers: 2: every stage needs at least one"):
        _C.split_stages(layers, [], [rule] * 3)
    backwards = _C.Edge(producer=1, consumer=0, bytes=4)
    with pytest.raises(ValueError, match=r"edge 0: producer: 1, consumer: 0: a producer must come"):
        _C.smallest_memory_limit(layers, [backwards], [rule])


def test_fields_are_given_by_name_and_have_defaults() -> None:
    rule = _C.StageMemoryRule(trained=2)
    assert (rule.trained, rule.frozen, rule.limit, rule.slowness) == (2, 1, math.inf, 1)
    for wrong in ({"trainde": 2}, {"trained": "2"}):
        with pytest.raises(TypeError):
            _C.StageMemoryRule(**wrong)
    with pytest.raises(TypeError):
        _C.StageMemoryRule(2)  # type: ignore[misc]
