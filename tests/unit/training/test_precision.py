"""Float32 masters beside 16-bit weights: the trajectory is that of the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import pipedream2bw as pd2
from tests.references.mixed_oracle import MixedOracle, half_away, lowered
from tests.references.oracle import Batch
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    copy_of,
    go_on,
    make_pipeline,
)
from tests.samples.models import TASKS, Task, token_loss
from tests.samples.tied_models import TIED
from tests.unit.capture.test_train_and_eval_modes import Untraceable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUM_BATCHES = 6
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def float_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), target)


def float_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return token_loss(logits.float(), target)


def task_of(name: str, **options: Any) -> Task:
    task = TASKS[name]
    options.setdefault("loss_fn", float_token_loss if name == "gpt" else float_loss)
    return Task(task.build, task.draw, training=task.training, cuts=task.cuts, **options)


OF_MASTERS: list[MakeOptimizer] = [
    lambda ps: Adam(ps, lr=0.01, foreach=False),
    lambda ps: AdamW(ps, lr=0.01, amsgrad=True, foreach=False),
    lambda ps: RMSprop(ps, lr=0.01),  # its own step, on the masters
]

MLP, GPT, SKIPS = task_of("mlp"), task_of("gpt"), task_of("skips")


def sgd(parameters: Iterable[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.3, momentum=0.5)


def train(
    task: Task,
    batches: Sequence[Batch],
    num_stages: int,
    m: int,
    make: MakeOptimizer = sgd,
    flush_after: Sequence[int] = (),
    opt_options: dict[str, Any] | None = None,
    **options: Any,
) -> Trajectory:
    with make_pipeline(task, num_stages, m, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()), **opt_options or {})
        return go_on(pipe, opt, batches, flush_after=flush_after)


def define(
    task: Task,
    batches: Sequence[Batch],
    m: int,
    make: MakeOptimizer = sgd,
    precision: str = "bf16",
    schedule: str = "2bw",
    **options: Any,
) -> Trajectory:
    model = task.model()
    dtype = DTYPES[precision]
    oracle = MixedOracle(
        model,
        lowered(model, dtype),
        make(model.parameters()),
        m,
        task.loss_fn,
        int("2bw" in schedule),
        dtype=dtype,
        **options,
    )
    losses = [oracle.train_step(batch) for batch in batches]
    return Trajectory(losses, copy_of(model.state_dict()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "m"),
    [("2bw", 1, 2), ("2bw", 2, 2), ("2bw", 4, 5), ("1f1b", 4, 3), ("2bw_split", 2, 3)],
)
def test_sgd_is_the_definitions_to_the_bit(
    schedule: str, num_stages: int, m: int, precision: str
) -> None:
    for task in (MLP, SKIPS, GPT):
        batches = task.batches([2 * m] * NUM_BATCHES)
        want = define(task, batches, m, precision=precision, schedule=schedule)
        got = train(task, batches, num_stages, m, schedule=schedule, precision=precision)
        assert_same(got, want)


@pytest.mark.parametrize("schedule", ["pipedream", "chimera", "interleaved_2bw"])
def test_other_schedules_train_with_masters(schedule: str) -> None:
    """Chimera's two copies of a stage stay equal; stages share ranks; four versions exist."""
    m, options = (1, {}) if schedule == "pipedream" else (4, {})
    if schedule == "interleaved_2bw":
        options = {"stages_per_rank": 2}
    batches = MLP.batches([2 * m] * NUM_BATCHES)
    got = train(MLP, batches, 4, m, schedule=schedule, precision="bf16", **options)
    plain = train(MLP, batches, 4, m, schedule=schedule, **options)
    for mine, theirs in zip(got.losses, plain.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=0.02)
        assert mine != theirs


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
@pytest.mark.parametrize("make", OF_MASTERS)
def test_optimizers_step_the_masters(make: MakeOptimizer, schedule: str) -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = define(SKIPS, batches, 3, make, schedule=schedule)
    got = train(SKIPS, batches, 3, 3, make, schedule=schedule, precision="bf16")
    assert_same(got, want, exact=False)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_split_master_trains_as_a_whole_one_but_for_ties(num_stages: int) -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = define(SKIPS, batches, 3, round_to=half_away)
    got = train(SKIPS, batches, num_stages, 3, precision="bf16", split_master=True)
    assert_same(got, want)


