"""Remedies for the delay are the same rules as plain PyTorch makes of them, stage by stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.references.remedies import Corrected, Discounted
from tests.runs.trajectory import (
    assert_close,
    assert_same,
    by_oracle,
    by_pipeline,
    copy_of,
    delays_under_pipedream,
    make_pipeline,
)
from tests.samples.models import TASKS, WIDTH, Task, whole
from tests.samples.odd_optimizers import CountsInGroup
from tests.samples.parameter_kinds import draw
from tests.samples.tied_models import TIED

Make = Callable[[Any], torch.optim.Optimizer]
Gradient = Callable[[torch.Tensor, int], torch.Tensor]
NUM_BATCHES = 9
WARMUP = 3
REMEDIES: dict[str, tuple[Any, Callable[[Make, int], Make]]] = {
    "discount": (
        pd2.LearningRateDiscount(5),
        lambda make, warmup: lambda ps: Discounted(make(ps), 5, warmup),
    ),
    "error feedback": (
        pd2.ErrorFeedback(0.8),
        lambda make, warmup: lambda ps: Corrected(make(ps), "error feedback", 0.8, warmup),
    ),
    "nesterov": (
        pd2.NesterovCorrection(0.7),
        lambda make, warmup: lambda ps: Corrected(make(ps), "nesterov", 0.7, warmup),
    ),
    "discounted feedback": (
        [pd2.LearningRateDiscount(5), pd2.ErrorFeedback()],
        lambda make, warmup: (
            lambda ps: Discounted(Corrected(make(ps), "error feedback", 1.0, warmup), 5, warmup)
        ),
    ),
}
OPTIMIZERS: dict[str, Make] = {
    "fused SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.5, weight_decay=0.01),
    "fused AdamW": lambda ps: AdamW(ps, lr=0.01),
    "own step": lambda ps: RMSprop(ps, lr=0.01, momentum=0.5),
    "counts in its groups": CountsInGroup,
}


@pytest.mark.parametrize(
    ("remedy", "optimizer"),
    [
        *((remedy, each) for remedy in REMEDIES for each in ("fused SGD", "own step")),
        # Nesterov's prediction takes the momentum of either.
        *(("nesterov", "fused AdamW"), ("discounted feedback", "fused AdamW")),
        ("discounted feedback", "counts in its groups"),
        *exhaustive(
            *(
                (remedy, each)
                for remedy in REMEDIES
                for each in ("fused AdamW", "counts in its groups")
                if remedy != "discounted feedback" and (remedy, each) != ("nesterov", "fused AdamW")
            )
        ),
    ],
)
def test_a_remedy_equals_its_rule(remedy: str, optimizer: str) -> None:
    task, m = TASKS["skips"], 4
    given, in_plain_torch = REMEDIES[remedy]
    batches = task.batches([2 * m] * NUM_BATCHES)
    make = OPTIMIZERS[optimizer]
    plain = by_oracle(task, batches, m, make)
    for schedule, d, v in (("2bw", 1, 1), ("2bw", 4, 1), ("2bw_split", 3, 1)):
        for warmup in (0, WARMUP):
            options: dict[str, Any] = {"warmup_batches": warmup, "schedule": schedule}
            want = by_oracle(task, batches, m, in_plain_torch(make, warmup), **options)
            got = by_pipeline(
                task, batches, d, m, make, staleness=given, stages_per_rank=v, **options
            )
            assert_same(got, want, exact=optimizer != "fused AdamW")
            assert got.losses != plain.losses


@pytest.mark.parametrize("schedule", ["2bw_eager", "interleaved_2bw"])
def test_every_schedule_with_a_delay_of_one_is_corrected(schedule: str) -> None:
    task, d, m, v = TASKS["skips"], 4, 8, 2 if "interleaved" in schedule else 1
    given, in_plain_torch = REMEDIES["discounted feedback"]
    batches = task.batches([m] * NUM_BATCHES)
    want = by_oracle(task, batches, m, in_plain_torch(OPTIMIZERS["fused SGD"], 0))
    got = by_pipeline(
        task,
        batches,
        d,
        m,
        OPTIMIZERS["fused SGD"],
        staleness=given,
        schedule=schedule,
        stages_per_rank=v,
    )
    assert_same(got, want)


@pytest.mark.parametrize("make", [SGD, RMSprop])
def test_under_pipedream_each_stage_discounts_by_its_own_delay(make: Any) -> None:
    task, d = TASKS["skips"], 4
    batches = task.batches([2] * NUM_BATCHES)
    delay_of = delays_under_pipedream(task, d, batches[0])

    def discounted(parameters: Any) -> torch.optim.Optimizer:
        delays = [delay_of[name] for name, _ in whole(task.model()).named_parameters()]
        return Discounted(make(parameters, lr=0.01), 5, 0, delays)

    want = by_oracle(task, batches, 1, discounted, schedule="pipedream", delay_of=delay_of)
    got = by_pipeline(
        task,
        batches,
        d,
        1,
        lambda ps: make(ps, lr=0.01),
        schedule="pipedream",
        staleness=pd2.LearningRateDiscount(5),
    )
    assert_same(got, want)


def train(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, batches: Sequence[Any]
) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(pipe.train_step(*batch.args, target=batch.target))
        opt.step()
    return [float(loss) for loss in losses]


def by_prediction(gradient: Gradient, w: torch.Tensor, lr: float, number: float) -> torch.Tensor:
    """Plain steps of w, with gradients at the weights that are predicted for the next batch."""
    read = [w, w - lr * gradient(w, 0)]
    w = read[1]
    step = -lr * gradient(read[0], 1)
    read.append(w + step)
    w = w + (1 - number) * step  # the first batch had no delay: nothing is made up for
    for t in range(2, NUM_BATCHES):
        step = -lr * gradient(read[t - 1], t)
        w = w + step
        read.append(w + number * step)
    return read[-1]


def by_nesterov(gradient: Gradient, w: torch.Tensor, lr: float, number: float) -> torch.Tensor:
    """The paper's equations, with two sequences of weights."""
    read = [w]
    for t in range(NUM_BATCHES):
        before = w
        w = read[t] - lr * (1 - number) * gradient(read[max(t - 1, 0)], t)
        read.append(w + number * (w - before))
    return read[-1]


