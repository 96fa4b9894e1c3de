"""Calls that no way of capture can look into are on one stage, which computes what they do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence as pack
from torch.nn.utils.rnn import pad_packed_sequence as pad

from pipedream2bw.capture.capture import capture
from pipedream2bw.capture.regions import with_transforms
from tests.runs.staged_run import check_split_equals_whole, cut

X = (torch.randn(6, 8),)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.Parameter(0.3 * torch.randn(4, 8, 8))


class Language(nn.Module):
    """PyTorch's own tutorial of nn.Transformer, whose mask has the size ``len(x)``."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.transpose(0, 1))
        mask = nn.Transformer.generate_square_subsequent_mask(len(x)) if self.masked else None
        return self.head(self.encoder(x, mask)).transpose(0, 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_tutorials_encoder_is_cut_between_its_layers(masked: bool, training: bool) -> None:
    model = Language(masked=masked).train(training)
    tokens = (torch.randint(0, 20, (3, 6)),)
    _, programs = check_split_equals_whole(model, 4, tokens, how="fx")
    assert all(
        any(name.startswith("encoder.layers") for name in program.parameters)
        for program in programs
    )


def test_an_encoder_that_is_given_padding_is_called_as_it_is() -> None:
    class Padded(Language):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens.transpose(0, 1))
            return self.head(self.encoder(x, src_key_padding_mask=tokens == 0)).transpose(0, 1)

    tokens = (torch.randint(0, 3, (3, 6)).index_fill(1, torch.tensor([0]), 1),)
    captured, _ = cut(Padded(masked=False), 1, tokens)
    assert "encoder" in [layer.name for layer in captured.layers]  # it looks for gradients itself
    check_split_equals_whole(Padded(masked=False), 2, tokens, exact=False)


class Packed(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name
        self.embedding, self.head = nn.Linear(4, 8), nn.Linear(16, 3)
        self.rnn = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        if self.by_name:
            packed = pack(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad(self.rnn(packed)[0], batch_first=True, total_length=5)
        else:
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)
        return self.head(out)


@pytest.mark.parametrize("by_name", [True, False])
def test_sequences_are_packed_between_layers(by_name: bool) -> None:
    args = (torch.randn(4, 5, 4), torch.tensor([5, 2, 4, 1]))
    check_split_equals_whole(Packed(by_name), 3, args, how="fx")


class Mapped(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.vmap(lambda w: torch.tanh(h @ w))(self.experts).mean(0))


class MappedRows(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.vmap(torch.vmap(lambda value: value * value.exp()))(self.first(x))
        return self.last(h) * torch.vmap(lambda row: row.sum())(x)[:, None]


class Gradients(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy(z: torch.Tensor) -> torch.Tensor:
            return self.first(z).tanh().sum()

        slopes = torch.func.grad(energy)(x) + torch.vmap(torch.func.grad(energy))(x)
        return self.last(slopes)


class Jacobians(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        jacobians = torch.vmap(torch.func.jacrev(lambda z: self.first(z).tanh()))(x)
        return self.last(jacobians.sum(1))


@pytest.mark.parametrize("kind", [Mapped, MappedRows, Gradients, Jacobians])
def test_transforms_of_functions_are_on_one_stage(kind: type[nn.Module]) -> None:
    check_split_equals_whole(kind(), 2, X)


def test_a_transform_that_spans_layers_is_refused_by_name() -> None:
    class Pulls(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, pull = torch.func.vjp(lambda z: self.first(z).tanh(), x)
            return self.last(pull(out)[0])

    with pytest.raises(ValueError, match=r"dynamo: TransformError: torch\.func"):
        capture(Pulls(), num_stages=2, example_args=X)


def test_a_region_that_fails_ends_its_transforms() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        torch._C._functorch._vmap_increment_nesting(3, "error")
        raise ArithmeticError("not today")

    with pytest.raises(ArithmeticError, match="not today"):
        with_transforms(fails, *X)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


class Energy(Layers):
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions = positions.clone().requires_grad_(True)
        energy = self.last(self.first(positions).tanh()).square().sum()
        return -torch.autograd.grad(energy, positions, create_graph=True)[0]


class EnergyOfInput(Layers):
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions.requires_grad_(True)
        energy = self.first(positions).tanh().sum()
        (forces,) = torch.autograd.grad(outputs=energy, inputs=positions, create_graph=True)
        return self.last(forces)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.energy, self.after = nn.Linear(8, 8), Energy(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.energy(self.before(x)))


@pytest.mark.parametrize(
    ("kind", "num_stages"), [(Energy, 1), (EnergyOfInput, 2), (Around, 2), (Around, 3)]
)
def test_layers_between_positions_and_forces_are_on_one_stage(
    kind: type[nn.Module], num_stages: int
) -> None:
    check_split_equals_whole(kind(), num_stages, X, how="fx")


def test_a_split_between_positions_and_forces_is_refused() -> None:
    with pytest.raises(ValueError, match=r"by which autograd.grad differentiates, is used in"):
        cut(Around(), 2, X, split=["energy.last"])


class Counts(Layers):
    def __init__(self, *, multiplies: bool) -> None:
        super().__init__()
        self.multiplies = multiplies
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.multiplies:
            self.steps *= 2
        return self.last(self.first(x * (self.steps / 10).clamp(max=1.0)).tanh())


@pytest.mark.parametrize("multiplies", [False, True])
def test_a_buffer_that_a_forward_adds_to(multiplies: bool) -> None:
    check_split_equals_whole(Counts(multiplies=multiplies), 2, X, how="export")


def test_a_buffer_that_is_written_with_another_value_keeps_both_writes() -> None:
    class Moves(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x) - self.mean
            self.mean.copy_(0.5 * self.mean + x.detach().mean(0))
            return self.last(x)

    check_split_equals_whole(Moves(), 2, X)


def test_a_model_that_cannot_be_captured_is_told_what_to_do_and_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Branches(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x) if self.first(x).sum().item() > 0 else x

    with pytest.raises(ValueError, match="could not be captured") as raised:
        capture(Branches(), num_stages=2, example_args=X)
    first, *reasons = str(raised.value).splitlines()
    assert re.search(r"2 stages\. Give fewer stages .* Move what else the reasons name", first)
    assert max(len(sentence.split()) for sentence in first.split(". ")) <= 25
    assert [reason.split(":")[0].strip() for reason in reasons] == ["fx", "export", "dynamo"]
    assert all(len(reason) < 260 for reason in reasons)
    assert capfd.readouterr().err == ""
