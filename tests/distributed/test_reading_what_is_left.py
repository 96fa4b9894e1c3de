"""Where a process is gone the pipeline has ended, and the others can read what they hold."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.discarding import WIDTH, batches
from tests.runs.launch import run_ranks
from tests.runs.trajectory import copy_of
from tests.runs.transports import GLOO, SHARED_MEMORY, TWO_MACHINES, over

M, ROWS, COUNT = 4, 8, 12
KILLED_IN, D = 6, 3


class Killed(nn.Module):
    """Its process is killed in the forward of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: list[int] = []  # shared by the copies of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.calls.append(len(self.calls))
            if len(self.calls) > KILLED_IN * M:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x).tanh()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    first, last = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    return [first, Killed(), last]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def survive(rank: int, world: int, schedule: str) -> dict[str, Any]:
    given = batches(COUNT, ROWS)
    pipe = pd2.PipelineModule(
        layers(),
        mse_loss,
        schedule=schedule,
        num_microbatches=M,
        example_args=(given[0].args[0][:2],),
        timeout=20.0,
    )
    opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    with pytest.raises(pd2.errors.StageError) as raised:
        for batch in given:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
    assert raised.value.discarded is None
    names = dict(pipe.named_parameters())
    seen = {
        "kind": type(raised.value).__name__,
        "parameters": copy_of({name: pipe.state_dict()[name] for name in names}),
        "moments": opt.state_dict(),
        "shown": copy_of(names),
    }
    for again in (pipe.flush, pipe.full_state_dict, opt.step):
        with pytest.raises(RuntimeError, match="the pipeline is closed"):
            again()
    pipe.close()
    seen["closed"] = copy_of({name: pipe.state_dict()[name] for name in names})
    return seen


def by_oracle(schedule: str) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Parameters and moments after each number of updates."""
    model = nn.Sequential(*layers())
    opt = sgd(model.parameters())
    oracle = Oracle(model, opt, M, mse_loss, int(schedule == "2bw"))
    found = []
    for batch in batches(COUNT, ROWS):
        oracle.train_step(batch)
        named = dict(model.named_parameters())
        moments = {name: opt.state[p]["momentum_buffer"].clone() for name, p in named.items()}
        found.append((copy_of(named), moments))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TWO_MACHINES, *exhaustive(GLOO)])
def test_after_a_process_was_killed_the_others_read_their_last_whole_update(
    transport: str, schedule: str
) -> None:
    args = (transport, survive, schedule)
    results = run_ranks(over, D, args=args, timeout=90, expect_failure=True)
    assert results[1].exit_code == -signal.SIGKILL
    versions = by_oracle(schedule)
    for rank in (0, 2):
        seen = results[rank].value
        assert seen is not None, results[rank]
        assert seen["kind"] == "PeerLost"
        mine = seen["parameters"]
        assert {name[0] for name in mine} == {str(rank)}
        made = [
            number
            for number, (weights, _) in enumerate(versions, 1)
            if all(torch.equal(mine[name], weights[name]) for name in mine)
        ]
        assert made in ([KILLED_IN - 1], [KILLED_IN])
        for other in ("shown", "closed"):
            assert all(torch.equal(seen[other][name], mine[name]) for name in mine)
        moments = versions[made[0] - 1][1]
        state = seen["moments"]
        for name in mine:
            found = [value for key, value in flat(state).items() if name in key and "mom" in key]
            assert len(found) == 1, (name, state)
            assert torch.equal(found[0], moments[name])


def flat(tree: Any, where: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {where: tree}
    found: dict[str, torch.Tensor] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        found |= flat(value, f"{where}/{name}")
    return found