@pytest.mark.parametrize("schedule", ["2bw", "chimera", "1f1b"])
def test_every_copy_of_a_parameter_has_a_split_master(schedule: str) -> None:
    """Those of a stage's copy in this process, and of other stages that hold a tied weight."""
    task = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)
    batches = task.batches([8] * NUM_BATCHES)
    options: dict[str, Any] = {"schedule": schedule, "split": ["blocks.2"], "precision": "bf16"}
    whole = train(task, batches, 2, 4, **options)
    split = train(task, batches, 2, 4, split_master=True, **options)
    for name, tensor in split.state.items():
        assert tensor.dtype == torch.float32
        # A weight may round to its other neighbour where its master is half way.
        assert (tensor - whole.state[name]).norm() <= 1e-3 * tensor.norm(), name
    with make_pipeline(task, 2, 4, batches[0], split_master=True, **options) as pipe:
        copies = [report.masters for report in pipe.memory_report().values()]
        elements = [sum(p.numel() for p in stage.weights.handles) for stage in pipe.session.stages]
        assert copies == [2 * number for number in elements]


def test_draining_changes_no_number() -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = train(SKIPS, batches, 3, 3, precision="bf16")
    assert_same(train(SKIPS, batches, 3, 3, flush_after=[0, 2, 3], precision="bf16"), want)


def test_clipping_and_recomputation_are_the_definitions() -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    want = define(SKIPS, batches, 3, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.1))
    got = train(
        SKIPS,
        batches,
        3,
        3,
        opt_options={"max_grad_norm": 0.1},
        precision="bf16",
        recompute=True,
    )
    assert_same(got, want)


