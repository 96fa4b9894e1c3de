"""``add_loss``: training is as if the loss function had added the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipedream2bw as pd2
from tests.runs.trajectory import (
    assert_same_state,
    by_oracle,
    by_pipeline,
    make_pipeline,
)
from tests.samples.flow_models import Mixture, Mixtures, adding, raising, random_batch
from tests.samples.models import WIDTH, Task


def check(
    num_stages: int,
    m: int,
    rows: Sequence[int],
    schedule: str = "2bw",
    task: Task | None = None,
    **options: Any,
) -> None:
    task = raising() if task is None else task
    batches = task.batches(rows)
    want = by_oracle(adding(), batches, m, schedule=schedule)
    plain = by_oracle(Task(task.build, task.draw), batches, m, schedule=schedule)
    got = by_pipeline(task, batches, num_stages, m, schedule=schedule, **options)
    assert_same_state(got.state, want.state)
    # And the added losses do change something.
    name = "mixtures.0.gate.weight"
    assert not torch.equal(plain.state[name], want.state[name])


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_training_is_with_the_sum_of_all_losses(
    num_stages: int, schedule: str, recompute: bool, opaque: bool
) -> None:
    m = num_stages + 1
    check(num_stages, m, [2 * m] * 4, schedule, raising(opaque=opaque), recompute=recompute)


@settings(max_examples=10, deadline=None)
@given(
    num_stages=st.sampled_from([1, 2, 4]),
    extra=st.integers(0, 3),
    more=st.lists(st.integers(0, 7), min_size=2, max_size=4),
    recompute=st.booleans(),
)
def test_an_added_loss_weighs_as_the_rows_of_its_microbatch(
    num_stages: int, extra: int, more: list[int], recompute: bool
) -> None:
    m = num_stages + extra
    check(num_stages, m, [m + number for number in more], recompute=recompute)


@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
def test_modules_that_are_run_again_add_their_loss_once(schedule: str) -> None:
    blocks = [f"mixtures.{i}" for i in range(4)]
    check(2, 3, [6] * 4, schedule, recompute=blocks)


def test_two_pipelines_add_each_microbatchs_loss() -> None:
    check(2, 4, [8, 9, 11, 8], "chimera")


def test_added_losses_that_are_sums_are_not_weighed() -> None:
    def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum")

    def gentle(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    task = raising()
    task = Task(task.build, task.draw, sum_loss)
    batches = task.batches([6, 7, 9, 6])
    want = by_oracle(adding("sum"), batches, 3, gentle, loss_reduction="sum")
    got = by_pipeline(task, batches, 2, 3, gentle, loss_reduction="sum")
    assert_same_state(got.state, want.state)


class Checkpointed(Mixture):
    """Runs itself again for its backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(pd2.add_loss, opaque=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def checkpointed(*, reentrant: bool) -> Task:
    def build() -> nn.Module:
        return Mixtures(lambda: Checkpointed(reentrant=reentrant))

    return Task(build, random_batch)


@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
def test_a_checkpoint_by_hooks_adds_the_loss_once(schedule: str) -> None:
    check(2, 3, [6, 7, 6], schedule, checkpointed(reentrant=False))


def test_a_reentrant_checkpoint_would_lose_it_and_is_refused() -> None:
    task = checkpointed(reentrant=True)
    with pytest.raises(RuntimeError, match="set use_reentrant=False"):
        by_pipeline(task, task.batches([6, 6]), 2, 3)


def test_evaluation_adds_nothing() -> None:
    task = raising()
    (batch,) = task.batches([6])
    with make_pipeline(task, 2, 3, batch) as pipe, pd2.collect_losses() as added:
        with torch.no_grad():
            output = pipe(*batch.args)
        parts = [adding().model()(part) for part in batch.args[0].tensor_split(3)]
    assert torch.equal(output, torch.cat(parts))
    assert added == []


def test_without_a_pipeline_the_losses_are_collected() -> None:
    task, reference = raising(), adding()
    (batch,) = task.batches([6])
    model, other = task.model(), reference.model()
    with pd2.collect_losses() as added:
        loss = task.loss_fn(model(*batch.args), batch.target)
    assert len(added) == 4
    for value in added:
        loss = loss + value
    loss.backward()
    reference.loss_fn(other(*batch.args), batch.target).backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_without_a_pipeline_and_a_collector_it_gives_the_activation() -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)
    assert pd2.add_loss(x, x.mean()) is x


