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


class Named(pd2.Extension):
    def __init__(self, name: str, saved: Any = None) -> None:
        self.name = name
        self._saved = saved

    def saved(self) -> Any:
        return self._saved

    def kept(self, weights: Any) -> dict[str, dict[str, Any]]:
        return {name: {"": torch.ones(3)} for name in weights.trainable}


TWICE = Named("one")
REFUSED: dict[str, tuple[Any, str]] = {
    "no extension": ([3], r"extensions\[0\]: 3 given, it must be of a subclass"),
    "no list": (TWICE, "extensions: Named given, it must be a list"),
    "no identifier": ([Named("a.b")], r"extensions\[0\]: name: 'a.b', it must be an identifier"),
    "an optimizer's word": ([Named("state")], "name: 'state', it must be an identifier, and none"),
    "without a name": ([Named("", {})], "name: '', what has a state must have a name"),
    "twice": ([TWICE, TWICE], r"extensions\[0\] and extensions\[1\]: Named, name: 'one', is given"),
    "two of a name": ([Named("one"), Named("one")], "name: 'one', is given twice"),
    "a list saved": ([Named("one", [1])], r"Named.saved\(\): list given, it must be a dictionary"),
    "kept saved": ([Named("one", {"kept": 1})], r'Named.saved\(\): it has the key "kept"'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_an_extension_is_refused(what: str) -> None:
    extensions, text = REFUSED[what]
    with Run(2).pipe as pipe:
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with pytest.raises((TypeError, ValueError), match=text):
            pd2.PipelineOptimizer(sgd, extensions=extensions)


@pytest.mark.parametrize("saved", [None, {}])
def test_names_of_extensions_and_of_optimizers_state_do_not_meet(
    saved: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = Run(2)
    with run.pipe as pipe:
        adam = torch.optim.Adam(pipe.parameters(), lr=0.1)
        opt = pd2.PipelineOptimizer(adam, extensions=[Named("exp_avg", saved)])
        pipe.train_step(X, target=Y)
        opt.step()
        before = opt.state_dict()
        pd2.save(tmp_path, pipe, opt).wait()
        pd2.load(tmp_path, pipe, opt)
        after = opt.state_dict()
    assert ("exp_avg" in after) == (saved is not None)
    for name, state in before["state"].items():
        assert state.keys() == after["state"][name].keys()
        assert torch.equal(state["exp_avg"], after["state"][name]["exp_avg"])
