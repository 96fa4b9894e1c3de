"""Gradient hooks: those for DistributedDataParallel average replicas' gradients as there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.runs.discarding import restart_delay
from tests.runs.launch import RankResult, in_turn, run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt

SIZE, ROWS, MICROBATCHES, BATCHES, LR = 16, 4, 2, 5, 0.3
EACH_PARAMETER = SIZE * 4 / 2**20  # MiB of a bias


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()), nn.Linear(SIZE, SIZE)]


def data(replica: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1 + replica)
    return [
        (torch.randn(ROWS, SIZE, generator=generator), torch.randn(ROWS, SIZE, generator=generator))
        for _ in range(BATCHES)
    ]


def build(model: Any = None, loss_fn: Any = mse_loss, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_microbatches": MICROBATCHES,
        "example_args": (torch.ones(1, SIZE),),
        "width": 2,
        "timeout": 60.0,
    }
    return pd2.PipelineModule(model or layers(), loss_fn, **settings | changes)


def sgd(parameters: Any, **options: Any) -> Any:
    return pd2.PipelineOptimizer(torch.optim.SGD(parameters, lr=LR), **options)


def train(pipe: Any, opt: Any, batches: Sequence[Any] | None = None) -> dict[str, torch.Tensor]:
    """This rank's weights after the training."""
    for x, y in data(pipe.replica) if batches is None else batches:
        pipe.train_step(x, target=y)
        opt.step()
    state = pipe.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether the other has what the one has, with the same bits."""
    bits = {name: tensor.view(torch.int32) for name, tensor in one.items()}
    return all(torch.equal(bits[name], other[name].view(torch.int32)) for name in bits)


# ---------------------------------------------------------------- against stock hooks on the whole


class Bucket:
    """What a hook may ask of a bucket, over gradients of its own."""

    def __init__(self, index: int, count: int, parameters: Sequence[nn.Parameter]) -> None:
        self._index, self._count = index, count
        self._parameters = list(parameters)
        self._buffer = torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None])

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == self._count - 1

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]


def train_whole(
    hook: Any, states: Sequence[Any], replica: int, *, by_parameter: bool
) -> dict[str, torch.Tensor]:
    """PipeDream-2BW's definition on the unsplit model; stages' gradients go through their hooks.

    Args:
        states: of the stages' hooks.
        by_parameter: each is a bucket, from the last one on.
    """
    model = nn.Sequential(*layers())
    versions = [[p.detach().clone() for p in model.parameters()]]
    for x, y in data(replica):
        show(model, versions[max(len(versions) - 2, 0)])
        model.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (mse_loss(model(part), target) / MICROBATCHES).backward()
        for state, stage in zip(states, model, strict=True):
            mine = list(stage.parameters())
            groups = [[p] for p in reversed(mine)] if by_parameter else [mine]
            for index, group in enumerate(groups):
                bucket: Any = Bucket(index, len(groups), group)
                mean = hook(state, bucket).wait().float()
                for p, part in zip(group, mean.split([p.numel() for p in group]), strict=True):
                    p.grad = part.view_as(p).clone()
        show(model, versions[-1])
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.add_(p.grad, alpha=-LR)  # as torch.optim.SGD
        versions.append([p.detach().clone() for p in model.parameters()])
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def show(model: nn.Module, weights: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for p, weight in zip(model.parameters(), weights, strict=True):
            p.copy_(weight)


def power_sgd(group: Any) -> PowerSGDState:
    return PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)


HOOKS: dict[str, tuple[Any, Callable[[Any], Any] | None]] = {
    "allreduce": (allreduce_hook, None),
    "fp16": (fp16_compress_hook, None),
    "bf16": (bf16_compress_hook, None),
    "in fp16": (fp16_compress_wrapper(allreduce_hook), None),
    "PowerSGD": (powerSGD_hook, power_sgd),
    "dense Ok-Topk": (pd2.ok_topk_hook, lambda group: pd2.OkTopkState(group, density=1)),
}


def as_in_ddp(rank: int, world: int) -> dict[str, list[bool]]:
    """By hook, with buckets of all and of one parameter: whether the weights have the same bits."""
    torch.set_num_threads(1)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    equals: dict[str, list[bool]] = {}
    for name, (hook, make_state) in HOOKS.items():
        for cap in (25.0, EACH_PARAMETER):
            with build(bucket_cap_mb=cap) as pipe:
                pipe.register_comm_hook(make_state, hook)
                got = train(pipe, sgd(pipe.parameters()))
            states = [groups[rank % 2]] * 2
            if make_state is not None:
                states = [make_state(group) for group in states]
            want = train_whole(hook, states, rank // 2, by_parameter=cap < 1)
            equals.setdefault(name, []).append(len(got) == 2 and equal(got, want))
            if name == "fp16" and cap < 1:
                with delays_everywhere(0.01), build(bucket_cap_mb=cap) as pipe:
                    pipe.register_comm_hook(make_state, hook)
                    late = train(pipe, sgd(pipe.parameters()))
                equals["fp16, all late"] = [equal(late, want)]
    return equals


def as_without(rank: int, world: int) -> dict[str, bool]:
    """Whether hooks that average all give the bits that replicas give without one."""
    torch.set_num_threads(1)
    with build() as pipe:
        want = train(pipe, sgd(pipe.parameters()))
    equals = {}
    for name in ("allreduce", "dense Ok-Topk"):
        hook, make_state = HOOKS[name]
        with build() as pipe:
            opt = sgd(pipe.parameters())  # before the hook
            pipe.register_comm_hook(make_state, hook)
            equals[name] = equal(train(pipe, opt), want)
    return equals


def refused_over_four(rank: int, world: int) -> dict[str, Outcome]:
    outcomes = {}
    for name, changes in {
        "two pipelines": {"schedule": "chimera"},
        "delays": {"schedule": "pipedream", "num_microbatches": 1},
    }.items():
        with build(**changes) as pipe:
            outcomes[name] = attempt(lambda: pipe.register_comm_hook(None, allreduce_hook))
    return outcomes


@pytest.fixture(scope="module")
def over_four() -> list[RankResult]:
    return run_ranks(in_turn, 4, args=(as_in_ddp, as_without, refused_over_four), timeout=150)


@pytest.mark.slow
def test_stock_hooks_train_as_on_the_unsplit_model(over_four: list[RankResult]) -> None:
    for result in over_four:
        equals = {name: [True, True] for name in HOOKS}
        assert result.value[0] == {**equals, "fp16, all late": [True]}


@pytest.mark.slow
def test_hooks_that_average_all_give_the_bits_of_the_sum(over_four: list[RankResult]) -> None:
    for result in over_four:
        assert result.value[1] == {"allreduce": True, "dense Ok-Topk": True}


@pytest.mark.slow
def test_schedules_without_one_update_for_all_stages_are_refused(
    over_four: list[RankResult],
) -> None:
    expected: Expected = {
        "two pipelines": ("ValueError", ["schedule: 'chimera' (pipelines: 2,", "of one pipeline"]),
        "delays": ("ValueError", ["schedule: 'pipedream'", "delays: [1, 0]", "one delay"]),
    }
    assert_raised((result.value[2] for result in over_four), expected)


# ---------------------------------------------------------------- beside other features


class OfOneReplica(nn.Module):
    """Has a parameter without a gradient on the other replica, and one without any."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(SIZE))
        self.here = nn.Parameter(torch.ones(SIZE))
        self.never = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.always
        return x * self.here if dist.get_rank() == 1 else x


