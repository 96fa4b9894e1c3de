"""Hooks of the user's modules run once per microbatch, or are refused."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.runs.trajectory import assert_same, by_oracle, go_on, sgd
from tests.samples.models import TASKS, WIDTH

BATCHES, M = 3, 4
KINDS = ["pre", "forward", "backward pre", "backward"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branching(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != WIDTH:  # which torch.fx cannot trace
            return x
        return super().forward(x)


def count_calls(model: nn.Module, names: list[str]) -> Counter[tuple[str, str]]:
    calls: Counter[tuple[str, str]] = Counter()

    def counting(kind: str, name: str) -> Any:
        def hook(module: nn.Module, *values: Any) -> None:
            tensors = torch.utils._pytree.tree_leaves(values)
            if any(type(tensor) is torch.Tensor for tensor in tensors):  # not the capture's
                calls[name, kind] += 1

        return hook

    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(counting("pre", name))
        module.register_forward_hook(counting("forward", name))
        module.register_full_backward_pre_hook(counting("backward pre", name))
        module.register_full_backward_hook(counting("backward", name))
    return calls


def make(model: Any, num_stages: int = 2, **options: Any) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        model,
        F.mse_loss,
        num_stages=num_stages,
        num_microbatches=M,
        example_args=(torch.randn(2, WIDTH),),
        timeout=60.0,
        **options,
    )


def train(pipe: pd2.PipelineModule) -> None:
    optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    for _ in range(BATCHES):
        pipe.train_step(torch.randn(2 * M, WIDTH), target=torch.randn(2 * M, WIDTH))
        optimizer.step()
    pipe.flush()


NAMES = ["layers.1", "layers.2.up", "layers.3.down"]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_hooks_run_once_per_microbatch(num_stages: int, schedule: str) -> None:
    model = Layers()
    calls = count_calls(model, NAMES)
    with make(model, num_stages, schedule=schedule) as pipe:
        train(pipe)
    assert calls == {(name, kind): BATCHES * M for name in NAMES for kind in KINDS}


@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
def test_hooks_registered_on_called_modules_later_run_too(schedule: str) -> None:
    names = NAMES[1:]
    for model in (Layers(), nn.Sequential(Layer(), Layer())):
        if isinstance(model, nn.Sequential):
            names = ["0", "1.up"]
        with make(model, schedule=schedule) as pipe:
            calls = count_calls(model, names)
            train(pipe)
        assert {key[0] for key in calls} == set(names)
        assert set(calls.values()) == {BATCHES * M}
        assert len(calls) == len(names) * len(KINDS)


def test_hooks_registered_later_on_a_module_that_was_not_called_run_from_then_on() -> None:
    model = Layers()
    calls: list[int] = []
    with make(model) as pipe:
        train(pipe)
        handle = model.layers[1].register_forward_hook(lambda *_: calls.append(1))
        model.layers.register_forward_hook(lambda *_: calls.append(2))  # as idle as in the model
        train(pipe)
        handle.remove()
        train(pipe)
    assert calls == [1] * (BATCHES * M + 2)  # two of trials


def test_hooks_of_the_model_itself_are_refused_later_too() -> None:
    model = Layers()
    with make(model) as pipe:
        model.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"_forward_hooks.* register hooks on modules inside"):
            train(pipe)


def test_hooks_of_the_model_itself_are_refused() -> None:
    model = Layers()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Layers itself has hooks, it must have none"):
        make(model)


def test_hooks_that_export_would_leave_out_are_refused() -> None:
    with make(Branching()) as pipe:
        assert "captured by export" in repr(pipe)
    model = Branching()
    count_calls(model, ["layers.1"])
    with pytest.raises(ValueError, match=r"layers\.1 has hooks, which an exported graph"):
        make(model)


class Noting(Layer):
    """Is called as a whole; its first forward registers a hook and notes that it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "noted"):
            self.noted = True
            self.down.register_forward_hook(lambda module, args, out: 2 * out + self.up.bias)
        return super().forward(x) if len(x) < 10**6 else x


class Collecting(Layers):
    """Adds up what hooks of its first forward have collected of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.collected: list[torch.Tensor] = []
        if not hasattr(self, "noted"):
            self.noted = True
            for layer in self.layers[:2]:
                layer.register_forward_hook(lambda module, args, out: self.collected.append(out))
        x = super().forward(x)
        return x + self.collected[0] * self.collected[1]


def with_noting() -> nn.Module:
    model = Layers()
    model.layers[1] = Noting()
    return model


class Depending(Layer):
    """Is called as a whole, and no fake tensor can tell what it does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() < 1e30 else x


def with_noting_behind_values() -> nn.Module:
    model = with_noting()
    model.get_submodule("layers")[0] = Depending()
    return model


@pytest.mark.parametrize("build", [with_noting, with_noting_behind_values, Collecting])
def test_hooks_that_a_first_forward_registers_are_those_of_the_unsplit_model(build: Any) -> None:
    task = TASKS["mlp"]
    batches = task.batches([8] * 5)
    model = build()
    want = by_oracle(task, batches, M, model=copy.deepcopy(model))
    with make(model) as pipe:
        assert "captured by fx" in repr(pipe)
        got = go_on(pipe, pd2.PipelineOptimizer(sgd(pipe.parameters())), batches)
    assert not any(module._forward_hooks for module in model.modules())
    assert_same(got, want)


def test_a_hook_that_changes_the_output_changes_it_for_every_microbatch() -> None:
    model = Layers()
    model.layers[2].register_forward_hook(lambda module, args, output: output * 0)
    x = torch.randn(8, WIDTH)
    with make(model) as pipe, torch.no_grad():
        rows = 8 // 4  # of each microbatch: a product's last bits may depend on them
        assert torch.equal(pipe(x), model.layers[3](torch.zeros(rows, WIDTH)).repeat(4, 1))
