"""Blocks that recompute by themselves give the same bits, and hold less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipedream2bw as pd2
from pipedream2bw.capture.chain import as_root
from tests.runs.trajectory import check_task
from tests.samples.flow_models import random_batch
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.recompute_models import (
    Attention,
    Nested,
    OneAfterTheOther,
    StatefulParts,
    WritesInput,
    total,
)


def gentle_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def blocks_of(name: str) -> list[str]:
    """The modules right below the root or below a list of modules."""
    return [
        path
        for path, module in as_root(TASKS[name].model()).named_modules()
        if path.rpartition(".")[0] in ("", "layers", "blocks", "rest")
        and not isinstance(module, nn.ModuleList)
        and path
        and not path.endswith("never")
    ]


@pytest.mark.parametrize("schedule", ["2bw", "zero_bubble"])
@pytest.mark.parametrize("name", TASKS)
def test_recomputed_blocks_equal_the_definition(name: str, schedule: str) -> None:
    for d in TASKS[name].depths[-2:]:
        blocks = blocks_of(name)
        check_task(
            TASKS[name], d, 2 * d, rows=[4 * d] * 4, schedule=schedule, recompute=blocks[::2]
        )


def test_a_recomputed_block_draws_the_same_numbers_and_keeps_its_inputs_only() -> None:
    torch.manual_seed(0)
    rows, width = 8, 32
    kept = {}
    for recompute in (False, ["0"]):
        block = nn.Sequential(nn.Linear(width, width, bias=False), nn.Dropout(0.5), Attention())
        block.double()
        before = block[0].weight.detach().clone()
        x = torch.randn(4 * rows, width, dtype=torch.float64)
        with pd2.PipelineModule(
            [block, nn.Identity()],
            total,
            num_microbatches=4,
            example_args=(x,),
            recompute=recompute,
            loss_reduction="sum",
            timeout=60.0,
        ) as pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=1.0))
            loss = pipe.train_step(x)
            optimizer.step()
            after = next(iter(pipe.state_dict().values()))
            assert torch.sum(before * (before - after)).item() == pytest.approx(loss.item())
            kept[not recompute] = pipe.memory_report()[0].activations
    assert kept[True] > 0
    assert kept[False] == 0  # the block's input is the user's


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "2bw_split"])
@pytest.mark.parametrize("recompute", [True, ["1"], ["1.parts"]])
@pytest.mark.parametrize("make", [Nested, StatefulParts])
def test_backwards_inside_backwards_and_blocks_with_state(
    make: Any, recompute: Any, schedule: str
) -> None:
    if make is Nested and recompute == ["1.parts"]:
        recompute = ["1", "2"]
    is_traced = recompute == ["1.parts"]

    def build() -> Any:
        model = [nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)]
        return OneAfterTheOther(model) if is_traced else model

    task = Task(build, random_batch, cuts=("0", "1", "2") if is_traced else ())
    check_task(task, 3, 4, [12] * 4, gentle_sgd, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", ["0"]), ("zero_bubble", True)])
def test_a_checkpoint_around_a_weight_in_what_is_recomputed_draws_the_same_numbers(
    schedule: str, recompute: Any
) -> None:
    class DropConnect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = checkpoint(lambda w: F.dropout(w, 0.5), self.w, use_reentrant=False)
            return F.linear(x, w)

    task = Task(lambda: [DropConnect(), nn.Linear(WIDTH, WIDTH)], random_batch)
    check_task(task, 2, 2, [4] * 4, schedule=schedule, recompute=recompute)


def test_a_block_may_have_no_layers_in_the_other_mode() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.aux = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.main(x)
            if self.training:
                y = y + self.aux(y)
            z: torch.Tensor = y.tanh()
            return z

    x = torch.randn(4, 4)
    with pd2.PipelineModule(
        OneAfterTheOther([Auxiliary(), nn.Linear(4, 4)]),
        F.mse_loss,
        num_stages=2,
        split=["1"],
        num_microbatches=2,
        example_args=(x,),
        recompute=["0.aux"],
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(x, target=x)
        optimizer.step()
        pipe.eval()
        assert pipe(x).shape == (4, 4)


def test_a_blocks_input_counts_as_held() -> None:
    x = torch.randn(4, WIDTH)
    with pd2.PipelineModule(
        [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Sigmoid())],
        total,
        num_microbatches=2,
        example_args=(x,),
        recompute=["1"],
        loss_reduction="sum",
        timeout=60.0,
    ) as pipe:
        pipe.train_step(x)
        pipe.flush()
        assert pipe.memory_report()[1].activations == 2 * WIDTH * 4


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("2.none", r"recompute: '2.none' is no module of the model"),
        ("1.0", r"recompute: no layer of the captured model is in '1.0': it computes nothing"),
    ],
)
def test_a_block_that_is_not_there_is_refused(block: str, message: str) -> None:
    class Refers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(2, 2))
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return y

    with pytest.raises(ValueError, match=message):
        pd2.PipelineModule(
            [nn.Linear(2, 2), Refers()],
            F.mse_loss,
            num_microbatches=2,
            example_args=(torch.randn(2, 2),),
            recompute=[block],
        )


def test_a_block_that_writes_to_its_input_is_refused() -> None:
    x = torch.randn(4, WIDTH)
    pipe = pd2.PipelineModule(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesInput(), nn.Linear(WIDTH, WIDTH)),
        F.mse_loss,
        num_stages=2,
        split=["2"],
        num_microbatches=2,
        example_args=(x,),
        recompute=["1"],
        timeout=60.0,
    )
    with pytest.raises(RuntimeError, match=r"block 1 writes to its inputs in place"):
        pipe.train_step(x, target=x)
        pipe.flush()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_stages_in_threads_share_a_block_and_each_watches_its_own_buffers() -> None:
    """A cut goes through a block that is recomputed, whose BatchNorm the first stage runs alone."""
    task = Task(Blocks, random_batch)
    options: Any = {"split": ["blocks.1.up"], "recompute": ["blocks.1", "blocks.2"]}
    for _ in range(4):
        check_task(task, 2, 8, [32] * 4, **options)
