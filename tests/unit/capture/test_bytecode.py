"""What torch.fx cannot trace and torch.export would change is captured by Dynamo as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.capture.capture import capture
from pipedream2bw.capture.captured import first_layers

WIDTH = 4


class Reversed(torch.autograd.Function):
    """Gradient reversal (arXiv 1409.7495), which only its backward tells from the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradients[0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[1] // 2):  # which torch.fx cannot count
            for layer in self.inner:
                x = layer(x).tanh() + self.shift
        return x


class CustomBackward(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Reversed.apply(self.through(self.first(x))))


class HookedTensor(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(self.first(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)
        return self.last(x)


class ManyOutputs(Layers):
    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> dict[str, Any]:
        hidden = Reversed.apply(self.through(self.first(x)))
        rows = hidden.shape[0]
        return {"given": x, "output": self.last(hidden).view(rows, -1), "scale": scale}


def output_of(found: Any) -> torch.Tensor:
    return found["output"] if isinstance(found, dict) else found


def loss_fn(found: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output_of(found), target)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Dynamo of torch 2.9 and 2.10 refuses hooks of intermediate tensors, and so does a capture there.
HOOKED = pytest.param(
    HookedTensor, marks=pytest.mark.skipif(TORCH < (2, 11), reason="Dynamo takes no hooks yet")
)
MODELS = [CustomBackward, HOOKED, ManyOutputs]
# After a failed torch.export, Dynamo stops at the assignment itself before torch 2.13.
IS_FOUND = TORCH >= (2, 13)
ASSIGNS = "LeftOutError: the forward assigns another tensor to the buffer" if IS_FOUND else ""


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pipeline_trains_as_the_model_does(kind: type[nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    model = kind()
    alone = copy.deepcopy(model)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    with pd2.PipelineModule(
        model,
        loss_fn,
        num_stages=stages,
        num_microbatches=3,
        schedule="1f1b",
        example_args=(x,),
        timeout=60.0,
    ) as pipe:
        assert "captured by dynamo" in repr(pipe)
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            loss = pipe.train_step(x, target=y)
            opt.step()
            total = 0.0
            sgd.zero_grad()
            for part, of_part in zip(x.chunk(3), y.chunk(3), strict=True):
                lost = loss_fn(alone(part), of_part)
                (lost / 3).backward()
                total += lost.item() / 3
            sgd.step()
            assert float(loss) == pytest.approx(total, rel=1e-6)
        state = pipe.full_state_dict()
        pipe.eval()
        evaluated, expected = pipe(x[:5]), alone.eval()(x[:5])
    # Layers that two stages call have their gradients added in another order.
    limit = {"rtol": 0.0, "atol": 0.0} if stages == 1 else {"rtol": 1e-5, "atol": 1e-7}
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, **limit)
    torch.testing.assert_close(output_of(evaluated), output_of(expected))
    if isinstance(expected, dict):
        assert torch.equal(evaluated["given"], x[:5])
        assert evaluated["scale"] == 2.0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CustomBackward, "autograd function Reversed would be lost"),
        pytest.param(HookedTensor, "a hook of a", marks=HOOKED.marks),
    ],
)
def test_the_capture_says_why_it_is_not_an_export(kind: type[nn.Module], reason: str) -> None:
    captured = capture(kind(), num_stages=2, example_args=(torch.randn(3, WIDTH),))
    assert captured.how == "dynamo"
    assert any("export: BackwardLostError" in note and reason in note for note in captured.notes)
    assert len(captured.layers) > 8
    apply = torch.autograd.Function.__dict__["apply"]
    # A method of C's from torch 2.15 on, which has no __func__.
    assert "_backwards_kept" not in repr(getattr(apply, "__func__", apply))


class OwnLookup(CustomBackward):
    """Looks attributes up by itself, as diffusers' models do."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


@pytest.mark.parametrize("kind", [CustomBackward, OwnLookup])
def test_stages_may_begin_at_modules(kind: type[nn.Module]) -> None:
    x = torch.randn(4, WIDTH)
    captured = capture(kind(), num_stages=2, split=["last"], example_args=(x,))
    assert captured.how == "dynamo"
    assert "last" in first_layers(captured)


def test_an_autograd_function_without_gradients_is_exported() -> None:
    class Frozen(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.through(Reversed.apply(x)))

    captured = capture(Frozen(), num_stages=2, example_args=(torch.randn(3, WIDTH),))
    assert captured.how == "export"


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.unsqueeze(1))
        for _ in range(x.shape[2] // 2):  # which torch.fx cannot count
            x = Reversed.apply(x)
        return self.last(x).squeeze(1)


@pytest.mark.parametrize(("captured", "trained"), [(32, 2), (2, 32)])
def test_a_microbatch_may_have_rows_for_which_another_library_convolves(
    captured: int, trained: int
) -> None:
    model = Convolves()
    alone = copy.deepcopy(model)
    x = torch.randn(2 * trained, WIDTH)
    with pd2.PipelineModule(
        model,
        F.mse_loss,
        num_stages=2,
        num_microbatches=2,
        schedule="1f1b",
        example_args=(torch.randn(captured, WIDTH),),
        timeout=60.0,
    ) as pipe:
        assert "captured by dynamo" in repr(pipe)
        loss = pipe.train_step(x, target=torch.zeros_like(x))
        parts = x.split(trained)
        expected = sum(F.mse_loss(alone(part), torch.zeros_like(part)) for part in parts) / 2
        assert float(loss) == float(expected)


class AssignsBuffer(CustomBackward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift = self.shift + 1
        return super().forward(x)


class SwitchesMode(CustomBackward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean(1, keepdim=True)
        return super().forward(x - mean)


class Returns(CustomBackward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AssignsBuffer, f"dynamo: {ASSIGNS}"),
        (SwitchesMode, "dynamo: LeftOutError: .*switches a mode of torch between layers"),
        (Returns, "dynamo: "),
    ],
)
def test_what_the_graph_would_leave_out_is_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)export: .*{reason}"):
        capture(kind(), num_stages=2, example_args=(torch.randn(3, WIDTH),))


def test_a_model_is_captured_any_number_of_times() -> None:
    for rows in range(1, 12):
        x = torch.randn(rows, WIDTH)
        assert capture(CustomBackward(), num_stages=2, example_args=(x,)).how == "dynamo"


class SavesElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.second(torch.tanh(self.first(x)))


def test_hooks_of_saved_tensors_are_not_left_out() -> None:
    with pytest.raises(ValueError, match="hooks of saved tensors would be lost: save_on_cpu"):
        capture(SavesElsewhere(), num_stages=2, example_args=(torch.randn(3, WIDTH),))
    inside = nn.Sequential(SavesElsewhere(), nn.Linear(WIDTH, WIDTH))  # is called as it is
    assert capture(inside, num_stages=2, example_args=(torch.randn(3, WIDTH),)).how == "sequential"
