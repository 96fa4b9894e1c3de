"""Simulated optimizers on the host: copies, steps and what waits, against a reference."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest

import pipedream2bw as pd2
from tests.references.host_copies import Action, HostRun
from tests.samples.schedule_sizes import sizes_for

NUM_BATCHES = 5
COSTS = (
    "forward",
    "input_grad",
    "weight_grad",
    "update",
    "all_reduce",
    "gradient_bytes",
    "weight_bytes",
)


def action_of(event: pd2.Event) -> Action:
    return Action(event.stage, event.kind, event.batch, event.microbatch)


def check(name: str, size: Any, rng: random.Random) -> None:
    host = pd2.HostCosts(
        down=rng.uniform(0.2, 4),
        up=rng.choice([0.03, rng.uniform(0.2, 4)]),
        buckets=rng.randint(1, 5),
        one_buffer=rng.random() < 0.5,
    )
    d, m = size.num_stages, size.num_microbatches
    costs = {cost: [rng.uniform(0.1, 1) for _ in range(d)] for cost in COSTS}
    if rng.random() < 0.5:
        costs["all_reduce"] = [0.0] * d
    latency = rng.uniform(0, 0.5)
    given: dict[str, Any] = {"num_stages": d, "num_microbatches": m}
    given["stages_per_rank"] = size.stages_per_rank
    found = pd2.simulate(
        name, **given, **costs, latency=latency, num_batches=NUM_BATCHES, host_costs=host
    )
    schedule = pd2.make_schedule(name, d, m, stages_per_rank=size.stages_per_rank)
    lists: dict[int, list[Action]] = {}
    first = [schedule.number_in_batch(stage, 0) for stage in range(schedule.num_stages)]
    numbered = {}
    for event in found.events:
        assert event.rank is not None
        microbatch = 0 if event.kind == "U" else event.microbatch - first[event.stage]
        action = Action(event.stage, event.kind, event.batch, microbatch)
        lists.setdefault(event.rank, []).append(action)
        numbered[action] = event
    want = HostRun(schedule, [lists[rank] for rank in sorted(lists)], costs, host, latency)
    for action, event in numbered.items():
        assert event.start == pytest.approx(want.starts[action], abs=1e-9), (action, host)
        assert event.end == pytest.approx(want.end(action), abs=1e-9), (action, host)


@pytest.mark.parametrize("name", pd2.schedule_names())
def test_copies_steps_and_what_waits_for_them_are_the_longest_ways(name: str) -> None:
    rng = random.Random(name)
    for size in sizes_for(name, 4):
        for _ in range(4):
            check(name, size, rng)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"down": -1.0}, ValueError, "host's down: -1: a bandwidth must be >= 0"),
        ({"up": math.nan}, ValueError, "host's up: nan: a bandwidth must be >= 0"),
        ({"buckets": 0}, ValueError, "host_costs.buckets: 0, it must be at least 1"),
        ({"buckets": 2**30}, ValueError, "host's buckets: 1073741824: must be >= 1 and <= "),
        ({"buckets": 1.5}, TypeError, "host_costs.buckets: "),
    ],
)
def test_costs_that_no_host_has_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        pd2.simulate("2bw", num_stages=2, num_microbatches=2, host_costs=pd2.HostCosts(**given))


def test_costs_of_the_host_are_an_object() -> None:
    with pytest.raises(TypeError, match=re.escape("host_costs: 1 given, it must be HostCosts")):
        pd2.simulate("2bw", num_stages=2, num_microbatches=2, host_costs=1)  # type: ignore[arg-type]
