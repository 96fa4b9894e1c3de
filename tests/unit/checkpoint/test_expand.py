"""Layers that shared their weights go on apart, with moments and older versions (``expand=``)."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.other_formats import import_weights
from tests.references.oracle import Batch, Oracle

WIDTH, ROWS, M, BEFORE, AFTER = 6, 8, 4, 5, 6


def block() -> nn.Sequential:
    # A bias before a norm has gradients of rounding alone, which Adam makes whole steps of.
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh())


def tied(seed: int = 0) -> nn.Sequential:
    """The second layer's block is the third's, too."""
    torch.manual_seed(seed)
    shared = block()
    first = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(first, shared, shared, nn.Linear(WIDTH, WIDTH))


def apart(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    first, last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, block(), block(), last)


BATCHES = [
    Batch((torch.randn(ROWS, WIDTH, generator=g),), torch.randn(ROWS, WIDTH, generator=g))
    for g in (torch.Generator().manual_seed(10 + t) for t in range(BEFORE + AFTER))
]
MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    # It has no fused pass: torch's own step keeps the state.
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.005, momentum=0.5),
}


def pipeline(model: nn.Module, make: Any, schedule: str = "2bw", stages: int = 2) -> Any:
    options: dict[str, Any] = {"num_stages": stages, "num_microbatches": M, "schedule": schedule}
    pipe = pd2.PipelineModule(model, mse_loss, example_args=BATCHES[0].args, **options)
    return pipe, pd2.PipelineOptimizer(make(pipe.parameters()))


def save_tied(path: Path, make: Any, schedule: str = "2bw") -> None:
    pipe, opt = pipeline(tied(), make, schedule)
    with pipe:
        for batch in BATCHES[:BEFORE]:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pd2.save(path, pipe, opt).wait()


def delinked(make: Any, delay: int) -> Oracle:
    """The oracle of the tied model, whose shared block is copied, with all that is kept of it."""
    before = Oracle(tied(), make(tied().parameters()), M, mse_loss, delay)
    before.optimizer = make(before.model.parameters())
    for batch in BATCHES[:BEFORE]:
        before.train_step(batch)
    model = apart()
    model.load_state_dict(before.model.state_dict())
    after = Oracle(model, make(model.parameters()), M, mse_loss, delay)
    names = list(dict(before.model.named_parameters()))
    places = [names.index(n if n in names else f"1{n[1:]}") for n, _ in model.named_parameters()]
    after.versions = [[version[i].clone() for i in places] for version in before.versions]
    states = [before.optimizer.state[before.parameters[i]] for i in places]
    for parameter, state in zip(after.parameters, states, strict=True):
        after.optimizer.state[parameter] = copy.deepcopy(state)
    return after


@pytest.mark.parametrize(
    ("kind", "schedule"), [("sgd", "2bw"), ("adamw", "2bw"), ("rmsprop", "2bw"), ("adamw", "1f1b")]
)
def test_a_delinked_run_is_that_of_the_definition(kind: str, schedule: str, tmp_path: Path) -> None:
    make = MAKERS[kind]
    save_tied(tmp_path, make, schedule)
    oracle = delinked(make, int(schedule == "2bw"))
    pipe, opt = pipeline(apart(seed=7), make, schedule, stages=4)
    with pipe:
        pd2.load(tmp_path, pipe, opt, expand={"2": "1"})
        losses = []
        for batch in BATCHES[BEFORE:]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        want = [oracle.train_step(batch) for batch in BATCHES[BEFORE:]]
        assert [float(loss) for loss in losses] == pytest.approx(want, rel=1e-5)
        state = pipe.state_dict()
    for name, value in oracle.model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(state["1.0.weight"], state["2.0.weight"])


class Looped(nn.Module):
    """Calls one block twice, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.block(x)))


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(), block())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(x))


def test_a_block_of_another_name_becomes_several(tmp_path: Path) -> None:
    expand = {"blocks.0": "block", "blocks.1": "block"}
    pipe, opt = pipeline(Looped(), MAKERS["adamw"])
    with pipe:
        for batch in BATCHES[:BEFORE]:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pd2.save(tmp_path, pipe, opt).wait()
        saved = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe, opt = pipeline(Unrolled(), MAKERS["adamw"])
    few = r"only here: \['blocks.0.0.weight', '[^\]]*\] and 3 more, only there: \['block[^\]]*\]$"
    with pipe, pytest.raises(ValueError, match=few):
        pd2.load(tmp_path, pipe, opt)
    for with_opt in (True, False):
        pipe, opt = pipeline(Unrolled(), MAKERS["adamw"])
        with pipe:
            pd2.load(tmp_path, pipe, opt if with_opt else None, expand=expand)
            for name, value in pipe.state_dict().items():
                former = name.replace("blocks.0", "block").replace("blocks.1", "block")
                assert torch.equal(value, saved[former]), name


def test_what_cannot_be_expanded_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    make = MAKERS["adamw"]
    save_tied(tmp_path, make)
    pipe, opt = pipeline(apart(seed=7), make)
    with pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        for expand, match in [
            (
                None,
                r"trained parameters: 9, the checkpoint has 6.*only here: \['2.0.weight'",
            ),
            (
                {"2": "1", "9": "1"},
                "expand: '9' from '1': no parameter or buffer here has the first",
            ),
            (
                {"2": "0"},
                "expand: '2' from '0': 2.0.weight would begin as 0.0.weight, which the che",
            ),
            (
                {"2": "nowhere"},
                "'2' from 'nowhere': 2.0.weight would begin as nowhere.0.weight, which .*step-",
            ),
            (
                {"2.0.weight": "1.0.weight"},
                r"only here: \['2.1.bias', '2.1.weight'\], only there: \[\]",
            ),
            ({"2": "1", "2.0.weight": "3.bias"}, r"2.0.weight: shape \[6, 6\], the checkpoint has"),
        ]:
            with pytest.raises(ValueError, match=match):
                pd2.load(tmp_path, pipe, opt, expand=expand)
        torch.save(before, tmp_path / "weights.pt")
        import_weights(tmp_path / "weights.pt", tmp_path / "imported")
        with pytest.raises(ValueError, match=r"expand: \{'2': '1'\}: step-0.* was imported"):
            pd2.load(tmp_path / "imported", pipe, opt, expand={"2": "1"})
        assert all(torch.equal(pipe.state_dict()[n], value) for n, value in before.items())


@pytest.mark.parametrize(
    ("expand", "rule"),
    [
        (["2"], "expand: list given, it must be a dict of names, those here with the checkpoint's"),
        ([], "expand: list given, it must be a dict of names"),
        ("2", "expand: '2' given, it must be a dict of names"),
        (2, "expand: 2 given, it must be a dict of names"),
        ({"2": 1}, "expand: {'2': 1}: 1 given, it must be a name"),
        ({2: "1"}, "expand: {2: '1'}: 2 given, it must be a name"),
    ],
)
def test_what_is_no_dict_of_names_is_refused(expand: Any, rule: str, tmp_path: Path) -> None:
    pipe, opt = pipeline(apart(), MAKERS["sgd"])
    with pipe, pytest.raises(TypeError, match=re.escape(rule)):
        pd2.load(tmp_path, pipe, opt, expand=expand)
