"""The pipeline trains what the definition says: the same losses and parameters, bit by bit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from tests.exhaustive import exhaustive
from tests.references.oracle import Batch, Oracle, run_oracle
from tests.runs.trajectory import (
    assert_close,
    assert_same,
    assert_same_state,
    by_oracle,
    by_pipeline,
    check_task,
    copy_of,
    make_pipeline,
    sgd,
)
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.schedule_sizes import V_SHAPED, sizes_for


def test_the_oracle_follows_the_recurrence_written_by_hand() -> None:
    # f(w) = a w / 2 w with a = 1, 2, ... as data: the gradient of batch t at w is a(t) w.
    model = nn.Linear(1, 1, bias=False)
    w0 = model.weight.item()
    batches = [Batch((torch.full((4, 1), float(t + 1)),)) for t in range(4)]

    def loss(output: torch.Tensor, target: None) -> torch.Tensor:
        return (output * model.weight.squeeze() / 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    run_oracle(model, optimizer, batches, 2, loss, delay=1)
    w1 = w0 - 0.125 * 1 * w0
    w2 = w1 - 0.125 * 2 * w0
    w3 = w2 - 0.125 * 3 * w1
    w4 = w3 - 0.125 * 4 * w2
    assert model.weight.item() == pytest.approx(w4, rel=1e-6)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6, *exhaustive(4, 5)])
@pytest.mark.parametrize("name", ["mlp", "skips"])
def test_every_depth_and_number_of_microbatches(name: str, num_stages: int) -> None:
    d = num_stages
    for m in sorted({d, d + 1, 2 * d + 1, 3 * d}):
        check_task(TASKS[name], d, m, rows=[2 * m] * 5)


OF_OTHERS = [(n, d) for n in TASKS if n not in ("mlp", "skips") for d in TASKS[n].depths]
CASES = [
    *(case for case in OF_OTHERS if case[1] not in (1, 4, 6)),
    *exhaustive(*(case for case in OF_OTHERS if case[1] in (1, 4, 6))),
]


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_every_model(name: str, num_stages: int) -> None:
    m = num_stages + 1
    check_task(TASKS[name], num_stages, m, rows=[2 * m] * 5)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("num_stages", "m"), [(1, 3), (2, 1), (2, 4), (3, 5), (4, 2), (6, 7)])
def test_flush_schedules_equal_gradient_accumulation(
    schedule: str, num_stages: int, m: int
) -> None:
    for name in ("skips", "gpt" if num_stages == 3 else "mlp"):
        check_task(TASKS[name], num_stages, m, rows=[2 * m] * 4, schedule=schedule)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3, 4, *exhaustive(5, 6)])
@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_every_schedule_at_every_depth(schedule: str, num_stages: int, recompute: bool) -> None:
    for sizes in sizes_for(schedule, num_stages):
        m = sizes.num_microbatches
        num_batches = num_stages + 3 if m == 1 else 5
        rows = [2 * m] * num_batches
        check_task(
            TASKS["drawing"],
            num_stages,
            m,
            rows,
            schedule=schedule,
            stages_per_rank=sizes.stages_per_rank,
            recompute=recompute,
        )


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_every_v_of_four_ranks(schedule: str) -> None:
    for sizes in sizes_for(schedule, 8):
        d, m, v = dataclasses.astuple(sizes)
        check_task(TASKS["mlp"], d, m, [2 * m] * 5, schedule=schedule, stages_per_rank=v)


SPLIT = ["2bw_split", "zero_bubble", "zero_bubble_2p", "interleaved_zero_bubble"]


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("name", TASKS)
def test_backwards_in_two_halves_equal_the_definition(name: str, schedule: str) -> None:
    for d in TASKS[name].depths[-2:]:  # every depth: see above
        m = 2 * d if schedule.startswith("interleaved") else d + 1
        check_task(TASKS[name], d, m, rows=[2 * m] * 5, schedule=schedule)


@pytest.mark.parametrize("num_batches", [1, 2, 3, 9])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_pipedream_is_one_update_later_on_every_stage_before(
    num_stages: int, num_batches: int
) -> None:
    check_task(TASKS["skips"], num_stages, 1, rows=[2] * num_batches, schedule="pipedream")


def test_flushing_pipedream_changes_no_number() -> None:
    task, rows = TASKS["skips"], [2] * 9

    def flush(batch: int, pipe: Any, optimizer: torch.optim.Optimizer) -> None:
        if batch in (1, 4, 5):
            pipe.flush()

    batches = task.batches(rows)
    want = by_pipeline(task, batches, 4, 1, schedule="pipedream")
    assert_same(by_pipeline(task, batches, 4, 1, between=flush, schedule="pipedream"), want)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b", "gpipe"])
@pytest.mark.parametrize("name", ["skips", "batch norm", "masked"])
def test_uneven_batches_and_batches_of_other_sizes(name: str, schedule: str) -> None:
    # 3 rows or more a microbatch: BatchNorm needs two.
    check_task(TASKS[name], 2, 3, rows=[10, 9, 11, 14, 6, 10], schedule=schedule)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_losses_that_are_sums_are_added_unweighted(schedule: str) -> None:
    def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum")

    task = dataclasses.replace(TASKS["skips"], loss_fn=sum_loss)

    def gentle(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    for rows in ([9] * 4, [10, 7, 11, 9]):
        check_task(task, 3, 3, rows, gentle, loss_reduction="sum", schedule=schedule)


@pytest.mark.parametrize("name", ["skips", "gpt", "batch norm"])
def test_double_precision(name: str) -> None:
    task = TASKS[name]

    def to_double(rows: int) -> Batch:
        batch = task.draw(rows)
        args, target = (
            torch.utils._pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, part)
            for part in (batch.args, batch.target)
        )
        return Batch(args, target)

    double = dataclasses.replace(task, build=lambda: task.build().double(), draw=to_double)
    check_task(double, 2, 3, rows=[6, 7, 6, 6])


def test_parameters_of_two_dtypes_in_one_stage() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.wide(self.first(x).double()).tanh()
            return self.last(y.float())

    check_task(Task(Mixed, TASKS["mlp"].draw), 2, 2, rows=[4] * 5)


def test_a_replicated_argument_reaches_every_microbatch_whole() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).tanh() @ mix) @ mix

    def draw(rows: int) -> Batch:
        mix = torch.randn(WIDTH, WIDTH) / WIDTH
        target = {"y": torch.randn(rows, WIDTH), "scale": torch.rand(3)}
        return Batch((torch.randn(rows, WIDTH),), target, {"mix": mix})

    def loss(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        assert target["scale"].shape == (3,)
        return F.mse_loss(output, target["y"]) * target["scale"].sum()

    task = Task(Mixing, draw, loss)
    check_task(task, 2, 4, rows=[8, 9, 12, 8], replicated=("mix", "scale"))


def test_structured_targets_are_split_like_arguments() -> None:
    def draw(rows: int) -> Batch:
        parts = (torch.randn(rows, WIDTH), {"weight": torch.rand(rows, 1), "power": 2})
        return Batch((torch.randn(rows, WIDTH),), parts)

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        y, options = target
        return ((output - y).abs() ** options["power"] * options["weight"]).mean()

    check_task(Task(TASKS["mlp"].build, draw, loss), 3, 4, rows=[9, 8, 8])


@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_parameter_after_every_batch(num_stages: int) -> None:
    task, m = TASKS["skips"], 4
    batches = task.batches([8] * 6)
    seen: dict[str, list[dict[str, torch.Tensor]]] = {"pipeline": [], "oracle": []}

    def look(number: int, trained: Any, optimizer: Any) -> None:
        if isinstance(trained, Oracle):
            seen["oracle"].append(copy_of(trained.model.state_dict()))
        else:
            trained.flush()
            seen["pipeline"].append(copy_of(dict(trained.named_parameters())))

    want = by_oracle(task, batches, m, between=look)
    assert_same(by_pipeline(task, batches, num_stages, m, between=look), want)
    assert len(seen["pipeline"]) == len(batches)
    for ours, theirs in zip(seen["pipeline"], seen["oracle"], strict=True):
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_flushing_at_random_moments_changes_no_bit(seed: int) -> None:
    chance = random.Random(seed)
    task = TASKS[chance.choice(["skips", "batch norm", "masked"])]
    d, m = 4 if 4 in task.depths else 5, 5
    batches = task.batches([15] * 8)
    pipe = make_pipeline(task, d, m, batches[0])
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5))
    losses = []
    for batch in batches:
        losses.append(pipe.train_step(*batch.args, target=batch.target, **batch.kwargs))
        if chance.random() < 0.5:
            pipe.flush()  # between the backward and its update too
        opt.step()
        while chance.random() < 0.4:
            chance.choice([pipe.flush, pipe.state_dict, opt.state_dict, losses[-1].item])()
    state = copy_of(pipe.state_dict())
    pipe.close()

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)

    want = by_oracle(task, batches, m, momentum)
    assert [loss.item() for loss in losses] == want.losses
    assert_same_state(state, want.state)


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_loading_weights_starts_the_delay_anew(schedule: str) -> None:
    task, m = TASKS["batch norm"], 3
    batches = task.batches([6] * 7)
    other = copy_of(task.model(seed=5).state_dict())

    def load(number: int, trained: Any, optimizer: Any) -> None:
        if number != 3:
            return
        if isinstance(trained, Oracle):
            trained.model.load_state_dict(other)
            trained.restart_delay()
        else:
            trained.load_state_dict(other)
            assert_same_state(copy_of(trained.state_dict()), other)

    want = by_oracle(task, batches, m, between=load, schedule=schedule)
    assert_same(by_pipeline(task, batches, 2, m, between=load, schedule=schedule), want)


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize("name", ["gpt", "masked", "batch norm"])
def test_evaluation_equals_the_whole_model_microbatch_by_microbatch(name: str, rows: int) -> None:
    task, m = TASKS[name], 4
    batches = task.batches([8, 8, 8])
    (batch,) = task.batches([rows], seed=9)
    pipe = make_pipeline(task, 2, m, batches[0])
    opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    for trained_on in batches:
        pipe.train_step(*trained_on.args, target=trained_on.target, **trained_on.kwargs)
        opt.step()
    pipe.eval()
    output = pipe(*batch.args, **batch.kwargs)
    assert not output.requires_grad
    model = pipe.unsplit()
    assert isinstance(model, nn.Module)
    assert not model.training
    with torch.no_grad():
        parts = [
            model(
                *(arg.tensor_split(min(rows, m))[j] for arg in batch.args),
                **{k: v.tensor_split(min(rows, m))[j] for k, v in batch.kwargs.items()},
            )
            for j in range(min(rows, m))
        ]
    assert torch.equal(output, torch.cat(parts))


def test_unsplit_gives_the_trained_module_back() -> None:
    task, m = TASKS["batch norm"], 3
    batches = task.batches([6] * 4)
    model = task.model()
    parameters = dict(model.named_parameters())
    pipe = make_pipeline(task, 2, m, batches[0], model=model)
    opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
    for batch in batches:
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
    assert pipe.unsplit() is model
    want = by_oracle(task, batches, m)
    assert_same_state(copy_of(model.state_dict()), want.state)
    for name, now in model.named_parameters():
        assert parameters[name] is now
        assert now.untyped_storage().nbytes() == now.nbytes, name  # not a part of the pipeline's
    # And it trains on without the pipeline.
    loss = task.loss_fn(model(*batches[0].args), batches[0].target)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.state_dict()["0.weight"], want.state["0.weight"])
    # A pipeline can take it over again.
    check = make_pipeline(task, 5, 5, batches[0], model=model)
    check.close()


def test_losses_do_not_depend_on_when_they_are_read() -> None:
    task, m = TASKS["gpt"], 4
    batches = task.batches([8] * 6)
    want = by_oracle(task, batches, m)
    with make_pipeline(task, 3, m, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses, read = [], []
        for number, batch in enumerate(batches):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            if number % 2:
                read.append(losses[number].item())
            elif number:
                read.append(losses[number - 2].item())
    assert read == [want.losses[i] for i in (1, 0, 3, 2, 5)]
    assert [float(loss) for loss in reversed(losses)] == want.losses[::-1]


def test_a_value_with_many_consumers_gets_the_sum_of_their_gradients() -> None:
    # Where stock autograd adds in another order, the gradient is the same to rounding.
    task = TASKS["fan"]
    batches = task.batches([12] * 3)
    want = by_oracle(task, batches, 6)
    got = by_pipeline(task, batches, 6, 6)
    for name, theirs in want.state.items():
        assert_close(name, got.state[name], theirs)
