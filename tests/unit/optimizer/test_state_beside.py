"""What optimizers keep beside their parameters' states is saved and resumed, or refused by name."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.functional import mse_loss
from torch.testing._internal.two_tensor import TwoTensor

import pipedream2bw as pd2
from tests.samples.odd_optimizers import CountsBeside, Lookahead

Make = Callable[[Any], torch.optim.Optimizer]

torch.manual_seed(1)
BATCHES = [torch.randn(8, 8) for _ in range(6)]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def made(
    make: Make = CountsBeside, num_stages: int = 2, **options: Any
) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    options = {"num_microbatches": 4, "example_args": (BATCHES[0],), **options}
    pipe = pd2.PipelineModule(model(), mse_loss, num_stages=num_stages, **options)
    return pipe, pd2.PipelineOptimizer(make(pipe.parameters()))


def train(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, first: int = 0, last: int = 6
) -> dict[str, torch.Tensor]:
    for x in BATCHES[first:last]:
        pipe.train_step(x, target=x)
        opt.step()
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(num_stages: int, tmp_path: Path) -> None:
    want = train(*made(num_stages=num_stages))
    first = made(num_stages=num_stages)
    train(*first, last=3)
    first[1].param_groups[0]["lr"] = 0.1  # which the stages have not heard of yet
    pd2.save(tmp_path, *first).wait()
    second = made(num_stages=num_stages)
    pd2.load(tmp_path, *second)
    assert_same(train(*second, first=3), want)


def test_the_state_dict_holds_what_each_stage_keeps(tmp_path: Path) -> None:
    """With 1F1B, as a loaded state's delay begins anew."""
    want = train(*made(schedule="1f1b"))
    first = made(schedule="1f1b")
    weights = train(*first, last=3)
    state = first[1].state_dict()
    assert state["total"] > 0
    assert state["state"]["sum"] > 0
    stages = state["stages"]
    assert [each["params"][0] for each in stages.values()] == ["0.weight", "2.weight"]
    assert stages["0.weight"]["total"] == state["total"] != stages["2.weight"]["total"]
    torch.save(state, tmp_path / "state.pt")
    second = made(schedule="1f1b")
    second[0].load_state_dict(weights)
    second[1].load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same(train(*second, first=3), want)


def test_it_goes_to_a_stock_optimizer_and_back() -> None:
    pipe, opt = made(num_stages=1, schedule="gpipe", num_microbatches=1)
    weights = train(pipe, opt, last=3)
    state = opt.state_dict()
    want = train(pipe, opt, first=3)
    whole = model()
    whole.load_state_dict(weights)
    stock = CountsBeside(whole.parameters())
    stock.load_state_dict(state)
    moved = made(num_stages=1, schedule="gpipe", num_microbatches=1)
    moved[0].load_state_dict(weights)
    moved[1].load_state_dict(stock.state_dict())
    assert_same(train(*moved, first=3), want)
    for x in BATCHES[3:]:
        stock.zero_grad()
        mse_loss(whole(x), x).backward()
        stock.step()
    assert_same(dict(whole.state_dict()), want)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_saves_and_loads_it(tmp_path: Path) -> None:
    first = made(schedule="1f1b")
    weights = train(*first, last=3)
    save(first[1].state_dict(), checkpoint_id=str(tmp_path))
    want = train(*first, first=3)
    second = made(schedule="1f1b")
    second[0].load_state_dict(weights)
    second[1].init_state()
    state = second[1].state_dict()
    load(state, checkpoint_id=str(tmp_path))
    second[1].load_state_dict(state)
    assert_same(train(*second, first=3), want)


def test_stages_that_are_split_otherwise_go_on_with_what_one_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = made(num_stages=4)
    train(*first, last=3)
    pd2.save(tmp_path, *first).wait()
    second = made(num_stages=2)
    with caplog.at_level(logging.WARNING, "pipedream2bw"):
        pd2.load(tmp_path, *second)
    assert "CountsBeside: stages kept other values beside their parameters' states" in caplog.text
    kept = first[1].state_dict()["stages"]
    stages = second[1].state_dict()["stages"]
    assert {n: each["total"] for n, each in stages.items()} == {
        name: kept[name]["total"] for name in ("0.weight", "2.weight")
    }


class Keeps(torch.optim.SGD):
    """Keeps something of every parameter, and under a key that is none."""

    of_parameter: Any = None
    of_all: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.of_parameter
        self.state["all"] = self.of_all  # type: ignore[index]


class Numbered(torch.optim.RMSprop):
    """Gives, under a key of its own, something of every parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "numbers": [1 for _ in self.param_groups[0]["params"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["numbers"]) != len(self.param_groups[0]["params"]):
            raise ValueError("other parameters")
        super().load_state_dict(state_dict)


class Within(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["all"] = dict.fromkeys(self.param_groups[0]["params"], 1)  # type: ignore[index]


class Bare(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"mine": super().state_dict()}


def keeps(**what: Any) -> Make:
    return lambda parameters: type("Keeping", (Keeps,), what)(parameters, lr=0.1)


TWO = TwoTensor(torch.zeros(2), torch.zeros(2))
REFUSED: dict[str, tuple[Make, str]] = {
    "a deque": (
        keeps(of_parameter=collections.deque([1])),
        r"optimizer.Keeping.*0\.weight\.kept: collections\.deque given",
    ),
    "an object beside": (keeps(of_all=object()), r"optimizer.Keeping.*all: builtins\.object given"),
    "a wrapper": (keeps(of_parameter=TWO), r"0\.weight\.kept: a tensor .* in a TwoTensor"),
    "another optimizer": (
        lambda parameters: Lookahead(torch.optim.RMSprop(parameters, lr=0.01)),
        "Lookahead: it has parameters' states in an optimizer that it is made of",
    ),
    "by parameter": (
        lambda parameters: Within(parameters, lr=0.01),
        r"Within: it has parameters' states in state\['all'\]",
    ),
    "its own order": (
        lambda parameters: Numbered(parameters, lr=0.01),
        r"Numbered\.load_state_dict\(\): ValueError: other parameters: it must take numbers",
    ),
    "no state": (
        lambda parameters: Bare(parameters, lr=0.01),
        r"""Bare\.state_dict\(\): its keys are \['mine'\], they must include "state" and""",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_before_the_first_batch(name: str, tmp_path: Path) -> None:
    make, text = REFUSED[name]
    pipe, opt = made(make)
    state = torch.get_rng_state()
    with pipe:
        with pytest.raises(TypeError, match=text):
            pd2.Checkpointer(tmp_path, pipe, opt)
        with pytest.raises(TypeError, match=text):
            pd2.save(tmp_path, pipe, opt)
        train(pipe, opt, last=2)
        with pytest.raises(TypeError, match=text):
            pd2.save(tmp_path, pipe, opt)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trial_step_tells_nobody(tmp_path: Path) -> None:
    told: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.RMSprop(parameters, lr=0.01)
        optimizer.register_step_post_hook(lambda *_: told.append(1))
        return optimizer

    pipe, opt = made(make)
    with pipe, pd2.Checkpointer(tmp_path, pipe, opt):
        assert not told
        train(pipe, opt, last=1)
        assert told
