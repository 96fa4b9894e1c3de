"""Of plans that are equally fast: one without a delay, then the one that needs the least memory."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.planner.planning.plan import RECOMPUTE
from tests.samples.models import TASKS

SCHEDULES = ("2bw", "1f1b", "2bw_v_half", "chimera")
EQUAL = 1.001


def profile_of(name: str) -> pd2.Profile:
    task = TASKS[name]
    model, (batch,) = task.model(), task.batches([4])
    assert isinstance(model, nn.Module)
    return pd2.profile(
        model,
        task.loss_fn,
        example_args=batch.args,
        example_kwargs=batch.kwargs,
        target=batch.target,
        dry=pd2.KNOWN_DEVICES["v100"],
    )


def one_by_one(profile: pd2.Profile, devices: int, memory: str) -> list[pd2.Plan]:
    """The plans of each schedule, width, depth, way to recompute and number of rows."""
    found = []
    for microbatch, schedule, width, depth, recompute in itertools.product(
        profile.microbatches, SCHEDULES, range(1, devices + 1), range(1, 2 * devices + 1), RECOMPUTE
    ):
        try:
            plan = pd2.plan(
                dataclasses.replace(profile, microbatches=(microbatch,)),
                devices=devices,
                memory=memory,
                batch=32,
                schedules=schedule,
                width=width,
                num_stages=depth,
                recompute=recompute,
            )
        except ValueError:  # there are no such sizes
            continue
        found.append(plan)
    return found


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", "skips", "gpt", "frozen"])
def test_the_best_of_all_ties_is_chosen(name: str, devices: int) -> None:
    profile = profile_of(name)
    chosen = pd2.plan(profile, devices=devices, memory="16GB", batch=32, schedules=SCHEDULES)
    every = one_by_one(profile, devices, "16GB")
    most = max(plan.rows_per_second for plan in every)
    ties = [plan for plan in every if plan.rows_per_second * EQUAL > most]
    assert len(ties) > 1
    best = min(ties, key=lambda plan: (plan.shape.mean_delay, plan.peak_bytes))
    assert chosen.rows_per_second * EQUAL > most
    assert (chosen.shape.mean_delay, chosen.peak_bytes) == (best.shape.mean_delay, best.peak_bytes)
    # The links are free.
    assert chosen.shape.mean_delay == 0
    kept = pd2.plan(profile, devices=devices, memory="16GB", batch=32, schedules="2bw")
    assert kept.schedule == "2bw"


@pytest.mark.parametrize(("objective", "said"), [("throughput", "fast"), ("cost", "expensive")])
def test_alternatives_that_tie_are_said_to_be_equal(objective: str, said: str) -> None:
    types = [pd2.DeviceType("v100", 8, price_per_hour=1.0)]
    plan = pd2.plan(profile_of("gpt"), devices=types, memory="16GB", batch=32, objective=objective)
    assert f"equally {said}; " in str(plan)
    for each in plan.alternatives:
        reason = each.lost_by.partition(";")[0]
        assert re.fullmatch(rf"equally {said}|[\d.]+ % (slower|more expensive)", reason), reason
        assert (reason == f"equally {said}") == (objective_of(each, objective, plan) < EQUAL)


def objective_of(other: pd2.Alternative, objective: str, plan: pd2.Plan) -> float:
    """How many times as long a row takes, or as much as it costs."""
    slower = plan.rows_per_second / other.rows_per_second
    if objective == "throughput":
        return slower
    return slower * other.price_per_hour / plan.price_per_hour


def test_replicas_of_one_stage_are_late_where_that_hides_their_sums() -> None:
    def schedule(bandwidth: str) -> str:
        types = [pd2.DeviceType("v100", 2)]
        cluster = pd2.Cluster.servers(
            types, devices_per_server=2, inside=bandwidth, outside=bandwidth
        )
        plan = pd2.plan(
            profile_of("gpt"), devices=cluster, memory="16GB", batch=32, width=2, num_stages=1
        )
        return plan.schedule

    assert [schedule(each) for each in ("1000TB/s", "100MB/s")] == ["1f1b", "2bw_fresh"]
