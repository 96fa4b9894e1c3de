"""Forwards and backwards recorded as graphs train as others do, with one launch each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.runtime import graphs
from pipedream2bw.runtime.graphs import StageGraphs
from tests.device import checked
from tests.device.on_device import batch_on, on
from tests.runs.trajectory import assert_same, by_pipeline, sgd
from tests.samples.models import TASKS
from tests.samples.schedule_sizes import V_SHAPED, sizes_for

DEVICE = "checked:0"
FIRST = "first microbatches"


def check_with_graphs(name: str, num_stages: int, m: int, **options: Any) -> dict[int, StageGraphs]:
    """Trains with and without graphs, to the same bits; what graphs did before the last batch."""
    reports: list[dict[int, StageGraphs]] = []
    use_graphs, optimizer = options.pop("graphs", "auto"), options.pop("optimizer", sgd)
    batches = TASKS[name].batches([2 * m] * options.pop("batches", 8))
    with_graphs, without = (
        by_pipeline(
            on(TASKS[name], DEVICE),
            batches,
            num_stages,
            m,
            optimizer,
            lambda number, pipe, optimizer: reports.append(pipe.graph_report()),
            example=batch_on(batches[0], DEVICE),
            devices=[DEVICE] * num_stages,
            graphs=graphs,
            **options,
        )
        for graphs in (False, use_graphs)
    )
    assert_same(with_graphs, without)
    return reports[-1]


@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_every_schedule(schedule: str) -> None:
    sizes = sizes_for(schedule, 2)[0]
    report = check_with_graphs(
        "mlp",
        2,
        sizes.num_microbatches,
        schedule=schedule,
        stages_per_rank=sizes.stages_per_rank,
        batches=12,
    )
    splits = {stage for stage, of_stage in report.items() if splits_backwards(of_stage)}
    for stage in report.keys() - splits:
        assert report[stage].forwards > 0
        assert report[stage].backwards > 0
    is_split = "zero_bubble" in schedule or "split" in schedule or schedule in V_SHAPED
    assert bool(splits) == is_split


def splits_backwards(report: StageGraphs) -> bool:
    return "the schedule splits backwards" in report.others


NOT_RECORDED = {
    "batch norm": 1,  # one without momentum reads its counter
    "branch": 2,  # looks at its input
    "drawing": 1,  # a checkpoint inside
    "masked": 0,
    "structures": 0,
}
"""How many stages of these models are executed as usual."""


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"lstm"}))  # which the device does not have
def test_every_model(name: str) -> None:
    num_stages = TASKS[name].depths[-1]
    report = check_with_graphs(name, num_stages, num_stages)
    usual = [of_stage for of_stage in report.values() if of_stage.others.keys() - {FIRST}]
    assert len(usual) == NOT_RECORDED.get(name, 0), report
    assert all(of_stage.forwards for of_stage in report.values() if of_stage not in usual)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers_that_write_by_torchs_operators_or_not(optimizer: Any) -> None:
    report = check_with_graphs(
        "mlp", 2, 3, optimizer=lambda parameters: optimizer(parameters, lr=0.01), graphs=True
    )
    assert report[0].backwards > 0


def test_there_is_one_forward_for_each_slot_and_microbatch_in_flight() -> None:
    report = check_with_graphs("mlp", 3, 3, graphs=True, batches=12)
    slots = 3  # two versions and the gradients take turns
    for stage, in_flight in enumerate((3, 2, 1)):
        of_stage = report[stage]
        # Of each forward a backward that writes a batch's first gradients, and one that adds.
        # Batches 0 and 1 read one version, and their gradients are apart.
        most = slots * in_flight * 3 + in_flight
        assert slots * in_flight * 2 <= of_stage.num_graphs <= most
        assert of_stage.bytes > 0


class Refused(nn.Module):
    """Does something that keeps a stage from being recorded."""

    def __init__(self, act: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.behind = nn.Linear(8, 8)  # its gradients come first
        self.register_buffer("count", torch.zeros(1))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.behind(self.act(self, self.layer(x)))
        return y


def read_by_host(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def replace_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.count = module.count + 1
    return x + module.count


def read_in_backward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * (1.0 if gradient.sum().item() > 0 else 2.0))
    return x * 1


REFUSED = [
    (read_by_host, "shows the host numbers, cannot be recorded"),
    (replace_buffer, "replaces? buffers"),
    (read_in_backward, "shows the host numbers, cannot be recorded"),
]


def build(act: Any, use_graphs: bool | str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = [Refused(lambda module, x: x), Refused(act)]
    options = {"loss_fn": F.mse_loss, **options}
    pipe = pd2.PipelineModule(
        [part.to(DEVICE) for part in model],
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.zeros(4, 8, device=DEVICE),),
        graphs=use_graphs,
        timeout=60.0,
        **options,
    )
    pipe.session.random_seed = 5
    return pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


def train(pipe: Any, opt: Any, batches: range, rows: int = 4) -> list[float]:
    losses = []
    for number in batches:
        # Not the default generators: a stage may be drawing from the device's.
        own = torch.Generator().manual_seed(number)
        x, target = torch.randn(2, rows, 8, generator=own)
        losses.append(pipe.train_step(x.to(DEVICE), target=target.to(DEVICE)))
        opt.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize(("act", "reason"), REFUSED)
def test_what_cannot_be_recorded_is_executed_as_usual(act: Any, reason: str) -> None:
    results = []
    for use_graphs in (False, "auto"):
        pipe, opt = build(act, use_graphs)
        with pipe:
            losses = train(pipe, opt, range(8))
            report = pipe.graph_report()
            results.append((losses, {k: v.cpu() for k, v in pipe.state_dict().items()}))
    assert results[0][0] == results[1][0]
    for name, tensor in results[0][1].items():
        assert torch.equal(tensor, results[1][1][name]), name
    assert any(re.search(reason, other) for other in report[1].others), report[1].others
    assert report[0].forwards > 0
    assert report[0].others.keys() == {FIRST}


@pytest.mark.parametrize(("act", "reason"), REFUSED)
def test_graphs_true_raises_with_the_reason(act: Any, reason: str) -> None:
    pipe, opt = build(act, True)
    with pytest.raises(pd2.errors.StageError, match=f"graphs: True, but .*{reason}"), pipe:
        train(pipe, opt, range(8))


def test_a_loss_function_that_reads_the_host_is_executed_as_usual() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, target)
        assert loss.item() >= 0
        return loss

    pipe, opt = build(lambda module, x: x, "auto", loss_fn=loss_fn)
    with pipe:
        train(pipe, opt, range(6))
        report = pipe.graph_report()
    assert report[1].forwards == 0
    assert report[0].forwards > 0


def test_a_stage_that_recomputes_is_executed_as_usual() -> None:
    report = check_with_graphs("mlp", 2, 2, recompute=[True, False])
    assert set(report[0].others) == {"the stage recomputes"}
    assert report[1].forwards > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute": True}, "graphs: True, recompute"),
        ({"random": "torch"}, "graphs: True, random: 'torch'"),
    ],
)
def test_graphs_true_refuses_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(lambda module, x: x, True, **options)


def add_mean(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return pd2.add_loss(x, x.square().mean())


def test_losses_added_in_a_recorded_forward_have_the_microbatchs_weight() -> None:
    results = []
    for use_graphs in (False, True):
        pipe, opt = build(add_mean, use_graphs)
        with pipe:  # microbatches of three rows beside two, and beside three
            for _ in range(5):
                train(pipe, opt, range(6), rows=5)
                train(pipe, opt, range(6, 12), rows=6)
            report = pipe.graph_report()
            results.append({name: tensor.cpu() for name, tensor in pipe.state_dict().items()})
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    assert report[1].backwards > 20


def test_numbers_in_a_target_are_constants_of_a_recording() -> None:
    def loss_fn(output: torch.Tensor, target: tuple[torch.Tensor, float]) -> torch.Tensor:
        return F.mse_loss(output, target[0]) * target[1]

    losses = []
    for use_graphs in (False, "auto"):
        pipe, opt = build(lambda module, x: x, use_graphs, loss_fn=loss_fn)
        with pipe:
            x, target = torch.ones(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE)
            of_run = []
            for number in range(100):
                factor = 1.0 + number % 2 if number < 20 else number / 10
                of_run.append(pipe.train_step(x, target=(target, factor)))
                opt.step()
            losses.append([loss.item() for loss in of_run])
            report = pipe.graph_report()
    assert losses[0] == losses[1]
    assert report[1].forwards > 10
    assert report[1].others["its arguments that are no tensors keep changing"] > 0


def test_other_shapes_are_recorded_anew() -> None:
    losses = []
    for use_graphs in (False, True):
        pipe, opt = build(lambda module, x: x, use_graphs)
        with pipe:
            losses.append(
                [
                    train(pipe, opt, range(20 * i, 20 * i + 6), rows)
                    for i, rows in enumerate((4, 6, 5))
                ]
            )
            report, memory = pipe.graph_report(), pipe.memory_report()
            assert [memory[i].graphs for i in (0, 1)] == [report[i].bytes for i in (0, 1)]
    assert losses[0] == losses[1]
    assert report[0].others[FIRST] > 4


def test_memory_bounds_the_graphs_and_those_long_unused_go(monkeypatch: Any) -> None:
    results = []
    most = None
    monkeypatch.setattr(graphs, "most_bytes_of", lambda device, num_stages: most)
    for rows in (4, 6):
        pipe, opt = build(lambda module, x: x, "auto")
        with pipe:
            train(pipe, opt, range(10), rows)
            most = max(most or 0, pipe.graph_report()[0].bytes + 1)
    for use_graphs in (False, "auto"):
        pipe, opt = build(lambda module, x: x, use_graphs)
        with pipe:
            losses = [train(pipe, opt, range(10), 4), train(pipe, opt, range(60), 6)]
            before = pipe.graph_report()[0]
            losses.append(train(pipe, opt, range(20), 6))
            after = pipe.graph_report()[0]
            results.append(losses)
    assert results[0] == results[1]
    assert before.others["no memory for more graphs"] > 0
    assert after.forwards - before.forwards == 40  # all of them
    assert after.bytes < 1.5 * most


def test_a_discarded_batch_leaves_no_trace() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if failing and target.shape[0] == 3:
            raise ValueError("a bad batch")
        return F.mse_loss(output, target)

    results = []
    for use_graphs in (False, "auto"):
        pipe, opt = build(lambda module, x: x, use_graphs, loss_fn=loss_fn, schedule="1f1b")
        with pipe:
            failing = False
            losses = train(pipe, opt, range(6))
            pipe.flush()
            failing = True
            with pytest.raises(pd2.errors.StageError, match="a bad batch"):
                train(pipe, opt, range(6, 7), rows=6)
                pipe.flush()
            losses += train(pipe, opt, range(7, 12))
            results.append(losses)
            report = pipe.graph_report()
    assert results[0] == results[1]
    assert report[0].forwards > 10


@pytest.mark.parametrize("use_graphs", [False, True])
def test_a_microbatch_takes_few_launches(use_graphs: bool) -> None:
    """docs/design/engine.md gives these numbers."""
    torch.manual_seed(1)
    layers = [module for _ in range(4) for module in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())]
    m = 16
    pipe = pd2.PipelineModule(
        nn.Sequential(*layers).to(DEVICE),
        F.mse_loss,
        num_stages=1,
        num_microbatches=m,
        example_args=(torch.zeros(m, 8, device=DEVICE),),
        graphs=use_graphs,
        schedule="1f1b",
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    x, target = torch.randn(m, 8).to(DEVICE), torch.randn(m, 8).to(DEVICE)
    counts = []
    with pipe:
        for _ in range(6):
            before = checked.num_launches()
            pipe.train_step(x, target=target)
            opt.step()
            pipe.flush()
            counts.append(checked.num_launches() - before)
    # 51 and 8 with torch 2.13.
    assert counts[-1] / m < 10 if use_graphs else counts[-1] / m > 40
