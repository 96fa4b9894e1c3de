"""What the user's code raises in a batch costs that batch, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.runs import failing
from tests.runs.discarding import Failure, Outcome, batches, by_oracle, make_model, train
from tests.runs.trajectory import assert_same_state
from tests.samples import failing_model as sample
from tests.samples.schedule_sizes import V_SHAPED, sizes_for

M, ROWS, COUNT = 4, 8, 9


def check(outcome: Outcome, given: Any, *, exact: bool = True, **options: Any) -> None:
    assert outcome.errors
    want = by_oracle(given, outcome, **options)
    if exact:
        assert outcome.losses == want.losses
    # Of two pipelines each has buffers of its own.
    names = [n for n in want.state if options.get("num_pipelines") != 2 or "num_calls" not in n]
    got = {name: outcome.state[name] for name in names}
    assert_same_state(got, {name: want.state[name] for name in names}, exact=exact)


def delays(schedule: str, num_stages: int) -> int | list[int]:
    if schedule == "pipedream":
        per_layer = 2  # parameters
        return [num_stages - 1 - i for i in range(num_stages) for _ in range(per_layer)]
    return int("2bw" in schedule)


@pytest.mark.parametrize("kind", ["forward", "backward", "hook", "memory"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_batch_that_fails_is_as_if_it_had_not_been(kind: str, layer: int) -> None:
    given = batches(COUNT, ROWS)
    outcome = train(
        given, [Failure(layer, kind, 3 * M + 2)], num_stages=3, num_microbatches=M, norm=True
    )
    assert [error.discarded[0] for error in outcome.errors] == [3]
    check(outcome, given, num_stages=3, num_microbatches=M, delay=1, norm=True)


@pytest.mark.parametrize("schedule", pd2.schedule_names())
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_under_every_schedule(schedule: str, kind: str) -> None:
    m = 1 if schedule == "pipedream" else M
    # Their updates do not wait for all stages: another one than the last must not fail then.
    waits = schedule not in ("pipedream", "2bw_fresh")
    layer = 1 if kind == "backward" and not waits else 0
    given = batches(COUNT, ROWS)
    pipelines = 2 if "chimera" in schedule else 1
    stages_per_rank = 2 if schedule in V_SHAPED else 1
    num_stages = 2 * stages_per_rank
    outcome = train(
        given,
        [Failure(layer, kind, 4 * m + m // 2)],
        num_stages=num_stages,
        num_microbatches=m,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
    )
    check(
        outcome,
        given,
        num_stages=num_stages,
        num_microbatches=m,
        delay=delays(schedule, num_stages),
        num_pipelines=pipelines,
        late=[2, 2, 1, 1] if schedule == "2bw_fresh" else None,
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_failures(seed: int) -> None:
    draw = random.Random(seed)
    num_stages = draw.choice([1, 2, 3])
    given = batches(COUNT, ROWS)
    failures = [
        Failure(
            draw.randrange(num_stages),
            draw.choice(["forward", "backward", "hook", "memory"]),
            draw.randrange(COUNT * M),
        )
        for _ in range(3)
    ]
    schedule = draw.choice(["2bw", "1f1b", "gpipe"])
    limit = draw.choice([None, 0.05])
    outcome = train(
        given,
        failures,
        num_stages=num_stages,
        num_microbatches=M,
        schedule=schedule,
        norm=draw.random() < 0.5,
        optimizer_options={} if limit is None else {"max_grad_norm": limit},
    )
    if outcome.errors:
        has_norm = any("running_mean" in name for name in outcome.state)
        check(
            outcome,
            given,
            num_stages=num_stages,
            num_microbatches=M,
            delay=delays(schedule, num_stages),
            norm=has_norm,
            max_grad_norm=limit,
        )


class Late(torch.autograd.Function):
    """Fails in the gradient of a weight, which comes after that of the input."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, fails: list[bool]) -> torch.Tensor:
        ctx.fails = fails
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.fails.pop():
            time.sleep(0.1)  # the stage before has its gradient
            raise ZeroDivisionError("on purpose")
        return gradients[0], None


