"""The allocator's peak over what memory_report() says."""

from __future__ import annotations

import functools
import gc
import os

import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2
from pipedream2bw.runtime.stage_memory import StageMemory

from .blocks import blocks
from .device import Device, open_device
from .ranks import on_ranks, patience, together
from .section import Pace, Rows
from .training import adamw_of, has_pass

NUM_STAGES, M, BATCHES = 2, 4, 4
AT_MOST = 1.05
HELD_BYTES = 32 << 20
"""Of gradients that wait to be added on a device, if a microbatch has so many."""
M_OF_MESSAGES = 16
MESSAGE_ON_A_GPU, MESSAGE_ELSEWHERE = (4096, 1024), (64, 64)
"""Sequence and width; of so many bytes that what the allocator keeps of messages shows."""
LEAST_OF_PROCESSES = 9.0  # seconds, in which processes have started and done little
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
    pace = Pace(rows)
    train(device, torch.randn(M, 8, 64), (2, 64), CONFIGURATIONS[0])  # loads what libraries load
    for configuration in CONFIGURATIONS if large else CONFIGURATIONS[::4]:
        schedule, precision, is_split = configuration
        name = f"{schedule}, {precision or 'float32'}{', split masters' * is_split}"
        if is_split and not has_pass(device):
            rows.absent(name, "no pass of the engine's for this device")
            continue
        if not pace.has_time(name):
            continue
        with rows.guarded(name):
            x = torch.randn(M * rows_each, length, width)
            judge(rows, name, *train(device, x, (number, width), configuration))
    name = "2bw, messages of 16 MiB"
    if pace.has_time(name):
        with rows.guarded(name):
            message = MESSAGE_ON_A_GPU if large else MESSAGE_ELSEWHERE
            x = torch.randn(M_OF_MESSAGES, *message, device=device.torch)  # the caller's own memory
            size = (2, x.shape[-1])
            peak, report = train(device, x, size, CONFIGURATIONS[0], m=M_OF_MESSAGES, batches=10)
            judge(rows, name, peak, report)
    with rows.guarded("workspaces"):
        note_workspaces(device, rows)


def judge(rows: Rows, name: str, peak: int, report: dict[int, StageMemory]) -> None:
    total = sum(stage.total for stage in report.values())
    detail = f"{peak:,} of {total:,} bytes"
    rows.figure(f"{name}: peak / report", peak / total, at_most=AT_MOST, detail=detail)
    added_later = sum(min(HELD_BYTES, stage.gradients) for stage in report.values())
    rows.check(
        f"{name}: the peak is the report's",
        0.8 * total <= peak <= AT_MOST * total + added_later,  # stages peak at other times
        f"{peak:,} of {total:,} and {added_later:,} that wait to be added",
    )


def note_workspaces(device: Device, rows: Rows) -> None:
    """What cuBLAS takes for a stream by default; the section's own environment has it take less."""
    if not device.is_gpu:
        rows.absent("cuBLAS's workspaces", "they are CUDA's")
        return
    if not rows.has_time("cuBLAS's workspaces", LEAST_OF_PROCESSES):
        return
    settings = (None, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    together(device, [functools.partial(note_workspace, device, rows, each) for each in settings])


def note_workspace(device: Device, rows: Rows, setting: str | None) -> None:
    name = f"cuBLAS's workspace of a stream, {setting or 'by default'}, bytes"
    with rows.guarded(name):
        results = on_ranks(
            device,
            rows,
            name,
            workspace_bytes,
            1,
            seconds=patience(rows),
            rendezvous="none",
            env={"CUBLAS_WORKSPACE_CONFIG": setting},
        )
        if results is not None:
            kept, most = results[0].value
            rows.figure(name, kept, detail=f"kept {kept:,}, at most {most:,} meanwhile")


def workspace_bytes(rank: int, world_size: int, device_type: str) -> tuple[int, int]:
    """What a product on a new stream leaves allocated beside its result, and its peak."""
    device = open_device(device_type)
    factor = torch.randn(1024, 1024, device=device.torch)
    product = factor @ factor
    device.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with device.on(device.new_stream()):
        torch.mm(factor, factor, out=product)
    device.synchronize()
    return (
        torch.accelerator.memory_allocated() - before,
        torch.accelerator.max_memory_allocated() - before,
    )


def train(
    device: Device,
    x: torch.Tensor,
    size: tuple[int, int],
    configuration: tuple[str, str | None, bool],
    *,
    m: int = M,
    batches: int = BATCHES,
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
        num_microbatches=m,
        schedule=schedule,
        example_args=(x[:m].to(device.torch),),
        precision=precision,
        split_master=is_split,
        timeout=60.0,
    ) as pipe:
        del model
        opt = pd2.PipelineOptimizer(adamw_of(device, pipe.parameters()))
        for _ in range(batches):
            pipe.train_step(x, target=x)
            opt.step()
        pipe.flush()
        device.synchronize()
        return torch.accelerator.max_memory_allocated() - before, pipe.memory_report()
