"""What scripts do to an optimizer beside its options: hooks, state, groups, a replaced step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline
from tests.samples.models import TASKS

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
BATCHES = 4


def clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.2, 0.2)


def double_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(2)


class Clamped(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        clamp(self, (), {})
        return result


def hooked(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    def make_with_hooks(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(double_gradients)
        optimizer.register_step_post_hook(clamp)
        return optimizer

    return make_with_hooks


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": hooked(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "AdamW": hooked(lambda p: torch.optim.AdamW(p, lr=0.01)),
    "Adagrad": hooked(lambda p: torch.optim.Adagrad(p, lr=0.01)),
    "a subclass": lambda p: Clamped(p, lr=0.01),
}


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "chimera"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_of_a_step_and_subclasses_train_as_the_unsplit_model(
    name: str, schedule: str
) -> None:
    task = TASKS["mlp"]
    m = 4
    batches = task.batches([8] * BATCHES)
    make = OPTIMIZERS[name]
    got = by_pipeline(task, batches, 2, m, make_optimizer=make, schedule=schedule)
    want = by_oracle(task, batches, m, make_optimizer=make, schedule=schedule)
    assert_same(got, want)


def pipeline(**options: Any) -> pd2.PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=2, example_args=(X,), **options
    )


def train(pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer, times: int = 1) -> None:
    for _ in range(times):
        pipe.train_step(X, target=X)
        optimizer.step()


def adamw(pipe: pd2.PipelineModule) -> torch.optim.AdamW:
    return torch.optim.AdamW(pipe.parameters(), lr=0.01, betas=(0.8, 0.9))


def test_a_hook_that_knows_the_model_is_refused() -> None:
    with pipeline() as pipe:
        model = pipe.session.root
        inner = adamw(pipe)
        inner.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(-1, 1))
        with pytest.raises(ValueError, match=r"knows module itself.*param_groups of the optimizer"):
            pd2.PipelineOptimizer(inner)
        other = adamw(pipe)
        other.register_step_post_hook(lambda *_: clamp(other, (), {}))
        with pytest.raises(ValueError, match=r"knows the optimizer"):
            pd2.PipelineOptimizer(other)


def test_hooks_of_the_pipelines_optimizer_are_refused() -> None:
    with pipeline() as pipe:
        optimizer = pd2.PipelineOptimizer(adamw(pipe))
        with pytest.raises(ValueError, match="register_step_post_hook: step\\(\\) registers"):
            optimizer.register_step_post_hook(clamp)
        with pytest.raises(ValueError, match="register_step_pre_hook: step\\(\\) registers"):
            optimizer.register_step_pre_hook(clamp)


def test_a_hook_that_comes_later_is_refused_until_the_optimizer_is_made_anew() -> None:
    with pipeline() as pipe:
        inner = adamw(pipe)
        optimizer = pd2.PipelineOptimizer(inner)
        train(pipe, optimizer)
        inner.register_step_post_hook(clamp)
        pipe.train_step(X, target=X)
        with pytest.raises(ValueError, match="hooks of an optimizer's step were registered"):
            optimizer.step()
        again = pd2.PipelineOptimizer(inner)
        again.step()
        train(pipe, again)
        pipe.flush()
        assert all(bool((p.abs() <= 0.2).all()) for p in pipe.parameters())


def test_a_replaced_step_is_refused_and_a_schedulers_is_not() -> None:
    with pipeline() as pipe:
        inner = adamw(pipe)
        torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)
        train(pipe, pd2.PipelineOptimizer(inner))
        step = inner.step
        inner.step = lambda closure=None: step(closure)  # type: ignore[method-assign]
        with pytest.raises(TypeError, match=r"step of this AdamW was replaced"):
            pd2.PipelineOptimizer(inner)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_state_from_before_the_pipeline_is_gone_on_with(kind: Any) -> None:
    options = {"lr": 0.01, **({} if kind is torch.optim.AdamW else {"momentum": 0.9})}

    def unsplit() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
        step(model, optimizer, 3)
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            (mse_loss(model(X[:2]), X[:2]) / 2 + mse_loss(model(X[2:]), X[2:]) / 2).backward()
            optimizer.step()

    whole, its_optimizer = unsplit()
    step(whole, its_optimizer, 4)
    model, inner = unsplit()
    with pd2.PipelineModule(
        model,
        mse_loss,
        num_stages=2,
        num_microbatches=2,
        schedule="1f1b",
        example_args=(X,),
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(inner)
        train(pipe, optimizer, 2)
        optimizer = pd2.PipelineOptimizer(inner)  # of the same state
        train(pipe, optimizer, 2)
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name])


def test_state_that_is_written_in_place_counts_and_other_changes_are_refused() -> None:
    with pipeline() as pipe, pipeline() as other:
        inner, its_inner = adamw(pipe), adamw(other)
        optimizer, its_optimizer = pd2.PipelineOptimizer(inner), pd2.PipelineOptimizer(its_inner)
        for mine, its_pipe in ((optimizer, pipe), (its_optimizer, other)):
            train(its_pipe, mine, 2)
            mine.state_dict()
        first = next(iter(inner.state))
        inner.state[first]["exp_avg"].mul_(100.0)
        for mine, its_pipe in ((optimizer, pipe), (its_optimizer, other)):
            train(its_pipe, mine, 2)
        changed = optimizer.state_dict()["state"]["0.weight"]["exp_avg"]
        assert not torch.equal(changed, its_optimizer.state_dict()["state"]["0.weight"]["exp_avg"])
        for change in (
            lambda state: state.update(exp_avg=torch.zeros(4, 4)),
            lambda state: state["step"].fill_(1.0),
        ):
            optimizer.state_dict()
            change(inner.state[first])
            pipe.train_step(X, target=X)
            with pytest.raises(ValueError, match=r"state of AdamW was changed for a parameter of"):
                optimizer.step()
            optimizer.state_dict()
            optimizer.step()


def test_a_parameter_more_or_less_in_a_group_is_refused() -> None:
    with pipeline() as pipe:
        inner = adamw(pipe)
        optimizer = pd2.PipelineOptimizer(inner)
        train(pipe, optimizer)
        removed = inner.param_groups[0]["params"].pop()
        pipe.train_step(X, target=X)
        with pytest.raises(ValueError, match=r"parameters by group: \[3\], .*made: \[4\]"):
            optimizer.step()
        inner.param_groups[0]["params"].append(removed)
        optimizer.step()


def test_weights_that_are_written_before_their_update_are_refused() -> None:
    """Where an optimizer steps the user's own parameters, the update tells who has written."""
    pipe = pd2.PipelineModule(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(X,),
    )
    optimizer = pd2.PipelineOptimizer(Clamped(pipe.parameters(), lr=0.01))
    for step in range(3):
        pipe.train_step(X, target=X)
        optimizer.step()
        pipe.flush()
        with torch.no_grad():  # after a flush it counts
            next(iter(pipe.parameters())).fill_(0.1 * step)
        assert float(pipe.state_dict()["0.weight"].mean()) == pytest.approx(0.1 * step)
    with pytest.raises(pd2.errors.StageError, match=r"0\.weight was written to while batches"):
        for _ in range(3):
            pipe.train_step(X, target=X)
            optimizer.step()
            with torch.no_grad():
                next(iter(pipe.parameters())).clamp_(-0.1, 0.1)
        pipe.flush()


def test_a_closure_is_called_once_before_the_step() -> None:
    """It may do nothing, as the one that Lightning's manual loop gives, or make the train_step."""
    calls: list[Any] = []

    def train(ways: Callable[[pd2.PipelineModule, pd2.PipelineOptimizer], Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pd2.PipelineModule(
            model, mse_loss, num_stages=2, num_microbatches=2, example_args=(X,)
        ) as pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            return [float(each) for each in [ways(pipe, optimizer) for _ in range(BATCHES)]]

    def plain(pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer) -> Any:
        loss = pipe.train_step(X, target=X)
        assert optimizer.step(lambda: calls.append(1)) is None
        return loss

    def inside(pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer) -> Any:
        with torch.no_grad():
            return optimizer.step(lambda: pipe.train_step(X, target=X))

    assert train(plain) == train(inside)
    assert len(calls) == BATCHES
