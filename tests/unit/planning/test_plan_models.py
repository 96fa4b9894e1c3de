"""Plans of models that are no chain: what crosses cuts is counted, and they train as planned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.references.oracle import Batch
from tests.references.plan_oracle import messages
from tests.runs.trajectory import Trajectory, assert_same, by_oracle, copy_of, sgd
from tests.samples.models import Task

HIDDEN, LENGTH, PLANES, SIZE = 8, 4, 4, 8
ROWS, NUM_MICROBATCHES, NUM_STAGES = 2, 4, 3
BANDWIDTH = 1e9


class Attention(nn.Module):
    """Of each place of x to the places of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        weights = (self.query(x) @ self.key(read).transpose(1, 2)).softmax(-1)
        return weights @ self.value(read)


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.own = nn.ModuleList(Attention() for _ in range(4))
        self.across = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            source = source + layer(source, source)
        memory, x = self.norm(source), target
        for own, across in zip(self.own, self.across, strict=True):
            x = x + own(x, x)
            x = x + across(x, memory)
        result: torch.Tensor = self.head(x)
        return result


class UNet(nn.Module):
    """Each level of the way down goes to its mirror image on the way up, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, PLANES, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(PLANES, PLANES, 3, 2, 1) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(PLANES, PLANES, 2, 2) for _ in range(3))
        self.join = nn.ModuleList(nn.Conv2d(2 * PLANES, PLANES, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).tanh()
        levels = []
        for layer in self.down:
            levels.append(x)
            x = layer(x).tanh()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), levels.pop()], 1)).tanh()
        return x


class Residual(nn.Module):
    """Adds its input to what two convolutions make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(PLANES, PLANES, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(PLANES)
        self.second = nn.Conv2d(PLANES, PLANES, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.norm(self.first(x)).relu())
        return (x + made).relu()


def resnet() -> nn.Module:
    blocks = [Residual() for _ in range(5)]
    head = nn.Linear(PLANES * SIZE * SIZE, 3)
    return nn.Sequential(nn.Conv2d(1, PLANES, 3, 1, 1), *blocks, nn.Flatten(), head)


def sentences(rows: int) -> Batch:
    pair = torch.randn(2, rows, LENGTH, HIDDEN)
    return Batch((pair[0], pair[1]), torch.randn(rows, LENGTH, HIDDEN))


def pictures(rows: int, output: tuple[int, ...]) -> Batch:
    return Batch((torch.randn(rows, 1, SIZE, SIZE),), torch.randn(rows, *output))


TASKS = {
    # What the encoder ends with has several readers: gradients add up in another order.
    "encoder and decoder": Task(EncoderDecoder, sentences, exact=False),
    "u-net": Task(UNet, functools.partial(pictures, output=(PLANES, SIZE, SIZE))),
    "resnet": Task(resnet, functools.partial(pictures, output=(3,))),
}


def profile_of(task: Task) -> pd2.Profile:
    (batch,) = task.batches([ROWS])
    return pd2.profile(
        task.model(),
        mse_loss,
        example_args=batch.args,
        target=batch.target,
        microbatch_rows=(ROWS,),
        dry=pd2.KNOWN_DEVICES["v100"],
    )


def plan_of(profile: pd2.Profile, schedule: str, num_stages: int = NUM_STAGES) -> pd2.Plan:
    """Devices have links of one bandwidth without latency; each stage could have its own."""
    cluster = pd2.Cluster.servers(
        num_stages, devices_per_server=1, inside=BANDWIDTH, outside=BANDWIDTH
    )
    return pd2.plan(
        profile,
        devices=cluster,
        memory="1GiB",
        batch=ROWS * NUM_MICROBATCHES,
        schedules=schedule,
        recompute="none",
        num_stages=num_stages,
        width=1,
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_message_takes_what_crosses_the_cuts(name: str) -> None:
    profile = profile_of(TASKS[name])
    plan = plan_of(profile, "2bw")
    firsts = [stage.layers[0] for stage in plan.stages]
    sent = messages(profile.microbatches[0], firsts, len(profile.layers))
    assert len(sent) >= NUM_STAGES - 1
    for k, stage in enumerate(plan.stages):
        most = max((size for (sender, _), size in sent.items() if sender == k), default=0.0)
        assert stage.message * BANDWIDTH == pytest.approx(most)


def test_the_encoders_result_goes_to_each_stage_of_the_decoder() -> None:
    """Here with a stage for every layer."""
    profile = profile_of(TASKS["encoder and decoder"])
    names = [layer.name for layer in profile.layers]
    reads = [i for i, name in enumerate(names) if name.startswith("across.") and "key" in name]
    assert len(reads) == 4
    (made,) = (i for i, name in enumerate(names) if name == "norm")
    by_layer = messages(profile.microbatches[0], range(len(names)), len(names))
    for layer in reads:
        assert by_layer.get((made, layer)) == ROWS * LENGTH * HIDDEN * 4


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("name", TASKS)
def test_a_planned_model_trains_as_the_whole_one(name: str, schedule: str) -> None:
    check_training(TASKS[name], plan_of(profile_of(TASKS[name]), schedule))


@pytest.mark.parametrize("schedule", ["2bw_v_half", "zero_bubble_v"])
def test_a_plan_of_a_v_holds_what_it_says(schedule: str) -> None:
    plan = plan_of(profile_of(TASKS["resnet"]), schedule, num_stages=4)
    assert plan.num_devices == 2
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (1,), (0,)]
    reports = check_training(TASKS["resnet"], plan)
    for stage, report in zip(plan.stages, reports.values(), strict=True):
        assert report.weights == stage.num_versions * stage.weight_bytes
        assert report.most_in_flight == stage.most_in_flight
        assert report.activations == stage.most_in_flight * stage.activation_bytes


def check_training(task: Task, plan: pd2.Plan) -> dict[int, Any]:
    """That it is the oracle's; returns what the stages held."""
    batches = task.batches([ROWS * NUM_MICROBATCHES] * 4)
    want = by_oracle(task, batches, NUM_MICROBATCHES, schedule=plan.schedule)
    pipe = pd2.PipelineModule(task.model(), mse_loss, plan=plan, example_args=batches[0].args)
    with pipe:
        begins = [program.first_layer_name for program in pipe.session.modes.first.programs]
        assert begins[1:] == plan.split
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
        got = Trajectory([float(loss) for loss in losses], copy_of(pipe.state_dict()))
        reports = pipe.memory_report()
    assert got.losses[-1] != got.losses[0]
    assert_same(got, want, exact=task.exact)
    return reports