@pytest.mark.parametrize(
    ("remedy", "definition"),
    [(pd2.ErrorFeedback(0.8), by_prediction), (pd2.NesterovCorrection(0.7), by_nesterov)],
)
def test_a_correction_is_what_its_paper_defines(remedy: Any, definition: Any) -> None:
    task, m, lr = TASKS["mlp"], 2, 0.1
    batches = [
        batch._replace(args=tuple(x.double() for x in batch.args), target=batch.target.double())
        for batch in task.batches([4] * NUM_BATCHES)
    ]
    model = task.model().double()

    def gradient(weights: torch.Tensor, t: int) -> torch.Tensor:
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
        loss = task.loss_fn(model(*batches[t].args), batches[t].target)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))

    with make_pipeline(task, 2, m, batches[0], model=copy.deepcopy(model)) as pipe:
        opt = pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=lr), staleness=remedy)
        train(pipe, opt, batches)
        got = nn.utils.parameters_to_vector(copy_of(pipe.state_dict()).values())
    first = nn.utils.parameters_to_vector(task.model().double().parameters()).detach()
    want = definition(gradient, first, lr, next(iter(vars(remedy).values())))
    assert (got - want).abs().max() < 1e-12


def test_what_a_parameter_without_a_gradient_had_is_not_applied_to_it() -> None:
    """The optimizer skips it, and so does a remedy."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    for remedy in ("error feedback", "nesterov"):
        task = Task(Sometimes, draw)
        given, in_plain_torch = REMEDIES[remedy]
        batches = task.batches([4] * NUM_BATCHES)
        make = OPTIMIZERS["fused SGD"]
        want = by_oracle(task, batches, 2, in_plain_torch(make, 0))
        assert_same(by_pipeline(task, batches, 1, 2, make, staleness=given), want)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_saved_remedies_go_on_where_they_were(remedy: str) -> None:
    task, d, m = TASKS["skips"], 3, 3
    batches = task.batches([m] * 10)
    given, in_plain_torch = REMEDIES[remedy]
    make = OPTIMIZERS["fused SGD"]
    with make_pipeline(task, d, m, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=given)
        train(pipe, opt, batches[:4])
        state, moments = copy_of(pipe.state_dict()), copy.deepcopy(opt.state_dict())
        train(pipe, opt, batches[4:6])
        pipe.load_state_dict(state)
        opt.load_state_dict(moments)
        again = train(pipe, opt, batches[4:])
    with make_pipeline(task, d, m, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=given)
        pipe.load_state_dict(state)
        opt.load_state_dict(moments)
        assert train(pipe, opt, batches[4:]) == again
    # The definition: the delay starts anew, moments and remedies do not.
    model = whole(task.model())
    stock = in_plain_torch(make, 0)(list(model.parameters()))
    oracle = Oracle(model, stock, m, task.loss_fn, delay=1)
    for batch in batches[:4]:
        oracle.train_step(batch)
    oracle.restart_delay()
    if isinstance(stock, Discounted) and isinstance(stock.inner, Corrected):
        stock.inner.restart_delay()
    elif isinstance(stock, Corrected):
        stock.restart_delay()
    assert [oracle.train_step(batch) for batch in batches[4:]] == again


def test_state_saved_without_a_remedy_lets_it_begin_anew() -> None:
    task, m = TASKS["skips"], 2
    batches = task.batches([m] * 4)
    with make_pipeline(task, 2, m, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(Adam(pipe.parameters()))
        train(pipe, opt, batches)
        state = opt.state_dict()
        assert "staleness" not in state
        given = [pd2.LearningRateDiscount(3), pd2.NesterovCorrection()]
        opt = pd2.PipelineOptimizer(Adam(pipe.parameters()), staleness=given)
        train(pipe, opt, batches)
        assert opt.state_dict()["staleness"]["delayed_batches"] == 4
        opt.load_state_dict(state)
        assert opt.state_dict()["staleness"] == {"delayed_batches": 0, "kept": {}}
        name, _ = next(pipe.named_parameters())
        bad = {**state, "staleness": {"delayed_batches": 0, "kept": {name: torch.ones(1)}}}
        with pytest.raises(ValueError, match=r"staleness of .*: shape \[1\]"):
            opt.load_state_dict(bad)


def test_what_remedies_keep_is_reported() -> None:
    task, m = TASKS["skips"], 3
    batches = task.batches([m] * 4)
    for remedy, tensors in (("discount", 0), ("error feedback", 1), ("nesterov", 1)):
        with make_pipeline(task, 3, m, batches[0]) as pipe:
            opt = pd2.PipelineOptimizer(
                SGD(pipe.parameters(), lr=0.1), staleness=REMEDIES[remedy][0]
            )
            train(pipe, opt, batches)
            pipe.flush()
            for report in pipe.memory_report().values():
                assert report.optimizer_state == tensors * report.weights // 2


def test_the_learning_rate_that_users_see_is_their_own() -> None:
    task, m = TASKS["skips"], 2
    batches = task.batches([m] * 6)
    for make in (SGD, RMSprop):
        with make_pipeline(task, 2, m, batches[0]) as pipe:
            wrapped = make(pipe.parameters(), lr=0.1)
            opt = pd2.PipelineOptimizer(wrapped, staleness=pd2.LearningRateDiscount(50))
            schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
            for number, batch in enumerate(batches):
                train(pipe, opt, [batch])
                assert wrapped.param_groups[0]["lr"] == 0.1 * 0.5**number
                schedule.step()
            opt.state_dict()
            assert_close("lr", torch.tensor(opt.param_groups[0]["lr"]), torch.tensor(0.1 / 64))


def test_bad_remedies_are_named() -> None:
    task = TASKS["skips"]
    batch = task.batches([4])[0]
    discount, feedback = pd2.LearningRateDiscount, pd2.ErrorFeedback
    nesterov = pd2.NesterovCorrection
    cases: list[tuple[Any, type[Exception], str]] = [
        (discount(0), ValueError, "num_batches: 0, it must be at least 1"),
        (discount(1.5), TypeError, "num_batches: 1.5 given"),  # type: ignore[arg-type]
        (feedback(0), ValueError, "coefficient: 0, it must be > 0"),
        (feedback("1"), TypeError, "coefficient: '1' given"),  # type: ignore[arg-type]
        (nesterov(1.0), ValueError, r"momentum: 1\.0, it must be > 0 and < 1"),
        ([feedback(), nesterov()], ValueError, "2 corrections given, there may be 1"),
        ([discount(1), discount(2)], ValueError, "2 discounts given"),
        ("nesterov", TypeError, "staleness: 'n' given, it must be a LearningRateDiscount"),
        (None, TypeError, "staleness: None given"),
    ]
    with make_pipeline(task, 2, 2, batch) as pipe:
        for given, kind, message in cases:
            with pytest.raises(kind, match=message):
                pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=given)
    with (
        make_pipeline(task, 3, 1, batch, schedule="pipedream") as pipe,
        pytest.raises(ValueError, match=r"delays: \[2, 1, 0\]\): it corrects a delay of 1"),
    ):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=feedback())
    task = TIED["language model"]
    batch = task.batches([4])[0]
    with (
        make_pipeline(task, 3, 1, batch, schedule="pipedream") as pipe,
        pytest.raises(ValueError, match=r"\[2, 1, 0\]\), tied parameters: .* must have one delay"),
    ):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=discount(3))
