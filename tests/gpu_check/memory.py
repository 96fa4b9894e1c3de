"""The allocator's peak over what memory_report() says."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2
from pipedream2bw.runtime.stage_memory import StageMemory

from .blocks import blocks
from .device import Device
from .section import Rows
from .training import adamw_of, has_pass

NUM_STAGES, M, BATCHES = 2, 4, 4
AT_MOST = 1.05
HELD_BYTES = 32 << 20
"""Of gradients that wait to be added on a device, if a microbatch has so many."""
CONFIGURATIONS = (
    ("2bw", None, False),
    ("1f1b", None, False),
    ("gpipe", None, False),
    ("2bw", "bf16", False),
    ("2bw", "bf16", True),
    ("1f1b", "bf16", False),
)
"""Schedule, precision, and whether masters are split."""


def run(device: Device, rows: Rows) -> None:
    large = device.is_gpu
    number, width, rows_each, length = (12, 1024, 2, 512) if large else (4, 128, 1, 16)
    train(device, torch.randn(M, 8, 64), (2, 64), CONFIGURATIONS[0])  # loads what libraries load
    for configuration in CONFIGURATIONS if large else CONFIGURATIONS[::4]:
        if configuration[2] and not has_pass(device):
            rows.absent("split masters", "no pass of the engine's for this device")
            continue
        x = torch.randn(M * rows_each, length, width)
        peak, report = train(device, x, (number, width), configuration)
        schedule, precision, is_split = configuration
        name = f"{schedule}, {precision or 'float32'}{', split masters' * is_split}"
        total = sum(stage.total for stage in report.values())
        rows.figure(f"{name}: peak / report", peak / total, at_most=AT_MOST)
        added_later = sum(min(HELD_BYTES, stage.gradients) for stage in report.values())
        rows.check(
            f"{name}: the peak is the report's",
            0.8 * total <= peak <= AT_MOST * total + added_later,  # stages peak at other times
            f"{peak:,} of {total:,} and {added_later:,} that wait to be added",
        )


def train(
    device: Device,
    x: torch.Tensor,
    size: tuple[int, int],
    configuration: tuple[str, str | None, bool],
) -> tuple[int, dict[int, StageMemory]]:
    """Bytes by which the peak lies above what there was before the model, and the report."""
    schedule, precision, is_split = configuration
    gc.collect()
    device.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    model = blocks(*size, device.torch)
    with pd2.PipelineModule(
        model,
        lambda output, target: F.mse_loss(output.float(), target),
        num_stages=NUM_STAGES,
        num_microbatches=M,
        schedule=schedule,
        example_args=(x[:M].to(device.torch),),
        precision=precision,
        split_master=is_split,
        timeout=60.0,
    ) as pipe:
        del model
        opt = pd2.PipelineOptimizer(adamw_of(device, pipe.parameters()))
        for _ in range(BATCHES):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()
        device.synchronize()
        return torch.accelerator.max_memory_allocated() - before, pipe.memory_report()
