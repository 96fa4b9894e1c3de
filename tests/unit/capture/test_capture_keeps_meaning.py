"""Capturing keeps what a module means: state, modes, in-place writes, hooks, custom gradients."""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipedream2bw.model.clone import structural_clone
from tests.runs.staged_run import (
    assert_same,
    check_split_equals_whole,
    cut,
    run_staged,
    run_whole,
    sum_of_squares,
)

X = (torch.randn(5, 8),)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 8:
            raise ValueError("width")
        return self.norm(self.dropout(self.linear(x)))


class Chain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_lstm() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.first = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
            self.second = nn.LSTM(12, 6, num_layers=2, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, _ = self.first(self.embedding(tokens))
            x, (hidden, _) = self.second(x)
            return self.head(x), hidden.transpose(0, 1)

    check_split_equals_whole(Tagger(), 3, (torch.randint(11, (5, 4)),), how="fx")


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_dropout_in_both_modes(training: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 8)
            self.tail = nn.BatchNorm1d(8, affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.norm(self.conv(x)), inplace=True)
            x = F.dropout(x.mean((2, 3)), 0.4, training=self.training)
            return self.tail(self.head(x))

    model = Net().train(training)
    check_split_equals_whole(model, 3, (torch.randn(5, 3, 6, 6),), how="fx")


def test_a_submodule_frozen_in_eval_mode_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model.train()
    model[1].eval()
    check_split_equals_whole(model, 2, X)
    assert [module.training for module in model] == [True, False, True, True]
    exported = Untraceable().train()
    exported.norm.eval()
    check_split_equals_whole(exported, 2, X, how="export")
    assert exported.training
    assert not exported.norm.training


def test_in_place_activations_at_every_cut() -> None:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(8, 8), nn.ReLU(inplace=True)]
        layers += [nn.Linear(8, 8), nn.Dropout(0.2, inplace=True)]
    for num_stages in (2, 5, 12):
        check_split_equals_whole(nn.Sequential(*layers), num_stages, X)


def test_a_value_read_after_a_write_in_place_is_not_separated_from_the_write() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            rows = y.view(-1)
            rows.add_(1.0)
            z = self.b(y)
            return self.c(z + y)

    captured, _ = check_split_equals_whole(Writes(), 2, X)
    with pytest.raises(ValueError, match=r"'a', which is written in place.*stages 0 and 1.*'add'"):
        cut(Writes(), 2, X, split=["b"])
    assert captured.how == "fx"


def test_a_shared_parameter_is_on_all_stages_that_use_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.again = nn.Linear(8, 8)
            self.again.weight = self.first.weight
            self.last = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.again(self.first(x).tanh()))

    _, programs = check_split_equals_whole(Tied(), 2, X, split=["last"])
    assert programs[0].parameters == ("first.weight", "first.bias", "again.bias")
    _, programs = check_split_equals_whole(Tied(), 2, X, split=["again"], exact=False)
    assert programs[0].parameters == ("first.weight", "first.bias")
    assert programs[1].parameters == ("first.weight", "again.bias", "last.weight", "last.bias")
    model = nn.Sequential(*Tied().children())
    _, programs = check_split_equals_whole(model, 3, X, exact=False)
    assert ["0.weight" in program.parameters for program in programs] == [True, True, False]


def test_a_table_looked_up_twice_fits_into_one_stage() -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.left = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            left = self.left(self.table(a))
            return self.right(self.table(b.view(-1, b.shape[-1])) + left)

    args = (torch.randint(11, (5, 4)), torch.randint(11, (5, 4)))
    _, programs = check_split_equals_whole(
        TwoTowers(), 3, args, how="fx", split=["left.2", "right"]
    )
    assert programs[0].parameters[0] == "table.weight"


def test_functional_code_parameters_and_constants_of_the_root() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.gains = nn.ParameterList([torch.randn(8) for _ in range(2)])
            self.register_buffer("shift", torch.randn(8))
            self.constant = torch.arange(8.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.linear(x, self.weight) * self.gains[0] + self.shift
            x = torch.where(x > 0, x, self.constant) / math.sqrt(self.weight.shape[0])
            parts = [x[..., 2:], x[:, :2].clamp(max=float("inf")), x[None, 0].T.new_zeros(5, 1)]
            return torch.cat(parts, -1) + torch.eye(9)[0] * self.gains[1].sum()

    check_split_equals_whole(Root(), 3, X, how="fx")


def test_frozen_parameters_have_a_stage_and_no_gradient() -> None:
    model = Chain(4)
    model.layers[0].requires_grad_(False)
    _, programs = check_split_equals_whole(model, 3, X)
    assert "layers.0.weight" in programs[0].parameters


def test_modules_with_parametrizations() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    )
    check_split_equals_whole(model, 3, X)


