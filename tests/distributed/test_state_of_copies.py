"""What optimizers keep is read, saved and resumed to the bit where stages have copies of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.samples.odd_optimizers import CountsBeside
from tests.samples.tied_chain import TiedChain, loss

WIDTH = 16


def tied() -> TiedChain:
    return TiedChain(WIDTH, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


Make = Callable[[Any], torch.optim.Optimizer]
SGD: Make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW: Make = functools.partial(torch.optim.AdamW, lr=0.01)
RMSPROP: Make = functools.partial(torch.optim.RMSprop, lr=0.01)

CHIMERA = {"schedule": "chimera", "num_stages": 2}
V = {"schedule": "interleaved_2bw", "num_stages": 2, "stages_per_rank": 2, "width": 2}
STAGES = {"schedule": "2bw", "num_stages": 2}
CASES: list[tuple[Make, bool, dict[str, Any]]] = [
    (SGD, False, CHIMERA),
    (RMSPROP, False, CHIMERA),
    (ADAMW, False, {**CHIMERA, "precision": "bf16"}),
    (RMSPROP, True, V),
    (RMSPROP, True, {**V, "precision": "bf16"}),
    (CountsBeside, False, V),
    (CountsBeside, False, STAGES),
    (CountsBeside, False, {**CHIMERA, "precision": "bf16"}),
]


def trained(make: Make, shard_state: bool, options: dict[str, Any], **of: Any) -> dict[str, Any]:
    """Trains from batch ``first`` to ``last``; may read states, load before and save after."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(
        torch.distributed.get_rank() % options.get("width", 1)
    )
    batches = [torch.randn(8, WIDTH, generator=generator) for _ in range(6)]
    with pd2.PipelineModule(
        tied(), loss, num_microbatches=4, example_args=(batches[0],), timeout=30.0, **options
    ) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), shard_state=shard_state)
        if "load" in of:
            pd2.load(of["load"], pipe, opt)
        for number in range(of.get("first", 0), of.get("last", 6)):
            pipe.train_step(batches[number], target=batches[number])
            opt.step()
            if number == of.get("read"):
                opt.state_dict()
        if "save" in of:
            pd2.save(of["save"], pipe, opt).wait()
        return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def check(rank: int, world: int, folder: str) -> None:
    for number, (make, shard_state, options) in enumerate(CASES):
        train = functools.partial(trained, make, shard_state, options)
        path, want = f"{folder}/{number}", train()
        train(last=3, read=1, save=path)
        resumed = train(first=3, load=path)
        for name, value in want.items():
            assert torch.equal(resumed[name], value), (number, name)


def test_states_of_copies_are_read_and_resumed(tmp_path: Path) -> None:
    run_ranks(check, 2, args=(str(tmp_path),), timeout=150)
