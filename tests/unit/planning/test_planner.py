"""Plans: read back with every field checked, and chosen for reasons that can be turned around."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw.errors import DoesNotFit
from pipedream2bw.planner.planning.planner import blocks_of
from pipedream2bw.planner.profiling.profile import (
    MicrobatchProfile,
    Profile,
    ProfiledDevice,
    ProfiledLayer,
)
from pipedream2bw.units import parse_bandwidth, parse_bytes, parse_seconds


def made_profile(
    seconds: list[float], *, megabytes: float = 1.0, message_bytes: int = 100_000
) -> Profile:
    """A chain of layers that take these seconds a forward, for microbatches of 1 and 2 rows."""
    n = len(seconds)
    size = int(megabytes * 1e6)
    layers = [
        ProfiledLayer(
            name=f"layers.{i // 2}.part{i % 2}",
            parameter_bytes=size,
            trained_bytes=size,
            can_cut_after=i + 1 < n,
            repeats=None,
        )
        for i in range(n)
    ]
    microbatches = [
        MicrobatchProfile(
            rows=rows,
            forward=tuple(rows * each for each in seconds),
            input_grad=tuple(rows * each for each in seconds),
            weight_grad=tuple(rows * each for each in seconds),
            activation_bytes=(rows * 2 * size,) * n,
            kept=(),
            spread=(0.0,) * n,
            edges=tuple((i, i + 1, rows * message_bytes) for i in range(n - 1)),
        )
        for rows in (1, 2)
    ]
    return Profile(
        model_name="Chain",
        parameters=("weight [1] torch.float32",),
        device=ProfiledDevice("made", "cpu", 2**34, False),
        torch_version="0",
        loss="loss",
        layers=tuple(layers),
        shared_parameters=(),
        microbatches=tuple(microbatches),
        seconds_per_update_byte={},
        seconds_per_action=0.0,
        links=None,
        all_reduce=(),
    )


def made_plan(**changes: Any) -> pd2.Plan:
    arguments = {"devices": 4, "memory": "60MB", "batch": 32, **changes}
    return pd2.plan(made_profile([1e-3] * 8), **arguments)


def test_units() -> None:
    assert parse_bytes("memory", "16GiB") == 16 * 2**30
    assert parse_bytes("memory", "16 GB") == 16e9
    assert parse_bytes("memory", "1.5TiB") == 1.5 * 2**40
    assert parse_bytes("memory", 100) == 100
    assert parse_bandwidth("inside", "25GB/s") == 25e9
    assert parse_bandwidth("inside", "100Gbit/s") == 12.5e9
    assert parse_seconds("latency", "5us") == pytest.approx(5e-6)
    with pytest.raises(ValueError, match="memory: '16GBs' given, it must be a number and one of B"):
        parse_bytes("memory", "16GBs")
    with pytest.raises(ValueError, match="memory: '16' given"):
        parse_bytes("memory", "16")
    with pytest.raises(ValueError, match="inside: '0GB/s' given, it must be > 0"):
        parse_bandwidth("inside", "0GB/s")
    with pytest.raises(ValueError, match=r"inside: -1\.0 given, it must be > 0"):
        parse_bandwidth("inside", -1.0)
    with pytest.raises(ValueError, match="memory: nan given"):
        parse_bytes("memory", math.nan)
    with pytest.raises(TypeError, match="memory: None given"):
        parse_bytes("memory", None)


def test_bad_arguments_name_the_field_and_both_values() -> None:
    with pytest.raises(ValueError, match="memory: '16GBs' given"):
        made_plan(memory="16GBs")
    with pytest.raises(ValueError, match=r"objective: .*known: throughput, cost, memory"):
        made_plan(objective="speed")
    with pytest.raises(ValueError, match="objective: 'cost' given, prices: none"):
        made_plan(objective="cost")
    with pytest.raises(ValueError, match="largest_batch: 31, batch: 32"):
        made_plan(largest_batch=31)
    with pytest.raises(ValueError, match=r"recompute: .*known: none, stages, blocks"):
        made_plan(recompute=["all"])
    with pytest.raises(ValueError, match="column bandwidth: 0 given, it must be > 0"):
        pd2.Cluster.mesh(2, 2, row="1GB/s", column=0)
    with pytest.raises(ValueError, match="bandwidth: 1 rows of"):
        pd2.Cluster.measured([[0.0]], [[1.0, 2.0]])
    with pytest.raises(ValueError, match="optimizer: 'lamb', known: sgd, momentum, adamw"):
        made_plan(optimizer="lamb")


def test_a_model_too_large_is_told_what_would_do() -> None:
    with pytest.raises(ValueError, match=r'lacks .* MiB: memory=".*MiB" would do') as error:
        made_plan(memory="1MB")
    would_do = str(error.value).split('memory="')[1].split('"')[0]
    assert made_plan(memory=would_do).peak_bytes <= float(would_do.removesuffix("MiB")) * 2**20


def test_messages_that_a_gpu_has_not_read_take_memory() -> None:
    """Stage 0 holds the most, and three microbatches' gradients of 100 kB beside it."""
    profile = made_profile([1e-3] * 4)
    gpu = dataclasses.replace(profile, device=dataclasses.replace(profile.device, type="cuda"))
    sizes = {"devices": 4, "num_stages": 4, "batch": 4, "optimizer": "sgd", "width": 1}
    choices = {"schedules": "1f1b", "recompute": "none"}
    limit = 2 * 1e6 + 4 * 2e6
    on_host = pd2.plan(profile, memory=limit, **sizes, **choices)
    assert [stage.message_bytes for stage in on_host.stages] == [0] * 4
    plan = pd2.plan(gpu, memory=limit + 3 * 1e5, **sizes, **choices)
    assert [stage.message_bytes for stage in plan.stages] == [3e5, 6e5, 6e5, 3e5]
    assert plan.peak_bytes == plan.stages[0].peak_bytes == on_host.peak_bytes + 3e5
    with pytest.raises(DoesNotFit) as error:
        pd2.plan(gpu, memory=limit + 2.9e5, **sizes, **choices)
    assert error.value.limit == pytest.approx(plan.peak_bytes, rel=2e-3)