def beside(rank: int, world: int) -> dict[str, Any]:
    """Trainings with a hook that have the bits of those without."""
    torch.set_num_threads(1)
    equals: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "several stages": {"schedule": "interleaved_2bw", "stages_per_rank": 2},
        "without slack": {"schedule": "interleaved", "stages_per_rank": 2},
        "missing gradients": {"schedule": "2bw"},
    }
    for name, changes in ways.items():
        ends = []
        for has_hook in (False, True):
            model = [OfOneReplica()] if name == "missing gradients" else None
            with build(model, **changes) as pipe:
                if has_hook:
                    pipe.register_comm_hook(lambda group: group, allreduce_hook)
                plain = torch.optim.SGD(pipe.parameters(), lr=LR, weight_decay=0.1)
                ends.append(train(pipe, pd2.PipelineOptimizer(plain)))
        equals[name] = equal(*ends)
    return equals


def with_loss_scale(rank: int, world: int) -> tuple[bool, int]:
    """A batch of which one replica's gradients overflow trains nothing, and no hook gets it."""
    torch.set_num_threads(1)
    calls = 0

    def counting(group: Any, bucket: dist.GradBucket) -> Any:
        nonlocal calls
        calls += 1
        assert bucket.buffer().isfinite().all()
        return allreduce_hook(group, bucket)

    good = data(rank)
    bad = (good[0][0] * (torch.inf if rank == 1 else 1), good[0][1])
    ends = []
    for options, batches in (
        ({}, good),
        ({"loss_scale": pd2.LossScale(init_scale=2.0**10)}, [*good[:2], bad, *good[2:]]),
    ):
        calls = 0
        with build(layers()[1:], schedule="1f1b") as pipe:
            pipe.register_comm_hook(None, counting)
            opt = sgd(pipe.parameters(), max_grad_norm=0.5, **options)
            ends.append(train(pipe, opt, batches))
    return equal(*ends), calls


