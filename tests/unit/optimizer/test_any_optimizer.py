"""Every optimizer of torch, users' own, and several together step as on the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import pipedream2bw as pd2
from tests.references.oracle import Oracle
from tests.runs.trajectory import Trajectory, assert_same, check_task, copy_of, make_pipeline
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.odd_optimizers import CountsInGroup, Lookahead, ScheduleFree, Together
from tests.samples.parameter_kinds import draw, stack

Make = Callable[[Any], torch.optim.Optimizer]
Several = Callable[[list[tuple[str, nn.Parameter]]], list[torch.optim.Optimizer]]

STOCK = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
}
REFUSED = {
    "LBFGS": "closure",
    "SparseAdam": "sparse gradients only, a pipeline's are dense",
}


def only_matrices() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


@pytest.mark.parametrize("name", sorted(STOCK.keys() - REFUSED.keys()))
def test_every_optimizer_of_torch(name: str) -> None:
    exact = name not in ("Adam", "AdamW")
    tasks = [(TASKS["skips"], 4), (TASKS["branch"], 3)]
    for task, d in [(Task(only_matrices, draw), 2)] if name == "Muon" else tasks:
        check_task(task, d, d, [2 * d] * 6, lambda p: STOCK[name](p, lr=0.01), exact=exact)


def test_nadam_with_decoupled_weight_decay() -> None:
    def nadamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(
            parameters, lr=0.01, betas=(0.98, 0.99), weight_decay=0.1, decoupled_weight_decay=True
        )

    for task, d in ((TASKS["skips"], 4), (TASKS["branch"], 3)):
        check_task(task, d, d, [2 * d] * 6, nadamw, exact=True)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_no_pipeline_can_serve_are_refused_with_the_reason(name: str) -> None:
    with (
        make_pipeline(TASKS["mlp"], 2, 2, draw(2)) as pipe,
        pytest.raises(TypeError, match=f"{name} .*{REFUSED[name]}"),
    ):
        pd2.PipelineOptimizer(STOCK[name](list(pipe.parameters()), lr=0.1))


def test_a_step_that_cannot_do_without_an_argument_is_refused() -> None:
    class Sharpness(SGD):
        def step(self, closure: Any, strength: float = 1.0) -> None:  # type: ignore[override]
            raise AssertionError

    with (
        make_pipeline(TASKS["mlp"], 2, 2, draw(2)) as pipe,
        pytest.raises(TypeError, match=r"Sharpness\.step\(\) needs closure"),
    ):
        pd2.PipelineOptimizer(Sharpness(pipe.parameters(), lr=0.1))


ODD: dict[str, Make] = {
    "counts in its groups": CountsInGroup,
    "schedule-free": ScheduleFree,
    "made of another": lambda p: Lookahead(RMSprop(p, lr=0.01)),
}


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "2bw_split"])
@pytest.mark.parametrize("name", ODD)
def test_users_own_optimizers(name: str, schedule: str) -> None:
    for d in (1, 2, 4):
        check_task(TASKS["skips"], d, d + 1, [2 * d + 2] * 6, ODD[name], schedule=schedule)


def test_an_optimizer_made_of_another_keeps_two_pipelines_alike() -> None:
    check_task(TASKS["mlp"], 2, 2, [4] * 5, ODD["made of another"], schedule="chimera")


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_an_optimizer_with_modes_evaluates_its_other_weights_and_trains_on(schedule: str) -> None:
    task, m = TASKS["mlp"], 3
    batches, delay = task.batches([6] * 8), int(schedule == "2bw")
    model = task.model()
    stock = ScheduleFree(model.parameters())
    oracle = Oracle(model, stock, m, task.loss_fn, delay)
    with make_pipeline(task, 2, m, batches[0], schedule=schedule) as pipe:
        optimizer = pd2.PipelineOptimizer(ScheduleFree(pipe.parameters()))
        for number, batch in enumerate(batches):
            if number in (3, 4, 7):
                optimizer.eval()
                stock.eval()
                assert not optimizer.param_groups[0]["train_mode"]
                for name, tensor in pipe.state_dict().items():
                    assert torch.equal(tensor, model.state_dict()[name]), name
                optimizer.train()
                stock.train()
                # The weights are back, but for rounding.
                oracle.versions[-1] = oracle._weights()
            loss = pipe.train_step(*batch.args, target=batch.target)
            optimizer.step()
            assert float(loss) == oracle.train_step(batch)
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name


# ---------------------------------------------------------------- several together


def matrices_apart(
    named: list[tuple[str, nn.Parameter]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As groups, which may be empty on a rank."""
    matrices = [p for _, p in named if p.ndim == 2]
    return [{"params": matrices}], [{"params": [p for _, p in named if p.ndim != 2]}]


