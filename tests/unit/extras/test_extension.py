"""An extension of a user's own: the one of docs/extending.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2

ROOT = Path(__file__).resolve().parents[3]
X, Y = torch.arange(32.0).reshape(8, 4).sin(), torch.arange(32.0).reshape(8, 4).cos()
DECAY = 0.75


def averaged_weights() -> Any:
    """The document's extension."""
    page = (ROOT / "docs/extending.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(import torch.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["AveragedWeights"](decay=DECAY)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


class Run:
    def __init__(self, num_stages: int, schedule: str = "2bw", own_step: bool = False) -> None:
        self.pipe = pd2.PipelineModule(
            model(),
            mse_loss,
            num_stages=num_stages,
            num_microbatches=4,
            schedule=schedule,
            example_args=(X,),
        )
        kind = torch.optim.Adamax if own_step else torch.optim.Adam
        self.averaged = averaged_weights()
        self.opt = pd2.PipelineOptimizer(
            kind(self.pipe.parameters(), lr=0.1), extensions=[self.averaged]
        )
        self.expected: dict[str, torch.Tensor] = {}

    def train(self, batches: int) -> None:
        for _ in range(batches):
            self.pipe.train_step(X, target=Y)
            self.opt.step()
            for name, weight in self.pipe.state_dict().items():  # drains: every version is seen
                known = self.expected.setdefault(name, weight.clone())
                known.lerp_(weight, 1 - DECAY)

    @property
    def averages(self) -> dict[str, torch.Tensor]:
        found = self.averaged.averages.values()
        return {name: average for of_stage in found for name, average in of_stage.items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_it_sees_every_version(schedule: str, own_step: bool) -> None:
    run = Run(2, schedule, own_step)
    with run.pipe:
        run.train(4)
        assert_same(run.averages, run.expected)


def test_its_bytes_are_reported() -> None:
    run = Run(2)
    with run.pipe:
        run.train(1)
        state = [each.optimizer_state for each in run.pipe.memory_report().values()]
        run.averaged.averages.clear()
        without = [each.optimizer_state for each in run.pipe.memory_report().values()]
    assert [a - b for a, b in zip(state, without, strict=True)] == [2 * (4 * 4 + 4) * 4] * 2


@pytest.mark.parametrize("how", ["state_dict", "checkpoint"])
def test_a_resumed_run_has_the_same_bits_on_other_stages(how: str, tmp_path: Path) -> None:
    first, second = Run(2), Run(4)
    with first.pipe, second.pipe:
        first.train(3)
        if how == "checkpoint":
            pd2.save(tmp_path, first.pipe, first.opt).wait()
            pd2.load(tmp_path, second.pipe, second.opt)
        else:
            second.pipe.load_state_dict(first.pipe.full_state_dict())
            second.opt.load_state_dict(first.opt.state_dict())
        assert_same(second.averages, first.averages)
        second.train(2)
        if how == "checkpoint":  # state_dict has no older versions
            first.train(2)
            assert_same(second.averages, first.averages)


def test_what_was_saved_with_it_loads_without_it(tmp_path: Path) -> None:
    run = Run(2)
    with run.pipe:
        run.train(2)
        pd2.save(tmp_path, run.pipe, run.opt).wait()
    plain = pd2.PipelineModule(
        model(), mse_loss, num_stages=2, num_microbatches=4, example_args=(X,)
    )
    with plain:
        opt = pd2.PipelineOptimizer(torch.optim.Adam(plain.parameters(), lr=0.1))
        pd2.load(tmp_path, plain, opt)
        assert "averaged_weights" not in opt.state_dict()


def test_a_second_optimizer_takes_the_first_ones_extensions_away() -> None:
    run = Run(2)
    with run.pipe:
        run.train(1)
        before = {name: average.clone() for name, average in run.averages.items()}
        adam = torch.optim.Adam(run.pipe.parameters(), lr=0.1)
        second = pd2.PipelineOptimizer(adam)
        run.pipe.train_step(X, target=Y)
        second.step()
        run.pipe.flush()
        assert_same(run.averages, before)
        assert all(each.optimizer_state < 4 * 160 for each in run.pipe.memory_report().values())


def test_something_else_is_no_extension() -> None:
    run = Run(2)
    with run.pipe, pytest.raises(TypeError, match=r"extensions\[0\]: int given, it must be an Ext"):
        pd2.PipelineOptimizer(
            torch.optim.SGD(run.pipe.parameters(), lr=0.1),
            extensions=[3],  # type: ignore[list-item]
        )