def with_a_discarded_batch(rank: int, world: int) -> tuple[bool, int]:
    """No hook gets what is left of a batch in which one replica's loss function fails."""
    torch.set_num_threads(1)
    ends, losses, calls = [], 0, 0

    def counting(group: Any, bucket: dist.GradBucket) -> Any:
        nonlocal calls
        calls += 1
        return allreduce_hook(group, bucket)

    def failing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal losses
        losses += 1
        if rank == 1 and losses == 2 * MICROBATCHES + 1:
            raise ZeroDivisionError("on purpose")
        return mse_loss(output, target)

    for loss_fn in (mse_loss, failing_loss):
        calls = number = 0
        with build(layers()[1:], loss_fn) as pipe:
            pipe.register_comm_hook(None, counting)
            opt = sgd(pipe.parameters())
            while number < BATCHES:
                x, y = data(rank)[number]
                if loss_fn is mse_loss and number == 2:  # as after the discarded batch
                    restart_delay(pipe)
                try:
                    pipe.train_step(x, target=y)
                    opt.step()
                    number += 1
                    if number == BATCHES:
                        pipe.flush()
                except pd2.errors.StageError as error:
                    if error.discarded is None:
                        raise
                    number = error.discarded[0]
            ends.append(train(pipe, opt, []))
    assert losses > BATCHES * MICROBATCHES or rank == 0
    return equal(*ends), calls


@pytest.fixture(scope="module")
def over_two() -> list[RankResult]:
    functions = (beside, with_loss_scale, with_a_discarded_batch)
    return run_ranks(in_turn, 2, args=functions, timeout=150)


@pytest.mark.slow
def test_hooks_go_with_several_stages_and_missing_gradients(over_two: list[RankResult]) -> None:
    for result in over_two:
        assert all(result.value[0].values()), result.value[0]


@pytest.mark.slow
def test_hooks_get_gradients_without_a_loss_scale_and_none_that_overflow(
    over_two: list[RankResult],
) -> None:
    for result in over_two:
        assert result.value[1] == (True, BATCHES)


@pytest.mark.slow
def test_no_hook_gets_a_discarded_batch(over_two: list[RankResult]) -> None:
    for result in over_two:
        assert result.value[2] == (True, BATCHES)


# ---------------------------------------------------------------- the document


def follow_the_document(rank: int, world: int, document: str) -> int:
    """Trains with each hook that the document's example registers; gives their number."""
    example = Path(document).read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"pd2": pd2}
    registered = 0
    for statement in ast.parse(example).body:
        code = compile(ast.Module([statement], []), "document", "exec")
        if isinstance(statement, ast.ImportFrom):
            exec(code, names)
            continue
        with build() as pipe:
            opt = sgd(pipe.parameters())
            exec(code, names | {"pipe": pipe})
            before = {name: value.clone() for name, value in pipe.state_dict().items()}
            assert not equal(before, train(pipe, opt))
            registered += 1
    return registered


def test_the_documents_hooks_run_as_they_are() -> None:
    document = Path(__file__).resolve().parents[2] / "docs/gradient_hooks.md"
    results = run_ranks(follow_the_document, 4, args=(str(document),), timeout=100)
    assert [result.value for result in results] == [3] * 4