def test_gradient_stopping_custom_functions_and_checkpoints_keep_their_meaning() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, alpha: float) -> torch.Tensor:
            ctx.alpha = alpha
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return -ctx.alpha * gradient, None

    class Stop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.linear(x)

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.stop, self.saves = Stop(), Saves()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = Reverse.apply(self.a(x), 0.5)
            return self.b(self.saves(y) * self.stop(y))

    captured, _ = check_split_equals_whole(Model(), 2, X, how="fx")
    leaves = [note.partition(" ")[0] for note in captured.notes]
    assert leaves == ["saves", "stop"]


def test_random_numbers_drawn_in_python_are_not_frozen() -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if torch.rand(()) < 0.5 else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(8, 8), LayerDrop(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.drop(self.a(x)))

    captured, _ = check_split_equals_whole(Model(), 2, X, how="fx")
    assert "drop" in [layer.name for layer in captured.layers]


def test_forward_hooks_registered_before_and_after_the_capture_run_in_the_clones() -> None:
    calls: list[str] = []
    model = Chain(2)
    model.layers[0].register_forward_hook(lambda *_: calls.append("before"))
    captured, programs = cut(model, 2, X)
    clone = structural_clone(model, {})
    model.layers[1].register_forward_hook(lambda *_: calls.append("after"))
    calls.clear()
    values: dict[str, Any] = dict(zip(programs[0].inputs, X, strict=True))
    for program in programs:
        results = program.bind(clone)([values[name] for name in program.inputs])
        values.update(zip(program.outputs, results, strict=True))
    assert captured.how == "fx"
    assert calls == ["before", "after"]


def test_a_module_with_hooks_is_not_traced_through() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Inner(), Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Outer()
    model.a.register_forward_hook(lambda module, args, output: output * 3)
    captured, _ = check_split_equals_whole(model, 2, X, how="fx")
    assert [layer.name for layer in captured.layers] == ["a", "b.linear"]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_the_modes_of_the_capturing_thread_do_not_matter(mode: str) -> None:
    contexts = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
    }
    untraceable, chain = Untraceable(), Chain(3)
    with contexts[mode]:
        captured = cut(untraceable, 2, X)[0]
        traced = cut(chain, 2, X)[0]
    assert (captured.how, traced.how) == ("export", "fx")
    assert captured.layers == cut(untraceable, 2, X)[0].layers
    assert traced.layers == cut(chain, 2, X)[0].layers


def test_a_region_without_gradients_stays_one_when_captured_without_gradients() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 8:
                raise ValueError("width")
            y = self.a(x)
            with torch.no_grad():
                gain = y.sigmoid()
            return self.b(y * gain)

    model = Stops()
    with torch.no_grad():
        captured, programs = cut(model, 2, X)
    assert captured.how == "export"
    got = run_staged(model, captured, programs, X, loss=sum_of_squares)
    assert_same(got, run_whole(model, X, loss=sum_of_squares))


@pytest.mark.parametrize("generator", ["python", "torch"])
def test_a_root_that_draws_random_numbers_in_python_is_refused(generator: str) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = random.random() if generator == "python" else float(torch.rand(()))
            return self.b(self.a(x)) if drawn < 0.5 else self.a(x).relu()

    model = Draws()  # its initial weights are drawn here
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"fx: RandomnessError: .*\n  export: "):
        cut(model, 2, X)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_constants_move_to_the_stages_device() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.table = torch.arange(8.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 8:
                raise ValueError("width")
            with torch.no_grad():
                ramp = torch.arange(8, device=x.device) + self.table
            return self.linear(x) + ramp + torch.zeros(8, device=x.device) + torch.tensor(2.0)

    model = Constants()
    captured, (program,) = cut(model, 1, X)
    assert captured.how == "export"
    there = torch.device("meta")
    weights = {old: nn.Parameter(old.detach().to(there)) for old in model.parameters()}
    run = program.bind(structural_clone(model, weights), there)
    (output,) = run([X[0].to(there)])
    assert output.device == there
    (here,) = program.bind(model)(list(X))
    assert torch.equal(here, model(*X))


def test_the_model_is_left_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.calls = 0
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = self.norm(self.linear(x))
            if x.shape[-1] != 8:
                raise ValueError("width")
            return self.last

    for model in (Counts(), nn.Sequential(Counts(), nn.ReLU()), [Counts(), nn.ReLU()]):
        counts = model if isinstance(model, Counts) else model[0]
        state = {name: value.clone() for name, value in counts.state_dict().items()}
        attributes = dict(counts.__dict__)
        modules = dict(counts._modules)
        cut(model, 2, X)
        assert counts.calls == 0
        assert counts.last is None
        assert counts.__dict__ == attributes
        assert counts._modules == modules
        for name, value in counts.state_dict().items():
            assert torch.equal(value, state[name])
            assert type(value) is torch.Tensor


def test_modules_of_other_threads_run_while_a_model_is_traced() -> None:
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    want = other(*X)
    results: list[torch.Tensor] = []

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: results.append(other(*X)))
            thread.start()
            thread.join()
            return self.b(self.a(x))

    captured, _ = cut(Waits(), 2, X)
    assert [layer.name for layer in captured.layers] == ["a", "b"]
    assert torch.equal(results[0], want)
