"""Frozen, low-rank, lazy, shared and parametrized parameters train as in the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipedream2bw as pd2
from tests.runs.trajectory import by_pipeline, check_task, copy_of, make_pipeline, sgd
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.parameter_kinds import KINDS, PARAMETRIZED, LowRank, draw, freeze, stack


def trained(pipe: pd2.PipelineModule, task: Task, rows: list[int], make: Any = sgd) -> None:
    optimizer = pd2.PipelineOptimizer(make(pipe.parameters()))
    for batch in task.batches(rows):
        pipe.train_step(*batch.args, target=batch.target)
        optimizer.step()
    pipe.flush()


def nbytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_parameters_of_every_kind_train_as_in_the_unsplit_model(name: str, num_stages: int) -> None:
    d, task = num_stages, KINDS[name]
    if d not in task.depths:
        return
    for schedule in ("2bw", "2bw_split", "1f1b"):
        check_task(task, d, d + 1, [3 * d + 3] * 5, schedule=schedule)
    check_task(task, d, d + 1, [3 * d + 3] * 5, recompute=True)


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_parametrized_model_comes_back_as_it_was(name: str) -> None:
    task = PARAMETRIZED[name]
    batches = task.batches([6] * 3)
    model = task.model()
    with make_pipeline(task, 2, 3, batches[0], model=model) as pipe:
        trained(pipe, task, [6] * 3)
        weights = copy_of(pipe.state_dict())
        assert pipe.unsplit() is model
    other = task.model(seed=7)
    other.load_state_dict(weights)
    with torch.no_grad():
        assert torch.equal(model.eval()(*batches[0].args), other.eval()(*batches[0].args))


def test_evaluation_in_eval_mode_leaves_the_norms_vectors_alone() -> None:
    task = PARAMETRIZED["spectral norm"]
    with make_pipeline(task, 2, 3, draw(6)) as pipe:
        trained(pipe, task, [6])
        before = copy_of(dict(pipe.named_buffers()))
        pipe.eval()(*draw(6).args)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.named_buffers())


# ---------------------------------------------------------------- frozen

NAMES = [f"{i}.{kind}" for i in range(0, 8, 2) for kind in ("weight", "bias")]


@settings(max_examples=40, deadline=None)
@given(
    frozen=st.sets(st.sampled_from(NAMES), max_size=len(NAMES) - 1),
    num_stages=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["2bw", "2bw_split", "1f1b", "gpipe", "2bw_eager"]),
    recompute=st.booleans(),
    more=st.integers(0, 2),
)
def test_frozen_parameters_cost_one_copy_and_no_backward(
    frozen: set[str], num_stages: int, schedule: str, recompute: bool, more: int
) -> None:
    d = num_stages
    m = (2 * d - 1 if schedule == "2bw_eager" else d) + more

    def build() -> nn.Module:
        return freeze(stack(lambda layer: layer), frozen)

    cuts = [str(8 // d * i) for i in range(1, d)]
    task = Task(build, draw, depths=(d,), cuts=("0", *cuts))
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "split": cuts}
    check_task(task, d, m, [2 * m] * 4, **options)
    versions = 2 if "2bw" in schedule else 1
    with make_pipeline(task, d, m, draw(m), **options) as pipe:
        trained(pipe, task, [2 * m] * 4)
        trains = False
        for stage, memory in pipe.memory_report().items():
            mine = [name for name in NAMES if int(name[0]) // (8 // d) == stage]
            parameters = dict(pipe.named_parameters())
            kept = nbytes(parameters[name] for name in mine if name not in frozen)
            assert memory.weights == versions * kept
            assert memory.gradients == kept
            assert memory.frozen_weights == nbytes(parameters[n] for n in mine if n in frozen)
            trains = trains or kept > 0
            if not trains:
                # No gradient comes here: nothing is kept, nothing runs again.
                assert (memory.most_in_flight, memory.activations) == (0, 0)
                assert memory.padding == 0
            else:
                assert memory.most_in_flight > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
def test_a_stage_that_trains_nothing_and_follows_none_does_nothing_in_its_backwards(
    schedule: str, recompute: bool
) -> None:
    calls = [0] * 4

    class Counting(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.layer = index, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[self.index] += 1
            result: torch.Tensor = self.layer(x)
            return result

    def build() -> list[nn.Module]:
        layers = [Counting(i) for i in range(4)]
        for i in (0, 1, 3):
            layers[i].requires_grad_(False)
        return list(layers)

    task = Task(build, draw, depths=(4,))
    with make_pipeline(task, 4, 5, draw(5), schedule=schedule, recompute=recompute) as pipe:
        calls[:] = [0] * 4
        with pipe.timeline() as timeline:
            trained(pipe, task, [10] * 3)
        again = 2 if recompute else 1
        assert calls == [15, 15, 15 * again, 15 * again]
        of_stage = {(event.stage, event.kind) for event in timeline.gather()}
        report = pipe.memory_report()
        again = [stage.runner._again for stage in pipe.session.stages]
        assert all(kept is None or not kept._kept for kept in again)
    assert [report[i].most_in_flight > 0 for i in range(4)] == [False, False, True, True]
    assert [stage for stage, kind in sorted(of_stage) if kind == "R"] == (
        [2, 3] if recompute else []
    )


class Stops(nn.Module):
    """Its output has no gradient, what it is given has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x).detach()
        return result


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b"])
def test_who_waits_for_a_gradient_hears_that_there_is_none(schedule: str, recompute: bool) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Stops(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    task = Task(lambda: copy.deepcopy(layers), draw, depths=(4,))
    check_task(task, 4, 5, [10] * 4, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_low_rank_training_costs_versions_of_the_adapters_only(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    task = KINDS["low rank"]
    with make_pipeline(task, 4, 5, draw(5)) as pipe:
        trained(pipe, task, [10] * 3, lambda p: optimizer([q for q in p if q.requires_grad]))
        adapter, base = 4 * 2 * 2 * WIDTH, 4 * (WIDTH * WIDTH + WIDTH)
        for memory in pipe.memory_report().values():
            assert memory.weights == 2 * adapter
            assert memory.gradients == adapter
            assert memory.frozen_weights == base
            assert memory.optimizer_state == (2 * adapter if optimizer is torch.optim.AdamW else 0)
            assert memory.padding == 0  # 64 bytes each
        assert f"{(adapter + base) // 4} parameters ({base // 4} frozen)" in str(pipe)


def test_two_pipelines_in_one_process_share_what_is_frozen() -> None:
    task = Task(lambda: stack(LowRank, 2), draw)
    with make_pipeline(task, 2, 2, draw(2), schedule="chimera") as pipe:
        frozen = [memory.frozen_weights for memory in pipe.memory_report().values()]
    assert frozen == [4 * (WIDTH * WIDTH + WIDTH)] * 2 + [0, 0]


def test_the_base_may_be_of_another_dtype() -> None:
    class Half(LowRank):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = self.base(x.bfloat16()).float()
            return low + x @ self.down.t() @ self.up.t()

    task = Task(lambda: stack(lambda layer: Half(layer.bfloat16())), draw)
    check_task(task, 2, 3, [6] * 4)
    with make_pipeline(task, 2, 3, draw(3)) as pipe:
        memory = pipe.memory_report()[0]
        assert memory.frozen_weights == 2 * 2 * (WIDTH * WIDTH + WIDTH)


def test_a_model_without_a_trainable_parameter_evaluates_and_has_no_optimizer() -> None:
    task = Task(lambda: freeze(stack(lambda layer: layer), NAMES), draw)
    with make_pipeline(task, 2, 2, draw(2)) as pipe:
        x = draw(4).args[0]
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([task.model()(part) for part in x.chunk(2)]))
        with pytest.raises(ValueError, match="trainable parameters of the pipeline: 0"):
            pd2.PipelineOptimizer(sgd(pipe.parameters()))


# ---------------------------------------------------------------- lazy


@pytest.mark.parametrize(
    ("lazy", "name"),
    [
        (lambda: nn.LazyLinear(WIDTH), "parameter '1.weight'"),
        (lambda: nn.LazyBatchNorm1d(), "parameter '1.weight'"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "buffer '1.running_mean'"),
    ],
)
def test_parameters_and_buffers_without_a_shape_are_refused(
    lazy: Callable[[], nn.Module], name: str
) -> None:
    task = Task(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), lazy()), draw)
    with pytest.raises(ValueError, match=f"{name} is lazy .*run one forward"):
        make_pipeline(task, 2, 2, draw(2))


def test_a_parameter_may_miss_its_gradient_in_some_batches_under_momentum() -> None:
    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(p, lr=0.01, momentum=0.9)

    check_task(KINDS["some microbatches"], 4, 5, [5] * 8, make)
    check_task(TASKS["branch"], 3, 3, [6] * 8, make)
    task = KINDS["some microbatches"]
    got = by_pipeline(task, task.batches([5]), 4, 5).state
    unused = nn.ModuleList(task.model()).get_parameter("0.never.weight")
    assert torch.equal(got["0.never.weight"], unused)