def test_depth_goes_where_messages_are_fast_and_width_where_all_reduces_are() -> None:
    """On a mesh the layout turns with the bandwidths of rows and columns."""
    profile = made_profile([1e-3] * 2, megabytes=8, message_bytes=4_000_000)

    def plan(row: str, column: str) -> pd2.Plan:
        return pd2.plan(
            profile,
            devices=pd2.Cluster.mesh(2, 2, row=row, column=column),
            memory="60MB",
            batch=16,
            schedules=["2bw"],
            recompute=["none"],
            optimizer="sgd",
        )

    along_rows = plan("100GB/s", "1GB/s")
    along_columns = plan("1GB/s", "100GB/s")
    for found, apart in ((along_rows, 1), (along_columns, 2)):
        assert (found.num_stages, found.width) == (2, 2)
        first, second = found.stages
        assert {b - a for a, b in zip(first.devices, second.devices, strict=True)} == {apart}


def test_cost_prefers_cheap_slow_devices_when_prices_say_so() -> None:
    def plan(price: Any, objective: str = "cost") -> pd2.Plan:
        types = [
            pd2.DeviceType("fast", 2, price_per_hour=price),
            pd2.DeviceType("slow", 2, throughput=0.5, price_per_hour=1.0),
        ]
        cluster = pd2.Cluster.servers(
            types, devices_per_server=4, inside="100GB/s", outside="100GB/s"
        )
        return pd2.plan(
            made_profile([1e-3] * 4),
            devices=cluster,
            memory="1GiB",
            batch=16,
            objective=objective,
            num_batches=10**6,
        )

    def used(found: pd2.Plan) -> set[int]:
        return {device for stage in found.stages for device in stage.devices}

    assert used(plan(10.0)) <= {2, 3}
    assert used(plan(1.0)) <= {0, 1}
    assert used(plan([(0.0, 0.1), (0.5, 50.0)])) <= {2, 3}  # cheap for half an hour only
    assert used(plan([(0.0, 0.1), (1000.0, 50.0)])) <= {0, 1}
    fastest = plan(10.0, "throughput")
    assert fastest.seconds_per_batch < plan(10.0).seconds_per_batch
    assert fastest.price_per_hour > plan(10.0).price_per_hour


