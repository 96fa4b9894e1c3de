"""What random runs of all options together have found (``python -m tests.pairs``)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.samples.odd_optimizers import CountsInGroup


def go_on_where_nothing_is_trained(rank: int, world: int, folder: str) -> int:
    """The count that the optimizer keeps in its group."""
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    model = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]
    with pd2.PipelineModule(model, mse_loss, num_microbatches=2, example_args=(x,)) as pipe:
        opt = pd2.PipelineOptimizer(CountsInGroup(pipe.parameters()))
        pipe.train_step(x, target=x)
        opt.step()
        pd2.save(folder, pipe, opt).wait()
        pd2.load(folder, pipe, opt)
        opt.load_state_dict(opt.state_dict())
        pipe.train_step(x, target=x)
        opt.step()
        opt.state_dict()
        count: int = opt.param_groups[0]["count"]
        return count


def test_a_process_that_trains_nothing_goes_on_with_an_optimizer_that_keeps_counts(
    tmp_path: Path,
) -> None:
    results = run_ranks(go_on_where_nothing_is_trained, 2, args=(str(tmp_path),), timeout=60)
    assert results[1].value == 2


def evaluate_one_of_two_pipelines(rank: int, world: int) -> float:
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    torch.manual_seed(0)
    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pd2.PipelineModule(
        model,
        nn.MSELoss(reduction="sum"),
        num_microbatches=2,
        example_args=(x,),
        schedule="chimera",
        loss_reduction="sum",
        normalizer=True,
    ) as pipe:
        pipe.eval()
        evaluated = pipe.eval_step(x, target=x, normalizer=8)
        pipe.train()
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        loss = pipe.train_step(x, target=x, normalizer=8)
        opt.step()
        assert abs(float(loss) - float(evaluated)) < 1e-6
        return float(evaluated)


def test_one_of_two_pipelines_evaluates_with_a_normalizer() -> None:
    first, second = run_ranks(evaluate_one_of_two_pipelines, 2, timeout=60)
    assert first.value == second.value
