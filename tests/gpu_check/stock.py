"""The GPT trained by torch alone: unsplit, and by torch.distributed.pipelining's 1F1B."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from .device import Device
from .gpt import Size, loss_fn, stages
from .training import adamw_of

HOST = torch.device("cpu")


class Masters:
    """Gives a model bfloat16 weights, of which AdamW steps float32 masters.

    A microbatch's gradients are added to the masters' as soon as autograd has them: in float32, as
    the pipeline does.
    """

    def __init__(self, device: Device, model: nn.Module) -> None:
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model.bfloat16()
        self._masters: list[torch.Tensor] = [*masters]
        self._weights: list[torch.Tensor] = list(model.parameters())
        for weight, master in zip(self._weights, masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(functools.partial(_add, master))
        self._optimizer = adamw_of(device, masters, fused=device.is_gpu)

    @torch.no_grad()
    def step(self) -> None:
        self._optimizer.step()
        torch._foreach_copy_(self._weights, self._masters)
        torch._foreach_zero_([m.grad for m in self._masters if m.grad is not None])


def _add(master: nn.Parameter, weight: torch.Tensor) -> None:
    assert master.grad is not None
    assert weight.grad is not None
    master.grad.add_(weight.grad)
    weight.grad = None


class LateNumber:
    """A device's number, for which the host waits no longer than for what comes before it."""

    def __init__(self, device: Device, value: torch.Tensor) -> None:
        self._host = torch.empty(value.shape, dtype=value.dtype).pin_memory()
        self._host.copy_(value, non_blocking=True)
        self._is_there = device.module.Event()
        self._is_there.record()

    def __float__(self) -> float:
        self._is_there.synchronize()
        return self._host.item()


Step = Callable[[torch.Tensor, torch.Tensor], "LateNumber | float"]


def unsplit(device: Device, size: Size) -> Step:
    """Gradients of the microbatches accumulated; gives the loss."""
    (model,) = stages(size, 1, device.torch)
    masters, m = Masters(device, model), size.num_microbatches

    def step(tokens: torch.Tensor, target: torch.Tensor) -> LateNumber:
        losses = []
        for part, after in zip(tokens.chunk(m), target.chunk(m), strict=True):
            loss = loss_fn(model(part), after) / m
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        masters.step()
        return LateNumber(device, torch.stack(losses).sum())

    return step


class OverHosts(nn.Module):
    """A stage on a device whose values come from the host and go there, for gloo's messages."""

    def __init__(self, stage: nn.Module, device: torch.device, *, is_last: bool) -> None:
        super().__init__()
        self.stage = stage
        self._device = device
        self._is_last = is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.stage(x.to(self._device))
        return y if self._is_last else y.to(HOST)


def one_f_one_b(
    device: Device, size: Size, rank: int, num_stages: int, *, over_hosts: bool
) -> Step:
    """A rank's part of a step; gives the loss on the last one, 0 on others.

    Args:
        over_hosts: the process group knows no tensors of the device.
    """
    module: nn.Module = stages(size, num_stages, device.torch)[rank]
    masters, m = Masters(device, module), size.num_microbatches
    is_last = rank == num_stages - 1
    if over_hosts:
        module = OverHosts(module, device.torch, is_last=is_last)
    there = HOST if over_hosts else device.torch

    def scaled_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(logits, target) / m

    schedule = Schedule1F1B(
        PipelineStage(module, rank, num_stages, there), m, scaled_loss, scale_grads=False
    )

    def step(tokens: torch.Tensor, target: torch.Tensor) -> LateNumber | float:
        losses: list[torch.Tensor] = []
        args = (tokens.to(there),) if rank == 0 else ()
        given = target if is_last else None
        schedule.step(*args, target=given, losses=losses, return_outputs=False)
        masters.step()
        return LateNumber(device, torch.stack(losses).detach().sum()) if is_last else 0.0

    return step
