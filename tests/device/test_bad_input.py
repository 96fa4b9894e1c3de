"""Of processes with a device each, all refuse what one got wrong, and go on as if it had not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.ranks import channels
from tests.device import checked
from tests.device.on_device import moved
from tests.device.test_processes import join
from tests.runs.discarding import restart_delay
from tests.runs.launch import run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt

ROWS, WIDTH = 8, 4


def train(device: str, schedule: str, bad: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Trains; before each batch every rank gives its part of each of the bad ones.

    Args:
        bad: by name, what this rank gives in place of the batch and of its target.
    """
    torch.manual_seed(0)
    pipe = pd2.PipelineModule(
        moved([nn.Linear(WIDTH, WIDTH) for _ in range(2)], device),
        mse_loss,
        num_stages=2,
        num_microbatches=2,
        schedule=schedule,
        example_args=(torch.zeros(1, WIDTH, device=device),),
        timeout=20.0,
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), max_grad_norm=1.0)
    outcomes: dict[str, Outcome] = {}
    losses = []
    x, y = good(device)
    with pipe:
        for _ in range(3):
            for name, (args, target) in bad.items():

                def use(args: Any = args, target: Any = target) -> None:
                    pipe.train_step(args, target=target)
                    opt.step()
                    pipe.flush()

                outcomes[name] = attempt(use)
            if not bad:  # as after batches that were discarded
                restart_delay(pipe)
            losses.append(pipe.train_step(x, target=y))
            opt.step()
        state = {name: value.tolist() for name, value in pipe.full_state_dict().items()}
        return {"outcomes": outcomes, "losses": [float(each) for each in losses], "state": state}


def good(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
    return x.sin().to(device), x.cos().to(device)


def bad_batches(rank: int, device: str) -> dict[str, tuple[Any, Any]]:
    """Rank 0 has the inputs, rank 1 the targets; the other one's are right."""
    x, y = good(device)
    same = torch.Tensor.detach
    change: dict[str, tuple[int, Callable[[Any], Any], Callable[[Any], Any]]] = {
        "no rows": (0, lambda x: x[:0], same),
        "list": (0, lambda x: [x], same),
        "rows of the target": (1, same, lambda y: y[:6]),
        "dtype": (0, torch.Tensor.double, same),
        "width": (0, lambda x: x[:, :3], same),
        "shape of the target": (1, same, lambda y: y[:, :3]),
    }
    return {
        name: (of_x(x), of_y(y)) if rank == wrong else (x, y)
        for name, (wrong, of_x, of_y) in change.items()
    }


def both(rank: int, world: int) -> list[dict[str, Any]]:
    device = join(rank, drains=0.05)
    over_a_group = mock.patch.object(channels, "make_device_ring", return_value=None)
    with over_a_group, checked.expect_no_errors():
        return [
            train(device, schedule, bad)
            for schedule in ("2bw", "1f1b")
            for bad in (bad_batches(rank, device), {})
        ]


EXPECTED: Expected = {
    # What is seen before anything of the batch is done.
    "no rows": ("ValueError", ["rows of the batch: 0, at least 1 needed"]),
    "list": ("TypeError", ["list given, a tensor in the example call"]),
    "rows of the target": ("ValueError", ["rows of the arguments: 8, rows of the target: 6"]),
    # What only the model or the loss can tell: the batch is discarded.
    "dtype": ("StageError", ["stage 0", "forward: RuntimeError", "Double and Float", "discarded"]),
    "width": ("StageError", ["stage 0", "forward: RuntimeError", "4x3", "discarded"]),
    "shape of the target": ("StageError", ["stage 1", "tensor b (3)", "discarded"]),
}


def test_all_ranks_refuse_one_ranks_batch_and_go_on() -> None:
    by_rank = [result.value for result in run_ranks(both, 2, rendezvous="environment", timeout=60)]
    for bad in (0, 2):
        assert_raised([rank[bad]["outcomes"] for rank in by_rank], EXPECTED)
        for rank in by_rank:
            for what in ("losses", "state"):
                # The delay begins anew before every batch, so 2bw trains as 1f1b does.
                assert rank[bad][what] == rank[3][what]
