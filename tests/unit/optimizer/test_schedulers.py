"""Every scheduler of torch sets the options of the updates that follow, on all stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler
from torch.optim.swa_utils import SWALR

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.runs.trajectory import Trajectory, assert_same, copy_of, make_pipeline
from tests.samples.models import TASKS
from tests.samples.odd_optimizers import Together

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0 / (t + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.2, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.001, anneal_epochs=3),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5),
    "AdamW": lambda p: AdamW(p, lr=0.01),
}


def test_none_is_forgotten() -> None:
    found = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


def advance(scheduler: Any, loss: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)  # a lazy loss is a number, too
    else:
        scheduler.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_update_has_the_options_of_its_step_call(name: str, optimizer: str) -> None:
    task, m, make = TASKS["skips"], 4, OPTIMIZERS[optimizer]
    batches = task.batches([8] * 7)
    model = task.model()
    stock = make(model.parameters())
    theirs = SCHEDULERS[name](stock)
    oracle = Oracle(model, stock, m, task.loss_fn, 1)
    losses = []
    for batch in batches:
        losses.append(oracle.train_step(batch))
        advance(theirs, losses[-1])
    want = Trajectory(losses, copy_of(model.state_dict()))
    with warnings.catch_warnings(), make_pipeline(task, 4, m, batches[0]) as pipe:
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*gradients are late")
        ours = pd2.PipelineOptimizer(make(pipe.parameters()))
        scheduler = SCHEDULERS[name](ours)
        lazy: list[Any] = []
        for batch in batches:
            lazy.append(pipe.train_step(*batch.args, target=batch.target))
            ours.step()
            advance(scheduler, lazy[-1])  # before most stages have made the update
        got = Trajectory([float(loss) for loss in lazy], copy_of(pipe.state_dict()))
    assert len({group["lr"] for group in stock.param_groups}) == 1
    assert ours.param_groups[0]["lr"] == stock.param_groups[0]["lr"] != make(model.parameters())
    assert_same(got, want, exact=optimizer != "AdamW")


@pytest.mark.parametrize("on", ["pipeline", "wrapped"])
def test_schedulers_of_several_optimizers(on: str) -> None:
    task, m = TASKS["skips"], 4
    batches = task.batches([8] * 6)

    def make(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        weights = [p for name, p in named if "weight" in name]
        biases = [p for name, p in named if "bias" in name]
        return [OPTIMIZERS["SGD"](weights), OPTIMIZERS["RMSprop"](biases)]

    def schedulers(optimizers: list[torch.optim.Optimizer], together: Any) -> list[Any]:
        if on == "pipeline":
            return [SCHEDULERS["OneCycleLR"](together), SCHEDULERS["ExponentialLR"](together)]
        return [
            SCHEDULERS["OneCycleLR"](optimizers[0]),
            SCHEDULERS["ReduceLROnPlateau"](optimizers[1]),
        ]

    model = task.model()
    stock = make(list(model.named_parameters()))
    together = Together(*stock)
    together.defaults = {"momentum": 0.0}
    oracle = Oracle(model, together, m, task.loss_fn, 1)
    theirs = schedulers(stock, together)
    losses = []
    for batch in batches:
        losses.append(oracle.train_step(batch))
        for scheduler in theirs:
            advance(scheduler, losses[-1])
    with warnings.catch_warnings(), make_pipeline(task, 4, m, batches[0]) as pipe:
        warnings.simplefilter("error", UserWarning)  # a step before the optimizer's
        mine = make(list(pipe.named_parameters()))
        ours = pd2.PipelineOptimizer(*mine)
        lazy: list[Any] = []
        made = schedulers(mine, ours)
        for batch in batches:
            lazy.append(pipe.train_step(*batch.args, target=batch.target))
            ours.step()
            for scheduler in made:
                advance(scheduler, lazy[-1])
        got = Trajectory([float(loss) for loss in lazy], copy_of(pipe.state_dict()))
    assert_same(got, Trajectory(losses, copy_of(model.state_dict())))


def test_a_scheduler_that_sets_what_not_all_optimizers_have_is_refused() -> None:
    with make_pipeline(TASKS["mlp"], 2, 2, TASKS["mlp"].draw(2)) as pipe:
        own = list(pipe.parameters())
        mixed = pd2.PipelineOptimizer(SGD(own[:4], lr=0.1), AdamW(own[4:]))
        with pytest.raises(ValueError, match="momentum"):
            SCHEDULERS["OneCycleLR"](mixed)
