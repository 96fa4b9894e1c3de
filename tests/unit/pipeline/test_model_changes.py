"""What a script changes of its model between batches: as in the unsplit model, or an error."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.samples.changed_models import CHANGES, WIDTH, batches, model_of, unsplit_losses

NUM_BATCHES, M = 5, 2
REFUSED = {
    "replaced module": "norm",
    "new module": "extra",
    "parameter": r"layer\.weight",
    "parametrized": "layer",
    "frozen": "requires_grad",
    "data of a parameter": "weight",
}
"""What no pipeline follows, and what the error names."""

LATE = {
    "written plain tensor": "plain",
    "config": "factor",
    "item": "factor",
    "element": "sequence",
    "set": "skipped",
    "closure": "value",
    "global": "FACTOR",
    "settings": "factor",
    "class": "of_class",
    "buffer": "offset",
    "written buffer": "offset",
    "statistics": "running_var",
    "values of a parameter": "weight",
}
"""What must not change while batches are being computed, and what the error names."""


def losses_with(
    kind: str, part: int, at: int, *, flushes: bool, schedule: str, **model: Any
) -> tuple[list[float], list[float]]:
    """Losses of the pipeline and of the unsplit model, where batch ``at`` follows a change."""
    data = batches(NUM_BATCHES)
    whole = model_of(**model)
    parts = whole.parts if model["is_traced"] else whole

    def change(t: int) -> None:
        if t == at:
            CHANGES[kind](parts[part], whole)

    has_delay = schedule == "2bw"
    want = []
    if kind not in REFUSED:
        want = unsplit_losses(whole, data, change, m=M, has_delay=has_delay)
    split = model_of(**model)
    parts_of_split = split.parts if model["is_traced"] else split
    with pd2.PipelineModule(
        split,
        mse_loss,
        num_stages=2,
        num_microbatches=M,
        schedule=schedule,
        example_args=data[0][:1],
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        got = []
        for t, (x, y) in enumerate(data):
            if t == at:
                if flushes:
                    pipe.flush()
                CHANGES[kind](parts_of_split[part], split)
            got.append(pipe.train_step(x, target=y))
            optimizer.step()
        return [float(each) for each in got], want


@pytest.mark.parametrize(
    # All pairs of them.
    ("schedule", "is_traced", "is_opaque"),
    [
        *(("1f1b", False, False), ("1f1b", True, True), ("2bw", False, True), ("2bw", True, False)),
        *exhaustive(("1f1b", False, True), ("1f1b", True, False)),
        *exhaustive(("2bw", False, False), ("2bw", True, True)),
    ],
)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_after_a_flush_is_followed_or_refused(
    kind: str, schedule: str, is_traced: bool, is_opaque: bool
) -> None:
    how = {"opaque": [is_opaque] * 3, "is_traced": is_traced}
    refused = REFUSED.get(kind)
    if refused is not None:
        with pytest.raises(ValueError, match=refused):
            losses_with(kind, 0, 2, flushes=True, schedule=schedule, **how)
        return
    got, want = losses_with(kind, 0, 2, flushes=True, schedule=schedule, **how)
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", LATE)
def test_what_code_reads_where_it_is_must_not_change_while_batches_are_computed(kind: str) -> None:
    refused = f"{LATE[kind]}.* Call flush\\(\\) before"
    by_autograd = "modified by an inplace operation"  # which may be the first to see it
    errors = (ValueError, pd2.errors.StageError)
    with pytest.raises(errors, match=f"{refused}|{by_autograd}"):
        losses_with(kind, 2, 2, flushes=False, schedule="2bw", opaque=[True] * 3, is_traced=False)


@settings(max_examples=int(os.environ.get("PIPEDREAM2BW_EXAMPLES", "60")), deadline=None)
@given(
    kind=st.sampled_from(list(CHANGES)),
    part=st.integers(0, 2),
    at=st.integers(0, NUM_BATCHES - 1),
    flushes=st.booleans(),
    schedule=st.sampled_from(["1f1b", "gpipe", "2bw"]),
    opaque=st.lists(st.booleans(), min_size=3, max_size=3),
    is_traced=st.booleans(),
    seed=st.integers(0, 9),
)
def test_no_change_is_ignored_in_silence(kind: str, part: int, at: int, **how: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, want = losses_with(kind, part, at, **how)
    except (ValueError, TypeError, pd2.errors.StageError):  # autograd may be the first to see it
        return
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("keeps", ["detached", "with its graph"])
def test_activations_that_a_hook_keeps_for_the_loss(layer: int, keeps: str) -> None:
    """Those of the last stage are the microbatch's own; those of others are refused."""
    kept: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept["it"] = output.detach() if keeps == "detached" else output

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target) + 0.1 * kept["it"].square().mean()

    model[layer].register_forward_hook(keep)
    (x, y), *_ = batches(NUM_BATCHES)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": M, "example_args": (x,)}
    if layer == 0:
        with pytest.raises(ValueError, match=r"a hook of module '0', on stage 0, and loss_fn both"):
            pd2.PipelineModule(model, loss_fn, **options)
        return
    want = sum(loss_fn(model(a), b).item() / M for a, b in zip(x.chunk(M), y.chunk(M), strict=True))
    with pd2.PipelineModule(model, loss_fn, **options) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        loss = pipe.train_step(x, target=y)
        optimizer.step()
        assert float(loss) == pytest.approx(want)


def test_a_loss_that_reads_a_number_which_changes_is_refused_until_a_flush() -> None:
    (x, y), *_ = batches(NUM_BATCHES)
    beta = 1.0
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pd2.PipelineModule(
        model,
        lambda output, target: output.sum() * 0 + beta,
        num_stages=2,
        num_microbatches=M,
        example_args=(x,),
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        losses = []
        for t in range(4):
            pipe.flush()
            beta = float(t)
            losses.append(pipe.train_step(x, target=y))
            optimizer.step()
        beta = 7.0
        with pytest.raises(ValueError, match=r"variable beta is 7\.0, it was 3\.0.* in target="):
            pipe.train_step(x, target=y)
        assert [float(loss) for loss in losses[:3]] == [0.0, 1.0, 2.0]


def test_update_bn_gives_the_statistics_of_the_unsplit_models_microbatches() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )

    whole, data = model(), batches(NUM_BATCHES)
    parts = [part for x, _ in data for part in x.chunk(M)]
    torch.optim.swa_utils.update_bn(parts, whole)
    with pd2.PipelineModule(
        model(), mse_loss, num_stages=2, num_microbatches=M, example_args=data[0][:1]
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.0))
        pipe.train_step(data[0][0], target=data[0][1])
        optimizer.step()
        pipe.flush()
        torch.optim.swa_utils.update_bn([x for x, _ in data], pipe)
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, whole.state_dict()[name])


def test_a_change_that_is_undone_before_a_batch_is_none() -> None:
    (x, y), *_ = batches(NUM_BATCHES)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    with pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=M, example_args=(x,)
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.eval()
        with pytest.raises((ValueError, TypeError)):
            pipe()
        pipe.train()
        pipe.train_step(x, target=y)
        optimizer.step()
        assert pipe.session.changes.digest == 0
