"""train() and eval() keep their meaning in a captured model: dropout, batch norm, own branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.references.oracle import Oracle
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, check_task, make_pipeline
from tests.samples.models import TASKS, WIDTH, Task


class Traceable(nn.Module):
    """One dropout only: stages that drew random numbers at once would share one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.norm(self.first(x)).relu())
        return self.last(self.dropout(y))


class Functional(Traceable):
    """The same with a call that gets the mode, and a branch on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.norm(self.first(x)).relu())
        y = F.dropout(y, 0.5, training=self.training)
        return self.last(y) if self.training else self.last(y * 2.0)


class Untraceable(Functional):
    """A root that symbolic tracing cannot follow, but torch.export can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != WIDTH:
            raise ValueError("width")
        return super().forward(x)


def chain() -> nn.Module:
    model = Traceable()
    return nn.Sequential(
        model.first, model.norm, nn.ReLU(), model.middle, model.dropout, model.last
    )


BUILDS = {"sequential": chain, "fx": Traceable, "fx-functional": Functional, "export": Untraceable}


@pytest.mark.parametrize("how", BUILDS)
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("first_mode", [True, False])
def test_switching_modes_while_training(how: str, num_stages: int, first_mode: bool) -> None:
    task = Task(BUILDS[how], TASKS["mlp"].draw, training=first_mode)
    batches = task.batches([12] * 8)
    modes = [first_mode, first_mode, not first_mode, not first_mode, first_mode, True, False, True]
    outputs: dict[type, list[torch.Tensor]] = {}

    def switch(number: int, trained: Any, optimizer: Any) -> None:
        if isinstance(trained, Oracle):
            trained.model.train(modes[number])
            with torch.no_grad():
                parts = [trained.model(part) for part in batches[0].args[0].tensor_split(4)]
            output = torch.cat(parts)
        else:
            trained.train(modes[number])
            assert f"captured by {how.partition('-')[0]}" in repr(trained)
            with torch.no_grad():
                output = trained(*batches[0].args)
        outputs.setdefault(type(trained), []).append(output)
        torch.manual_seed(number)  # for this batch's dropout; evaluating has drained the stages

    want = by_oracle(task, batches, 4, between=switch)
    got = by_pipeline(task, batches, num_stages, 4, between=switch)
    assert_same(got, want)
    ours, theirs = (values for _, values in sorted(outputs.items(), key=lambda i: i[0] is Oracle))
    assert len(ours) == len(theirs) == len(batches)
    for mode, left, right in zip(modes, ours, theirs, strict=True):
        assert mode or torch.equal(left, right)  # in training mode dropout makes them differ


def test_a_forward_that_runs_again_before_its_backward_does_so_in_its_own_mode() -> None:
    task = TASKS["batch norm"]
    batches = task.batches([9] * 5)

    def evaluate(number: int, pipe: Any, optimizer: Any) -> None:
        pipe.eval()  # under 2bw the last backwards are still to come
        with torch.no_grad():
            pipe(*batches[0].args)
        pipe.train()

    got = by_pipeline(task, batches, 2, 3, between=evaluate, recompute=True)
    assert_same(got, by_oracle(task, batches, 3))


def test_dropout_drops_in_training_only() -> None:
    task = Task(Untraceable, TASKS["mlp"].draw)
    (batch,) = task.batches([12])
    with make_pipeline(task, 2, 4, batch) as pipe, torch.no_grad():
        first, second = pipe(*batch.args), pipe(*batch.args)
        assert not torch.equal(first, second)
        pipe.eval()
        assert not pipe.training
        first, second = pipe(*batch.args), pipe(*batch.args)
        assert torch.equal(first, second)


def test_evaluation_in_training_mode_updates_batch_norm_as_the_module_does() -> None:
    task = TASKS["batch norm"]
    (batch,) = task.batches([12])
    model = task.model()
    with make_pipeline(task, 2, 3, batch) as pipe, torch.no_grad():
        pipe(*batch.args)
        for part in batch.args[0].tensor_split(3):
            model(part)
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("untraceable", [False, True])
def test_a_batch_norm_whose_output_nobody_uses_keeps_its_statistics(untraceable: bool) -> None:
    class Unused(Traceable):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if untraceable and x.shape[-1] != WIDTH:
                raise ValueError("width")
            y = self.first(x)
            self.norm(y)
            return self.last(self.middle(y))

    check_task(Task(Unused, TASKS["mlp"].draw), 2, 2, rows=[4, 4, 5])


def test_a_stage_that_has_nothing_to_do_in_evaluation() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            if self.training:
                y = y * 2 * torch.rand_like(y)
            return self.last(y)

    task = Task(Noisy, TASKS["mlp"].draw)
    (batch,) = task.batches([6])
    model = task.model().eval()
    with make_pipeline(task, 3, 3, batch, split=["mul", "last"]) as pipe, torch.no_grad():
        assert torch.equal(pipe.eval()(*batch.args), model(*batch.args))
