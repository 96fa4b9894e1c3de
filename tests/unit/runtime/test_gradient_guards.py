"""Functions that would silently see no gradients on a pipeline's parameters raise instead."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.runs.trajectory import assert_same_state, by_oracle, copy_of, make_pipeline, sgd
from tests.samples.models import TASKS

Parameters = Sequence[nn.Parameter]


def total_norm(parameters: Parameters) -> None:
    nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def log_norms(parameters: Parameters) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.data.norm(2).item()


def scale_by_hand(parameters: Parameters) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad *= 0.5


def add_to(parameters: Parameters) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.add_(p.detach())


@pytest.mark.parametrize(
    "use",
    [
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, norm_type=float("inf"), foreach=False),
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, foreach=True),
        lambda ps: nn.utils.clip_grad_value_(ps, 1.0),
        lambda ps: nn.utils.clip_grad_value_(ps, 1.0, foreach=True),
        total_norm,
        log_norms,
        scale_by_hand,
        add_to,
    ],
)
def test_computing_with_gradients_is_refused_and_does_no_harm(
    use: Callable[[Parameters], Any],
) -> None:
    task = TASKS["skips"]
    batches = task.batches([4] * 4)
    want = by_oracle(task, batches, 2)
    with make_pipeline(task, 2, 2, batches[0]) as pipe:
        parameters = list(pipe.parameters())
        opt = pd2.PipelineOptimizer(sgd(parameters))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            with pytest.raises(RuntimeError, match=r"parameter .*max_grad_norm.*value=\. Move or"):
                use(parameters)
            opt.step()
        assert_same_state(copy_of(pipe.state_dict()), want.state)


class OwnSGD(torch.optim.SGD):
    """Its own step sets gradients."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
def test_what_forgets_gradients_still_works(kind: type[torch.optim.SGD]) -> None:
    """zero_grad() in all forms; where it leaves None, the next drain sees to it."""
    task = TASKS["skips"]
    batches = task.batches([4] * 4)
    want = by_oracle(task, batches, 2)
    model = task.model()
    with make_pipeline(task, 2, 2, batches[0], model=model) as pipe:
        wrapped = kind(pipe.parameters(), lr=0.3)
        opt = pd2.PipelineOptimizer(wrapped)
        for number, batch in enumerate(batches):
            pipe.flush()
            for each in (opt, wrapped, pipe):
                each.zero_grad(set_to_none=number % 2 == 0)
                # An update may just use them.
                assert all(parameter.grad is not None for parameter in model.parameters())
            model.zero_grad(set_to_none=number % 2 == 0)
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pipe.flush()
        with pytest.raises(RuntimeError, match="max_grad_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert_same_state(copy_of(pipe.state_dict()), want.state)
        pipe.unsplit()
    F.mse_loss(model(*batches[0].args), batches[0].target).backward()
    wrapped.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_copies_files_and_the_model_that_is_given_back_have_no_gradients() -> None:
    task = TASKS["skips"]
    (batch,) = task.batches([4])
    model = task.model()
    pipe = make_pipeline(task, 2, 2, batch, model=model)
    before = [p.clone() for p in model.parameters()]
    for p in copy.deepcopy(model).parameters():
        assert p.grad is None
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for p in torch.load(file, weights_only=False).parameters():
        assert p.grad is None
    pipe.unsplit()
    assert all(p.grad is None for p in model.parameters())
    F.mse_loss(model(*batch.args), batch.target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_parameters_have_none_and_the_others_gradients_no_memory() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    x = torch.randn(4, 64)
    with pd2.PipelineModule(
        model, F.mse_loss, num_stages=2, num_microbatches=2, example_args=(x,), timeout=60.0
    ):
        assert all(p.grad is None for p in model[0].parameters())
        for p in model[1].parameters():
            assert p.grad is not None
            assert p.grad.shape == p.shape
            assert p.grad.dtype == p.dtype
            assert "EngineGradient(1." in repr(p.grad)
            with pytest.raises(RuntimeError, match="storage"):
                p.grad.untyped_storage().data_ptr()
