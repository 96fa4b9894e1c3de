"""Evaluations with a loss between train_steps, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

import pipedream2bw as pd2
from tests.samples.models import TASKS

TASK = TASKS["mlp"]
M = 4
ROWS = (8, 7, 3, 8, 1)


def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


def trained(
    schedule: str, *, evaluates: bool, rows: tuple[int, ...], replica: int, **options: Any
) -> Any:
    """The losses and metrics of train_steps, and of evaluations before each of them."""
    batches = TASK.batches(rows, seed=replica)
    evaluated, losses = [], []
    options = dict(options)
    with pd2.PipelineModule(
        TASK.model(),
        options.pop("loss_fn", TASK.loss_fn),
        schedule=schedule,
        num_microbatches=options.pop("num_microbatches", M),
        example_args=batches[0].args,
        metrics={"spread": spread, "rows": lambda output, target: float(len(target))},
        timeout=30,
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.05))
        counted: dict[str, Any] = {} if options.get("normalizer") is not True else {"normalizer": 9}
        for batch in batches:
            if evaluates:
                with torch.no_grad():
                    number = pipe.eval_step(*batch.args, target=batch.target, **counted)
                assert number.done()
                evaluated.append([float(number), *number.metrics.values()])
            losses.append(pipe.train_step(*batch.args, target=batch.target, **counted))
            opt.step()
        pipe.flush()
        numbers = [[float(loss), *loss.metrics.values()] for loss in losses]
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
    return evaluated, numbers, state


def check(schedule: str, rows: tuple[int, ...] = ROWS, replica: int = 0, **options: Any) -> None:
    """An evaluation's numbers are a train_step's on the same weights, and change none of those."""
    evaluated, numbers, state = trained(
        schedule, evaluates=True, rows=rows, replica=replica, **options
    )
    newest_are_read = schedule in ("1f1b", "gpipe")
    for position, (found, wanted) in enumerate(zip(evaluated, numbers, strict=True)):
        if position == 0 or newest_are_read:
            assert found == wanted, (position, found, wanted)
    _, others, other = trained(schedule, evaluates=False, rows=rows, replica=replica, **options)
    assert numbers == others
    assert all(torch.equal(state[name], value) for name, value in other.items())
