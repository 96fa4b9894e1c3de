"""A run that goes on from a checkpoint is the run that would have been, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import Folder
from tests.samples.models import TASKS

WIDTH = 6


def make_model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(4):
        dropped = nn.Sequential(nn.Tanh(), nn.Dropout(0.1))
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), dropped]
    return nn.Sequential(*layers)


BATCHES = [
    (torch.randn(12, WIDTH, generator=g), torch.randn(12, WIDTH, generator=g))
    for g in [torch.Generator().manual_seed(s) for s in range(9)]
]

Make = Callable[[Any], list[torch.optim.Optimizer]]


def sgd(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]


def adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)]


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


@dataclasses.dataclass
class Trained:
    pipe: pd2.PipelineModule
    opt: pd2.PipelineOptimizer
    losses: list[Any] = dataclasses.field(default_factory=list)

    def train(self, begin: int, end: int) -> None:
        for x, y in BATCHES[begin:end]:
            self.losses.append(self.pipe.train_step(x, target=y))
            self.opt.step()

    def finish(self) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        self.pipe.flush()
        state = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        self.opt.state_dict()
        names = {id(p): name for name, p in self.pipe.named_parameters()}
        moments = {
            f"{names[id(p)]}/{key}": value.clone() if torch.is_tensor(value) else value
            for p, of_one in self.opt.state.items()
            for key, value in of_one.items()
        }
        losses = [float(loss) for loss in self.losses]
        self.pipe.close()
        return losses, state, moments


@pytest.fixture
def start() -> Iterator[Callable[..., Trained]]:
    made: list[pd2.PipelineModule] = []

    def begin(make: Make = sgd, seed: int = 1, staleness: Any = (), **options: Any) -> Trained:
        given: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "schedule": "2bw"}
        example = (torch.zeros(3, WIDTH),)
        model = options.pop("model", None) or make_model(seed)
        scale = options.pop("loss_scale", None)
        pipe = pd2.PipelineModule(
            model, mse_loss, example_args=example, timeout=20.0, **{**given, **options}
        )
        made.append(pipe)
        opt = pd2.PipelineOptimizer(*make(pipe.parameters()), staleness=staleness, loss_scale=scale)
        return Trained(pipe, opt)

    yield begin
    for pipe in made:
        pipe.session.ending.abort("the test is over")


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
    name: str, after: int, start: Callable[..., Trained], tmp_path: Path
) -> None:
    options, others = SETTINGS[name]
    undisturbed = start(**options)
    undisturbed.train(0, after)
    saving = pd2.save(tmp_path, undisturbed.pipe, undisturbed.opt)
    undisturbed.train(after, len(BATCHES))
    want = undisturbed.finish()
    saving.done.result(20)
    for changed in ({}, *others):
        resumed = start(**{**options, **changed}, seed=9)
        torch.manual_seed(0)
        pd2.load(tmp_path, resumed.pipe, resumed.opt)
        resumed.train(after, len(BATCHES))
        losses, *rest = resumed.finish()
        assert_equal((losses, *rest), (want[0][after:], *want[1:]))


def test_a_tied_and_a_frozen_model_are_saved_once(
    start: Callable[..., Trained], tmp_path: Path
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
    first = start(model=Tied(), num_stages=3)
    first.train(0, 4)
    saving = pd2.save(tmp_path, first.pipe, first.opt)
    first.train(4, 9)
    want = first.finish()
    saving.done.result(20)
    newest = load_file(tmp_path / "step-00000004" / "model-00001-of-00001.safetensors")
    assert sorted(newest) == ["a.bias", "a.weight", "b.bias", "b.weight", "c.bias"]
    torch.manual_seed(5)
    second = start(model=Tied(), num_stages=2)
    pd2.load(tmp_path, second.pipe, second.opt)
    second.train(4, 9)
    losses, *rest = second.finish()
    assert_equal((losses, *rest), (want[0][4:], *want[1:]))


def test_the_newest_weights_are_a_checkpoint_of_hugging_faces_form(
    start: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start()
    run.train(0, 3)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    state = {name: value.clone() for name, value in run.pipe.state_dict().items()}
    folder = tmp_path / "step-00000003"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert set(found) == set(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    plain = make_model(seed=7)
    other = start(model=plain)
    other.pipe.load_checkpoint(folder)
    assert all(torch.equal(other.pipe.state_dict()[name], value) for name, value in state.items())


def test_without_older_versions_the_delay_begins_anew(
    start: Callable[..., Trained], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.train(0, 3)
    pd2.save(tmp_path, run.pipe, run.opt, versions="newest").wait()
    weights, state = dict(run.pipe.state_dict()), run.opt.state_dict()
    other = start(seed=3)
    other.pipe.session.random_seed = run.pipe.random_seed
    other.train(0, 3)
    other.pipe.load_state_dict(weights)
    other.opt.load_state_dict(state)
    other.train(3, 9)
    resumed = start(seed=9)
    pd2.load(tmp_path, resumed.pipe, resumed.opt)
    assert "its delay begins anew" in caplog.text
    resumed.train(3, 9)
    want, got = other.finish(), resumed.finish()
    assert_equal((got[0], *got[1:]), (want[0][3:], *want[1:]))


class Keeper:
    """Has a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_is_beside_the_pipeline_comes_back(
    start: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start()
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
    other = start(seed=4)
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


def test_what_does_not_fit_is_refused_with_both_values_and_changes_nothing(
    start: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start(make=adamw)
    run.train(0, 2)
    pd2.save(tmp_path, run.pipe, run.opt).wait()

    def refused(match: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        beside, trained = options.pop("beside", {}), options.pop("trained", 1)
        other = start(**{"make": adamw, "seed": 5, **options})
        other.train(0, trained)
        other.pipe.flush()
        before = {name: value.clone() for name, value in other.pipe.state_dict().items()}
        with pytest.raises(kind, match=match):
            pd2.load(tmp_path, other.pipe, other.opt, **beside)
        after = other.pipe.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        other.train(trained, 2 * trained)
        other.pipe.flush()
        assert other.pipe.session.num_train_steps == 2 * trained

    refused("optimizer: SGD, the checkpoint has AdamW", make=sgd)
    wider = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH))
    refused("trained parameters: 4, the checkpoint has 16", model=wider)
    frozen = make_model()
    frozen[0].weight.requires_grad_(False)
    refused("trained parameters: 15, the checkpoint has 16.*only there: .'0.weight'", model=frozen)
    small = make_model().bfloat16()
    refused("torch.bfloat16, the checkpoint has torch.float32", model=small, trained=0)
    refused("loss_scale: given, the checkpoint has none", loss_scale=pd2.LossScale())
    refused("random: 'torch', the checkpoint has 'keyed'", random="torch")
    remedy = pd2.ErrorFeedback()
    refused(r"staleness: .ErrorFeedback.*, the checkpoint has \[\]", staleness=remedy)
    refused("data: given, the checkpoint was saved without", beside={"data": Keeper()})
    refused("schedulers: 1, the checkpoint has 0", beside={"schedulers": [Keeper()]})
    refused("extra: 'ema' given, the checkpoint has none", beside={"extra": {"ema": Keeper()}})
    refused("data: int given", TypeError, beside={"data": 3})


def by_kind(parameters: Any, *, reverse: bool = False) -> list[torch.optim.Optimizer]:
    """Matrices decay, the others do not."""
    given = list(parameters)
    matrices = {"params": [p for p in given if p.dim() == 2], "weight_decay": 0.1}
    others = {"params": [p for p in given if p.dim() != 2], "weight_decay": 0.0}
    groups = [others, matrices] if reverse else [matrices, others]
    return [torch.optim.AdamW(groups, lr=0.01)]


def alike(parameters: Any, *, reverse: bool = False) -> list[torch.optim.Optimizer]:
    """Two optimizers of one kind."""
    given = list(parameters)
    parts = [[p for p in given if p.dim() == 2], [p for p in given if p.dim() != 2]]
    return [torch.optim.SGD(part, lr=0.1) for part in (parts[::-1] if reverse else parts)]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            by_kind,
            r"param_groups: 0\.bias is in group 0 of AdamW \(optimizer 0\), the checkpoint has it "
            r"in group 1 of AdamW \(optimizer 0\)",
        ),
        (
            alike,
            r"0\.bias is in group 0 of SGD \(optimizer 0\), the checkpoint has it in group 0 of "
            r"SGD \(optimizer 1\)",
        ),
    ],
)
def test_groups_of_other_parameters_are_refused(
    make: Any, match: str, start: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start(make=make)
    run.train(0, 2)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    other = start(make=functools.partial(make, reverse=True), num_stages=3)
    with pytest.raises(ValueError, match=match):
        pd2.load(tmp_path, other.pipe, other.opt)
    same = start(make=make, num_stages=3)
    pd2.load(tmp_path, same.pipe, same.opt)


class WithList(torch.optim.SGD):
    """Keeps tensors in a list, and writes to them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = self.state[parameter].setdefault("sums", [torch.zeros(parameter.shape)])
                sums[0] += parameter.grad
                parameter.data -= 0.01 * sums[0]


def test_tensors_in_lists_are_saved_as_they_were_between_the_batches(
    start: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    begin = Folder.begin

    def slow(self: Folder, *args: Any) -> str:
        assert go.wait(20)
        return begin(self, *args)

    monkeypatch.setattr(Folder, "begin", slow)

    def make(parameters: Any) -> list[torch.optim.Optimizer]:
        return [WithList(parameters, lr=0.01)]

    run = start(make=make)
    run.train(0, 4)
    saving = pd2.save(tmp_path, run.pipe, run.opt)
    run.train(4, 9)
    run.pipe.flush()
    go.set()
    saving.done.result(20)
    want = run.finish()
    resumed = start(make=make, seed=9)
    pd2.load(tmp_path, resumed.pipe, resumed.opt)
    resumed.train(4, 9)
    losses, state, _ = resumed.finish()
    assert losses == want[0][4:]
    assert all(torch.equal(state[name], value) for name, value in want[1].items())


def test_a_model_that_a_file_cannot_hold_is_refused_by_name(
    start: Callable[..., Trained], tmp_path: Path
) -> None:
    model = make_model()
    model[9].register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
    run = start(model=model)
    with pytest.raises(
        TypeError, match=r"9\.angles: a tensor of torch.complex128.*torch.complex64"
    ):
        pd2.Checkpointer(tmp_path, run.pipe, run.opt, preempt=())
    named = nn.Sequential()
    named.add_module("$0", nn.Linear(WIDTH, WIDTH))
    named.add_module("1", nn.Linear(WIDTH, WIDTH))
    run = start(model=named)
    with pytest.raises(ValueError, match=r"\$0\.\w+: names in a checkpoint must not begin with"):
        pd2.save(tmp_path, run.pipe, run.opt)
    run.train(0, 2)
    assert run.finish()[0]


def test_a_save_with_something_that_cannot_be_saved_is_refused(
    start: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start()
    with pytest.raises(TypeError, match=r"extra\.f: builtins.set given"):
        pd2.save(tmp_path, run.pipe, run.opt, extra={"f": {1}})
    with pytest.raises(ValueError, match="versions: 'some'"):
        pd2.save(tmp_path, run.pipe, run.opt, versions="some")
    run.losses.append(run.pipe.train_step(*BATCHES[0][:1], target=BATCHES[0][1]))
    with pytest.raises(ValueError, match=r"save: 1 train_steps and 0 opt.step\(\)"):
        pd2.save(tmp_path, run.pipe, run.opt)
    run.opt.step()
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    with pytest.raises(ValueError, match="0 checkpoints"):
        pd2.load(tmp_path / "other", run.pipe, run.opt)


def test_a_language_model_is_saved_to_memory_and_loaded(
    start: Callable[..., Trained],
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