class LateLayer(torch.nn.Module):
    def __init__(self, fails: list[bool]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, Late.apply(self.weight, self.fails)).tanh()


@pytest.mark.parametrize(
    ("schedule", "optimizer", "options", "ends"),
    [
        ("pipedream", torch.optim.SGD, {}, True),
        ("pipedream", torch.optim.RMSprop, {"clip_grad_value": 1.0}, True),
        ("pipedream", torch.optim.RMSprop, {"max_grad_norm": 1.0}, False),
        ("pipedream", torch.optim.SGD, {"max_grad_norm": math.inf}, False),
        ("pipedream", torch.optim.SGD, {"precision": "bf16", "max_grad_norm": math.inf}, False),
        ("2bw", torch.optim.SGD, {}, False),
        ("2bw", torch.optim.RMSprop, {}, True),
        ("2bw", torch.optim.RMSprop, {"max_grad_norm": math.inf}, False),
        ("2bw", torch.optim.SGD, {"precision": "bf16"}, True),
        ("2bw", torch.optim.SGD, {"precision": "bf16", "max_grad_norm": math.inf}, False),
        ("2bw_split", torch.optim.SGD, {}, False),
        ("2bw_split", torch.optim.RMSprop, {}, True),
        ("2bw_split", torch.optim.RMSprop, {"max_grad_norm": math.inf}, False),
        ("1f1b", torch.optim.RMSprop, {}, False),
        ("zero_bubble", torch.optim.RMSprop, {}, False),
    ],
)
def test_a_late_failure_discards_only_where_no_stage_has_made_the_update(
    schedule: str, optimizer: Any, options: dict[str, Any], ends: bool
) -> None:
    m = 1 if schedule == "pipedream" else M
    fails = [False] * 20
    fails[-3 * m] = True  # the last microbatch of batch 2
    x = torch.randn(8, 4)
    of_optimizer = {key: options[key] for key in options if "_grad_" in key}
    pipe = pd2.PipelineModule(
        [torch.nn.Linear(4, 4), LateLayer(fails)],
        torch.nn.functional.mse_loss,
        num_microbatches=m,
        schedule=schedule,
        example_args=(x[: 8 // m],),
        **{key: options[key] for key in options if key not in of_optimizer},
    )
    opt = pd2.PipelineOptimizer(optimizer(pipe.parameters(), lr=0.1), **of_optimizer)
    with pytest.raises(pd2.errors.StageError) as raised:
        for _ in range(4):
            pipe.train_step(x, target=x)
            opt.step()
            pipe.flush()
    newest = {stage.weights.engine.newest_version for stage in pipe.session.stages}
    assert (raised.value.discarded is None) == ends
    assert (raised.value.stage, raised.value.action) == (1, LATE.get(schedule, "backward"))
    assert (len(newest) == 1) or ends
    pipe.close()


LATE = {"2bw_split": "weight gradient", "zero_bubble": "weight gradient"}


@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
def test_one_stage_that_sends_nothing_discards_any_late_failure(schedule: str) -> None:
    fails = [False] * 20
    fails[-3 * M] = True
    x = torch.randn(8, 4)
    pipe = pd2.PipelineModule(
        [LateLayer(fails)],
        torch.nn.functional.mse_loss,
        num_microbatches=M,
        schedule=schedule,
        example_args=(x[: 8 // M],),
    )
    opt = pd2.PipelineOptimizer(torch.optim.RMSprop(pipe.parameters(), lr=0.1))
    with pytest.raises(pd2.errors.StageError) as raised:
        for _ in range(4):
            pipe.train_step(x, target=x)
            opt.step()
            pipe.flush()
    assert raised.value.discarded == (2,)
    pipe.close()


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd"}, {"clip": "norm"}])
@pytest.mark.parametrize("schedule", ["2bw", "2bw_split"])
@pytest.mark.parametrize("layer", [0, 1])
def test_random_failures_know_which_of_a_weights_gradient_may_end_the_pipeline(
    schedule: str, layer: int, options: dict[str, Any]
) -> None:
    plain = {"width": 1, "precision": None, "scaled": False, "tied": False, "accumulate": 1}
    nowhere: frozenset[int] = frozenset()
    case = dataclasses.replace(
        failing.draw(0, seed=0),
        schedule=schedule,
        sizes=sizes_for(schedule, 2)[0],
        depth=2,
        transport=failing.THREADS,
        failures=(sample.Failure("weight gradient", 3, layer=layer),),
        **dict.fromkeys(("evaluates", "reads", "flushes"), nowhere),
        **{**plain, "optimizer": "muon", "clip": "", **options},  # type: ignore[arg-type]
    )
    seen = failing.run_case(case)
    assert seen.wrong == ""
    assert bool(seen.ended) != case.has_verdicts


EARLY: dict[str, dict[str, Any]] = {
    "rotating": {},
    "clipping": {"max_grad_norm": 0.05},
    "own step": {"optimizer": torch.optim.Adagrad, "max_grad_norm": 0.05},
    "split backward": {"schedule": "2bw_split"},
    "two stages each": {"schedule": "interleaved_2bw", "stages_per_rank": 2},
}


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize("call", [3 * M + 2, 4 * M + M - 1])
def test_a_failure_before_stages_that_are_a_batch_ahead_is_discarded(name: str, call: int) -> None:
    options = {"schedule": "2bw", "optimizer": torch.optim.SGD, **EARLY[name]}
    limit = options.pop("max_grad_norm", None)
    given = batches(COUNT, ROWS)
    outcome = train(
        given,
        [Failure(0, "backward", call)],
        num_stages=4,
        num_microbatches=M,
        optimizer_options={} if limit is None else {"max_grad_norm": limit},
        **options,
    )
    check(
        outcome,
        given,
        num_stages=4,
        num_microbatches=M,
        delay=1,
        optimizer=options["optimizer"],
        max_grad_norm=limit,
    )


@pytest.mark.parametrize("limit", [0.05, math.inf])
@pytest.mark.parametrize("layer", range(3))
def test_under_pipedream_any_failure_is_discarded_where_updates_wait(
    limit: float, layer: int
) -> None:
    given = batches(COUNT, ROWS)
    outcome = train(
        given,
        [Failure(layer, "backward", 3)],
        num_stages=3,
        num_microbatches=1,
        schedule="pipedream",
        optimizer_options={"max_grad_norm": limit},
    )
    assert [error.discarded[0] for error in outcome.errors] == [3]
    check(
        outcome,
        given,
        num_stages=3,
        num_microbatches=1,
        delay=delays("pipedream", 3),
        max_grad_norm=limit,
    )


def test_an_evaluation_that_fails_costs_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x = torch.randn(8, 4)
    pipe = pd2.PipelineModule(
        list(model), torch.nn.functional.mse_loss, num_microbatches=2, example_args=(x,)
    )
    with pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(x, target=x)
        with torch.no_grad(), pytest.raises(pd2.errors.StageError, match="evaluation") as raised:
            pipe(torch.randn(8, 5))
        assert raised.value.discarded == ()
        opt.step()
        pipe.train_step(x, target=x)
        opt.step()
        with torch.no_grad():
            assert pipe(x).shape == x.shape


def test_close_tells_that_the_last_batch_was_discarded() -> None:
    given = batches(3, ROWS)
    model = make_model([Failure(0, "forward", 2 * M)], 2, norm=False)
    pipe = pd2.PipelineModule(
        list(model),
        torch.nn.functional.mse_loss,
        num_microbatches=M,
        schedule="1f1b",
        example_args=(given[0].args[0][:2],),
    )
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    for batch in given[:2]:
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
    pipe.flush()
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe.train_step(*given[2].args, target=given[2].target)
    opt.step()
    with pytest.raises(pd2.errors.StageError, match="on purpose") as raised:
        pipe.close()
    assert raised.value.discarded == (2,)
    with pytest.raises(RuntimeError, match=r"close\(\) was called"):
        pipe.train_step(*given[2].args, target=given[2].target)
    assert_same_state(dict(model.state_dict()), state)
