"""What the user's own objects hold, parameters, optimizers and modes, is followed or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2

X = torch.arange(32.0).reshape(8, 4).sin()
Y = torch.arange(32.0).reshape(8, 4).cos()


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def pipeline(model: nn.Module, loss_fn: Any = mse_loss, **options: Any) -> pd2.PipelineModule:
    options = {"num_stages": 2, "num_microbatches": 2, "example_args": (X,), **options}
    return pd2.PipelineModule(model, loss_fn, **options)


def train(pipe: pd2.PipelineModule, optimizer: torch.optim.Optimizer, batches: int) -> None:
    for _ in range(batches):
        pipe.train_step(X, target=Y)
        optimizer.step()


def sgd(pipe: pd2.PipelineModule) -> pd2.PipelineOptimizer:
    return pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


# ---------------------------------------------------------------- parameters held elsewhere


class Helper:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x)
        return result


class Holds(nn.Module):
    """Calls its layer through something that the pipeline's clones cannot see into."""

    def __init__(self, hold: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = hold(self.layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.held(x)
        return result


@pytest.mark.parametrize("hold", [lambda layer: lambda x: layer(x), Helper])
def test_a_parameter_that_only_a_closure_or_an_object_holds_is_no_loss(
    hold: Callable[[nn.Module], Any],
) -> None:
    with (
        pytest.raises(
            (RuntimeError, ValueError), match=r"parameter .*layer\.(weight|bias).*closure"
        ),
        pipeline(nn.Sequential(Holds(hold), Holds(hold))) as pipe,
    ):
        train(pipe, sgd(pipe), 2)


class Exported(nn.Module):
    """Cannot be traced symbolically, and holds a layer in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        layer = self.layer
        self.held = lambda x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 2:
            x = self.first(x)
        result: torch.Tensor = self.held(torch.relu(x))
        return result


def test_a_parameter_that_the_capture_takes_for_a_constant_is_refused() -> None:
    with (
        pytest.raises((RuntimeError, ValueError), match=r"parameter layer\.(weight|bias)"),
        pipeline(Exported()) as pipe,
    ):
        train(pipe, sgd(pipe), 2)


def test_a_loss_that_uses_the_models_parameters_is_no_loss_of_gradients() -> None:
    model = layers()

    def penalised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        penalty: Any = sum(p.square().sum() for p in model.parameters())
        return mse_loss(output, target) + penalty

    with (
        pytest.raises(RuntimeError, match=r"parameter [01]\.\w+: a gradient reached the model's"),
        pipeline(model, penalised) as pipe,
    ):
        train(pipe, sgd(pipe), 2)


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class WithLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return mse_loss(self.layer(output), target)

    with pytest.raises(ValueError, match=r"loss_fn: WithLayer has 2 trainable parameters"):
        pipeline(layers(), WithLayer())


def test_hooks_of_parameters_are_refused() -> None:
    model = layers()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ValueError, match=r"parameter 0\.weight: 1 hooks"):
        pipeline(model)


def test_freezing_and_unfreezing_later_is_refused_and_can_be_undone() -> None:
    model = layers()
    model[0].requires_grad_(False)
    with pipeline(model) as pipe:
        optimizer = sgd(pipe)
        model[0].requires_grad_(True)
        with pytest.raises(ValueError, match=r"0\.weight: requires_grad is True, it was False"):
            pipe.train_step(X, target=Y)
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        with pytest.raises(ValueError, match=r"1\.weight: requires_grad is False, it was True"):
            pipe.train_step(X, target=Y)
        model[1].requires_grad_(True)
        train(pipe, optimizer, 2)


def test_the_model_that_is_given_back_has_gradients_of_its_own() -> None:
    with pipeline(layers()) as pipe:
        train(pipe, sgd(pipe), 2)
        model = pipe.unsplit()
    assert isinstance(model, nn.Module)
    model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---------------------------------------------------------------- optimizers


class WithAttribute(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.factor = 2.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor)


class CountsInGroup(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["step"])


def stock(make: Any, rates: list[float]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = layers()
    optimizer = make(model.parameters(), lr=0.1)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
            (mse_loss(model(x), y) / 2).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("make", [WithAttribute, CountsInGroup])
def test_an_optimizer_keeps_its_attributes_and_what_it_counts_in_its_groups(make: Any) -> None:
    rates = [0.1, 0.1, 0.05, 0.05, 0.2]
    weights, state = stock(make, rates)
    with pipeline(layers(), schedule="1f1b") as pipe:
        optimizer = pd2.PipelineOptimizer(make(pipe.parameters(), lr=0.1))
        for number, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            if number == 2:
                # Reading the state neither hides the new rate from the stages nor loses the count.
                kept = optimizer.state_dict()["param_groups"][0]
                assert kept["lr"] == rate
                assert kept.get("step", 2) == 2
            train(pipe, optimizer, 1)
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, weights[name]), name
        saved = optimizer.state_dict()["param_groups"][0]
    assert {**saved, "params": None} == {**state["param_groups"][0], "params": None}


def rmsprop_ends(rate: Any, batches: int, refused_step: bool = False) -> dict[str, torch.Tensor]:
    with pipeline(layers()) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.RMSprop(pipe.parameters(), lr=rate))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        for _ in range(batches):
            train(pipe, optimizer, 1)
            scheduler.step()
            if refused_step:
                with pytest.raises(ValueError, match="exactly one call of"):
                    optimizer.step()
        return copy.deepcopy(dict(pipe.state_dict()))


def test_a_rate_that_is_a_tensor_is_the_one_at_the_call_of_step() -> None:
    want, got = rmsprop_ends(0.1, 3), rmsprop_ends(torch.tensor(0.1), 3)
    for name in want:
        assert torch.allclose(got[name], want[name], rtol=1e-5, atol=1e-7), name


def test_a_refused_step_swallows_no_change_of_options() -> None:
    want, got = rmsprop_ends(0.1, 3), rmsprop_ends(0.1, 3, refused_step=True)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_another_optimizer_leaves_the_updates_of_the_former_to_it() -> None:
    ends = []
    for flush in (True, False):
        with pipeline(layers()) as pipe:
            train(pipe, sgd(pipe), 3)
            if flush:
                pipe.flush()
            adam = pd2.PipelineOptimizer(torch.optim.Adam(pipe.parameters(), lr=0.01))
            train(pipe, adam, 3)
            ends.append(copy.deepcopy(dict(pipe.state_dict())))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_loading_the_state_of_a_fresh_optimizer_forgets_the_moments() -> None:
    ends = []
    for trained_before in (0, 4):
        with pipeline(layers(), schedule="1f1b") as pipe:
            adam = pd2.PipelineOptimizer(torch.optim.Adam(pipe.parameters(), lr=0.1))
            weights, state = copy.deepcopy((dict(pipe.state_dict()), adam.state_dict()))
            train(pipe, adam, trained_before)
            pipe.load_state_dict(weights)
            adam.load_state_dict(state)
            train(pipe, adam, 3)
            ends.append(copy.deepcopy(dict(pipe.state_dict())))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# ---------------------------------------------------------------- modes and copies


def test_modes_may_alternate_from_batch_to_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        optimizer = sgd(pipe)
        losses = []
        for training in (True, False, True, False, False, True):
            pipe.train(training)
            losses.append(pipe.train_step(X, target=Y))
            optimizer.step()
        pipe.flush()
        assert all(torch.isfinite(torch.tensor(float(loss))) for loss in losses)


def test_the_full_state_is_a_copy_of_each_tensor_alone() -> None:
    with pipeline(layers()) as pipe:
        optimizer = sgd(pipe)
        full = pipe.full_state_dict()
        before = copy.deepcopy(full)
        train(pipe, optimizer, 3)
        pipe.flush()
        for name, tensor in full.items():
            assert torch.equal(tensor, before[name]), name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
