"""A training script that torchrun starts again and again, with as many stages as processes.

    torchrun ... tests/runs/restarting.py FOLDER --batches 12 --kill RANK BATCH

All it does for that is ``resume()`` and ``step()``. Into FOLDER go its checkpoints and, for the
test that started it, the batch that runs (``at-1`` with one process) and what each rank has in the
end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2

WIDTH = 6
SLOW = "slow"
"""A file of the folder; while it is there, batches take SLOW_SECONDS longer."""
SLOW_SECONDS = 0.3


def train(
    folder: Path,
    batches: int,
    num_stages: int,
    every: int = 4,
    begin: Callable[[int, int], None] = lambda rank, batch: None,
) -> dict[str, Any]:
    """Trains to the end from the newest checkpoint on; gives what this process then has.

    Args:
        begin: called before each batch, with the rank and the batch's number.
    """
    torch.set_num_threads(1)
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)]
    rows = torch.randn(2, 60, WIDTH, generator=torch.Generator().manual_seed(11))
    pipe = pd2.PipelineModule(
        nn.Sequential(*layers),
        mse_loss,
        num_stages=num_stages,
        num_microbatches=4,
        example_args=(rows[0, :1],),
        timeout=20.0,
    )
    opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01))
    sampler = pd2.ResumableSampler(60, 24, seed=5)
    losses: dict[int, Any] = {}
    with (
        pipe,
        pd2.Checkpointer(folder / "checkpoints", pipe, opt, data=sampler, every=every) as ckpt,
    ):
        start = ckpt.resume()
        chosen = (each for _ in range(batches) for each in sampler)
        for batch in range(start, batches):
            begin(pipe.rank, batch)
            x, y = rows[:, next(chosen)]
            losses[batch] = pipe.train_step(x, target=y)
            opt.step()
            sampler.advance()
            ckpt.step()
        return {
            "start": start,
            "losses": {str(batch): float(loss) for batch, loss in losses.items()},
            "state": {name: value.tolist() for name, value in pipe.state_dict().items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--every", type=int, default=4, help="batches from one save to the next")
    parser.add_argument(
        "--kill", type=int, nargs=2, help="a rank before a batch, once it has a checkpoint"
    )
    options = parser.parse_args()
    folder, world = options.folder, int(os.environ["WORLD_SIZE"])

    def begin(rank: int, batch: int) -> None:
        if [rank, batch] == options.kill and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            while not any(folder.glob("checkpoints/step-*/checkpoint.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            written = folder / f"at-{world}.partial"
            written.write_text(str(batch))
            written.rename(folder / f"at-{world}")
        if (folder / SLOW).exists():
            time.sleep(SLOW_SECONDS)

    result = train(folder, options.batches, world, options.every, begin)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
