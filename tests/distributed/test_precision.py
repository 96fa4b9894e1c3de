"""Mixed precision under processes: masters, and one scale that every rank decides alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.references.mixed_oracle import MixedOracle, clip_norm, half_away, lowered
from tests.runs.launch import run_ranks
from tests.runs.trajectory import copy_of, make_pipeline
from tests.unit.optimizer.test_loss_scale import SCALE
from tests.unit.training.test_precision import DTYPES, SKIPS, sgd

NUM_BATCHES = 7


NARROW: dict[str, Any] = {"gradient_dtype": torch.bfloat16}


def check(
    width: int,
    schedule: str,
    precision: str,
    max_grad_norm: float | None = None,
    shard_state: bool = False,
    **options: Any,
) -> None:
    """On every rank; each compares what it holds. Of fp16 only the last replica overflows."""
    d = torch.distributed.get_world_size() // width
    m = d + 1
    own = torch.distributed.get_rank() // d
    by_replica = [SKIPS.batches([2 * m] * NUM_BATCHES, seed=10 + r) for r in range(width)]
    scaled = precision == "fp16"
    if scaled:
        by_replica[-1][2].args[0][1] *= 3e4
    model = SKIPS.model()
    oracle = MixedOracle(
        model,
        lowered(model, DTYPES[precision]),
        sgd(model.parameters()),
        m,
        SKIPS.loss_fn,
        int(schedule == "2bw"),
        dtype=DTYPES[precision],
        narrow="gradient_dtype" in options,
        clip=lambda parameters: max_grad_norm and clip_norm(parameters, max_grad_norm),
        scale=SCALE.init_scale if scaled else None,
        growth_interval=SCALE.growth_interval,
        round_to=half_away if options.get("split_master") else lambda weight: weight,
    )
    want = [oracle.train_replicas(batches)[own] for batches in zip(*by_replica, strict=True)]
    assert bool(oracle.num_overflows) == scaled
    with make_pipeline(
        SKIPS,
        d,
        m,
        by_replica[0][0],
        width=width,
        schedule=schedule,
        precision=precision,
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(
            sgd(pipe.parameters()),
            loss_scale=SCALE if scaled else None,
            max_grad_norm=max_grad_norm,
            shard_state=shard_state,
        )
        losses, scales = [], []
        for batch in by_replica[own]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            scales.append(opt.loss_scale if scaled else 1.0)
        state = copy_of(pipe.state_dict())
        assert [float(scale) for scale in scales] == oracle.scales[1:]
        moments = copy.deepcopy(opt.state_dict())
        whole = pipe.full_state_dict()
        pipe.load_state_dict(model.state_dict())
        opt.load_state_dict(moments)
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        ours = [float(loss) for loss in losses]
    assert str(ours) == str(want)
    for name, tensor in (*state.items(), *whole.items()):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.state_dict()[name]), name


def masters(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    for schedule in ("2bw", "1f1b"):
        for precision in ("bf16", "fp16"):
            check(width, schedule, precision)
    check(width, "2bw", "bf16", split_master=True)
    with delays_everywhere(0.02):
        for precision in ("bf16", "fp16"):
            check(width, "2bw", precision)


def narrow_gradients(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    for schedule in ("2bw", "1f1b"):
        check(width, schedule, "bf16", **NARROW)
    check(width, "2bw", "bf16", split_master=True, max_grad_norm=0.05, **NARROW)
    small = {"bucket_cap_mb": 1e-6, "shard_state": True}
    check(width, "2bw", "bf16", max_grad_norm=0.05, **small, **NARROW)
    check(width, "1f1b", "bf16", **small, **NARROW)
    with delays_everywhere(0.02):
        check(width, "2bw", "bf16", shard_state=True, **NARROW)


@pytest.mark.parametrize(("world", "width"), [(4, 2), *exhaustive((2, 1), (2, 2))])
def test_masters_and_scales_are_the_definitions(world: int, width: int) -> None:
    run_ranks(masters, world, args=(width,), timeout=180.0)


@pytest.mark.parametrize(("world", "width"), [(4, 2), *exhaustive((2, 1), (2, 2), (4, 4))])
def test_sums_in_bfloat16_are_the_definitions(world: int, width: int) -> None:
    run_ranks(narrow_gradients, world, args=(width,), timeout=180.0)
