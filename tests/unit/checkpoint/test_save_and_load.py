"""A run that goes on from a checkpoint is the run that would have been, bit for bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import Folder
from pipedream2bw.checkpoint.snapshot import HostMemory
from tests.runs.saved import saved
from tests.samples.models import TASKS
from tests.unit.checkpoint.trained_run import (
    BATCHES,
    WIDTH,
    Keeper,
    Trained,
    adamw,
    make_model,
)


def rprop(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Rprop(parameters, lr=0.01)]


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    given = list(parameters)
    return [
        torch.optim.Muon([p for p in given if p.dim() == 2], lr=0.01),
        torch.optim.AdamW([p for p in given if p.dim() != 2], lr=torch.tensor(0.01)),
    ]


def counting(parameters: Any) -> list[torch.optim.Optimizer]:
    return [Counting(parameters, lr=0.01)]


class Counting(torch.optim.SGD):
    """Keeps a counter in its groups, and numbers beside tensors in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.05 / group["k"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + parameter.numel()
        return super().step(closure)


def assert_equal(got: Any, want: Any) -> None:
    assert got[0] == want[0]
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert set(mine) == set(theirs)
        for name, value in mine.items():
            same = (
                torch.equal(value, theirs[name])
                if torch.is_tensor(value)
                else (value == theirs[name])
            )
            assert same, name


SETTINGS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sgd": ({}, [{"num_stages": 1}, {"num_stages": 4}, {"schedule": "2bw_split"}]),
    "adamw": ({"make": adamw}, [{"num_stages": 3}]),
    "error feedback": (
        {"make": adamw, "staleness": pd2.ErrorFeedback()},
        [{"num_stages": 3}],
    ),
    "nesterov": ({"staleness": pd2.NesterovCorrection(0.5)}, [{}]),
    "discount": ({"staleness": pd2.LearningRateDiscount(7)}, [{"num_stages": 1}]),
    "rprop": ({"make": rprop}, [{"num_stages": 3}]),
    "muon": ({"make": muon_and_adamw}, [{"num_stages": 4}]),
    "counting": ({"make": counting}, [{"num_stages": 3}]),
    "1f1b": ({"schedule": "1f1b", "make": adamw}, [{"schedule": "gpipe", "num_stages": 3}]),
    "pipedream": ({"schedule": "pipedream", "num_stages": 3, "num_microbatches": 1}, [{}]),
    "chimera": ({"schedule": "chimera"}, [{}]),
    "interleaved": (
        {"schedule": "interleaved_2bw", "num_stages": 4, "stages_per_rank": 2},
        [{"schedule": "2bw", "num_stages": 2, "stages_per_rank": None}],
    ),
    "bf16": ({"precision": "bf16", "make": adamw}, [{"num_stages": 3}]),
    "split": (
        {"precision": "bf16", "split_master": True, "make": adamw},
        [{"num_stages": 3}, {"split_master": False}],
    ),
    "loss scale": (
        {
            "precision": "fp16",
            "make": adamw,
            "loss_scale": pd2.LossScale(init_scale=2.0**40, growth_interval=2),
        },
        [{"num_stages": 1}],
    ),
    "warm-up": ({"warmup_batches": 6}, [{"num_stages": 3}]),
    "recompute": ({"recompute": True}, [{"recompute": False}]),
}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_loaded_run_has_the_bits_of_the_one_that_went_on(
    name: str, after: int, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    options, others = SETTINGS[name]
    undisturbed = start_trained(**options)
    undisturbed.train(0, after)
    saving = pd2.save(tmp_path, undisturbed.pipe, undisturbed.opt)
    undisturbed.train(after, len(BATCHES))
    want = undisturbed.finish()
    saving.done.result(20)
    for changed in ({}, *others):
        resumed = start_trained(**{**options, **changed}, seed=9)
        torch.manual_seed(0)
        pd2.load(tmp_path, resumed.pipe, resumed.opt)
        resumed.train(after, len(BATCHES))
        losses, *rest = resumed.finish()
        assert_equal((losses, *rest), (want[0][after:], *want[1:]))


def test_a_stage_that_has_gone_on_while_another_is_copied_is_saved_as_it_was(
    start_trained: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped_on = threading.Event()
    copy = HostMemory.copy

    class Observed(Counting):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if self.param_groups[0]["k"] == 5:
                stepped_on.set()
            return result

    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        return [Observed(parameters, lr=0.01)]

    def late(self: HostMemory, live: Any, key: tuple[str, int]) -> Any:
        if key == ("weights", 1):
            assert stepped_on.wait(20)
        return copy(self, live, key)

    run = start_trained(make=make)
    run.train(0, 4)
    monkeypatch.setattr(HostMemory, "copy", late)
    saving = pd2.save(tmp_path, run.pipe, run.opt)
    run.train(4, len(BATCHES))
    want = run.finish()
    saving.done.result(20)
    monkeypatch.undo()
    resumed = start_trained(make=make, seed=9)
    pd2.load(tmp_path, resumed.pipe, resumed.opt)
    assert resumed.opt.param_groups[0]["k"] == 4
    resumed.train(4, len(BATCHES))
    got = resumed.finish()
    assert_equal(got, (want[0][4:], *want[1:]))


def test_a_tied_and_a_frozen_model_are_saved_once(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.c.weight = self.a.weight
            self.b.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.c(self.b(self.a(x).tanh()).tanh())
            return out

    torch.manual_seed(0)
    first = start_trained(model=Tied(), num_stages=3)
    first.train(0, 4)
    saving = pd2.save(tmp_path, first.pipe, first.opt)
    first.train(4, 9)
    want = first.finish()
    saving.done.result(20)
    newest = load_file(saved(tmp_path, 4) / "model-00001-of-00001.safetensors")
    assert sorted(newest) == ["a.bias", "a.weight", "b.bias", "b.weight", "c.bias"]
    torch.manual_seed(5)
    second = start_trained(model=Tied(), num_stages=2)
    pd2.load(tmp_path, second.pipe, second.opt)
    second.train(4, 9)
    losses, *rest = second.finish()
    assert_equal((losses, *rest), (want[0][4:], *want[1:]))


def test_the_newest_weights_are_a_checkpoint_of_hugging_faces_form(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained()
    run.train(0, 3)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    state = {name: value.clone() for name, value in run.pipe.state_dict().items()}
    folder = saved(tmp_path, 3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert set(found) == set(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    plain = make_model(seed=7)
    other = start_trained(model=plain)
    other.pipe.load_checkpoint(folder)
    assert all(torch.equal(other.pipe.state_dict()[name], value) for name, value in state.items())


def test_without_older_versions_the_delay_begins_anew(
    start_trained: Callable[..., Trained], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_trained()
    run.train(0, 3)
    pd2.save(tmp_path, run.pipe, run.opt, versions="newest").wait()
    weights, state = dict(run.pipe.state_dict()), run.opt.state_dict()
    other = start_trained(seed=3)
    other.pipe.session.random_seed = run.pipe.random_seed
    other.train(0, 3)
    other.pipe.load_state_dict(weights)
    other.opt.load_state_dict(state)
    other.train(3, 9)
    resumed = start_trained(seed=9)
    pd2.load(tmp_path, resumed.pipe, resumed.opt)
    assert "its delay begins anew" in caplog.text
    resumed.train(3, 9)
    want, got = other.finish(), resumed.finish()
    assert_equal((got[0], *got[1:]), (want[0][3:], *want[1:]))


def test_what_is_beside_the_pipeline_comes_back(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(run.opt, [1, 2], 0.5)
    ema = Keeper({"w": torch.arange(3.0), "n": 3})
    run.train(0, 2)
    scheduler.step()
    torch.manual_seed(77)
    pd2.save(
        tmp_path,
        run.pipe,
        run.opt,
        data=Keeper({"position": 5}),
        schedulers=[scheduler],
        extra={"ema": ema, "best": 0.5, "tried": (1, "a")},
    ).wait()
    drawn = torch.rand(3)
    other = start_trained(seed=4)
    theirs = torch.optim.lr_scheduler.MultiStepLR(other.opt, [1, 2], 0.5)
    data, kept = Keeper(), Keeper()
    values = pd2.load(
        tmp_path, other.pipe, other.opt, data=data, schedulers=[theirs], extra={"ema": kept}
    )
    assert values == {"best": 0.5, "tried": (1, "a")}
    assert torch.equal(torch.rand(3), drawn)
    assert data.state == {"position": 5}
    assert torch.equal(kept.state["w"], torch.arange(3.0))
    assert theirs.state_dict() == scheduler.state_dict()
    assert other.opt.param_groups[0]["lr"] == run.opt.param_groups[0]["lr"] == 0.025


class WithList(torch.optim.SGD):
    """Keeps tensors in a list, and writes to them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = self.state[parameter].setdefault("sums", [torch.zeros(parameter.shape)])
                sums[0] += parameter.grad
                parameter.data -= 0.01 * sums[0]


def test_tensors_in_lists_are_saved_as_they_were_between_the_batches(
    start_trained: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    make_folder = Folder.make

    def slow(self: Folder, *names: str) -> None:
        assert go.wait(20)
        make_folder(self, *names)

    monkeypatch.setattr(Folder, "make", slow)

    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        return [WithList(parameters, lr=0.01)]

    run = start_trained(make=make)
    run.train(0, 4)
    saving = pd2.save(tmp_path, run.pipe, run.opt)
    run.train(4, 9)
    run.pipe.flush()
    go.set()
    saving.done.result(20)
    want = run.finish()
    resumed = start_trained(make=make, seed=9)
    pd2.load(tmp_path, resumed.pipe, resumed.opt)
    resumed.train(4, 9)
    losses, state, _ = resumed.finish()
    assert losses == want[0][4:]
    assert all(torch.equal(state[name], value) for name, value in want[1].items())


def test_a_language_model_is_saved_to_memory_and_loaded(
    start_trained: Callable[..., Trained],
) -> None:
    task = TASKS["gpt"]
    batches = task.batches([4] * 6)
    results = []
    for resumed in (False, True):
        pipe = pd2.PipelineModule(
            task.model(seed=2 if resumed else 1),
            task.loss_fn,
            num_stages=3 if resumed else 2,
            num_microbatches=4,
            example_args=batches[0].args,
            schedule="2bw",
        )
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pipe:
            if resumed:
                pd2.load("memory://gpt", pipe, opt)
            for number, batch in enumerate(batches):
                if resumed and number < 3:
                    continue
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
                if number == 2 and not resumed:
                    pd2.save("memory://gpt", pipe, opt).wait()
            results.append({n: v.clone() for n, v in pipe.state_dict().items()})
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.timeout(60)
def test_a_batch_that_waits_for_its_step_is_taken_back_by_a_load(tmp_path: Path) -> None:
    x = torch.arange(32.0).reshape(8, 4).sin()
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipe = pd2.PipelineModule(
        model, nn.functional.mse_loss, num_stages=2, num_microbatches=4, example_args=(x,)
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))

    def train() -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(pipe.train_step(x, target=x))
            opt.step()
        return list(map(float, losses))

    train()
    pd2.save(tmp_path, pipe, opt).wait()
    want = train()
    pipe.train_step(x, target=x)  # whose step never comes
    pd2.load(tmp_path, pipe, opt)
    assert train() == want
    pipe.train_step(x, target=x)
    pd2.load(tmp_path, pipe, opt)
    pipe.load_state_dict(pipe.full_state_dict())
    train()
    pipe.flush()
    pipe.close()