@pytest.mark.parametrize(("split", "bytes_each"), [(False, 20), (True, 18)])
def test_adam_takes_few_bytes_per_parameter(split: bool, bytes_each: int) -> None:
    batches = MLP.batches([4] * 3)
    with make_pipeline(MLP, 2, 2, batches[0], precision="bf16", split_master=split) as pipe:
        opt = pd2.PipelineOptimizer(Adam(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pipe.flush()
        elements = sum(p.numel() for p in pipe.parameters())
        counted = [
            report.weights + report.masters + report.gradients + report.optimizer_state
            for report in pipe.memory_report().values()
        ]
        assert sum(counted) == bytes_each * elements


@pytest.mark.parametrize("split", [False, True])
def test_saving_and_loading_loses_nothing(split: bool) -> None:
    batches = SKIPS.batches([6] * NUM_BATCHES)
    options: dict[str, Any] = {"precision": "bf16", "split_master": split, "schedule": "1f1b"}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Adam(parameters, lr=0.01)

    whole = train(SKIPS, batches, 3, 3, make, **options)
    with make_pipeline(SKIPS, 3, 3, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        weights, moments = go_on(pipe, opt, batches[:3]).state, copy.deepcopy(opt.state_dict())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    unsplit = SKIPS.model(seed=5)
    unsplit.load_state_dict(weights)  # of the model as it was
    with make_pipeline(SKIPS, 3, 3, batches[0], model=SKIPS.model(seed=6), **options) as pipe:
        opt = pd2.PipelineOptimizer(make(pipe.parameters()))
        pipe.load_state_dict(unsplit.state_dict())
        opt.load_state_dict(moments)
        got = go_on(pipe, opt, batches[3:])
        assert_same(got, Trajectory(whole.losses[3:], whole.state))
        model = pipe.unsplit()
    assert isinstance(model, nn.Module)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole.state[name]), name


class Mixed(nn.Module):
    """What stays in float32, what is converted, and what has no fraction."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 3)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(index) + x).relu()
        x = self.frozen(self.norm(x) + self.shift)
        result: torch.Tensor = self.last(x)
        return result


def _mixed_batch(rows: int) -> Batch:
    return Batch((torch.randint(13, (rows,)), torch.randn(rows, 8)), torch.randn(rows, 3))


def test_statistics_stay_float32_and_all_else_is_converted() -> None:
    task = Task(Mixed, _mixed_batch, float_loss)
    batches = task.batches([6] * NUM_BATCHES)
    model = task.model()
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    low = lowered(model, torch.bfloat16)
    oracle = MixedOracle(
        model, low, sgd(model.parameters()), 3, float_loss, 1, dtype=torch.bfloat16
    )
    losses = [oracle.train_step(batch) for batch in batches]
    given = task.model()
    with make_pipeline(task, 3, 3, batches[0], model=given, precision="bf16") as pipe:
        opt = pd2.PipelineOptimizer(sgd([p for p in pipe.parameters() if p.requires_grad]))
        ours = []
        for batch in batches:
            ours.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        assert [float(loss) for loss in ours] == losses
        state = pipe.state_dict()
        for name, tensor in low.state_dict().items():
            if name in dict(model.named_parameters()) and not name.startswith("frozen"):
                tensor = model.state_dict()[name]
            assert state[name].dtype == tensor.dtype, name
            assert torch.equal(state[name], tensor), name
        pipe.eval()
        low.eval()
        for parameter, weight in zip(low.parameters(), oracle.versions[-1], strict=True):
            parameter.data.copy_(weight)
        index, x = batches[0].args
        output = pipe(index, x)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, low(index, x.bfloat16()))
        pipe.unsplit()
    assert {name: tensor.dtype for name, tensor in given.state_dict().items()} == dtypes
    given(index, x)  # runs as it did


def test_half_precision_models_get_masters_and_fp32_widens_them() -> None:
    batches = MLP.batches([4] * 3)
    given = MLP.model().bfloat16()
    wide = copy.deepcopy(given).float()
    for precision in ("bf16", "fp32"):
        with make_pipeline(
            MLP, 2, 2, batches[0], model=copy.deepcopy(given), precision=precision
        ) as pipe:
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            state = copy_of(pipe.state_dict())
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    want = by_oracle(MLP, batches, 2, sgd, model=wide)
    assert all(torch.equal(state[name], tensor) for name, tensor in want.state.items())


def test_a_model_that_cannot_be_captured_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8).requires_grad_(False))
    before = copy_of(model.state_dict())
    with pytest.raises(ValueError, match="refuses the example"):
        pd2.PipelineModule(
            model,
            float_loss,
            num_stages=2,
            num_microbatches=2,
            example_args=(torch.randn(2, 7),),
            precision="bf16",
        )
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_a_dtype_that_the_device_does_not_compute_in_is_refused() -> None:
    """Of single operators torch does not tell: their errors name them and the stage."""
    (batch,) = MLP.batches([4])
    lacking = RuntimeError("not implemented for 'Half'")
    with (
        mock.patch.object(torch.Tensor, "__matmul__", side_effect=lacking),
        pytest.raises(ValueError, match=r"precision: 'fp16', device: cpu: .*float16.*for 'Half'"),
    ):
        make_pipeline(MLP, 2, 2, batch, precision="fp16")

    class Lacking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cdist(x, x).mean()

    task = Task(lambda: nn.Sequential(nn.Linear(8, 8), Lacking()), MLP.draw, float_loss)
    cause = r"(?s)stage 1, batch 0, microbatch 0, forward: .*cdist.*'Half'"
    with (
        pytest.raises(RuntimeError, match=cause),
        make_pipeline(task, 2, 2, batch, precision="fp16") as pipe,
    ):
        pd2.PipelineOptimizer(sgd(pipe.parameters()))
        float(pipe.train_step(*batch.args, target=batch.target))


def test_a_small_gpt_learns_as_in_float32() -> None:
    """Losses stay within 2 % of float32's."""
    tokens = torch.arange(5).repeat(8, 1) + torch.arange(8).unsqueeze(1)
    batch = Batch((tokens % 13,), (tokens + 1) % 13)

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return AdamW(parameters, lr=0.01)

    scaled = {"loss_scale": pd2.LossScale(growth_interval=10)}
    wanted = train(GPT, [batch] * 40, 2, 2, make).losses
    assert wanted[-1] < 0.5 * wanted[0]
    for options, of_optimizer in (
        ({"precision": "bf16"}, {}),
        ({"precision": "bf16", "split_master": True}, {}),
        ({"precision": "fp16"}, scaled),
        ({"autocast": torch.bfloat16}, {}),
        ({"autocast": torch.float16}, scaled),
    ):
        losses = train(GPT, [batch] * 40, 2, 2, make, opt_options=of_optimizer, **options).losses
        if not of_optimizer:
            for mine, theirs in zip(losses, wanted, strict=True):
                assert mine == pytest.approx(theirs, rel=0.02), options
        assert losses[-1] < 0.55 * losses[0], options


def test_an_exported_model_is_evaluated_after_training() -> None:
    torch.manual_seed(0)
    model = Untraceable()
    (batch,) = TASKS["mlp"].batches([6])
    (x,), target = batch.args, batch.target
    with pd2.PipelineModule(
        model,
        float_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(x,),
        precision="bf16",
        timeout=60.0,
    ) as pipe:
        assert "captured by export" in repr(pipe)
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        loss = pipe.train_step(x, target=target)
        opt.step()
        assert float(loss) > 0
        pipe.eval()
        assert pipe(x).dtype == torch.bfloat16
