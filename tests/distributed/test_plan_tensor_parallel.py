"""A plan whose stages are on several devices each opens by its options, and holds what it says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks

WIDTH, ROWS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(self.norm(x)).tanh())
        return x + made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def made_plan() -> pd2.Plan:
    x, y = batch()
    profile = pd2.profile(
        model(),
        mse_loss,
        example_args=(x,),
        target=y,
        microbatch_rows=(2,),
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    return pd2.plan(
        profile,
        devices=4,
        memory="1GB",
        batch=ROWS,
        tensor_parallel=2,
        sharded="*.up",
        summed="*.down",
        width=1,
        num_stages=2,
        schedules="2bw",
        recompute="none",
    )


def train(rank: int, world_size: int, path: str) -> tuple[list[float], bool]:
    """The losses, and whether this process's stage holds what the plan says."""
    plan = pd2.Plan.load(path)
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    made = model()
    for block in made:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, y = batch()
    given = {**plan.options, "mesh": mesh}
    with pd2.PipelineModule(
        pd2.use_local_shards(made), mse_loss, example_args=(x[:2],), **given
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-2))
        losses = []
        for _ in range(4):
            loss = pipe.train_step(*([x] if pipe.is_first_stage else []), target=y)
            opt.step()
            losses.append(loss)
        pipe.flush()
        ((index, report),) = pipe.memory_report().items()
        stage = plan.stages[index]
        holds = (
            report.weights == stage.num_versions * stage.weight_bytes
            and report.gradients == stage.gradient_bytes
            and report.optimizer_state == stage.state_bytes
        )
        return [float(loss) for loss in losses], holds


def test_a_plan_of_shared_stages_opens_by_its_options(tmp_path: Path) -> None:
    plan = made_plan()
    assert plan.mesh == {"dp": 1, "pp": 2, "tp": 2}
    plan.save(tmp_path / "plan.json")
    results = [each.value for each in run_ranks(train, 4, args=[str(tmp_path / "plan.json")])]
    assert all(holds for _, holds in results)
    losses = [each for each, _ in results]
    x, y = batch()
    sizes = {"num_stages": 2, "num_microbatches": 2, "split": plan.split, "schedule": "2bw"}
    with pd2.PipelineModule(model(), mse_loss, example_args=(x[:2],), **sizes) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-2))
        alone = []
        for _ in range(4):
            alone.append(pipe.train_step(x, target=y))
            opt.step()
        torch.testing.assert_close(losses[-1], [float(each) for each in alone])
