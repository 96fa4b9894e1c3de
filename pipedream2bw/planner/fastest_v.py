"""The V-shaped schedule that is fastest with given costs, of those that fit into memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .. import _C
from .._C import Schedule
from ..checks import check_whole_number
from .simulation import PerStage, edge_costs, stage_costs

_MOST_STEPS = 6  # a period: with longer ways a microbatch only waits
_EQUAL = 1.001


def fastest_v_schedule(
    *,
    num_stages: int,
    num_microbatches: int,
    in_flight: float,
    forward: PerStage = 1.0,
    input_grad: PerStage = 1.0,
    weight_grad: PerStage = 1.0,
    latency: PerStage = 0.0,
    bandwidth: PerStage = math.inf,
    message_bytes: PerStage = 0.0,
) -> Schedule:
    """Searches the V-shaped schedules without a flush for the fastest one that fits into memory.

    Rank r holds stages r and num_stages - 1 - r (arXiv 2405.15362), with two weight versions as
    under ``"2bw"``. A V is four steps (docs/schedules.md); all of up to a period's six slots are
    simulated with the costs, ``"2bw_v"`` and its kin among them. Of those that are equally fast, to
    a thousandth, the one with the fewest activations is taken. Each rank finds the same one, given
    the same numbers.

    >>> schedule = pd2.fastest_v_schedule(
    ...     num_stages=16, num_microbatches=16, in_flight=6, input_grad=1.2, weight_grad=0.8,
    ...     latency=0.4,
    ... )
    >>> pipe = pd2.PipelineModule(
    ...     model, loss_fn, schedule=schedule, num_stages=16, num_microbatches=16, example_args=(x,)
    ... )

    Args:
        num_stages: the model's stages, two on each rank.
        num_microbatches: microbatches of a batch.
        in_flight: the most microbatches whose activations a rank may hold, those of one of its two
            stages counted as half of one. Rank 0 of ``"2bw"`` with as many ranks holds
            ``num_stages / 2``; a V needs a third of that or more.
        forward: seconds of a stage's forward of one microbatch, or in any one unit, like all times.
        input_grad: seconds of the part of its backward that the previous stage waits for.
        weight_grad: seconds of the other part.
        latency: seconds that a message takes however short, in either direction.
        bandwidth: bytes per second in each direction; 0 or infinite: bytes take no time.
        message_bytes: a microbatch's activations between two stages, and their gradients.

    Raises:
        ValueError: an odd number of stages; ``in_flight`` or ``num_microbatches`` are fewer than
            any V needs (says the least); numbers of costs that do not fit, or costs that are
            negative or not finite.
    """
    check_whole_number("num_stages", num_stages)
    check_whole_number("num_microbatches", num_microbatches)
    if num_stages % 2:
        raise ValueError(f"num_stages: {num_stages}: a V has two stages a rank, so it must be even")
    of_stages = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad}
    of_edges = {"latency": latency, "bandwidth": bandwidth, "message_bytes": message_bytes}
    ranks = num_stages // 2
    every = itertools.product(range(1, _MOST_STEPS + 1), repeat=4)
    needs = {steps: found for steps in every if (found := _C.v_needs(ranks, steps)) is not None}
    fewest = min(halves for halves, _ in needs.values()) / 2
    if not in_flight >= fewest:
        raise ValueError(
            f"in_flight: {in_flight}, ranks: {ranks}: a V needs in_flight >= {fewest:g}"
        )
    least = min(least for _, least in needs.values())
    if num_microbatches < least:
        raise ValueError(
            f"num_microbatches: {num_microbatches}, ranks: {ranks}: a V needs num_microbatches >= "
            f"{least}"
        )
    fitting = [
        steps
        for steps, (halves, least) in sorted(needs.items(), key=lambda item: item[1][0])
        if halves <= 2 * in_flight and least <= num_microbatches
    ]
    if not fitting:
        raise ValueError(
            f"in_flight: {in_flight}, num_microbatches: {num_microbatches}: no V of {ranks} ranks "
            "needs as few of both"
        )
    stages, edges = stage_costs(of_stages, num_stages), edge_costs(of_edges, num_stages)

    def made(steps: tuple[int, ...]) -> Schedule:
        name = "_".join(["2bw_v", *map(str, steps)])
        return _C.v_schedule(name, ranks, steps, num_microbatches)

    periods = [_C.simulate(made(steps), stages, edges, 4, None).period for steps in fitting]
    return made(fitting[first_of_fastest(periods)])


def first_of_fastest(periods: Sequence[float]) -> int:
    """The number of the first period that is within a thousandth of the shortest."""
    most = _EQUAL * min(periods)
    return next(index for index, period in enumerate(periods) if period <= most)
