"""Keeps streams and threads late by random times: whoever does not wait for them is found."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .device import Device

STREAMS_OF_A_POOL = 32  # c10/cuda/CUDAStream.h: streams of one priority are given out in turn
# Of streams: a priority beyond those that there are is the highest, which messages have. Stages'
# own work has the one above the lowest: csrc/engine/cuda_streams.cpp.
LOWEST, OF_STAGES, HIGHEST = 0, -1, -100
LONGEST = 1e-3
PAUSE = 1e-3  # between two rounds of sleeping kernels


class Jitter:
    """While it is entered, work of every stream of the device begins late.

    A thread of its own puts sleeping kernels on all streams of the device's pools, of which the
    library's are some; ``into`` lets a model's layers sleep before their forward and their
    backward, on the stream of these; ``here`` is for the caller's.
    """

    def __init__(self, device: Device, seed: int) -> None:
        self._device = device
        self._chance = random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._disturb, name="jitter")

    def __enter__(self) -> Jitter:
        if self._device.is_gpu:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def here(self, *_: object) -> None:
        """The current stream and the calling thread."""
        if self._chance.random() < 0.5:
            self._device.sleep(self._chance.random() * LONGEST)
        if self._chance.random() < 0.1:
            time.sleep(self._chance.random() * LONGEST)

    def into(self, model: nn.Module) -> nn.Module:
        """``here`` before and after each layer's forward, and in its backward."""

        def before(module: nn.Module, args: Any) -> None:
            self.here()

        def after(module: nn.Module, args: Any, result: Any) -> None:
            self.here()
            for tensor in pytree.tree_leaves(result):
                if type(tensor) is torch.Tensor and tensor.requires_grad:
                    tensor.register_hook(self.here)

        for module in model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)
        return model

    def _disturb(self) -> None:
        module = self._device.module
        streams = [
            module.Stream(self._device.torch, priority=priority)
            for priority in (LOWEST, OF_STAGES, HIGHEST)
            for _ in range(STREAMS_OF_A_POOL)
        ]
        chance = random.Random(self._chance.random())
        while not self._ended.is_set():
            chance.shuffle(streams)
            for stream in streams:
                with self._device.on(stream):
                    self._device.sleep(chance.random() * LONGEST)
            for stream in streams:  # or they would pile up: the device has fewer queues
                stream.synchronize()
            time.sleep(PAUSE)