@pytest.mark.parametrize(
    ("x", "value", "kind", "message"),
    [
        (torch.ones(2), torch.ones(2), ValueError, r"value: shape \[2\], it must be one number"),
        (torch.ones(2), 1.0, TypeError, r"value: float given"),
        (torch.ones(2), torch.ones((), dtype=torch.long), TypeError, r"value: torch.int64 given"),
        (torch.arange(2), torch.ones(()), TypeError, r"x: torch.int64 given"),
    ],
)
def test_what_is_no_loss_is_refused(
    x: Any, value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pd2.add_loss(x, value)


class Branching(Mixtures):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != WIDTH:  # which torch.fx cannot trace
            return x
        return super().forward(x)


def test_torch_export_does_not_drop_it() -> None:
    task = Task(lambda: Branching(lambda: Mixture(pd2.add_loss, opaque=False)), random_batch)
    (batch,) = task.batches([6])
    with make_pipeline(task, 2, 3, batch) as pipe:
        assert "captured by export" in repr(pipe)
    check(2, 3, [6, 7, 6], task=task)


class Early(nn.Module):
    """A stage with a loss of its own, whose output is detached before the loss is added, or after.

    Args:
        where: "before", "after"; "next", by the next stage; or "beside", where the output is not
            detached, and has a constant loss.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        own = x.square().mean()
        if self.where == "before":
            return pd2.add_loss(x.detach(), own)
        if self.where == "beside":
            x = pd2.add_loss(x, own.detach())
            pd2.add_loss(x, own).detach()
            return x
        x = pd2.add_loss(x, own)
        return x.detach() if self.where == "after" else x


class Late(nn.Linear):
    def __init__(self, where: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach() if self.where == "next" else x)


def train_apart(where: str, schedule: str, batches: int, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, WIDTH)
    m = 1 if schedule == "pipedream" else 4
    with pd2.PipelineModule(
        [Early(where), Late(where)],
        F.mse_loss,
        num_microbatches=m,
        schedule=schedule,
        example_args=(x,),
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        for _ in range(batches):
            pipe.train_step(x, target=y)
            opt.step()
        return {name: value.clone() for name, value in pipe.state_dict().items()}


@pytest.mark.parametrize("where", ["after", "next"])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b", "pipedream"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_that_no_backward_reaches_is_told(
    schedule: str, where: str, recompute: bool
) -> None:
    begin = train_apart("before", schedule, 0)
    with pytest.warns(UserWarning, match=r"add_loss: 1 of stage 0 trained nothing") as told:
        trained = train_apart(where, schedule, 6, recompute=recompute)
    assert len(told) == 1
    assert torch.equal(trained["0.linear.weight"], begin["0.linear.weight"])


def test_a_constant_loss_beside_a_lost_one_hides_it_not() -> None:
    with pytest.warns(UserWarning, match=r"add_loss: 1 of stage 0 trained nothing"):
        train_apart("beside", "2bw", 3)


@pytest.mark.parametrize("schedule", ["2bw", "2bw_split", "1f1b", "pipedream", "2bw_fresh"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.filterwarnings("error:add_loss")
def test_a_stage_trains_by_its_own_loss_alone(schedule: str, recompute: bool) -> None:
    trained = train_apart("before", schedule, 6, recompute=recompute)
    begin = train_apart("before", schedule, 0)
    assert not torch.equal(trained["0.linear.weight"], begin["0.linear.weight"])


class Refusing(Late):
    """Fails where a batch has a row with that number in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0].item() == 1.0:
            raise KeyError("a bad batch")
        return super().forward(x)


@pytest.mark.filterwarnings("error:add_loss")
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_of_a_batch_that_is_discarded_no_loss_is_called_lost(schedule: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    bad = torch.full((8, WIDTH), 100.0)
    model = [Early("no"), Refusing("no")]
    nn.init.constant_(model[0].linear.weight, 1.0)  # a tanh of 1 for the bad batch alone
    with pd2.PipelineModule(
        model, F.mse_loss, num_microbatches=4, schedule=schedule, example_args=(x,)
    ) as pipe:
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
        opt = pd2.PipelineOptimizer(sgd, max_grad_norm=1e9)  # so that any batch can be discarded
        with pytest.raises((pd2.errors.StageError, KeyError), match="bad batch"):
            pipe.train_step(bad, target=x)
            opt.step()
            pipe.flush()
        for _ in range(6):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()
