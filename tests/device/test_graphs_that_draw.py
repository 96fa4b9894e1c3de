"""A graph's forwards draw what the usual execution draws for the microbatch that is replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipedream2bw as pd2
from pipedream2bw.runtime.graphs import StageGraphs
from tests.device.on_device import moved

DEVICE = "checked:0"
FIRST = "first microbatches"
OWN = torch.Generator(DEVICE)

Act = Callable[[torch.Tensor], torch.Tensor]


class Drawing(nn.Module):
    """Something that draws, between layers whose gradients depend on what is drawn."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = act() if isinstance(act, type) else act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.behind(self.act(self.before(x)))
        return y


def attend(x: torch.Tensor) -> torch.Tensor:
    y = x.view(x.shape[0], 1, 2, 4)
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.3).reshape(x.shape)


def draw_much(x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(8, device=x.device) + torch.empty_like(x).uniform_()
    kept = F.dropout(F.rrelu(x, training=True)) * torch.bernoulli(torch.full_like(x, 0.7))
    return kept * noise + F.dropout(x) + x[:, torch.randperm(8, device=x.device)]


DRAWING: dict[str, Any] = {
    "nn.Dropout": nn.Dropout,
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": attend,
    "several draws": draw_much,
}


def drop(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x)


def build(
    act: Act, device: str, use_graphs: bool | str, loss_fn: Any = F.mse_loss, **options: Any
) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    torch.manual_seed(1)
    model = moved([Drawing(drop), Drawing(act)], device)
    pipe = pd2.PipelineModule(
        model,
        loss_fn,
        num_stages=2,
        num_microbatches=3,
        example_args=(torch.zeros(6, 8, device=device),),
        graphs=use_graphs,
        timeout=60.0,
        **options,
    )
    pipe.session.random_seed = 5
    return pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


def train(pipe: Any, opt: Any, batches: range, rows: int = 6) -> list[float]:
    device = next(iter(pipe.parameters())).device
    losses = []
    for number in batches:
        own = torch.Generator().manual_seed(number)
        x, target = torch.randn(2, rows, 8, generator=own)
        losses.append(pipe.train_step(x.to(device), target=target.to(device)))
        opt.step()
    return [loss.item() for loss in losses]


Result = tuple[list[float], dict[str, torch.Tensor]]


def trained(
    act: Act, device: str, use_graphs: bool | str, **options: Any
) -> tuple[Result, dict[int, StageGraphs]]:
    pipe, opt = build(act, device, use_graphs, **options)
    with pipe:
        losses = train(pipe, opt, range(8))
        losses += train(pipe, opt, range(8, 14), rows=7)  # one microbatch is larger
        state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
        return (losses, state), pipe.graph_report()


def check_same(got: Result, want: Result) -> None:
    assert got[0] == want[0]
    assert torch.tensor(got[0]).isfinite().all()
    assert got[1].keys() == want[1].keys()
    assert all(torch.equal(tensor, want[1][name]) for name, tensor in got[1].items())


@pytest.mark.parametrize("name", DRAWING)
def test_replays_draw_what_the_usual_execution_draws(name: str) -> None:
    usual, _ = trained(DRAWING[name], DEVICE, False)
    by_graphs, report = trained(DRAWING[name], DEVICE, True)
    check_same(by_graphs, usual)
    check_same(trained(DRAWING[name], "cpu", False)[0], usual)
    for of_stage in report.values():
        assert of_stage.others.keys() == {FIRST}
        assert of_stage.forwards > 20
        assert of_stage.backwards > 20


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw_eager"])
def test_every_kind_of_schedule(schedule: str) -> None:
    usual, _ = trained(drop, DEVICE, False, schedule=schedule)
    by_graphs, report = trained(drop, DEVICE, "auto", schedule=schedule)
    check_same(by_graphs, usual)
    assert all(of_stage.forwards > 10 for of_stage in report.values())


def test_gradients_that_go_to_the_host_leave_in_backwards_of_recorded_forwards() -> None:
    """Those backwards are executed as usual, on what a graph has drawn."""
    options = {"optimizer_device": "cpu", "bucket_cap_mb": 1e-4}
    usual, _ = trained(attend, DEVICE, False, **options)
    by_graphs, report = trained(attend, DEVICE, True, **options)
    check_same(by_graphs, usual)
    assert report[1].others["the batch's gradients go to the host"] > 5


def test_a_discarded_batch_leaves_no_trace() -> None:
    fails = False

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails and target.shape[0] == 3:
            raise ValueError("a bad batch")
        return F.mse_loss(F.dropout(output, 0.1), target)

    results = []
    for use_graphs in (False, "auto"):
        pipe, opt = build(draw_much, DEVICE, use_graphs, loss_fn, schedule="1f1b")
        with pipe:
            fails = False
            losses = train(pipe, opt, range(6))
            pipe.flush()
            fails = True
            with pytest.raises(pd2.errors.StageError, match="a bad batch"):
                train(pipe, opt, range(6, 7), rows=9)
                pipe.flush()
            losses += train(pipe, opt, range(7, 12))
            state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
            results.append((losses, state))
            report = pipe.graph_report()
    check_same(results[1], results[0])
    assert report[1].forwards > 20
    assert report[1].others.keys() == {FIRST}


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty_like(x).uniform_(generator=OWN)


def by_host(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if float(torch.rand(1)) > 0.5 else x


def in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(lambda x: F.dropout(x.sin()), x, use_reentrant=False)
    return y


class DrawsBackward(torch.autograd.Function):
    """Drops gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return F.dropout(gradient) + 0.01 * torch.rand_like(gradient)


def in_backward(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = DrawsBackward.apply(F.dropout(x))  # type: ignore[no-untyped-call]
    return y


REFUSED: dict[str, tuple[Act, str]] = {
    "own generator": (own_generator, "aten::uniform_ draws random numbers that a graph cannot"),
    "on the host": (by_host, "draws random numbers that a graph cannot draw again"),
    "in a checkpoint": (in_checkpoint, "keeps its place among them, as a checkpoint does"),
    "in a backward": (in_backward, "draws random numbers in a backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_again_is_executed_as_usual(name: str) -> None:
    act, reason = REFUSED[name]
    OWN.manual_seed(3)
    usual, _ = trained(act, DEVICE, False)
    OWN.manual_seed(3)
    by_graphs, report = trained(act, DEVICE, "auto")
    check_same(by_graphs, usual)
    if act is not own_generator:
        check_same(trained(act, "cpu", False)[0], usual)
    assert any(reason in other for other in report[1].others), report[1].others
    assert report[0].others.keys() == {FIRST}


def test_a_number_of_draws_that_changes_is_not_recorded() -> None:
    calls = itertools.count()

    def act(x: torch.Tensor) -> torch.Tensor:
        for _ in range(next(calls)):
            x = F.dropout(x, 0.1)
        return x

    with pytest.raises(pd2.errors.StageError, match="the number of its draws changes"):
        trained(act, DEVICE, True)


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_true_raises_with_the_reason(name: str) -> None:
    act, reason = REFUSED[name]
    with pytest.raises(pd2.errors.StageError, match=f"graphs: True, but .*{reason}"):
        trained(act, DEVICE, True)
