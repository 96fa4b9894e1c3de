"""Frozen layers whose weights are fetched when they are used: a stage larger than its device."""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import math
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ..checks import check_whole_number
from ..model.hooks import has_hooks
from ..rules import instance
from ..runtime.extension import Extension, HeldBytes

_Use = tuple[str, bool]
"""A layer's file, and whether its backward uses the weights."""

_Coming = concurrent.futures.Future[Callable[[], list[torch.Tensor]]]
"""Gives what hands weight and bias over to the thread that computes."""


class _Layer(NamedTuple):
    path: Path
    shapes: list[torch.Size]  # of weight and bias
    dtype: torch.dtype
    ahead: int

    def read(self) -> list[torch.Tensor]:
        """Maps the file into memory, which it leaves when the tensors do."""
        sizes = [math.prod(shape) * self.dtype.itemsize for shape in self.shapes]
        if (found := self.path.stat().st_size) != sum(sizes):
            raise ValueError(
                f"{self.path}: {found} bytes, the layer has {sum(sizes)}: the file was changed. "
                "Call stream_weights() again"
            )
        whole: Any = torch.from_file(str(self.path), shared=False, size=found, dtype=torch.uint8)
        whole[:: mmap.PAGESIZE].sum()  # reads every page, in this thread
        parts = zip(whole.split(sizes), self.shapes, strict=True)
        return [part.view(self.dtype).view(shape) for part, shape in parts]


_layers: dict[str, _Layer] = {}
"""By file; those that this process has used."""


class StreamedWeights(Extension):
    """What :func:`stream_weights` has made.

    As an extension of the optimizer it has ``memory_report()`` count the layers that are there.

    Attributes:
        nbytes: of all weights that are in files now.
        most_bytes: that one thread holds at a time, of layers in use and fetched ahead.
    """

    def __init__(self, sizes: list[int], ahead: int) -> None:
        self.nbytes = sum(sizes)
        self.most_bytes = sum(sorted(sizes)[-1 - ahead :])

    def bytes_of(self, stage: int) -> HeldBytes:
        return HeldBytes(frozen_weights=self.most_bytes)


