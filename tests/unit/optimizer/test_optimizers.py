"""Every optimizer takes the delayed gradients as the definition says, fused or by its own step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.runs.trajectory import (
    assert_close,
    assert_same,
    by_oracle,
    by_pipeline,
    check_task,
    copy_of,
    make_pipeline,
)
from tests.samples.models import TASKS, WIDTH, Task

Parameters = Iterable[nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]


class SignDescent(torch.optim.Optimizer):
    """A user's own optimizer: momentum of signs, with state of its own kinds."""

    def __init__(self, params: Parameters, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad.sign(), 1 - group["beta"])
                parameter.add_(mean, alpha=-group["lr"] / state["calls"])


class ClippedSGD(SGD):
    """A subclass must not be taken for what it inherits from."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)
        super().step()


def groups(make: Callable[..., torch.optim.Optimizer], *options: dict[str, Any]) -> Make:
    """Deals the parameters to param_groups with the given options, in turn."""

    def build(parameters: Parameters) -> torch.optim.Optimizer:
        dealt = list(parameters)
        return make([{"params": dealt[i :: len(options)], **o} for i, o in enumerate(options)])

    return build


FUSED: dict[str, Make] = {
    "sgd-weight-decay": lambda p: SGD(p, lr=0.2, weight_decay=0.1),
    "sgd-maximize": lambda p: SGD(p, lr=0.02, maximize=True),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd-dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    "sgd-nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam-everything": lambda p: Adam(
        p, lr=0.01, betas=(0.6, 0.95), eps=1e-6, weight_decay=0.1, amsgrad=True, maximize=True
    ),
    "adam-decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adam-tensor-lr": lambda p: Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw-decay": lambda p: AdamW(p, lr=0.01, weight_decay=0.3, betas=(0.8, 0.99)),
    "adamw-amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "adamw-maximize": lambda p: AdamW(p, lr=0.01, maximize=True),
    "sgd-groups": groups(
        SGD,
        {"lr": 0.1},
        {"lr": 0.2, "momentum": 0.8},
        {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.5, "nesterov": True},
    ),
    "adamw-groups": groups(
        AdamW, {"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.0}, {"lr": 0.005, "amsgrad": True}
    ),
}

GENERIC: dict[str, Make] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "sign-descent": SignDescent,
    "clipped-sgd": lambda p: ClippedSGD(p, lr=0.5),
    "rmsprop-groups": groups(torch.optim.RMSprop, {"lr": 0.01}, {"lr": 0.02, "alpha": 0.5}),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_equal_the_stock_ones(name: str) -> None:
    check_task(TASKS["skips"], 3, 4, [8] * 8, FUSED[name], exact=False)
    # Some parameters have no gradient in some batches, some never.
    check_task(TASKS["branch"], 3, 3, [6] * 8, FUSED[name], exact=False)
    with make_pipeline(TASKS["mlp"], 2, 2, TASKS["mlp"].draw(2)) as pipe:
        assert "one fused pass" in repr(pd2.PipelineOptimizer(FUSED[name](pipe.parameters())))


@pytest.mark.parametrize("name", GENERIC)
def test_other_optimizers_run_their_own_step(name: str) -> None:
    check_task(TASKS["skips"], 3, 4, [8] * 8, GENERIC[name])
    check_task(TASKS["branch"], 3, 3, [6] * 8, GENERIC[name])
    with make_pipeline(TASKS["mlp"], 2, 2, TASKS["mlp"].draw(2)) as pipe:
        assert "its own step" in repr(pd2.PipelineOptimizer(GENERIC[name](pipe.parameters())))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    def build() -> nn.Module:  # Muon takes matrices only
        linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
        return nn.Sequential(*[m for linear in linears for m in (linear, nn.Tanh())])

    task = Task(build, TASKS["mlp"].draw)
    check_task(task, 3, 3, [6] * 4, lambda p: torch.optim.Muon(p, lr=0.01))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("make", [FUSED["adamw-groups"], GENERIC["rmsprop"]])
def test_in_place_where_one_version_is_kept(schedule: str, make: Make) -> None:
    check_task(TASKS["skips"], 3, 4, [8] * 6, make, exact=False, schedule=schedule)
    check_task(TASKS["branch"], 3, 4, [8] * 6, make, exact=False, schedule=schedule)


def test_a_parameter_without_a_loaded_momentum_begins_it_as_torch_does() -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([8])

    def loaded(parameters: Parameters) -> torch.optim.Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9, dampening=0.3)

    model = task.model()
    stock = loaded(model.parameters())
    state = stock.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.ones_like(next(model.parameters()))}}
    stock.load_state_dict(copy.deepcopy(state))
    with make_pipeline(task, 2, 4, batch, model=task.model(), schedule="1f1b") as pipe:
        optimizer = pd2.PipelineOptimizer(loaded(pipe.parameters()))
        optimizer.load_state_dict(state)
        loss = pipe.train_step(*batch.args, target=batch.target)
        optimizer.step()
        assert float(loss) > 0
        trained = pipe.full_state_dict()
    task.loss_fn(model(*batch.args), batch.target).backward()
    stock.step()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6)


def test_frozen_parameters_may_be_left_out_and_stay() -> None:
    task = TASKS["frozen"]

    def trainable(parameters: Parameters) -> torch.optim.Optimizer:
        return AdamW([p for p in parameters if p.requires_grad], lr=0.01)

    before = copy_of(task.model().state_dict())
    batches = task.batches([8] * 5)
    got = by_pipeline(task, batches, 3, 4, trainable)
    assert_same(got, by_oracle(task, batches, 4, trainable), exact=False)
    for name in ("0.weight", "4.bias", "6.weight", "8.bias"):
        assert torch.equal(got.state[name], before[name])
    assert not torch.equal(got.state["8.weight"], before["8.weight"])
    check_task(task, 2, 4, [8] * 5, GENERIC["rmsprop"])  # given to it, without a gradient


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0 / (t + 1)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("make", [FUSED["adamw"], FUSED["sgd-momentum"], GENERIC["rmsprop"]])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_learning_rate_of_an_update_is_that_of_its_step_call(name: str, make: Make) -> None:
    # The update of the last batches happens after the scheduler has moved on.
    task = TASKS["skips"]
    batches = task.batches([8] * 8)
    made: dict[int, lr_scheduler.LRScheduler] = {}

    def schedule(number: int, trained: Any, optimizer: torch.optim.Optimizer) -> None:
        if number == 0:
            made[id(trained)] = SCHEDULERS[name](optimizer)
        else:
            made[id(trained)].step()
            optimizer.param_groups[0]["weight_decay"] = 0.01 * number

    want = by_oracle(task, batches, 4, make, schedule)
    got = by_pipeline(task, batches, 4, 4, make, schedule)
    assert_same(got, want, exact=False)


@pytest.mark.parametrize(
    "make",
    [FUSED["sgd-nesterov"], FUSED["adamw-groups"], FUSED["adam-everything"], GENERIC["nadam"],
     GENERIC["sign-descent"]],
)  # fmt: skip
@pytest.mark.parametrize("name", ["skips", "branch"])
def test_a_saved_run_goes_on_where_it_stopped(name: str, make: Make) -> None:
    task, m = TASKS[name], 3
    batches = task.batches([6] * 8)

    # By the definition: the same, but the delay starts anew, as nothing old is saved.
    def restart(number: int, trained: Any, optimizer: Any) -> None:
        if number == 4:
            trained.restart_delay()

    want = by_oracle(task, batches, m, make, restart)

    losses = []
    saved: dict[str, Any] = {}
    for part in (batches[:4], batches[4:]):
        with make_pipeline(task, 3, m, batches[0]) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()))
            if saved:
                pipe.load_state_dict(saved["model"])
                opt.load_state_dict(saved["optimizer"])
            for batch in part:
                losses.append(pipe.train_step(*batch.args, target=batch.target))
                opt.step()
            # An optimizer's state_dict refers to live tensors: a checkpoint is a copy.
            saved = copy.deepcopy({"optimizer": opt.state_dict(), "model": pipe.state_dict()})
            losses = [float(loss) for loss in losses]
    assert_close("losses", torch.tensor(losses), torch.tensor(want.losses))
    for key, theirs in want.state.items():
        assert_close(key, saved["model"][key], theirs)


@pytest.mark.parametrize("name", ["sgd-groups", "adamw-groups", "adam-everything"])
def test_the_state_dict_is_the_stock_optimizers(name: str) -> None:
    task, m = TASKS["branch"], 3
    batches = task.batches([6] * 4)
    states: dict[bool, dict[str, Any]] = {}

    def look(number: int, trained: Any, optimizer: torch.optim.Optimizer) -> None:
        if number in (0, 3):
            is_oracle = isinstance(trained, Oracle)
            states[is_oracle] = copy.deepcopy(optimizer.state_dict())

    by_oracle(task, batches, m, FUSED[name], look)
    by_pipeline(task, batches, 3, m, FUSED[name], look)
    ours, theirs = states[False], states[True]
    # Parameters have names in place of numbers, in the same order.
    names = [name for group in ours["param_groups"] for name in group["params"]]
    assert len(set(names)) == len(names)
    assert all(isinstance(name, str) for name in names)
    ours["state"] = {names.index(name): state for name, state in ours["state"].items()}
    for group in ours["param_groups"]:
        group["params"] = [names.index(name) for name in group["params"]]
    assert ours["param_groups"] == theirs["param_groups"]
    # Stock optimizers have no state for a parameter that never had a gradient.
    with_content = {index for index, state in ours["state"].items() if state}
    assert with_content == {index for index, state in theirs["state"].items() if state}
    for index in with_content:
        mine, stock = ours["state"][index], theirs["state"][index]
        assert mine.keys() == stock.keys()
        for key, value in stock.items():
            if isinstance(value, torch.Tensor):
                assert mine[key].dtype == value.dtype, key
                assert_close(f"{index} {key}", mine[key], value)
            else:
                assert mine[key] == value


@pytest.mark.parametrize("name", ["sgd-nesterov", "adamw-amsgrad"])
def test_stock_and_pipeline_optimizers_load_each_others_state(name: str) -> None:
    task, m, make = TASKS["skips"], 2, FUSED[name]
    batches = task.batches([4] * 6)
    model = task.model()
    stock = make(model.parameters())
    oracle = Oracle(model, stock, m, task.loss_fn, delay=1)
    for batch in batches[:3]:
        oracle.train_step(batch)
    other = task.model()
    other.load_state_dict(model.state_dict())
    with make_pipeline(task, 2, m, batches[0], model=other) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        opt.load_state_dict(copy.deepcopy(stock.state_dict()))
        oracle.restart_delay()
        for batch in batches[3:]:
            oracle.train_step(batch)
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        for key, value in pipe.state_dict().items():
            assert_close(key, value, model.state_dict()[key])
        stock.load_state_dict(copy.deepcopy(opt.state_dict()))
