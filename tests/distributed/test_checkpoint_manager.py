"""A manager of checkpoints as torchtitan's is works with a pipeline, over numbers of stages.

It gives ``torch.distributed.checkpoint`` one dictionary: the model's tensors under their own names
beside objects that have a state, and lets training go on while that is written. The model's part is
the class that docs/checkpoints.md tells its users to write.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import Trajectory, assert_same, copy_of, make_pipeline
from tests.samples.models import TASKS

TASK = TASKS["mlp"]
BATCHES = TASK.batches([4] * 7)
KEEP = 2

Mode = Literal["sync", "async", "staged"]
"""A save is written at once, by a thread from a copy, or from a copy made during training."""


@dataclasses.dataclass
class Counter:
    """The trainer's own state."""

    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def documented_weights(pipe: pd2.PipelineModule) -> Any:
    """What the document gives a manager for the model."""
    (code,) = re.findall(r"```python\n(class Weights:\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {"pipe": pipe}
    exec(code, names)
    return names["Weights"]()


class Trainer:
    """A run, and what saves it."""

    def __init__(self, folder: Path, num_stages: int, seed: int) -> None:
        self.folder = folder
        self.pipe = make_pipeline(
            TASK, num_stages, 2, BATCHES[0], model=TASK.model(seed), schedule="2bw"
        )
        self.opt = pd2.PipelineOptimizer(sgd(self.pipe.parameters()))
        self.weights = documented_weights(self.pipe)
        self.counter = Counter()
        self.states = {
            "optimizer": self.opt,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.5),
            "train_state": self.counter,
        }
        self.losses: list[Any] = []
        # Savers use a group of their own: training sends messages meanwhile.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.stager = DefaultStager(StagingOptions(False, False, True, False))
        self.staging: Any = None
        self.written: Any = None

    def whole(self, without: Collection[str] = ()) -> dict[str, Any]:
        given = {name: state for name, state in self.states.items() if name not in without}
        return {**self.weights.state_dict(), **given}

    def train(self, number: int) -> None:
        batch = BATCHES[number]
        self.losses.append(self.pipe.train_step(*batch.args, target=batch.target))
        if self.staging is not None:  # no step before all has been copied
            self.staging.result()
            self.staging = None
        self.opt.step()
        self.states["lr_scheduler"].step()
        self.counter.step += 1

    def save(self, mode: Mode) -> dict[str, torch.Tensor]:
        """Begins to save, and tells what must be saved."""
        self.wait()
        place = str(self.folder / f"step-{self.counter.step}")
        now = copy_of(self.pipe.state_dict())
        if mode == "sync":
            save(self.whole(), checkpoint_id=place)
        elif mode == "async":
            self.written = async_save(self.whole(), checkpoint_id=place, process_group=self.group)
        else:
            response: Any = async_save(
                self.whole(),
                checkpoint_id=place,
                process_group=self.group,
                async_stager=self.stager,
            )
            self.staging, self.written = response.staging_completion, response.upload_completion
        return now

    def wait(self) -> None:
        """Waits for the save that is under way; then older ones may be removed."""
        if self.written is not None:
            self.written.result()
            self.written = None
        if self.pipe.rank == 0:
            steps = sorted(int(path.name.split("-")[1]) for path in self.folder.glob("step-*"))
            for old in steps[:-KEEP]:
                shutil.rmtree(self.folder / f"step-{old}")

    def load(self, step: int, without: Collection[str] = ()) -> None:
        self.opt.init_state()
        state = self.whole(without)
        load(state, checkpoint_id=str(self.folder / f"step-{step}"))
        # The objects have been given their states; of the model only tensors have been filled.
        self.weights.load_state_dict(state)

    def finish(self) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
        self.pipe.flush()
        losses = [float(loss) for loss in self.losses]
        self.wait()
        self.stager.close()
        state = copy_of(self.pipe.state_dict())
        momenta = {
            name: each["momentum_buffer"].clone()
            for name, each in self.opt.state_dict()["state"].items()
        }
        self.pipe.close()
        return losses, state, {"momenta": momenta, "step": self.counter.step}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def first_part(rank: int, world: int, folder: str) -> Any:
    """Saves after batches 1, 2 and 3, each time in another way, and trains one more."""
    trainer = Trainer(Path(folder), world, seed=1)
    saved = {}
    modes: list[Mode] = ["sync", "async", "staged"]
    for number, mode in enumerate(modes):
        trainer.train(number)
        saved[number + 1] = trainer.save(mode)
    trainer.train(3)  # which is lost
    return saved, trainer.finish()


def second_part(rank: int, world: int, folder: str) -> Any:
    trainer = Trainer(Path(folder), max(world, 1), seed=2)
    trainer.load(3)
    for number in (3, 4):
        trainer.train(number)
    trainer.save("async")
    return trainer.finish()


def third_part(rank: int, world: int, folder: str) -> Any:
    trainer = Trainer(Path(folder), world, seed=3)
    trainer.train(0)  # so that there is an older version, too
    trainer.losses.clear()
    trainer.load(5, without=["train_state"])
    for number in (5, 6):
        trainer.train(number)
    return trainer.finish()


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.timeout(120)
def test_a_managers_checkpoints_go_from_two_stages_to_one_and_back(tmp_path: Path) -> None:
    """The delay begins anew at each load; all else is as if the run had never ended."""
    folder = str(tmp_path)
    first = [result.value for result in run_ranks(first_part, 2, args=[folder])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    for step in (2, 3):
        want = merged([saved[step] for saved, _ in first])
        found = {name: torch.zeros_like(value) for name, value in want.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about loading without other processes
            load(found, checkpoint_id=f"{folder}/step-{step}")
        assert all(torch.equal(found[name], value) for name, value in want.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = second_part(0, 0, folder)
    last = [result.value for result in run_ranks(third_part, 2, args=[folder])]

    model = TASK.model()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    oracle = Oracle(model, optimizer, 2, TASK.loss_fn, 1)
    losses = []
    for number, batch in enumerate(BATCHES):
        if number in (3, 5):
            oracle.restart_delay()
        losses.append(oracle.train_step(batch))
        scheduler.step()
        if number == 4:
            assert_same(
                Trajectory(alone[0], alone[1]), Trajectory(losses[3:], copy_of(model.state_dict()))
            )
    assert alone[2]["step"] == 5
    assert [part[2]["step"] for part in last] == [3, 3]  # excluded from loading
    got = Trajectory(last[0][0], merged([part[1] for part in last]))
    assert_same(got, Trajectory(losses[5:], copy_of(model.state_dict())))
    momenta = merged([part[2]["momenta"] for part in last])
    for name, parameter in model.named_parameters():
        assert torch.equal(momenta[name], optimizer.state[parameter]["momentum_buffer"]), name