def test_a_v_is_proposed_for_the_least_memory_without_bubbles() -> None:
    """Rank 0 of ``2bw`` has eight microbatches in flight, every rank of ``2bw_v_half`` half."""
    sizes = {"devices": 8, "batch": 32, "width": 1, "recompute": "none", "memory": "1GB"}
    of_all, in_line = (
        pd2.plan(made_profile([1e-3] * 32), objective="memory", slack=1e-6, **sizes, **schedules)
        for schedules in ({}, {"schedules": ["2bw"]})
    )
    assert (of_all.schedule, of_all.num_stages, of_all.stages_per_rank) == ("2bw_v_half", 16, 2)
    assert of_all.bubble == pytest.approx(0, abs=1e-3)
    assert of_all.seconds_per_batch == pytest.approx(in_line.seconds_per_batch, rel=1e-5)
    assert of_all.peak_bytes == 4 * (5 * 1e6 + 5 * 2e6)
    assert in_line.peak_bytes == 4 * (5 * 1e6 + 8 * 2e6)


def test_the_start_is_the_cheapest_hour_within_the_window() -> None:
    """A night of low prices from hour 8 to 12; the run takes about an hour."""
    prices = [(0.0, 2.0), (8.0, 0.5), (12.0, 2.0)]
    types = [pd2.DeviceType("spot", 2, price_per_hour=prices)]
    cluster = pd2.Cluster.servers(types, devices_per_server=2, inside="1GB/s", outside="1GB/s")

    def planned(**changes: Any) -> pd2.Plan:
        return made_plan(devices=cluster, batch=16, objective="cost", **changes)

    batches = round(3600 / planned().seconds_per_batch)
    now = planned(num_batches=batches)
    later = planned(num_batches=batches, start_within=24.0)
    assert (now.start_hour, later.start_hour) == (0.0, 8.0)
    assert later.total_price == pytest.approx(now.total_price / 4)
    hours = batches * later.seconds_per_batch / 3600
    assert later.total_price == pytest.approx(0.5 * later.num_devices * hours)
    assert planned(num_batches=batches, start_within=7.0).start_hour == 0.0
    soon = planned(num_batches=batches, start_within=7.5)
    assert soon.start_hour == 7.5
    assert later.total_price < soon.total_price < now.total_price
    assert planned().total_price == 0.0
    with pytest.raises(ValueError, match=r"start_within: 3\.0 hours, .*num_batches: None"):
        planned(start_within=3.0)
    with pytest.raises(ValueError, match=r"start_within: -1\.0, it must be >= 0"):
        planned(start_within=-1.0)
    with pytest.raises(ValueError, match=r"start_within: 3\.0 hours, objective: 'throughput'"):
        made_plan(num_batches=5, start_within=3.0)


def test_memory_is_a_reason_for_throughput_alone() -> None:
    servers = pd2.Cluster.servers(
        [pd2.DeviceType("gpu", 4, price_per_hour=2.0)],
        devices_per_server=4,
        inside="1GB/s",
        outside="1GB/s",
    )
    plans = {
        objective: made_plan(devices=servers, memory="1GB", objective=objective)
        for objective in ("throughput", "cost", "memory")
    }
    # A batch of one device costs the least, whatever would be faster.
    assert plans["cost"].num_devices < plans["throughput"].num_devices
    assert "memory forbids" not in plans["cost"].bound_by + plans["memory"].bound_by


