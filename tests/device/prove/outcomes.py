"""What may be left out of a training, and what may become of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import pipedream2bw as pd2
from tests.device import checked
from tests.references.oracle import Batch
from tests.runs.trajectory import Trajectory, assert_same, copy_of

NUM_BATCHES, NUM_JUDGED = 6, 3
"""What is left out in the last batches may be for those that would come after them."""
KINDS = [checked.Ordering.STREAM_WAIT, checked.Ordering.RECORD_STREAM, checked.Ordering.HOST_WAIT]
FOUND, NOT_REACHED, IMPLIED, UNNEEDED, MISSED = WORDS = (
    "found",
    "not reached",
    "implied",
    "unneeded",
    "missed",
)
VERDICTS = {
    None: NOT_REACHED,
    checked.Verdict.IMPLIED: IMPLIED,
    checked.Verdict.UNNEEDED: UNNEEDED,
    checked.Verdict.OPEN: MISSED,
}

Outcome = tuple[checked.Ordering, int, str]
"""The n-th of a kind, and what became of the training without it."""


def synchronize() -> None:
    """Waits until all devices are idle."""
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)


@dataclasses.dataclass(frozen=True)
class Between:
    """What is done between the first batches and the others, beside training.

    Attributes:
        saves: begins a checkpoint, whose weights and buffers belong to what came out.
        evaluates: calls the pipeline, whose output does.
    """

    saves: bool = False
    evaluates: bool = False


NOTHING = Between()


def train(
    pipe: pd2.PipelineModule,
    batches: Sequence[Batch],
    judged: Callable[[], None],
    between: Between = NOTHING,
    **optimizer: Any,
) -> Trajectory:
    """Trains by Adam; the state is the host's. Calls ``judged`` after the first batches."""
    adam = torch.optim.Adam(pipe.parameters(), lr=0.01, foreach=False)
    opt = pd2.PipelineOptimizer(adam, **optimizer)
    losses = []
    state = {}
    with contextlib.ExitStack() as ends:
        for number, batch in enumerate(batches):
            if between.saves and number == 1:
                folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
                saving = pd2.save(folder, pipe, opt)
            if between.evaluates and number == 1:
                pipe.eval()
                state["evaluated"] = pipe(*batch.args).cpu()
                pipe.train()
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            if number == NUM_JUDGED - 1:
                losses[-1].item()
                if between.saves:
                    saving.wait()
                    (file,) = folder.rglob("model-*.safetensors")
                    state |= {f"saved {name}": value for name, value in load_file(file).items()}
                judged()
    state |= {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
    return Trajectory([float(loss) for loss in losses], copy_of(state))


Run = Callable[[Callable[[], None]], Trajectory]
"""Trains, and calls what it is given after the first batches."""


def count(run: Run, want: Trajectory, kind: checked.Ordering) -> int:
    """How many of a kind the first batches of a training have."""
    checked.drop_nth(kind, 0)
    counts: list[int] = []
    assert_same(run(lambda: counts.append(checked.count(kind))), want)
    return counts[0]


def without(
    run: Run,
    want: Trajectory,
    kind: checked.Ordering,
    n: int,
    *,
    meet: Callable[[], object] = lambda: None,
) -> str:
    """What becomes of a training without the n-th of a kind; 0: nothing is left out.

    Args:
        meet: waits until other processes are as far.
    """
    synchronize()  # what was given before is over
    checked.drop_nth(kind, n)
    meet()
    is_same = True
    try:
        assert_same(run(lambda: None), want)
        gc.collect()
        checked.settle_memory()  # a missing record_stream shows where memory may be used again
    except Exception:
        is_same = False
    gc.collect()  # what the exception held
    errors, verdict = checked.errors(), checked.verdict()
    checked.drop_nth(kind, 0)
    synchronize()
    checked.clear_errors()
    return FOUND if errors or not is_same else VERDICTS[verdict]
