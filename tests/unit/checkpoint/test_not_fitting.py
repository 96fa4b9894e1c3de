"""A checkpoint that does not fit, or cannot be written, is refused and changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from tests.unit.checkpoint.trained_run import (
    BATCHES,
    WIDTH,
    Keeper,
    Trained,
    adamw,
    make_model,
    sgd,
)


def test_what_does_not_fit_is_refused_with_both_values_and_changes_nothing(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained(make=adamw)
    run.train(0, 2)
    pd2.save(tmp_path, run.pipe, run.opt).wait()

    def refused(match: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        beside, trained = options.pop("beside", {}), options.pop("trained", 1)
        other = start_trained(**{"make": adamw, "seed": 5, **options})
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
    refused(
        "data: given, the checkpoint was saved without it. Give data=", beside={"data": Keeper()}
    )
    refused(
        "schedulers: 1, the checkpoint has 0. Give schedulers=", beside={"schedulers": [Keeper()]}
    )
    refused("extra: 'ema' given, the checkpoint has none", beside={"extra": {"ema": Keeper()}})
    refused("data: int given", TypeError, beside={"data": 3})


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_frozen_layer_that_the_model_lacks_is_refused(
    is_alone: bool, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    more = nn.Sequential(*make_model(), nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    run = start_trained(model=more)
    run.train(0, 1)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    other = start_trained(seed=5)
    with pytest.raises(ValueError, match=r"12\.bias") as refused:
        pd2.load(tmp_path, other.pipe, None if is_alone else other.opt)
    assert "the model does not have it, the checkpoint step-00000001" in str(refused.value)


class Table(nn.Module):
    """Adds a buffer, which may be saved or not."""

    def __init__(self, value: float, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((WIDTH,), value), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def test_a_buffer_that_is_saved_no_more_must_have_its_value(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    def run_with(value: float, *, persistent: bool) -> Trained:
        table = Table(value, persistent=persistent)
        return start_trained(model=nn.Sequential(*make_model(), table))

    run = run_with(1.0, persistent=True)
    run.train(0, 1)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    same, other = (run_with(value, persistent=False) for value in (1.0, 2.0))
    pd2.load(tmp_path, same.pipe, same.opt)
    with pytest.raises(ValueError, match=r"12\.table: the model's values differ"):
        pd2.load(tmp_path, other.pipe, other.opt)


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
    make: Any, match: str, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained(make=make)
    run.train(0, 2)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    other = start_trained(make=functools.partial(make, reverse=True), num_stages=3)
    with pytest.raises(ValueError, match=match):
        pd2.load(tmp_path, other.pipe, other.opt)
    same = start_trained(make=make, num_stages=3)
    pd2.load(tmp_path, same.pipe, same.opt)


def test_a_model_that_a_file_cannot_hold_is_refused_by_name(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    model = make_model()
    model[9].register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
    run = start_trained(model=model)
    with pytest.raises(
        TypeError, match=r"9\.angles: a tensor of torch.complex128.*torch.complex64"
    ):
        pd2.Checkpointer(tmp_path, run.pipe, run.opt, preempt=())
    named = nn.Sequential()
    named.add_module("$0", nn.Linear(WIDTH, WIDTH))
    named.add_module("1", nn.Linear(WIDTH, WIDTH))
    run = start_trained(model=named)
    with pytest.raises(ValueError, match=r"\$0\.\w+: names in a checkpoint must not begin with"):
        pd2.save(tmp_path, run.pipe, run.opt)
    run.train(0, 2)
    assert run.finish()[0]


def test_a_save_with_something_that_cannot_be_saved_is_refused(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained()
    with pytest.raises(TypeError, match=r"extra\.f: builtins.set given"):
        pd2.save(tmp_path, run.pipe, run.opt, extra={"f": {1}})
    with pytest.raises(ValueError, match="versions: 'some'"):
        pd2.save(tmp_path, run.pipe, run.opt, versions="some")
    run.losses.append(run.pipe.train_step(*BATCHES[0][:1], target=BATCHES[0][1]))
    with pytest.raises(ValueError, match=r"save: 1 train_steps and 0 opt.step\(\)"):
        pd2.save(tmp_path, run.pipe, run.opt)
    run.opt.step()
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    with pytest.raises(ValueError, match="no checkpoint, or no such folder"):
        pd2.load(tmp_path / "other", run.pipe, run.opt)


class Refuses(Keeper):
    """Does not take what was saved, but what it had."""

    def load_state_dict(self, state: Any) -> None:
        if state != "mine":
            self.state = "half"
            raise KeyError("no such entry")
        self.state = state


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("schedulers", "schedulers: number 1, Refuses"),
        ("data", "data, Refuses"),
        ("extra", "extra: 'c', Refuses"),
    ],
)
def test_where_an_object_refuses_its_state_all_stays_as_it_was(
    place: str, name: str, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    def beside(what: type[Keeper], state: str) -> tuple[list[Keeper], dict[str, Any]]:
        objects = [Keeper(state) for _ in range(6)]
        number = {"schedulers": 1, "data": 2, "extra": 4}[place]
        objects[number] = what(state)
        one, two, data, a, c, e = objects
        return objects, {
            "schedulers": [one, two],
            "data": data,
            "extra": {"a": a, "c": c, "e": e},
        }

    run = start_trained(make=adamw)
    run.train(0, 2)
    pd2.save(tmp_path, run.pipe, run.opt, **beside(Keeper, "theirs")[1]).wait()
    other = start_trained(make=adamw, seed=5)
    other.train(0, 1)
    other.pipe.flush()
    before = {key: value.clone() for key, value in other.pipe.state_dict().items()}
    torch.manual_seed(7)
    random = torch.get_rng_state()
    objects, given = beside(Refuses, "mine")
    refused = f"{name}: the saved state is refused: KeyError: 'no such entry'"
    with pytest.raises(ValueError, match=refused):
        pd2.load(tmp_path, other.pipe, other.opt, **given)
    assert [each.state for each in objects] == ["mine"] * 6
    assert torch.equal(torch.get_rng_state(), random)
    after = other.pipe.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    other.train(1, 2)
    assert other.pipe.session.num_train_steps == 2
    objects, given = beside(Keeper, "mine")
    pd2.load(tmp_path, other.pipe, other.opt, **given)
    assert [each.state for each in objects] == ["theirs"] * 6


def test_generators_that_do_not_fit_are_refused_by_name(
    start_trained: Callable[..., Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_trained()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda: torch.zeros(5, dtype=torch.uint8))
        pd2.save(tmp_path, run.pipe, run.opt).wait()
    with pytest.raises(ValueError, match="generators: the saved state is refused: "):
        pd2.load(tmp_path, run.pipe, run.opt)
    run.train(0, 1)
    pd2.load(tmp_path, run.pipe, run.opt, generators=False)


def test_what_has_no_state_to_save_is_refused(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained()
    scheduler: Any = torch.optim.lr_scheduler.StepLR(run.opt, 1)
    with pytest.raises(TypeError, match=r"schedulers: StepLR given, it must be a list: \[sched"):
        pd2.save(tmp_path, run.pipe, run.opt, schedulers=scheduler)
    with pytest.raises(TypeError, match=r"data: list given, .* state_dict.*, as ResumableSampler"):
        pd2.save(tmp_path, run.pipe, run.opt, data=[])  # type: ignore[arg-type]


def test_weights_alone_need_nothing_that_was_saved_beside_them(
    start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    run = start_trained(make=adamw)
    run.train(0, 2)
    beside = {"data": Keeper("theirs"), "schedulers": [Keeper("theirs")], "extra": {"a": 1}}
    pd2.save(tmp_path, run.pipe, run.opt, **beside).wait()
    other = start_trained(seed=5, random="torch")
    with pytest.raises(ValueError, match="schedulers: 2, the checkpoint has 1"):
        pd2.load(tmp_path, other.pipe, schedulers=[Keeper("mine"), Keeper("mine")])
    pd2.load(tmp_path, other.pipe)
    theirs = run.pipe.state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in other.pipe.state_dict().items())
    data = Keeper("mine")
    pd2.load(tmp_path, other.pipe, data=data)
    assert data.state == "theirs"