def test_memory_objective_takes_less_memory_within_the_slack() -> None:
    fastest = made_plan(memory="1GB")
    smallest = made_plan(memory="1GB", objective="memory", slack=0.5)
    assert smallest.peak_bytes < fastest.peak_bytes
    assert smallest.seconds_per_batch <= 1.5 * fastest.seconds_per_batch


def test_blocks_are_recomputed_only_where_memory_demands_it() -> None:
    plan = made_plan(schedules=["1f1b"], recompute=["none", "blocks"], memory="24MB", devices=2)
    names = plan.recompute
    assert isinstance(names, list)
    assert names
    assert all(isinstance(name, str) and name.startswith("layers.") for name in names)
    assert len(names) < 4
    assert plan.peak_bytes <= 24e6
    assert blocks_of(["embed", "h.0.a", "h.0.b", "h.1", "norm", "h.2.a", "x", "h.2.b"]) == {
        "h.0": (1, 3),
        "h.1": (3, 4),
    }


@given(
    seconds=st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=8),
    devices=st.integers(1, 6),
    megabytes=st.floats(10, 100),
    more=st.floats(1, 4),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_memory_or_bandwidth_never_makes_a_plan_slower(
    seconds: list[float], devices: int, megabytes: float, more: float
) -> None:
    """With two versions a batch takes what the slowest stage does: the best split is the best."""
    profile = made_profile(seconds, message_bytes=0)

    def planned(memory: float, bandwidth: float) -> float:
        cluster = pd2.Cluster.servers(
            devices, devices_per_server=2, inside="100GB/s", outside=bandwidth
        )
        try:
            return pd2.plan(
                profile, devices=cluster, memory=memory, batch=16, schedules=["2bw"]
            ).seconds_per_batch
        except DoesNotFit:
            return math.inf

    before = planned(megabytes * 1e6, 1e8)
    assert planned(more * megabytes * 1e6, 1e8) <= before * (1 + 1e-9)
    assert planned(megabytes * 1e6, more * 1e8) <= before * (1 + 1e-9)


@given(
    schedule=st.sampled_from(
        ["2bw", "2bw_v_half", "1f1b", "gpipe", "interleaved", "zero_bubble", "v_half", "chimera"]
    ),
    seconds=st.lists(st.floats(1e-4, 1e-2), min_size=8, max_size=12),
)
@settings(max_examples=25, deadline=None)
def test_a_plan_takes_what_its_stages_take_in_the_simulator(
    schedule: str, seconds: list[float]
) -> None:
    plan = pd2.plan(made_profile(seconds), devices=4, memory="2GB", batch=16, schedules=[schedule])
    simulated = pd2.simulate(
        plan.schedule,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        stages_per_rank=plan.stages_per_rank,
        forward=[stage.forward for stage in plan.stages],
        input_grad=[stage.input_grad for stage in plan.stages],
        weight_grad=[stage.weight_grad for stage in plan.stages],
        recompute=[stage.recompute for stage in plan.stages],
        all_reduce=[stage.all_reduce for stage in plan.stages],
        update=[stage.update for stage in plan.stages],
        latency=[stage.message for stage in plan.stages[:-1]],
    )
    assert plan.seconds_per_batch == pytest.approx(simulated.period, rel=0.01)
    for stage, fields in zip(plan.stages, map(dataclasses.asdict, plan.stages), strict=True):
        assert fields["layers"] == stage.layers
        assert sum(seconds[slice(*stage.layers)]) * plan.microbatch_rows == pytest.approx(
            stage.forward
        )


def of_two_types(big: str, small: str) -> pd2.Cluster:
    types = [pd2.DeviceType("big", 1, memory=big), pd2.DeviceType("small", 3, memory=small)]
    return pd2.Cluster.servers(types, devices_per_server=4, inside="1TB/s", outside="1TB/s")