class StreamedLinear(nn.Module):
    """A frozen ``nn.Linear`` without weights in memory; ``weight`` and ``bias`` are new copies."""

    def __init__(self, layer: nn.Linear, kept: _Layer) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kept = kept
        # Whoever loads a state compares shapes: so the digest is one. It takes no memory.
        digest = torch.empty(0, int(kept.path.stem[-16:], 16) >> 1, dtype=torch.bool)
        self.register_buffer("digest_of_weights", digest)

    @property
    def weight(self) -> torch.Tensor:
        return self._read()[0]

    @property
    def bias(self) -> torch.Tensor | None:
        return next(iter(self._read()[1:]), None)

    def _read(self) -> list[torch.Tensor]:
        device = self.get_buffer("digest_of_weights").device
        return [tensor.to(device) for tensor in self.kept.read()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        file = str(self.kept.path)
        _layers.setdefault(file, self.kept)  # a copy may come from another process
        y: torch.Tensor = _streamed_linear(x, file, self.in_features, self.out_features)
        return y


def stream_weights(
    model: nn.Module, folder: str | os.PathLike[str], *, ahead: int = 1, least_bytes: int = 1 << 20
) -> StreamedWeights:
    """Puts the weights of a model's frozen linear layers into files, and fetches them when used.

    So a stage may be larger than its device: at a time it holds the layer in use and those that
    are fetched ahead, in another thread. Which layers come next is what came next last time. A
    forward and a backward fetch a layer once each. Results have the bits of ``nn.Linear``. Call it
    before the pipeline is made. ``state_dict()`` and checkpoints have a digest of these weights,
    as a shape. The idea of units that are resident in turn is Superpipeline's (arXiv 2410.08791).

    >>> model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     streamed = pd2.stream_weights(model, folder, least_bytes=0)
    ...     y = model(torch.randn(2, 4))
    >>> streamed.nbytes
    80

    Args:
        model: whose layers are replaced, but for those with hooks or with a parameter that is
            trained.
        folder: on a disk of the machine. Names of files follow from the weights: processes and
            models may share it.
        ahead: layers that are fetched ahead.
        least_bytes: smaller layers stay in memory.

    Raises:
        ValueError, TypeError: ``ahead`` or ``least_bytes`` is no whole number in its range; no
            layer is frozen and large enough, or one is on meta; ``model`` is no module.
    """
    instance("a torch.nn.Module", nn.Module).check("model", model)
    check_whole_number("ahead", ahead)
    check_whole_number("least_bytes", least_bytes, at_least=0)
    at = Path(folder)
    at.mkdir(parents=True, exist_ok=True)
    sizes = []
    made: dict[int, StreamedLinear] = {}  # a layer in two places stays one
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        tensors = list(layer.parameters(recurse=False))
        size = sum(tensor.nbytes for tensor in tensors)
        stays = has_hooks(layer) or any(tensor.requires_grad for tensor in tensors)
        if type(layer) is nn.Linear and name and size >= least_bytes and not stays:
            if id(layer) not in made:
                made[id(layer)] = StreamedLinear(layer, _written(at, name, tensors, ahead))
                sizes.append(size)
            model.set_submodule(name, made[id(layer)])
    if not sizes:
        raise ValueError(
            f"stream_weights: 0 frozen nn.Linear of {least_bytes} bytes or more in the model, it "
            "must be one at least: call requires_grad_(False) first, or give a smaller least_bytes"
        )
    return StreamedWeights(sizes, ahead)


def _written(folder: Path, name: str, tensors: list[nn.Parameter], ahead: int) -> _Layer:
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(f"stream_weights: {name} is on meta, it must have values: load them first")
    hosts = [tensor.detach().cpu().contiguous() for tensor in tensors]
    parts = [(ctypes.c_char * host.nbytes).from_address(host.data_ptr()) for host in hosts]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    path = (folder / f"{name}-{digest.hexdigest()}.bin").absolute()
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        for part in parts:
            file.write(part)
    partial.replace(path)  # another process may read it
    return _Layer(path, [tensor.shape for tensor in tensors], tensors[0].dtype, ahead)


class _Fetcher(threading.local):
    """The layers that a thread uses, and those that it will use next."""

    def __init__(self) -> None:
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "fetch")
        self._next: dict[_Use, _Use] = {}  # what came next last time
        self._last: _Use | None = None
        self._coming: dict[str, _Coming] = {}

    def take(self, use: _Use, like: torch.Tensor) -> list[torch.Tensor]:
        """Weight and bias, for this thread's stream."""
        file, device = use[0], like.device
        if like.dtype != _layers[file].dtype:
            raise ValueError(
                f"{file}: {_layers[file].dtype}, the layer's input: {like.dtype}: they must be "
                f"equal. Call .to({like.dtype}) on the frozen layers before stream_weights(), with "
                "precision=, too; and leave out autocast="
            )
        if self._last is not None:
            self._next[self._last] = use
        self._last = use
        coming = self._coming.pop(file, None) or self._reader.submit(_fetch, file, device)
        tensors = coming.result()()
        wanted: list[str] = []
        for _ in range(_layers[file].ahead):
            if (following := self._next.get(use)) is None:
                break
            use = following
            wanted.append(use[0])
        for each in [each for each in self._coming if each not in wanted]:
            self._coming.pop(each).cancel()  # and gone before others are fetched
        for each in dict.fromkeys(wanted):
            if each not in self._coming:
                self._coming[each] = self._reader.submit(_fetch, each, device)
        return tensors


_fetcher = _Fetcher()


def _fetch(file: str, device: torch.device) -> Callable[[], list[torch.Tensor]]:
    tensors = _layers[file].read()
    if device.type != "cuda":
        return lambda: [tensor.to(device) for tensor in tensors]
    copying: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(copying):
        copies = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]

    def hand_over() -> list[torch.Tensor]:
        here = torch.cuda.current_stream(device)
        here.wait_stream(copying)
        for copy in copies:
            copy.record_stream(here)
        return copies

    return hand_over


@torch.library.custom_op(
    "pipedream2bw::streamed_linear",
    mutates_args=(),
    schema="(Tensor x, str file, int in_features, int out_features) -> Tensor",
)
def _streamed_linear(x: torch.Tensor, file: str, _: int, out_features: int) -> torch.Tensor:
    return functional.linear(x, *_fetcher.take((file, False), x))


@torch.library.custom_op(
    "pipedream2bw::streamed_linear_backward",
    mutates_args=(),
    schema="(Tensor gradient, str file, int in_features) -> Tensor",
)
def _streamed_gradient(gradient: torch.Tensor, file: str, in_features: int) -> torch.Tensor:
    weight, *_ = _fetcher.take((file, True), gradient)
    rows = gradient.reshape(-1, gradient.shape[-1]) @ weight
    return rows.reshape(*gradient.shape[:-1], in_features)


@_streamed_linear.register_fake
def _shape(x: torch.Tensor, file: str, in_features: int, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@_streamed_gradient.register_fake
def _gradient_shape(gradient: torch.Tensor, file: str, in_features: int) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], in_features)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.file, ctx.in_features, _ = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return _streamed_gradient(gradient, ctx.file, ctx.in_features), None, None, None


_streamed_linear.register_autograd(_backward, setup_context=_keep)
