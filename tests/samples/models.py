"""Small models to train, each with the batches and the loss it is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.references.oracle import Batch, LossFunction

WIDTH = 8
VOCABULARY = 13
LENGTH = 5


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and what it is trained on.

    ``draw(rows)`` makes a random batch. ``exact`` is False where the pipeline adds gradients in
    another order than stock autograd: values with three or more consumers. ``cuts`` are the names
    where stages may begin; without them the pipeline chooses.
    """

    build: Callable[[], Any]
    draw: Callable[[int], Batch]
    loss_fn: LossFunction = F.mse_loss
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    exact: bool = True
    training: bool = True
    cuts: tuple[str, ...] = ()

    def model(self, seed: int = 1) -> Any:
        torch.default_generator.manual_seed(seed)  # the CPU's: of all devices takes 3 ms
        model = self.build()
        for module in model if isinstance(model, list) else [model]:
            module.train(self.training)
        return model

    def split(self, num_stages: int) -> str | list[str]:
        if not self.cuts:
            return "auto"
        return [self.cuts[len(self.cuts) * i // num_stages] for i in range(1, num_stages)]

    def batches(self, rows: Sequence[int], seed: int = 2) -> list[Batch]:
        torch.default_generator.manual_seed(seed)
        return [self.draw(number) for number in rows]


def whole(model: Any) -> nn.Module:
    """The model as one module: a list of modules chained, results passed on as arguments."""
    return Chain(model) if isinstance(model, list) else model


class Chain(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for index, module in enumerate(self.children()):
            result = module(*args, **(kwargs if index == 0 else {}))
            args = result if isinstance(result, tuple) else (result,)
        return result


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def _dropout() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers)


class Skips(nn.Module):
    """Values that pass over several stages, each with two consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x).tanh()
        second = self.layers[1](first).tanh()
        third = self.layers[2](second).tanh()
        fourth = self.layers[3](third)
        fifth = self.layers[4](fourth + second)
        return self.layers[5](fifth + first) + x


class Drawing(Skips):
    """As Skips, with operators that draw random numbers, one of them inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.saving = Saving()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.dropout(self.layers[0](x).tanh(), 0.2, self.training)
        second = F.rrelu(self.layers[1](first), training=self.training)
        third = self.saving(self.layers[2](second))
        fourth = self.layers[3](third) + torch.rand_like(third)
        y = self.layers[4](fourth + second).unsqueeze(1)
        fifth = self.attention(y, y, y)[0].squeeze(1)
        return self.layers[5](fifth + first) + x


class Saving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        def computed(x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.linear(self.dropout(x)))

        return checkpoint(computed, x, use_reentrant=False)


class Fan(nn.Module):
    """One value with a consumer in every later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.first(x).tanh()
        total = shared
        for layer in self.rest:
            total = layer(total).tanh() * shared
        return total


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Embeddings, blocks with LayerNorm and attention, dropout, a head of its own."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Masked(nn.Module):
    """Integer and mask inputs that only late stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.positions = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, *, where: torch.Tensor
    ) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        x = x.masked_fill(mask.unsqueeze(-1), 0.0)
        return self.head(x + self.positions(where))


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, Any]:
        y = self.linear(x) * scale
        return y, {"mask": x > 0, "pair": (y.tanh(), None), "count": 3, "constant": x.detach()}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, y: torch.Tensor, extra: dict[str, Any]) -> tuple[Any, ...]:
        assert extra["pair"][1] is None
        assert not extra["constant"].requires_grad
        z = self.linear(y).tanh()
        return z * extra["count"], [extra["pair"][0], extra["mask"]], extra["constant"], None


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, z: torch.Tensor, values: list[torch.Tensor], constant: torch.Tensor, none: None
    ) -> dict[str, torch.Tensor]:
        return {"out": self.linear(z + values[0]).masked_fill(values[1], 0.5) + constant}


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 3),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.first(self.embedding(tokens))
        x, _ = self.second(x)
        return self.head(x)


class Branch(nn.Module):
    """Uses one of two layers, so that some parameters have no gradient in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.negative = nn.Linear(WIDTH, WIDTH)
        self.positive = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, sign: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.positive if sign[0] > 0 else self.negative
        return layer(x).tanh(), sign


class Exit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * sign.unsqueeze(-1)


def _frozen() -> nn.Module:
    model = _mlp()
    for index in (0, 4, 6):
        model.get_submodule(str(index)).requires_grad_(False)
    model.get_parameter("8.bias").requires_grad_(False)
    return model


def _random(rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH))


def _text(rows: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (rows, LENGTH))
    return Batch((tokens,), torch.randint(VOCABULARY, (rows, LENGTH)))


def _masked_text(rows: int) -> Batch:
    tokens, target = (torch.randint(VOCABULARY, (rows, LENGTH)) for _ in range(2))
    where = torch.randint(7, (rows, LENGTH))
    return Batch((tokens, torch.rand(rows, LENGTH) > 0.7), target, {"where": where})


def _images(rows: int) -> Batch:
    return Batch((torch.randn(rows, 2, 6, 6),), torch.randint(3, (rows,)))


def _scaled(rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH), {"scale": 0.5})


def _signed(rows: int) -> Batch:
    sign = torch.full((rows,), 1.0 if torch.rand(()) > 0.5 else -1.0)
    return Batch((torch.randn(rows, WIDTH), sign), torch.randn(rows, WIDTH))


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def out_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output["out"], target)


def drawing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(F.dropout(output, 0.1), target)


TASKS = {
    "mlp": Task(_mlp, _random),
    "skips": Task(Skips, _random, cuts=tuple(f"layers.{i}" for i in range(1, 6))),
    "drawing": Task(Drawing, _random, drawing_loss, cuts=tuple(f"layers.{i}" for i in range(1, 6))),
    "fan": Task(Fan, _random, exact=False, cuts=tuple(f"rest.{i}" for i in range(5))),
    "gpt": Task(GPT, _text, token_loss, training=False),
    "masked": Task(Masked, _masked_text, token_loss, depths=(2, 4)),
    "structures": Task(lambda: [Front(), Middle(), Back()], _scaled, out_loss, depths=(3,)),
    "batch norm": Task(_cnn, _images, F.cross_entropy, depths=(2, 5)),
    "dropout in eval": Task(_dropout, _random, training=False),
    "lstm": Task(Recurrent, _text, token_loss, depths=(2, 4)),
    "branch": Task(lambda: [Branch(), Branch(), Exit()], _signed, depths=(3,)),
    "frozen": Task(_frozen, _random),
}