def test_a_calibrations_offset_is_left_free_on_devices_of_every_type() -> None:
    calibration = pd2.Calibration(1.0, 4e6)
    cluster = of_two_types("34MB", "30MB")
    for limited in ({"devices": cluster}, {"memory": "34MB"}):
        plan = made_plan(**limited, calibration=calibration)
        limits = {stage.memory_limit for stage in plan.stages}
        assert limits <= {30e6, 26e6}
        assert plan.peak_bytes <= max(limits)
    with pytest.raises(ValueError, match="device type small: memory: 3000000 bytes, the cal"):
        made_plan(devices=of_two_types("24MB", "3MB"), calibration=calibration)
    with pytest.raises(ValueError, match=r"memory: 3000000 bytes, the calibration's offset: 40000"):
        made_plan(memory="3MB", calibration=calibration)


def test_what_would_do_is_told_with_the_calibrations_offset() -> None:
    calibration = pd2.Calibration(1.0, 2.0**30)
    with pytest.raises(DoesNotFit, match=r"^memory: 1\.001 GiB: .* lacks 0\.\d+ GiB") as error:
        made_plan(memory="1.001GiB", calibration=calibration)
    plan = made_plan(memory=error.value.limit, calibration=calibration)
    assert 0.998 * error.value.limit <= plan.peak_bytes + calibration.offset <= error.value.limit
    would_do = str(error.value).split('memory="')[1].split('"')[0]
    plan = made_plan(memory=would_do, calibration=calibration)
    most = float(would_do.removesuffix("GiB")) * 2**30
    assert plan.peak_bytes + calibration.offset <= most
    with pytest.raises(ValueError, match=r'recompute blocks, .*GiB" would do \(with the .*offset'):
        made_plan(memory="1.001GiB", calibration=calibration, recompute=["blocks"])


def test_what_a_faster_plan_needs_is_told_with_the_offset() -> None:
    def needed(memory: float, calibration: pd2.Calibration | None) -> float:
        plan = made_plan(memory=memory, calibration=calibration, recompute="none", schedules="2bw")
        found = re.search(r"memory forbids .*, which needs (\S+) GiB", plan.bound_by)
        assert found is not None
        return float(found[1])

    alone = needed(23e6, None)
    assert needed(23e6 + 2**30, pd2.Calibration(1.0, 2.0**30)) == pytest.approx(1 + alone, abs=6e-3)


def test_types_with_a_memory_of_their_own_are_told() -> None:
    own = r"DeviceType\(memory=\): 'big' \(0.0009\d+ GiB\), 'small"
    with pytest.raises(DoesNotFit, match=own) as error:
        made_plan(devices=of_two_types("1MB", "1MB"), memory="1TB")
    made_plan(devices=of_two_types(*[f"{error.value.limit} B"] * 2), memory="1TB")


def test_a_fresh_schedule_has_as_many_microbatches_as_its_late_share_takes() -> None:
    def fresh(**share: float) -> pd2.Plan:
        sizes = {"num_stages": 4, "width": 1, "batch": 4, "largest_batch": 1024}
        return made_plan(schedules="2bw_fresh", **sizes, **share)

    few, usual, many = fresh(max_late_share=1.0), fresh(), fresh(max_late_share=0.1)
    assert few.num_microbatches < 7 <= usual.num_microbatches < 25 <= many.num_microbatches
    assert few.shape.mean_delay == 5 / (2 * few.most_microbatches)
    assert f"2bw_fresh, {100 * many.shape.mean_delay:.0f} % late: 1 replica" in str(many)
    # In a batch of few rows the largest batch sets the number.
    for rows in (4, 6, 8):
        plan = made_plan(num_stages=4, width=1, batch=rows)
        assert (plan.schedule, plan.num_microbatches) == ("2bw_fresh", rows)
    with pytest.raises(ValueError, match=r"max_late_share: 1\.5, it must be at most 1"):
        made_plan(schedules="2bw_fresh", max_late_share=1.5)
