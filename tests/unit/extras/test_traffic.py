"""The bytes that stages move, against counts made by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import pipedream2bw as pd2
from examples.gpt import Block

V100 = pd2.KNOWN_DEVICES["v100"]
FLOAT = 4


def opened(model: nn.Module, x: torch.Tensor, **options: Any) -> pd2.PipelineModule:
    usual: dict[str, Any] = {"num_microbatches": 4, "schedule": "1f1b", "timeout": 60.0}
    return pd2.PipelineModule(model, F.mse_loss, example_args=(x,), **{**usual, **options})


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def test_an_mlp_moves_what_is_counted_by_hand() -> None:
    b, x = 2, torch.randn(8, 5)  # rows of a microbatch
    with opened(mlp(), x, num_stages=2, split=["2"]) as pipe:
        report = pd2.traffic_report(pipe, torch.randn(8, 3), figures=V100)
    assert report.microbatch_rows == b
    first, last = report.stages[0], report.stages[1]

    # x W^T + bias, then max(0, .)
    assert first.forward.weights == FLOAT * (7 * 5 + 7)
    assert first.forward.activations == FLOAT * (5 * b + 7 * b + 2 * 7 * b)
    assert first.forward.messages == FLOAT * 7 * b
    assert first.forward.flops == 2 * b * 5 * 7
    # Of the ReLU: gradient and result in, gradient out. Of W: gradient and x in, dW out; of the
    # bias: gradient in, its sum out. Then each is read and added to the batch's, which is read
    # and written.
    assert first.backward.weights == 0
    assert first.backward.activations == FLOAT * (7 * b + 5 * b)
    parameters = 7 * 5 + 7
    assert first.backward.gradients == FLOAT * (2 * 7 * b + 2 * 7 * b + parameters + 3 * parameters)
    assert first.backward.messages == FLOAT * 7 * b
    assert first.backward.flops == 2 * b * 5 * 7
    # Weights in and out, gradients in; no state yet.
    assert first.update.weights == 2 * FLOAT * parameters
    assert first.update.gradients == FLOAT * parameters
    assert first.update.optimizer == first.update.messages == first.update.flops == 0
    # The batch's first backward writes the sum without reading it.
    assert first.of_batch.gradients == 4 * first.backward.gradients
    assert first.saved_by_first == FLOAT * parameters

    # The loss reads output and target and gives one number.
    assert last.forward.weights == FLOAT * (3 * 7 + 3)
    assert last.forward.activations == FLOAT * (7 * b + 3 * b + 2 * 3 * b + 1)
    assert last.forward.messages == FLOAT * 7 * b
    parameters = 3 * 7 + 3
    assert last.backward.weights == FLOAT * 3 * 7
    assert last.backward.activations == FLOAT * (2 * 3 * b + 7 * b)
    of_loss, of_input = 1 + 3 * b, 3 * b + 7 * b
    assert last.backward.gradients == FLOAT * (
        of_loss + of_input + 3 * b + 3 * b + parameters + 3 * parameters
    )
    assert last.backward.flops == 2 * (2 * b * 7 * 3)


def test_a_gpt_block_moves_what_is_counted_by_hand() -> None:
    rows, context, w, heads = 2, 6, 8, 2
    n = rows * context
    x = torch.randn(8, context, w)
    model = nn.Sequential(nn.Linear(w, w), Block(w, heads), nn.Linear(w, w))
    with opened(model, x, num_stages=3, split=["1", "2"]) as pipe:
        stage = pd2.traffic_report(pipe, x, figures=V100).stages[1]

    norm, logsumexp = 2 * w, rows * heads * context
    matrices = (3 * w * w, w * w, 4 * w * w + 4 * w, 4 * w * w + w)  # with biases
    assert stage.forward.weights == FLOAT * (2 * norm + sum(matrices))
    assert stage.forward.activations == FLOAT * (
        2 * (2 * n * w + 2 * n)  # norms give each row's mean and deviation, too
        + n * (w + 3 * w)
        + (4 * n * w + logsumexp)
        + n * (w + w)
        + 3 * n * w
        + n * (w + 4 * w)
        + 2 * 4 * n * w
        + n * (4 * w + w)
        + 3 * n * w
    )
    assert stage.forward.messages == 2 * FLOAT * n * w
    attention = 2 * 2 * rows * heads * context * context * (w // heads)
    assert stage.forward.flops == 2 * n * (3 + 1 + 4 + 4) * w * w + attention

    without_biases = (3 + 1 + 4 + 4) * w * w
    assert stage.backward.weights == FLOAT * (2 * norm + without_biases)
    assert stage.backward.activations == FLOAT * (
        2 * (n * w + 2 * n)
        + n * w  # what each product multiplied
        + n * w
        + n * w
        + n * 4 * w
        + n * 4 * w  # what went into the GELU
        + (4 * n * w + logsumexp)
    )
    parameters = 2 * norm + sum(matrices)
    assert stage.backward.gradients == FLOAT * (
        2 * (2 * n * w + norm)  # norms
        + sum(2 * out * n + inner * n for out, inner in ((3 * w, w), (w, w), (4 * w, w)))
        + (2 * w * n + 4 * w * n)
        + without_biases
        + (4 * w * n + 4 * w)  # biases
        + (w * n + w)
        + 2 * 4 * n * w  # GELU
        + 4 * n * w  # attention
        + 2 * 3 * n * w  # of query, key and value put together
        + 2 * 3 * n * w  # both branches of each sum
        + 3 * parameters
    )
    assert stage.backward.messages == 2 * FLOAT * n * w
    # torch counts five products of attention's backward for two of its forward.
    assert stage.backward.flops == 2 * 2 * n * without_biases + attention * 5 // 2


def adamw(pipe: pd2.PipelineModule) -> pd2.PipelineOptimizer:
    return pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters()))


def test_updates_read_and_write_the_state_that_exists() -> None:
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    with opened(mlp(), x, num_stages=2, split=["2"]) as pipe:
        optimizer = adamw(pipe)
        pipe.train_step(x, target=y)
        optimizer.step()
        pipe.flush()
        report, memory = pd2.traffic_report(pipe, y, figures=V100), pipe.memory_report()
    for index, stage in report.stages.items():
        assert stage.update.optimizer == 2 * memory[index].optimizer_state > 0


def test_masters_are_weights_and_sums_of_16_bit_gradients_are_float32() -> None:
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    with opened(mlp(), x, num_stages=1, precision="bf16") as pipe:
        (stage,) = pd2.traffic_report(pipe, y.bfloat16(), figures=V100).stages.values()
    parameters = 5 * 7 + 7 + 7 * 3 + 3
    assert stage.update.weights == (2 * FLOAT + 2) * parameters
    assert stage.update.gradients == FLOAT * parameters
    assert stage.forward.weights == 2 * parameters
    assert stage.saved_by_first == FLOAT * parameters


def recomputed(recompute: Any) -> tuple[pd2.StageTraffic, pd2.StageTraffic]:
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    with opened(mlp(), x, num_stages=1) as pipe:
        (plain,) = pd2.traffic_report(pipe, y, figures=V100).stages.values()
    with opened(mlp(), x, num_stages=1, recompute=recompute) as pipe:
        (again,) = pd2.traffic_report(pipe, y, figures=V100).stages.values()
    assert again.forward == plain.forward
    assert again.backward.gradients == plain.backward.gradients
    return plain, again


def test_a_recomputed_stage_moves_its_forward_once_more() -> None:
    plain, again = recomputed(True)
    assert again.backward.weights == plain.backward.weights + plain.forward.weights
    assert again.backward.activations == plain.backward.activations + plain.forward.activations
    assert again.backward.flops == plain.backward.flops + plain.forward.flops


def test_a_recomputed_block_moves_what_is_run_again_up_to_what_it_saves_last() -> None:
    plain, again = recomputed(["0", "1", "2"])
    # A linear layer saves its argument alone, which is not computed again: the ReLU is.
    assert again.backward.weights == plain.backward.weights
    assert again.backward.activations == plain.backward.activations + FLOAT * 2 * 7 * 2


def test_rows_of_an_embedding_count_not_the_table() -> None:
    tokens = torch.zeros(8, 6, dtype=torch.int64)
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    with opened(model, tokens, num_stages=2, split=["1"]) as pipe:
        stage = pd2.traffic_report(pipe, torch.randn(8, 6, 4), figures=V100).stages[0]
    assert stage.forward.weights == FLOAT * 2 * 6 * 4
    assert stage.backward.gradients == FLOAT * (2 * 6 * 4 + 1000 * 4 + 3 * 1000 * 4)


def test_least_times_are_the_longer_of_arithmetic_and_memory() -> None:
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    slow_memory = pd2.DeviceFigures(
        name="slow memory",
        type="cpu",
        flops_per_second={torch.float32: 1e12},
        bytes_per_second=1e6,
        memory_bytes=2**30,
        efficiency=0.1,
    )
    slow_arithmetic = pd2.DeviceFigures(
        name="slow arithmetic",
        type="cpu",
        flops_per_second={torch.float32: 1e3},
        bytes_per_second=1e12,
        memory_bytes=2**30,
    )
    with opened(mlp(), x, num_stages=1) as pipe:
        by_memory = pd2.traffic_report(pipe, y, figures=slow_memory)
        by_arithmetic = pd2.traffic_report(pipe, y, figures=slow_arithmetic)
    forward = by_memory.stages[0].forward
    assert forward.least_seconds == pytest.approx(forward.moved / 1e6)
    assert forward.memory_bound == 1.0
    assert forward.intensity == forward.flops / forward.moved
    forward = by_arithmetic.stages[0].forward
    assert forward.least_seconds == pytest.approx(forward.flops / 1e3, rel=1e-6)
    assert forward.memory_bound == pytest.approx(0.0, abs=1e-6)
    assert "slow arithmetic: 1e-06 GFLOP/s, 1000 GB/s" in str(by_arithmetic)


def test_a_timeline_gives_the_share_of_the_roofline_and_the_machine_is_measured() -> None:
    x, y = torch.randn(64, 256), torch.randn(64, 256)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with opened(model, x, num_stages=2) as pipe:
        optimizer = adamw(pipe)
        with pipe.timeline() as timeline:
            for _ in range(3):
                pipe.train_step(x, target=y)
                optimizer.step()
        report = pd2.traffic_report(pipe, y, events=timeline.rows)
    assert report.figures.flops_per_second[torch.float32] > 1e8
    assert report.figures.bytes_per_second > 1e8
    for stage in report.stages.values():
        for action in (*stage.actions.values(), stage.of_batch):
            assert action.share_of_roofline is not None
            assert action.share_of_roofline > 0
    assert "of roofline" in str(report)


def test_the_report_changes_nothing() -> None:
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(), nn.Linear(7, 3))
    with opened(model, x, num_stages=2) as pipe:
        before = {name: value.clone() for name, value in pipe.full_state_dict().items()}
        state = torch.get_rng_state()
        pd2.traffic_report(pipe, y, figures=V100)
        assert torch.equal(torch.get_rng_state(), state)
        after = pipe.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Counting(nn.Linear):
    """Counts its forwards in a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.kept = {"calls": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["calls"] += 1
        return super().forward(x)


def test_the_report_leaves_tensors_in_plain_attributes_as_they_are() -> None:
    counting = Counting()
    model = nn.Sequential(counting, nn.Linear(3, 3))
    with opened(model, torch.randn(8, 5), num_stages=2) as pipe:
        pd2.traffic_report(pipe, torch.randn(8, 3), figures=V100)
    assert counting.kept["calls"] == 0


class ReadsAValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0].sum(0, keepdim=True).expand_as(x) + x


