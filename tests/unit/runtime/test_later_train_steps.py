"""A loss that needs later batches says so instead of waiting for what cannot come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.runs.discarding import batches, make_model

JOINS = ["tied", "norm"]


def pipedream(num_stages: int, example: Any, joins: str) -> Any:
    """A pipeline, and its optimizer, whose stages make their updates together because of that."""
    model = make_model((), num_stages, norm=False)
    if joins == "tied":
        model[-1].linear.weight = model[0].linear.weight
    pipe = pd2.PipelineModule(
        list(model),
        mse_loss,
        schedule="pipedream",
        num_microbatches=1,
        example_args=example,
    )
    sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
    return pipe, pd2.PipelineOptimizer(sgd, max_grad_norm=0.1 if joins == "norm" else None)


@pytest.mark.parametrize("joins", [*JOINS, "nothing"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_loss_is_there_or_says_how_many_train_steps_it_needs(num_stages: int, joins: str) -> None:
    given = batches(8, 2)

    def losses(*, reads: bool) -> list[float]:
        pipe, opt = pipedream(num_stages, given[0].args, joins)
        with pipe:
            lazy: list[pd2.Loss] = []
            for number, batch in enumerate(given):
                if number == 5:
                    pipe.flush()
                lazy.append(pipe.train_step(*batch.args, target=batch.target))
                opt.step()
                # Stage 0 is d - 1 batches late; the last one has made no update since a flush.
                is_late = joins != "nothing" and number not in (0, 5)
                missing = num_stages - 2 if is_late else 0
                if reads and missing:
                    with pytest.raises(RuntimeError, match=f"of which {missing} must still"):
                        lazy[-1].item()
                if reads and number >= missing:
                    lazy[number - missing].item()
            pipe.flush()
            return [loss.item() for loss in lazy]

    assert losses(reads=True) == losses(reads=False)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.timeout(60)
def test_forwards_that_wait_for_later_batches_hold_up_neither_modes_nor_ends(
    joins: str, count: int
) -> None:
    given = batches(count + 2, 2)

    def trained(*, toggles: bool) -> list[float]:
        pipe, opt = pipedream(3, given[0].args, joins)
        losses = []
        for number, batch in enumerate(given):
            if number == count and toggles:
                pipe.eval()
                pipe.train()
            elif number == count:
                pipe.flush()
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        pipe.close()  # finishes the last batch, whose forward waits, too
        return [loss.item() for loss in losses]

    assert trained(toggles=True) == trained(toggles=False)


def test_another_optimizer_changes_what_updates_wait_for() -> None:
    """By the loss of the second batch since a flush, which needs a later one if they wait."""
    given = batches(3, 2)
    pipe, _ = pipedream(3, given[0].args, "nothing")
    with pipe:
        for limit in (None, 0.1, None):
            sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
            opt = pd2.PipelineOptimizer(sgd, max_grad_norm=limit)
            pipe.flush()
            for batch in given[:2]:
                loss = pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            if limit is not None:
                with pytest.raises(RuntimeError, match="of which 1 must still"):
                    loss.item()
            else:
                loss.item()
            assert pipe.session.stages.updates_wait == (limit is not None)
