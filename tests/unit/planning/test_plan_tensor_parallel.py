"""The degree of tensor parallelism is searched with replicas and stages, as enumeration finds it.

Each model's layers are written down with what a device does of them at a degree, by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.errors import DoesNotFit
from pipedream2bw.planner.profiling.profile import (
    MicrobatchProfile,
    Profile,
    ProfiledDevice,
    ProfiledLayer,
)
from tests.references.plan_oracle import Problem
from tests.references.plan_search import Search

KB = 1000
DEGREES = (1, 2, 4, 8)
ROWS = (1, 2)


class Layer(NamedTuple):
    """A layer: milliseconds of its forward for a row, kilobytes, and what devices have of it."""

    name: str
    ms: float
    weights: int
    out: int
    kept: int
    part: str = "whole"
    """Or "sharded", "between" or "summed"."""


Link = tuple[float, float]


def block(i: int, hidden: int) -> list[Layer]:
    at = f"layers.{i}"
    return [
        Layer(f"{at}.norm", 0.1, 2, hidden, hidden),
        Layer(f"{at}.up", 1.0, 4000, 4 * hidden, hidden, "sharded"),
        Layer(f"{at}.act", 0.1, 0, 4 * hidden, 4 * hidden, "between"),
        Layer(f"{at}.down", 1.0, 4000, hidden, 4 * hidden, "summed"),
        Layer(f"{at}.add", 0.0, 0, hidden, 0),
    ]


TRANSFORMER = [
    Layer("embed", 0.1, 3000, 200, 0),
    *block(0, 200),
    *block(1, 200),
    Layer("head", 0.4, 3000, 4, 200),
]
VGG = [
    Layer("features.0", 2.0, 10, 3000, 0, "sharded"),
    Layer("features.1", 2.0, 40, 1500, 3000, "summed"),
    Layer("relu", 0.1, 0, 1500, 1500),
    Layer("features.2", 2.0, 80, 1500, 1500, "sharded"),
    Layer("features.3", 2.0, 160, 700, 1500, "summed"),
    Layer("pool", 0.1, 0, 100, 700),
    Layer("classifier.0", 0.6, 40_000, 16, 100, "sharded"),
    Layer("classifier.1", 0.0, 0, 16, 16, "between"),
    Layer("classifier.2", 0.3, 16_000, 16, 16, "summed"),
    Layer("classifier.3", 0.1, 4000, 4, 16),
]
MODELS = {"transformer": TRANSFORMER, "vgg": VGG}
CLUSTERS: dict[str, tuple[int, int, Link, Link]] = {
    # Devices, devices of a server, links inside and outside: seconds and bytes per second.
    "two servers": (8, 4, (2e-6, 5e10), (2e-5, 1e9)),
    "one slow network": (8, 1, (0.0, 1e9), (1e-5, 3e9)),
}


def profile_of(layers: Sequence[Layer], degree: int = 1, ring: Link = (0.0, 1e9)) -> Profile:
    """Of a device that shares every layer with the others of a ring."""
    latency, rate = ring

    def added_up(size: float) -> float:
        return 2 * (degree - 1) * (latency + size / degree / rate)

    def item(rows: int) -> MicrobatchProfile:
        forward, input_grad, weight_grad, kept = [], [], [], []
        for i, each in enumerate(layers):
            share = 1 if each.part == "whole" else degree
            ms = 1e-3 * each.ms * rows / share
            out = KB * rows * each.out
            read = KB * rows * (layers[i - 1].out if i else 0)
            forward.append(ms + (added_up(out) if each.part == "summed" else 0))
            input_grad.append(ms + (added_up(read) if each.part == "sharded" and i else 0))
            weight_grad.append(ms if each.weights else 0.0)
            whole = each.part in ("whole", "sharded")
            kept.append(KB * rows * each.kept // (1 if whole else share))
        edges = [(i, i + 1, KB * rows * each.out) for i, each in enumerate(layers[:-1])]
        for i, each in enumerate(layers):
            if each.name.endswith(".norm"):  # the residual
                edges.append((i - 1, i + 4, KB * rows * layers[i - 1].out))
        return MicrobatchProfile(
            rows=rows,
            forward=tuple(forward),
            input_grad=tuple(input_grad),
            weight_grad=tuple(weight_grad),
            activation_bytes=tuple(kept),
            kept=(),
            spread=(0.0,) * len(layers),
            edges=tuple(sorted(edges)),
        )

    sizes = [KB * each.weights // (1 if each.part == "whole" else degree) for each in layers]
    return Profile(
        model_name="Made",
        parameters=("weight [1] torch.float32",),
        device=ProfiledDevice("made", "cpu", 2**34, False),
        torch_version="0",
        loss="loss",
        layers=tuple(
            ProfiledLayer(
                name=each.name,
                parameter_bytes=size,
                trained_bytes=size,
                can_cut_after=i + 1 < len(layers)
                # No residual goes past a stage, whose time would take long to enumerate.
                and not any(a <= i < b for a, b, _ in item(1).edges if b > a + 1)
                and (degree == 1 or each.part == "whole"),
                repeats=None,
            )
            for i, (each, size) in enumerate(zip(layers, sizes, strict=True))
        ),
        shared_parameters=(),
        microbatches=tuple(item(rows) for rows in ROWS),
        seconds_per_update_byte={"adamw": 1e-11},
        seconds_per_action=0.0,
        links=None,
        all_reduce=(),
    )


def names(layers: Sequence[Layer], part: str) -> list[str]:
    return [each.name for each in layers if each.part == part]


def planned(layers: Sequence[Layer], cluster: pd2.Cluster, **changes: Any) -> pd2.Plan:
    options: dict[str, Any] = {
        "memory": "1GB",
        "batch": 8,
        "tensor_parallel": DEGREES,
        "sharded": names(layers, "sharded"),
        "summed": names(layers, "summed"),
        "recompute": "none",
        "schedules": "1f1b",
    }
    return pd2.plan(profile_of(layers), devices=cluster, **{**options, **changes})


def made_cluster(devices: int, each: int, inside: Link, outside: Link) -> pd2.Cluster:
    return pd2.Cluster.servers(
        devices,
        devices_per_server=each,
        inside=inside[1],
        outside=outside[1],
        inside_latency=inside[0],
        outside_latency=outside[0],
    )


def problem_of(layers: Sequence[Layer], name: str, degree: int, **sizes: Any) -> Problem:
    """Of groups of adjacent devices, each of which is one device."""
    devices, each, inside, outside = CLUSTERS[name]
    groups = made_cluster(devices // degree, max(1, each // degree), inside, outside)
    ring = inside if degree <= each else outside
    return Problem(
        profile_of(layers, degree, ring),
        groups,
        recompute=("none",),
        optimizer="adamw",
        **sizes,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_degree_is_the_best_of_all_by_enumeration(
    model: str, cluster: str, schedule: str
) -> None:
    """Of each degree every width, depth, number of rows and set of cuts."""
    layers, found = MODELS[model], set()
    whole = sum(4 * KB * each.weights for each in layers)
    for batch, memory in itertools.product((2, 8, 32), (0.15 * whole, 0.4 * whole, 10 * whole)):
        sizes: dict[str, Any] = {"memory": memory, "batch": batch, "largest_batch": batch}
        best = {
            degree: Search(
                problem_of(layers, cluster, degree, schedules=(schedule,), **sizes)
            ).fastest()
            for degree in DEGREES
        }
        try:
            plan = planned(
                layers,
                made_cluster(*CLUSTERS[cluster]),
                schedules=schedule,
                optimizer="adamw",
                **sizes,
            )
        except DoesNotFit:
            assert min(best.values()) == float("inf")
            continue
        found.add(plan.tensor_parallel)
        taken = 1 / plan.rows_per_second
        assert min(best.values()) <= taken * (1 + 1e-9)
        assert taken <= min(best.values()) * 1.001
        assert plan.peak_bytes <= memory * (1 + 1e-9)
        others = {each.tensor_parallel: each for each in plan.alternatives}
        for degree in others.keys() - {plan.tensor_parallel}:
            assert 1 / others[degree].rows_per_second <= best[degree] * 1.02
    assert len(found) > 1


def test_a_stage_says_what_each_of_its_devices_does_and_holds() -> None:
    cluster = made_cluster(*CLUSTERS["two servers"])
    sizes: dict[str, Any] = {"tensor_parallel": 4, "num_stages": 2, "width": 1}
    plan = planned(TRANSFORMER, cluster, **sizes)
    by_hand = profile_of(TRANSFORMER, 4, CLUSTERS["two servers"][2])
    item = next(each for each in by_hand.microbatches if each.rows == plan.microbatch_rows)
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert plan.mesh == {"dp": 1, "pp": 2, "tp": 4}
    assert plan.num_devices == 8
    for stage in plan.stages:
        held = range(*stage.layers)
        assert stage.forward == pytest.approx(sum(item.forward[i] for i in held))
        assert stage.input_grad == pytest.approx(sum(item.input_grad[i] for i in held))
        assert stage.weight_grad == pytest.approx(sum(item.weight_grad[i] for i in held))
        assert stage.weight_bytes == sum(by_hand.layers[i].trained_bytes for i in held)
        assert stage.activation_bytes == sum(item.activation_bytes[i] for i in held)
    assert "2 stages on 4 devices each" in str(plan)
    assert "1 x 1 x 4" in str(planned(TRANSFORMER, cluster, tensor_parallel=4))


def test_measured_links_and_a_mesh_are_those_of_groups() -> None:
    """Links between all devices alike, in each way to say it."""
    rate = 2e9
    alike = pd2.Cluster.servers(8, devices_per_server=8, inside=rate, outside=rate)
    matrix = pd2.Cluster.measured([[0.0] * 8] * 8, [[rate] * 8] * 8)
    mesh = pd2.Cluster.mesh(2, 4, row=rate, column=rate)
    for degree in (2, 4):
        sizes: dict[str, Any] = {"tensor_parallel": degree, "width": 1, "num_stages": 2}
        times = [planned(VGG, each, **sizes).seconds_per_batch for each in (alike, matrix, mesh)]
        assert times == pytest.approx([times[0]] * 3)
    slow = [[rate] * 8 for _ in range(8)]
    slow[2][3] = rate / 10  # in the second group of two
    slower = pd2.Cluster.measured([[0.0] * 8] * 8, slow)
    sizes = {"tensor_parallel": 2, "width": 1, "num_stages": 1}
    assert planned(VGG, slower, **sizes).stages[0].forward == pytest.approx(
        planned(VGG, pd2.Cluster.measured([[0.0] * 8] * 8, [[rate / 10] * 8] * 8), **sizes)
        .stages[0]
        .forward
    )


def test_sums_take_as_long_on_faster_devices_and_cost_all_devices_of_a_group() -> None:
    def plan(throughput: float, price: float = 1.0, **changes: Any) -> pd2.Plan:
        types = [pd2.DeviceType("x", 4, throughput=throughput, price_per_hour=price)]
        cluster = pd2.Cluster.servers(types, devices_per_server=4, inside=1e9, outside=1e9)
        return planned(
            VGG, cluster, **{"tensor_parallel": 4, "width": 1, "num_stages": 1, **changes}
        )

    slow, fast = plan(1.0).stages[0].forward, plan(2.0).stages[0].forward
    adds = KB * sum(each.out for each in VGG if each.part == "summed")
    rows = plan(1.0).microbatch_rows
    sums = 2 * 3 * adds * rows / 4 / 1e9
    assert fast - sums == pytest.approx((slow - sums) / 2)
    assert plan(1.0, price=3.0, objective="cost").price_per_hour == 12


def test_a_plan_of_a_degree_is_kept_in_its_file(tmp_path: Path) -> None:
    made = planned(TRANSFORMER, made_cluster(*CLUSTERS["two servers"]), tensor_parallel=2)
    made.save(tmp_path / "plan.json")
    assert pd2.Plan.load(tmp_path / "plan.json") == made


def test_a_pipeline_is_not_opened_as_if_its_layers_were_whole() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.Sequential(*layers)
    x = torch.ones(4, 4)
    profile = pd2.profile(
        model, mse_loss, example_args=(x,), target=x, dry=pd2.KNOWN_DEVICES["v100"]
    )
    plan = pd2.plan(
        profile,
        devices=4,
        memory="1GB",
        batch=4,
        tensor_parallel=2,
        num_stages=2,
        width=1,
        sharded="0",
        summed="2",
        schedules="1f1b",
    )
    assert plan.split == ["4"], "behind what reads the sum"
    with pytest.raises(
        ValueError, match=r"tensor_parallel of the plan: 2, plan=: .*'dp': 1, 'pp': 2, 'tp': 2"
    ):
        pd2.PipelineModule(model, mse_loss, plan=plan, example_args=(x,))
    assert plan.options == {
        "num_stages": 2,
        "num_microbatches": plan.num_microbatches,
        "schedule": "1f1b",
        "stages_per_rank": 1,
        "split": ["4"],
        "recompute": [False, False],
        "gradient_dtype": None,
        "mesh": {"dp": 1, "pp": 2, "tp": 2},
    }


def test_stages_on_devices_that_a_mesh_does_not_number() -> None:
    types = [pd2.DeviceType("a", 2, memory="20MB"), pd2.DeviceType("b", 2, memory="200MB")]
    made = planned(TRANSFORMER, types, tensor_parallel=2, num_stages=2, width=1)
    assert made.stages[0].devices == (2, 3)
    with pytest.raises(ValueError, match=r"options: stage 0 is on devices \[2, 3\], the mesh"):
        _ = made.options


def test_a_degree_without_a_plan_is_told() -> None:
    x = torch.ones(4, 4)
    profile = pd2.profile(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
        mse_loss,
        example_args=(x,),
        target=x,
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    sizes = {"devices": 4, "memory": "1GB", "batch": 4, "num_stages": 2, "width": 1}
    with pytest.warns(UserWarning, match="tensor_parallel: 2 has no plan: "):
        made = pd2.plan(profile, **sizes, tensor_parallel=(1, 2), sharded="0", summed="1")
    assert made.tensor_parallel == 1


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"tensor_parallel": 3}, ValueError, "tensor_parallel: 3, devices of type device: 8: "),
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel: 0"),
        ({"tensor_parallel": "2"}, TypeError, "tensor_parallel: '2' given"),
        ({"tensor_parallel": ()}, ValueError, "tensor_parallel: none"),
        ({"summed": "*.dwon"}, ValueError, r"summed: '\*\.dwon', layers of the profile: embed, "),
        ({"sharded": 3}, TypeError, "sharded: 3 given"),
        ({"summed": ()}, ValueError, r"summed: \[\], the last layer is 'head'"),
        ({"sharded": (), "summed": ()}, ValueError, "tensor_parallel: 8, sharded: none, summed: n"),
        ({"objective": "memory"}, ValueError, "tensor_parallel: 1, 2, 4, 8, objective: 'memory'"),
        (
            {"sharded": ["*.up", "*.down"]},
            ValueError,
            r"sharded: .*, summed: .*: both name 'layers.0.down': what a layer makes either stays",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        planned(TRANSFORMER, made_cluster(*CLUSTERS["two servers"]), **given)


def test_degrees_that_no_server_or_type_allows_are_refused() -> None:
    six = pd2.Cluster.servers(12, devices_per_server=6, inside=1e9, outside=1e9)
    with pytest.raises(ValueError, match="tensor_parallel: 4, devices_per_server: 6"):
        planned(TRANSFORMER, six, tensor_parallel=4)
    types = [pd2.DeviceType("a", 4), pd2.DeviceType("b", 4, throughput=2.0)]
    two = pd2.Cluster.servers(types, devices_per_server=4, inside=1e9, outside=1e9)
    with pytest.raises(ValueError, match=r"tensor_parallel: 2, throughputs .*: \[1\.0, 2\.0\]"):
        planned(TRANSFORMER, two, tensor_parallel=(1, 2))


def middle(layers: Sequence[nn.Module], wide: int) -> pd2.Profile:
    x = torch.ones(2, wide)
    return pd2.profile(
        nn.Sequential(*layers),
        mse_loss,
        example_args=(x,),
        target=x,
        dry=pd2.KNOWN_DEVICES["v100"],
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("wide", "narrow"), [(5, 12), (8, 6), (15, 7), (2, 4)])
def test_each_degree_cuts_the_layers_into_equal_parts(wide: int, narrow: int, bias: bool) -> None:
    layers = nn.Linear(wide, narrow, bias), nn.Tanh(), nn.Linear(narrow, wide), nn.Tanh()
    profile = middle(layers, wide)
    for degree in range(2, 9):
        # Only the bias tells which dimension of the weight is cut.
        fits = narrow % degree == 0 or (not bias and wide % degree == 0)
        cut = "0.bias" if wide % degree == 0 and bias else "0.weight"
        refused = f"tensor_parallel: {degree}, layer '0': shape of {cut}: "
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=refused):
            pd2.plan(
                profile,
                devices=degree,
                memory="1GB",
                batch=2,
                tensor_parallel=degree,
                sharded="0",
                summed="2",
            )


def test_a_degree_that_cuts_no_layer_is_not_left_out_of_a_list() -> None:
    profile = middle([nn.Linear(8, 4), nn.Linear(4, 8), nn.Tanh()], 8)
    sizes: dict[str, Any] = {"devices": 24, "memory": "1GB", "batch": 24}
    with pytest.raises(ValueError, match=r"tensor_parallel: 3, layer '0': shape of .*: \[4, 8\]"):
        pd2.plan(profile, **sizes, tensor_parallel=(1, 2, 3), sharded="0", summed="1")


def test_a_scalar_and_the_bias_of_a_sum_stay_whole() -> None:
    profile = middle([nn.Linear(3, 4), nn.Linear(4, 3), nn.Tanh()], 3)
    scaled = (*profile.parameters, "0.scale [1] torch.float32", "0.shift [] torch.float32")
    profile = dataclasses.replace(profile, parameters=scaled)
    options: dict[str, Any] = {"sharded": "0", "summed": "1", "tensor_parallel": 4}
    assert pd2.plan(profile, devices=4, memory="1GB", batch=2, **options).tensor_parallel == 4
