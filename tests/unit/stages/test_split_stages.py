"""The partitioner as Python sees it; csrc/core's own tests cover its rules."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream2bw import _C

Layer = tuple[float, ...]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Layer], list[tuple[int, int, int]], int]:
    num_layers = draw(st.integers(1, 9))
    small = st.integers(0, 9).map(float)
    layers = [
        (*draw(st.tuples(small, small, small, small)), 5.0, draw(st.sampled_from([0.0, 5.0])))
        for _ in range(num_layers)
    ]
    pairs = list(itertools.combinations(range(num_layers), 2))
    edges = [
        (producer, consumer, 3)
        for producer, consumer in (draw(st.lists(st.sampled_from(pairs))) if pairs else [])
    ]
    return layers, edges, draw(st.integers(1, num_layers))


def use(
    layers: list[Layer], edges: list[tuple[int, int, int]], first: int, end: int
) -> tuple[float, float]:
    """Seconds and bytes of a stage with 2 versions and 3 microbatches in flight."""
    stage = range(first, end)
    enter = {p for p, c, _ in edges if p not in stage and c in stage}
    leave = {p for p, c, _ in edges if p in stage and c not in stage}
    seconds = sum(sum(layer[:3]) for layer in layers[first:end])
    trained = sum(layer[5] for layer in layers[first:end])
    frozen = sum(layer[4] for layer in layers[first:end]) - trained
    activations = sum(layer[3] for layer in layers[first:end])
    messages = (len(enter) + len(leave)) * 2 * (3 * 0.5 + 1)
    return seconds + messages, 2 * trained + frozen + 3 * activations


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(10, 400))
def test_the_split_is_the_best_of_all_within_the_memory(
    model: tuple[list[Layer], list[tuple[int, int, int]], int], limit: int
) -> None:
    layers, edges, num_stages = model
    rules = [(2, 1, 3, 0, limit, 1)] * num_stages
    best = least = math.inf
    for cuts in itertools.combinations(range(1, len(layers)), num_stages - 1):
        bounds = itertools.pairwise((0, *cuts, len(layers)))
        uses = [use(layers, edges, first, end) for first, end in bounds]
        most = max(bytes for _, bytes in uses)
        least = min(least, most)
        if most <= limit:
            best = min(best, max(seconds for seconds, _ in uses))
    split = _C.split_stages(layers, edges, rules, seconds_per_byte=0.5, seconds_per_value=1)
    assert (split[1] if split else math.inf) == best
    assert _C.smallest_memory_limit(layers, edges, rules) == least
    if split:
        bounds = itertools.pairwise((*split[0], len(layers)))
        assert max(use(layers, edges, first, end)[0] for first, end in bounds) == best


def test_further_values_cuts_and_recompute_arrive() -> None:
    layers: list[Layer] = [(1, 0, 0, 0, 0, 0)] * 4
    rules = [(0, 1, 0, 0, math.inf, 1)] * 2
    assert _C.split_stages(layers, [], rules) == ([0, 2], 2)
    assert _C.split_stages(layers, [], rules, recompute=True) == ([0, 2], 4)
    assert _C.split_stages(layers, [], rules, can_cut=[True, False, False]) == ([0, 1], 3)
    values = [(1, [2, 3], 0.0, 5.0)]
    assert _C.split_stages(layers, [], rules, values=values) == ([0, 1], 3)
    slow_second = [rules[0], (0, 1, 0, 0, math.inf, 3)]
    assert _C.split_stages(layers, [], slow_second) == ([0, 3], 3)


def test_nonsense_names_the_rule_and_the_values() -> None:
    layers: list[Layer] = [(1, 0, 0, 0, 0, 0)] * 2
    rule = (0, 1, 0, 0, math.inf, 1)
    with pytest.raises(ValueError, match=r"stages: 3, layers: 2: every stage needs at least one"):
        _C.split_stages(layers, [], [rule] * 3)
    with pytest.raises(ValueError, match=r"edge 0: producer: 1, consumer: 0: a producer must come"):
        _C.smallest_memory_limit(layers, [(1, 0, 4)], [rule])
    with pytest.raises(TypeError):
        _C.split_stages(layers, [], [rule[:5]])
