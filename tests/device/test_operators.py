"""The checked device computes what the CPU does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "checked:1"


class Attention(nn.Module):
    """A block of a transformer, with dropout."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(x)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
    return nn.Sequential(*layers), torch.randn(8, 9)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    return model, torch.randn(4, 3, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Embedding(20, 16),
        nn.Dropout(0.1),
        Attention(16, heads=2),
        Attention(16, heads=4),
        nn.Linear(16, 20),
    )
    return model, torch.randint(20, (3, 7))


def steps(
    model: nn.Module, x: torch.Tensor, make: Callable[..., torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """What three steps of training leave: losses, gradients, parameters, buffers."""
    optimizer = make(model.parameters())
    left = []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            optimizer.zero_grad()
            loss = functional.log_softmax(model(x), -1).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            left.append(loss.detach())
    left += [p.grad for p in model.parameters() if p.grad is not None]
    left += [*model.parameters(), *model.buffers()]
    return [tensor.detach().cpu() for tensor in left]


@pytest.mark.parametrize("make", [mlp, convolutions, transformer])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    ],
    ids=["sgd", "adamw"],
)
def test_training_leaves_the_cpus_bits(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    model, x = make()
    on_device = copy.deepcopy(model).to(DEVICE)
    torch.manual_seed(3)
    expected = steps(model, x, optimizer)
    torch.checked.default_generators[1].manual_seed(3)  # type: ignore[attr-defined]
    found = steps(on_device, x.to(DEVICE), optimizer)
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_device_draws_the_cpus_random_numbers() -> None:
    torch.manual_seed(5)
    expected = [torch.randn(7), torch.rand(3), torch.randint(9, (4,)), torch.randperm(6)]
    torch.manual_seed(5)
    found = [
        torch.randn(7, device=DEVICE),
        torch.rand(3, device=DEVICE),
        torch.randint(9, (4,), device=DEVICE),
        torch.randperm(6, device=DEVICE),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    state = torch.checked.get_rng_state(DEVICE)  # type: ignore[attr-defined]
    first = torch.rand(4, device=DEVICE)
    torch.checked.set_rng_state(state, DEVICE)  # type: ignore[attr-defined]
    assert torch.equal(first.cpu(), torch.rand(4, device=DEVICE).cpu())


def test_drawing_on_a_device_leaves_the_cpus_generator() -> None:
    state = torch.get_rng_state()
    functional.dropout(torch.ones(9, device=DEVICE), 0.5)
    torch.rand(4, device=DEVICE)
    assert torch.equal(torch.get_rng_state(), state)


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device=DEVICE)
    x.unfold(0, 2, 2)[0].fill_(1)
    x.view(torch.int32)[3] = 0x40000000
    x.split(2)[1].add_(1)
    x.t()[2].mul_(5)
    x.movedim(0, 1).diagonal().add_(7)
    expected = torch.zeros(4, 6)
    expected[:2] = 1
    expected[3] = 2
    expected[2:] += 1
    expected[:, 2] *= 5
    expected.diagonal().add_(7)
    assert torch.equal(x.cpu(), expected)


def test_out_tensors_take_the_shape() -> None:
    out = torch.empty(0, device=DEVICE)
    result = torch.add(torch.ones(3, device=DEVICE), 1, out=out)
    assert result is out
    assert out.tolist() == [2, 2, 2]
    out.resize_(5)
    assert out.shape == (5,)
    assert out[:3].tolist() == [2, 2, 2]


def test_indices_and_masks() -> None:
    x = torch.arange(12.0)
    y = x.to(DEVICE)
    for index in (torch.tensor([3, 1, 3]), x > 4):
        assert torch.equal(y[index.to(DEVICE)].cpu(), x[index])
        assert torch.equal(y[index].cpu(), x[index])
    y[y > 4] = 0
    assert y.sum().item() == 10
    assert y.nonzero().shape == (4, 1)


def test_types_promote_as_on_the_cpu() -> None:
    x = torch.ones(3, dtype=torch.bfloat16, device=DEVICE)
    assert (x * 2.5).dtype == torch.bfloat16
    assert (x * torch.tensor(2.5)).dtype == torch.bfloat16
    assert (x + torch.ones(3, device=DEVICE)).dtype == torch.float32


def test_tensors_of_two_devices_are_refused() -> None:
    x = torch.ones(3, device="checked:0")
    with pytest.raises(RuntimeError, match=r"on the same device.*checked:0.*checked:1"):
        x + torch.ones(3, device="checked:1")
    with pytest.raises(RuntimeError, match=r"on the same device.*cpu"):
        x + torch.ones(3)


def test_device_without_an_index_is_the_current_one() -> None:
    with torch.accelerator.device_index(2):
        assert torch.ones(1, device="checked").device == torch.device("checked:2")
    assert torch.ones(1, device="checked").device == torch.device("checked:0")


def test_storages_and_copies() -> None:
    x = torch.arange(6.0, device=DEVICE)
    assert torch.equal(copy.deepcopy(x).cpu(), x.cpu())
    y = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 2, (2,), (2,))
    assert y.tolist() == [2, 4]
    assert x.to("checked:3").tolist() == x.tolist()
    assert x.to(torch.float64).t().tolist() == x.tolist()
    p = nn.Parameter(torch.zeros(2, device=DEVICE))
    p.data = x[:2]
    assert p.tolist() == [0, 1]


def test_autocast_lowers_the_precision() -> None:
    layer, x = nn.Linear(4, 3).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("checked", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert functional.log_softmax(y, -1).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