@contextlib.contextmanager
def refused(kind: type[Exception], *, match: str, model: nn.Module | None = None) -> Any:
    pipe = opened(model or mlp(), torch.randn(8, 5), num_stages=1)
    with pipe, pytest.raises(kind, match=match):
        yield pipe


def test_bad_input_is_refused_by_name() -> None:
    with refused(ValueError, match="microbatch_rows: 0") as pipe:
        pd2.traffic_report(pipe, torch.randn(8, 3), microbatch_rows=0)
    with refused(TypeError, match="figures: str given, it must be a DeviceFigures") as pipe:
        pd2.traffic_report(pipe, torch.randn(8, 3), figures="h100")
    with refused(ValueError, match="the model or its loss refuses them") as pipe:
        pd2.traffic_report(pipe)
    model = nn.Sequential(nn.Linear(5, 5), ReadsAValue())
    with refused(ValueError, match="cannot be run on tensors without", model=model) as pipe:
        pd2.traffic_report(pipe, torch.randn(8, 5))


def test_two_pipelines_have_microbatches_of_their_own_and_sum_their_copies() -> None:
    x = torch.randn(8, 5)
    with opened(mlp(), x, num_stages=2, num_microbatches=4, schedule="chimera") as pipe:
        report = pd2.traffic_report(pipe, torch.randn(8, 3), figures=V100)
        weights = sum(p.numel() for p in pipe.session.stages[0].weights.trainable.values())
    assert report.microbatch_rows == 2
    assert report.stages[0].update.messages == 2 * FLOAT * weights
