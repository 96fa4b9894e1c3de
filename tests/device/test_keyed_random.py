"""What a device draws by key, it draws again, and its default generator does not notice."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipedream2bw as pd2
from tests.device import checked
from tests.device.on_device import moved
from tests.device.test_process_group import connect, full, in_threads


@pytest.mark.parametrize("given", [False, True], ids=["default", "named default"])
def test_draws_of_a_device_follow_the_key_alone(given: bool) -> None:
    x = torch.ones(64, device="checked:1")
    generator = torch.checked.default_generators[1] if given else None  # type: ignore[attr-defined]

    def drawn(microbatch: int) -> torch.Tensor:
        with pd2.reference_random(seed=5, train_step=0, microbatch=microbatch):
            dropped = F.dropout(x)
            return torch.stack([dropped, torch.empty_like(x).uniform_(generator=generator)]).cpu()

    torch.checked.manual_seed_all(1)  # type: ignore[attr-defined]
    before = torch.checked.get_rng_state(1)  # type: ignore[attr-defined]
    first = drawn(0)
    assert torch.equal(torch.checked.get_rng_state(1), before)  # type: ignore[attr-defined]
    torch.checked.manual_seed_all(2)  # type: ignore[attr-defined]
    assert torch.equal(drawn(0), first)
    assert not torch.equal(drawn(1)[0], first[0])
    assert not torch.equal(drawn(1)[1], first[1])


def test_a_checkpoint_leaves_the_generator_that_stages_share_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch sets it back around a forward that runs again, while another stage may draw."""
    x = torch.ones(64, device="checked:1", requires_grad=True)
    touched = []

    class Watched:
        """Of the device's default generator, what would shift another thread's numbers."""

        def get_state(self) -> torch.Tensor:
            touched.append("read")
            return torch.zeros(16, dtype=torch.uint8)

        def set_state(self, state: torch.Tensor) -> None:
            touched.append("set")

    generators = (torch.checked.default_generators[0], Watched())  # type: ignore[attr-defined]
    with pd2.reference_random(seed=5, train_step=0, microbatch=0):
        monkeypatch.setattr(torch.checked, "default_generators", generators)  # type: ignore[attr-defined]
        dropped = checkpoint(lambda x: F.dropout(x).square(), x, use_reentrant=False)
        dropped.sum().backward()
    assert touched == []
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), 2 * dropped.detach().cpu())


class DrawsBackward(torch.autograd.Function):
    """Drops gradients, by an operator with a Generator argument and by one without."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return F.dropout(gradient) + 0.01 * torch.rand_like(gradient)


class DrawsWhenItGoesBack(nn.Module):
    """Before, in and after a checkpoint that draws; in another thread than the stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers[0](F.dropout(x))
        x.register_hook(lambda gradient: gradient * torch.empty_like(gradient).uniform_())
        x = checkpoint(lambda x: F.dropout(self.layers[1](x)).sin(), x, use_reentrant=False)
        return self.layers[2](DrawsBackward.apply(x))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("schedule", ["2bw", "zero_bubble"])
def test_a_backward_draws_by_the_key(schedule: str) -> None:
    results = []
    for device in ("cpu", "checked:0"):
        torch.manual_seed(1)
        model = moved([DrawsWhenItGoesBack(), DrawsWhenItGoesBack()], device)
        pipe = pd2.PipelineModule(
            model,
            F.mse_loss,
            num_stages=2,
            num_microbatches=3,
            example_args=(torch.zeros(6, 8, device=device),),
            schedule=schedule,
            timeout=60.0,
        )
        pipe.session.random_seed = 5
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pipe:
            losses = []
            for seed in range(4):
                x, target = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed))
                losses.append(pipe.train_step(x.to(device), target=target.to(device)))
                opt.step()
            state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
            results.append(([loss.item() for loss in losses], state))
    (cpus, want), (devices, got) = results
    assert devices == cpus
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())


def test_others_draw_from_the_default_generator_meanwhile() -> None:
    """An operator that takes a generator gets one of the thread's own."""
    begins = threading.Event()

    def state() -> list[int]:
        found: torch.Tensor = torch.checked.get_rng_state(1)  # type: ignore[attr-defined]
        return found.tolist()  # type: ignore[no-any-return]

    before = state()

    def program(rank: int, group: Any) -> Any:
        connect(rank, group)
        x = full(1.0)
        if rank == 0:
            begins.wait(20)
            time.sleep(0.5)
            meanwhile = state()
            group.send([x], 1, 0)
            return meanwhile
        with pd2.reference_random(seed=5, train_step=0, microbatch=0):
            full(1.0).uniform_()
            group.recv([x], 0, 0).wait()
            begins.set()
            x.uniform_()  # waits here until the message has come
        return x.tolist()

    checked.set_drains(at_first_use=False, probability=0.0, seed=0)
    meanwhile, drawn = in_threads(program)
    assert meanwhile == before
    assert drawn != [1.0] * 10
