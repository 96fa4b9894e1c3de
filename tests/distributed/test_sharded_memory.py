"""What replicas take up, and send, that share out masters and optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from benchmarks.measuring.memory import resident_bytes
from pipedream2bw.model.storages import return_freed_memory
from pipedream2bw.optimizer.shares import is_divided
from tests.distributed.test_replica_sums import bytes_sent
from tests.exhaustive import exhaustive
from tests.runs.launch import run_ranks

HALF: dict[str, Any] = {"precision": "bf16"}
NARROW: dict[str, Any] = {"precision": "bf16", "gradient_dtype": torch.bfloat16}
NUMEL, COUNT = 128 * 128, 8


def square_model() -> list[nn.Module]:
    return [nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(COUNT)))]


def measured(world: int, **options: Any) -> dict[str, float]:
    """Of a parameter: what is reported, what masters and moments take up, and bytes sent."""
    x = torch.ones(2, 128)
    with pd2.PipelineModule(
        square_model(),
        mse_loss,
        num_microbatches=2,
        width=world,
        example_args=(x,),
        **options,
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01), shard_state=True)
        sent = bytes_sent(pipe, opt, x, 2)
        (report,), (stage,) = pipe.memory_report().values(), pipe.session.stages
        engine, slot = stage.weights.engine, stage.weights.engine.newest_slot
        owned = [i for i in range(COUNT) if engine.owns(i)]
        masters = [engine.master(slot, i) for i in owned if options]
        tensors = [master for master in masters if master is not None]
        for name in ("exp_avg", "exp_avg_sq"):
            tensors += [engine.optimizer_state(name, i) for i in owned]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        reported = report.weights + report.gradients + report.masters + report.optimizer_state
        return {
            "reported": reported / (COUNT * NUMEL),
            "padding": report.padding,
            "kept": sum(each.nbytes() for each in storages.values()) / (COUNT * NUMEL),
            "sent": sent / (2 * COUNT * NUMEL),
        }


def all_measured(rank: int, world: int) -> list[dict[str, float]]:
    return [measured(world, precision="bf16"), measured(world), measured(world, **NARROW)]


@pytest.mark.parametrize("world", [2, 4])
def test_a_parameter_takes_8_and_12_over_w_bytes(world: int) -> None:
    results = [result.value for result in run_ranks(all_measured, world, timeout=100)]
    for half, full, narrow in results:
        assert half["reported"] == 8 + 12 / world
        assert half["kept"] == pytest.approx(12 / world, abs=0.01)
        assert full["reported"] == 12 + 8 / world
        assert full["kept"] == pytest.approx(8 / world, abs=0.01)
        assert narrow["reported"] == 6 + 12 / world
        assert narrow["kept"] == pytest.approx(12 / world, abs=0.01)
    # Gradients to whom they belong, and from there the weights as the stages compute with them.
    for number, each in enumerate((4 + 2, 4 + 4, 2 + 2)):
        sent = sum(result[number]["sent"] for result in results) / world
        assert sent == pytest.approx(each * (world - 1) / world, rel=0.02)


def wide_model() -> nn.Sequential:
    """Two matrices, which three replicas have to cut."""
    return nn.Sequential(nn.Linear(16, 1000), nn.Tanh(), nn.Linear(1000, 16))


def planned_and_held(rank: int, world: int) -> tuple[float, int, bool]:
    """Bytes of masters and moments, as planned and as they are, and whether a parameter is cut."""
    x = torch.ones(2 * world, 16)
    profile = pd2.profile(
        wide_model().bfloat16(),
        mse_loss,
        example_args=(x[:2].bfloat16(),),
        target=x[:2].bfloat16(),
        microbatch_rows=(1, 2),
        dry=pd2.KNOWN_DEVICES["h100"],
    )
    sizes: dict[str, Any] = {"devices": world, "width": world, "num_stages": 1, "batch": 2 * world}
    plan = pd2.plan(
        profile, memory="1GiB", schedules="2bw", shard_state=True, recompute="none", **HALF, **sizes
    )
    with pd2.PipelineModule(
        wide_model(), mse_loss, plan=plan, example_args=(x[:1],), **HALF
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01), shard_state=True)
        pipe.train_step(x[:2], target=x[:2])
        opt.step()
        pipe.flush()
        (report,), (stage,) = pipe.memory_report().values(), pipe.session.stages
        cut = [is_divided(stage.weights, i) for i in range(len(stage.weights.trainable))]
    return plan.stages[0].state_bytes, report.masters + report.optimizer_state, any(cut)


def test_replicas_hold_the_share_that_is_planned_but_for_a_sixteenth() -> None:
    results = [result.value for result in run_ranks(planned_and_held, 3, timeout=100)]
    assert all(has_cut for _, _, has_cut in results)
    (planned,) = {each for each, _, _ in results}
    assert planned == 12 * sum(p.numel() for p in wide_model().parameters()) / 3
    assert sum(held for _, held, _ in results) == 3 * planned
    assert max(held for _, held, _ in results) <= planned * 17 / 16


LARGE, NUM_LARGE = 512, 160


def large_model() -> list[nn.Module]:
    return [nn.Sequential(*(nn.Linear(LARGE, LARGE, bias=False) for _ in range(NUM_LARGE)))]


def grown(rank: int, world: int, options: dict[str, Any]) -> dict[str, float]:
    """Of a parameter: bytes by which training grows the process at most, and what is reported.

    Also by how many at most until the optimizer is there.
    """
    torch.set_num_threads(1)
    x = torch.ones(2, LARGE)
    trained_one_batch(square_model(), torch.ones(2, 128), world, options)  # loads the libraries
    return_freed_memory()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with pipeline_of(large_model(), x, world, options) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01), shard_state=True)
        while_made = resident_bytes("VmHWM") - before
        return_freed_memory()
        # What the model took up before the pipeline took it over, and whole masters, are gone. On a
        # busy machine a rank that waits holds more buckets in most batches: not in all.
        growths = []
        for _ in range(10):
            return_freed_memory()
            Path("/proc/self/clear_refs").write_text("5")
            for _ in range(2):
                pipe.train_step(x, target=x)
                opt.step()
            pipe.flush()
            growths.append(resident_bytes("VmHWM") - before)
        growth = min(growths)
        (report,) = pipe.memory_report().values()
    held = report.weights + report.gradients + report.masters + report.optimizer_state
    count = NUM_LARGE * LARGE**2
    found = {"while made": while_made, "grown": growth, "total": report.total, "held": held}
    return {name: nbytes / count for name, nbytes in found.items()}


def pipeline_of(
    model: list[nn.Module], x: torch.Tensor, world: int, options: dict[str, Any]
) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        model,
        mse_loss,
        num_microbatches=2,
        width=world,
        example_args=(x,),
        bucket_cap_mb=1.0,
        **options,
    )


def trained_one_batch(
    model: list[nn.Module], x: torch.Tensor, world: int, options: dict[str, Any]
) -> None:
    with pipeline_of(model, x, world, options) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01), shard_state=True)
        pipe.train_step(x, target=x)
        opt.step()


@pytest.mark.parametrize(
    ("options", "whole", "world"),
    exhaustive((HALF, 8, 2), (NARROW, 6, 4), (HALF, 8, 4), (NARROW, 6, 2)),
)
def test_a_process_grows_by_6_or_8_and_12_over_w_bytes_a_parameter(
    options: dict[str, Any], whole: int, world: int
) -> None:
    for result in run_ranks(grown, world, args=(options,), timeout=120):
        found = result.value
        print({name: round(nbytes, 2) for name, nbytes in found.items()}, "bytes a parameter")
        assert found["held"] == whole + 12 / world
        assert found["held"] < found["total"] < 1.01 * found["held"]
        assert found["held"] < found["grown"] < 1.05 * found["total"]
        # Whole masters, beside the model that it takes over and its weights in bfloat16.
        assert found["while made"] < 1.05 * (whole + 4 + 4 + 2)
