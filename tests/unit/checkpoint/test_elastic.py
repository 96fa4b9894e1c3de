"""A run that goes on under another delay, precision or frozen set trains as the definition does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.references.mixed_oracle import MixedOracle, half_away, lowered
from tests.references.oracle import Oracle
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    assert_same_state,
    copy_of,
    go_on,
    make_pipeline,
    stage_of_parameters,
)
from tests.samples.models import TASKS


def float_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)


TASK = dataclasses.replace(TASKS["mlp"], loss_fn=float_loss)
BATCHES = TASK.batches([12] * 8)
SAVED_AT = 3
"""The batch that the resumed run begins with."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    *others, last = parameters
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [last], "lr": 0.0}]
    return torch.optim.SGD(groups, lr=0.3, momentum=0.5)


Begin = Callable[..., tuple[pd2.PipelineModule, pd2.PipelineOptimizer]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    pipes: list[pd2.PipelineModule] = []

    def make(
        num_stages: int, m: int, *, seed: int = 1, frozen: Collection[str] = (), **options: Any
    ) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        model = made(seed, frozen)
        pipes.append(make_pipeline(TASK, num_stages, m, BATCHES[0], model=model, **options))
        return pipes[-1], pd2.PipelineOptimizer(sgd(pipes[-1].parameters()))

    yield make
    for pipe in pipes:
        pipe.session.ending.abort("the test is over")


def made(seed: int = 1, frozen: Collection[str] = ()) -> nn.Module:
    """The last parameter lies between two bfloat16, where ways of rounding differ, and stays."""
    model: nn.Module = TASK.model(seed)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    with torch.no_grad():
        list(model.parameters())[-1].fill_(seed + 2.0**-8)
    return model


@dataclasses.dataclass(frozen=True)
class Part:
    """How a part of the run is made."""

    schedule: str
    num_stages: int
    m: int = 4

    def describe(self, oracle: Oracle, pipe: pd2.PipelineModule) -> None:
        """Makes the oracle train as this part does, from its next batch on."""
        stages = stage_of_parameters(pipe)
        delays = pipe_delays(self)
        names = dict(oracle.model.named_parameters())
        oracle.delays = [delays[stages[name]] for name in names]
        oracle.num_microbatches = self.m
        oracle.num_pipelines = 2 if self.schedule == "chimera" else 1


def pipe_delays(part: Part) -> list[int]:
    """Of each stage, by the schedules' definitions."""
    if part.schedule == "pipedream":
        return [part.num_stages - 1 - stage for stage in range(part.num_stages)]
    return [int("2bw" in part.schedule)] * part.num_stages


PIPEDREAM_2, PIPEDREAM_3 = Part("pipedream", 2, m=1), Part("pipedream", 3, m=1)
TWO_VERSIONS, FLUSHED = Part("2bw", 2), Part("1f1b", 3)


@pytest.mark.parametrize(
    ("first", "second", "anew", "warns"),
    [
        (TWO_VERSIONS, FLUSHED, [], False),
        (FLUSHED, TWO_VERSIONS, [0, 1], True),
        (TWO_VERSIONS, Part("chimera", 2), [], False),
        (Part("chimera", 2), Part("2bw", 3), [0, 1, 2], True),
        # W(2) and W(3) are there; stage 0 would read W(1) next.
        (TWO_VERSIONS, PIPEDREAM_3, [], True),
        (FLUSHED, PIPEDREAM_3, [0, 1], True),
        # There is no W(2) of the last stage, and 2bw reads one version everywhere.
        (PIPEDREAM_3, TWO_VERSIONS, [0, 1], True),
        (PIPEDREAM_3, FLUSHED, [], False),
        # Stage 0 is now the former one and half of the next, of which there is W(2), too.
        (PIPEDREAM_3, PIPEDREAM_2, [], False),
        # Stage 1 is now half of a stage with W(2), half of one without.
        (PIPEDREAM_2, PIPEDREAM_3, [1], True),
    ],
    ids=lambda value: f"{value.schedule}-{value.num_stages}" if isinstance(value, Part) else "",
)
def test_a_run_under_another_delay_is_the_definitions(
    first: Part,
    second: Part,
    anew: list[int],
    warns: bool,
    begin: Begin,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each stage reads the oldest version that there is of it; ``anew``: of these, the newest."""
    pipe, opt = begin(first.num_stages, first.m, schedule=first.schedule)
    model = made()
    oracle = Oracle(model, sgd(model.parameters()), first.m, float_loss, 0)
    first.describe(oracle, pipe)
    got = go_on(pipe, opt, BATCHES[:SAVED_AT])
    losses = [oracle.train_step(batch) for batch in BATCHES[:SAVED_AT]]
    assert_same(got, Trajectory(losses, copy_of(model.state_dict())))
    pd2.save(tmp_path, pipe, opt).wait()

    pipe, opt = begin(second.num_stages, second.m, seed=7, schedule=second.schedule)
    pd2.load(tmp_path, pipe, opt)
    assert ("delay begins anew" in caplog.text) == warns
    assert_same_state(copy_of(pipe.state_dict()), copy_of(model.state_dict()))
    second.describe(oracle, pipe)
    stages, newest = stage_of_parameters(pipe), oracle.versions[-1]
    oracle.versions = [
        [
            of_newest if stages[name] in anew else weight
            for (name, _), weight, of_newest in zip(
                model.named_parameters(), version, newest, strict=True
            )
        ]
        for version in oracle.versions
    ]
    losses = [oracle.train_step(batch) for batch in BATCHES[SAVED_AT:]]
    got = go_on(pipe, opt, BATCHES[SAVED_AT:])
    assert_same(got, Trajectory(losses, copy_of(model.state_dict())))


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The dtypes of a part of the run; ``round_to`` gives weights that it computes with."""

    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    round_to: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight.bfloat16().float()


SINGLE = Numbers({}, torch.float32, lambda weight: weight)
MASTERS = Numbers({"precision": "bf16"})
SPLIT = Numbers({"precision": "bf16", "split_master": True}, round_to=half_away)
ON_HOST = Numbers({**MASTERS.options, "optimizer_device": "cpu"})


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SINGLE, MASTERS),
        (SINGLE, SPLIT),
        (MASTERS, SINGLE),
        (MASTERS, SPLIT),
        (SPLIT, SINGLE),
        (SPLIT, MASTERS),
        (SINGLE, ON_HOST),
        (ON_HOST, SPLIT),
    ],
)
def test_a_run_in_another_precision_goes_on_from_the_same_masters(
    schedule: str, first: Numbers, second: Numbers, begin: Begin, tmp_path: Path
) -> None:
    pipe, opt = begin(2, 4, schedule=schedule, **first.options)
    model = made()
    oracle = MixedOracle(
        model,
        lowered(model, first.dtype),
        sgd(model.parameters()),
        4,
        float_loss,
        int("2bw" in schedule),
        dtype=first.dtype,
        round_to=first.round_to,
    )
    got = go_on(pipe, opt, BATCHES[:SAVED_AT])
    losses = [oracle.train_step(batch) for batch in BATCHES[:SAVED_AT]]
    assert_same(got, Trajectory(losses, copy_of(model.state_dict())))
    pd2.save(tmp_path, pipe, opt).wait()

    pipe, opt = begin(3, 4, seed=7, schedule=schedule, **second.options)
    pd2.load(tmp_path, pipe, opt)
    assert_same_state(copy_of(pipe.state_dict()), copy_of(model.state_dict()))
    # Of an older version only what was computed with is in a checkpoint.
    oracle.versions[-2] = [first.round_to(weight) for weight in oracle.versions[-2]]
    oracle.low, oracle.dtype = lowered(model, second.dtype), second.dtype
    oracle.round_to = second.round_to
    losses = [oracle.train_step(batch) for batch in BATCHES[SAVED_AT:]]
    got = go_on(pipe, opt, BATCHES[SAVED_AT:])
    assert_same(got, Trajectory(losses, copy_of(model.state_dict())))