def two(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Several:
    def make(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        matrices, rest = matrices_apart(named)
        return [first(matrices), second(rest)]

    return make


SEVERAL: dict[str, tuple[Several, bool]] = {
    "own and fused": (two(lambda p: RMSprop(p, lr=0.01), lambda p: SGD(p, lr=0.1)), True),
    "two fused": (two(lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, lr=0.01)), False),
    "two of one kind": (two(lambda p: AdamW(p, lr=0.01), lambda p: AdamW(p, lr=0.02)), False),
    "two with their own": (two(lambda p: RMSprop(p, lr=0.01), CountsInGroup), True),
}
if hasattr(torch.optim, "Muon"):
    SEVERAL["Muon and AdamW"] = (
        two(lambda p: torch.optim.Muon(p, lr=0.02), lambda p: AdamW(p, lr=0.01)),
        False,
    )


def by_several(
    task: Task, d: int, m: int, num_batches: int, make: Several, schedule: str = "2bw"
) -> tuple[Trajectory, Trajectory]:
    batches = task.batches([2 * m] * num_batches)
    model = task.model()
    stock = Together(*make(list(model.named_parameters())))
    oracle = Oracle(model, stock, m, task.loss_fn, int("2bw" in schedule))
    losses = [oracle.train_step(batch) for batch in batches]
    want = Trajectory(losses, copy_of(model.state_dict()))
    with make_pipeline(task, d, m, batches[0], schedule=schedule) as pipe:
        optimizer = pd2.PipelineOptimizer(*make(list(pipe.named_parameters())))
        lazy = []
        for batch in batches:
            lazy.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
        got = Trajectory([], copy_of(pipe.state_dict()))
        got.losses = [float(loss) for loss in lazy]
    return got, want


def _with_norms(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.LayerNorm(WIDTH))


BLOCKS = Task(lambda: stack(_with_norms), draw)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "2bw_split"])
@pytest.mark.parametrize("name", SEVERAL)
def test_optimizers_over_disjoint_parameters_step_together(name: str, schedule: str) -> None:
    make, exact = SEVERAL[name]
    for d in (1, 2, 4):
        got, want = by_several(BLOCKS, d, d + 1, 5, make, schedule)
        # A rounding in AdamW reaches the others' parameters by way of the gradients.
        assert_same(got, want, exact=exact)


KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9),
    lambda p: SGD(p, lr=0.2),
    lambda p: RMSprop(p, lr=0.01),
    CountsInGroup,
]


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    dealt=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    num_stages=st.sampled_from([1, 2, 4]),
)
def test_any_parameters_to_any_optimizers(
    kinds: list[Any], dealt: list[int], num_stages: int
) -> None:
    task = Task(lambda: stack(lambda layer: layer), draw)

    def make(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        owners = [number % len(kinds) for number in dealt]
        return [
            kind([{"params": [p for (_, p), mine in zip(named, owners, strict=True) if mine == i]}])
            for i, kind in enumerate(kinds)
        ]

    got, want = by_several(task, num_stages, num_stages + 1, 4, make)
    assert_same(got, want)


def test_each_fused_optimizer_keeps_state_of_its_own_parameters_only() -> None:
    make = two(lambda p: RMSprop(p, lr=0.01), lambda p: AdamW(p, lr=0.01))
    task = Task(lambda: stack(lambda layer: layer), draw)
    with make_pipeline(task, 2, 2, draw(2)) as pipe:
        optimizer = pd2.PipelineOptimizer(*make(list(pipe.named_parameters())))
        pipe.train_step(*draw(4).args, target=draw(4).target)
        optimizer.step()
        pipe.flush()
        for memory in pipe.memory_report().values():
            assert memory.optimizer_state == 2 * 2 * 4 * WIDTH  # the biases' two moments
            # 32 bytes of each bias: in two versions, the gradient and both moments.
            assert memory.padding == 2 * 32 * (2 + 1 + 2)


@pytest.mark.parametrize("name", ["own and fused", "two fused", "two with their own"])
def test_the_state_of_all_is_saved_and_loaded(name: str) -> None:
    make, _ = SEVERAL[name]
    task, m = TASKS["mlp"], 3
    batches = task.batches([6] * 6)
    ends = []
    for stops in (False, True):
        saved: dict[str, Any] = {}
        for part in (batches[:3], batches[3:]) if stops else (batches,):
            with make_pipeline(task, 2, m, batches[0], schedule="1f1b") as pipe:
                optimizer = pd2.PipelineOptimizer(*make(list(pipe.named_parameters())))
                if saved:
                    pipe.load_state_dict(saved["model"])
                    optimizer.load_state_dict(saved["optimizer"])
                for batch in part:
                    pipe.train_step(*batch.args, target=batch.target)
                    optimizer.step()
                saved = {"optimizer": optimizer.state_dict(), "model": dict(pipe.state_dict())}
                saved = copy.deepcopy(saved)
                assert len(saved["optimizer"]["optimizers"]) == 2
        ends.append(saved)
    for key, tensor in ends[0]["model"].items():
        assert torch.equal(ends[1]["model"][key], tensor), key
    with make_pipeline(task, 2, m, batches[0]) as pipe:
        alone = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1))
        with pytest.raises((ValueError, KeyError)):
            alone.load_state_dict(saved["optimizer"])
        of_one = alone.state_dict()
        several = pd2.PipelineOptimizer(*make(list(pipe.named_parameters())))
        with pytest.raises(ValueError, match="state_dict of 0 optimizers, the pipeline has 2"):
            several.load_state_dict(of_one)
        for use in (alone.step, alone.state_dict, lambda: alone.load_state_dict(of_one)):
            with pytest.raises(ValueError, match="no longer the pipeline's"):
                use()


def test_a_parameter_in_two_optimizers_or_in_none_is_named_with_them() -> None:
    with make_pipeline(TASKS["mlp"], 2, 2, draw(2)) as pipe:
        own = list(pipe.parameters())
        for optimizers, text in (
            (
                [SGD(own[:3], lr=0.1), RMSprop(own[2:])],
                r"parameter 2\.weight is in optimizer 0 \(SGD\) and in optimizer 1 \(RMSprop\)",
            ),
            (
                [SGD(own[:3], lr=0.1), RMSprop(own[4:])],
                r"missing in optimizer 0 \(SGD\) and optimizer 1 \(RMSprop\): 1 \(2\.bias\)",
            ),
            (
                [SGD(own, lr=0.1), RMSprop(nn.Linear(2, 2).parameters())],
                r"parameters of optimizer 1 \(RMSprop\): 2, of them not the pipeline's: 2",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                pd2.PipelineOptimizer(*optimizers)
        with pytest.raises(TypeError, match=r"list given, .*one after the other"):
            pd2.PipelineOptimizer([SGD(own, lr=0.1)])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="0 optimizers given"):
            pd2.PipelineOptimizer()


def test_groups_may_not_be_added_unnoticed() -> None:
    with make_pipeline(TASKS["mlp"], 2, 2, draw(2)) as pipe:
        stock = SGD(pipe.parameters(), lr=0.1)
        optimizer = pd2.PipelineOptimizer(stock)
        foreign = {"params": list(nn.Linear(2, 2).parameters())}
        with pytest.raises(ValueError, match="every trainable parameter of the pipeline"):
            optimizer.add_param_group(foreign)


@pytest.mark.parametrize("kind", [AdamW, RMSprop])
def test_weight_decay_spares_biases_and_norms(kind: Any) -> None:
    def make(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        (decay,), (spared,) = matrices_apart(named)
        groups = [decay, {**spared, "weight_decay": 0.0}]
        return [kind(groups, lr=0.01, weight_decay=0.3)]

    for d in (1, 2, 4):
        got, want = by_several(BLOCKS, d, d + 1, 4, make)
        assert_same(got, want, exact=kind is RMSprop)


def test_named_parameters_may_be_given_as_torch_takes_them() -> None:
    def make(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        return [SGD(named[:5], lr=0.1), RMSprop([p for _, p in named[5:]])]

    got, want = by_several(TASKS["mlp"], 2, 3, 4, make)
    assert_same(got, want)
