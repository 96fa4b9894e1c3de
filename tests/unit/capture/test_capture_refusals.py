"""What cannot be captured is refused with the rule and both values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipedream2bw.capture.capture import capture
from pipedream2bw.capture.chain import as_root

X = (torch.randn(4, 3),)


@pytest.mark.parametrize("model", [3, [nn.ReLU(), 3], None, "model"])
def test_neither_a_module_nor_a_list_of_modules(model: Any) -> None:
    with pytest.raises(TypeError, match=r"must be an nn.Module or a list of nn.Modules"):
        as_root(model)


def test_an_empty_list() -> None:
    with pytest.raises(ValueError, match=r"a list of 0 modules given; a pipeline needs at least 1"):
        as_root([])


@pytest.mark.parametrize("as_list", [True, False])
def test_example_arguments_that_the_model_refuses(as_list: bool) -> None:
    modules = [nn.Linear(3, 3), nn.Linear(4, 3)]
    model: Any = modules if as_list else nn.Sequential(*modules)
    with pytest.raises(ValueError, match=r"example arguments: RuntimeError.* Give example_args"):
        capture(model, num_stages=2, example_args=X)


def test_a_layer_that_fake_tensors_cannot_run_is_no_refusal() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(x.detach().numpy().sum() * 0 + 1)

    model = nn.Sequential(nn.BatchNorm1d(3), Reads(), nn.Linear(3, 3))
    captured = capture(model, num_stages=2, example_args=X)
    assert any("costs of _1, _2 are guessed" in note for note in captured.notes)
    assert model[0].num_batches_tracked == 0
    assert captured.layers[2].forward_cost > 0


def test_a_sequential_with_two_arguments() -> None:
    with pytest.raises(ValueError, match=r"give 2 arguments: nn.Sequential takes 1|do not fit"):
        capture(nn.Sequential(nn.ReLU(), nn.ReLU()), num_stages=2, example_args=(*X, *X))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((torch.randn(4, 3), torch.randn(5, 3)), r"y has 5 rows, x has 4: .*replicated="),
        ((torch.randn(4, 3), torch.tensor(1.0)), r"y has shape \(\).*replicated="),
        ((torch.randn(0, 3), torch.randn(0, 3)), r"x has shape \(0, 3\).*at least 1"),
    ],
)
def test_example_tensors_of_different_rows(example: Any, message: str) -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y).relu()

    with pytest.raises(ValueError, match=message):
        capture(Add(), num_stages=2, example_args=example)


def test_when_every_way_fails_each_ones_reason_is_told() -> None:
    class Hopeless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum().item() > 0 else x

    with pytest.raises(
        ValueError,
        match=r"(?s)\(Hopeless, in train mode\).*2 stages.*list of.*fx: TraceError.*export: ",
    ):
        capture(Hopeless(), num_stages=2, example_args=X)


def test_a_batch_size_that_the_forward_depends_on_is_told() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] != 4:
                raise ValueError("rows")
            return self.linear(x).relu()

    with pytest.raises(ValueError, match=r"export: "):
        capture(Fixed(), num_stages=2, example_args=X)


@pytest.mark.parametrize("inner", [False, True])
def test_a_buffer_that_the_forward_assigns_stays_the_models(inner: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return self.linear(x) + self.count

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.last = Counts(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.counts(x))

    model = Around()
    counts = model.counts
    before = counts.count
    captured = capture(model if inner else counts, num_stages=1, example_args=X)
    assert counts.count is before
    assert torch.equal(before, torch.zeros(1))
    # torch.fx would leave the assignment out.
    whole = ("counts is kept whole, as torch.fx cannot look inside: ", "fx: ")
    assert any(
        note.startswith(whole) and "assigns another tensor to the buffer count" in note
        for note in captured.notes
    )