FIRST, LAST = ["0.weight", "2.bias"], ["2.bias", "8.weight"]


@pytest.mark.parametrize("parts", [(TWO_VERSIONS, Part("2bw", 3)), (PIPEDREAM_3, PIPEDREAM_3)])
@pytest.mark.parametrize(("before", "after"), [(FIRST, LAST), ([], FIRST), (LAST, [])])
def test_weights_alone_go_on_with_others_frozen(
    parts: tuple[Part, Part], before: list[str], after: list[str], begin: Begin, tmp_path: Path
) -> None:
    """What is frozen now keeps its newest value; of what was frozen, all versions are one."""
    first, second = parts
    pipe, opt = begin(first.num_stages, first.m, frozen=before, schedule=first.schedule)
    model = made(frozen=before)
    oracle = Oracle(model, sgd(model.parameters()), first.m, float_loss, 0)
    first.describe(oracle, pipe)
    go_on(pipe, opt, BATCHES[:SAVED_AT])
    for batch in BATCHES[:SAVED_AT]:
        oracle.train_step(batch)
    pd2.save(tmp_path, pipe, opt).wait()

    pipe, opt = begin(second.num_stages, second.m, seed=7, frozen=after, schedule=second.schedule)
    numbers = f"{12 - len(after)}, the checkpoint has {12 - len(before)}"
    with pytest.raises(ValueError, match=f"trained parameters: {numbers}"):
        pd2.load(tmp_path, pipe, opt)
    pd2.load(tmp_path, pipe)
    assert_same_state(copy_of(pipe.state_dict()), copy_of(model.state_dict()))
    versions = oracle.versions
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(name not in after)
        for version in versions[:-1] if name in after else []:
            version[number] = versions[-1][number]
    oracle = Oracle(model, sgd(model.parameters()), second.m, float_loss, 0)
    second.describe(oracle, pipe)
    oracle.versions = versions
    losses = [oracle.train_step(batch) for batch in BATCHES[SAVED_AT:]]
    got = go_on(pipe, opt, BATCHES[SAVED_AT:])
    assert_same(got, Trajectory(losses, copy_of(model.state_dict())))


def test_weights_alone_of_another_model_are_refused(begin: Begin, tmp_path: Path) -> None:
    pipe, opt = begin(2, 4, frozen=FIRST)
    pd2.save(tmp_path, pipe, opt).wait()
    for layers, match in (
        (5, r"trained parameters: 10, the checkpoint has 10.*only there: \['10.bias', '10.weight'"),
        (7, r"trained parameters: 14, the checkpoint has 10.*only here: \['12.bias', '12.weight'"),
    ):
        model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(8, 8), nn.Tanh())])
        with make_pipeline(TASK, 2, 4, BATCHES[0], model=model) as other:
            before = copy_of(other.state_dict())
            with pytest.raises(ValueError, match=match):
                pd2.load(tmp_path, other)
            assert_same_state(copy_of(other.state_dict()), before)
