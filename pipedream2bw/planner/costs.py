"""Costs of stages and edges as users give them: one number for all, or one for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .. import _C

PerStage = float | Sequence[float]


def halves_of_backward(
    backward: PerStage | None,
    input_grad: PerStage | None,
    weight_grad: PerStage | None,
    num_stages: int,
) -> tuple[list[float], list[float]]:
    """Returns the seconds of the input gradients and of the weight gradients."""
    if input_grad is None and weight_grad is None:
        whole = one_each("backward", 2.0 if backward is None else backward, num_stages)
        for stage, seconds in enumerate(whole):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"backward[{stage}]: {seconds}: a cost must be finite and >= 0")
        halves = [seconds / 2 for seconds in whole]
        return halves, halves
    if backward is not None or input_grad is None or weight_grad is None:
        raise ValueError(
            f"backward: {backward}, input_grad: {input_grad}, weight_grad: {weight_grad}: give "
            "backward alone, or both of the others"
        )
    return (
        one_each("input_grad", input_grad, num_stages),
        one_each("weight_grad", weight_grad, num_stages),
    )


def stage_costs(given: Mapping[str, PerStage], num_stages: int) -> list[_C.StageCosts]:
    """Returns what each stage costs, of costs by the names of ``_C.StageCosts``."""
    values = {name: one_each(name, of_all, num_stages) for name, of_all in given.items()}
    return [_C.StageCosts(**{n: values[n][i] for n in values}) for i in range(num_stages)]


def edge_costs(given: Mapping[str, PerStage], num_stages: int) -> list[_C.EdgeCosts]:
    """Returns what each pair of neighbours costs, of costs by the names of ``_C.EdgeCosts``."""
    values = {
        name: one_each(name, of_all, num_stages, of_edges=True) for name, of_all in given.items()
    }
    return [_C.EdgeCosts(**{n: values[n][i] for n in values}) for i in range(num_stages - 1)]


def one_each(name: str, given: PerStage, num_stages: int, *, of_edges: bool = False) -> list[float]:
    """Returns one value for each stage, or for each edge."""
    expected = num_stages - 1 if of_edges else num_stages
    if isinstance(given, (int, float)):
        return [float(given)] * expected
    values = [float(value) for value in given]
    if len(values) != expected:
        what = "pair of neighbouring stages" if of_edges else "stage"
        raise ValueError(
            f"{name}: {len(values)} values, num_stages: {num_stages}: one number, or one for each "
            f"{what}"
        )
    return values
