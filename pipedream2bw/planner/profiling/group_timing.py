"""Times of groups of layers, measured by running the code that stages run."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...capture.saved_bytes import SavedBytes
from ...model.clone import copies_of_buffers, structural_clone
from ...model.storages import storage_of
from ...model.trees import as_received, tensors_in
from ...stages.cut import split_into_stages
from ...stages.program import StageProgram
from .layer_groups import Group
from .prepared import LossGraph
from .timing import time_on

_WARMUP_ROUNDS = 2
_FEWEST_ROUNDS = 5

# Of groups that do the same, so many are timed: the weights of a single one would stay in a cache
# that a real stage's weights do not fit in.
_MEMBERS = 4


@dataclasses.dataclass(frozen=True)
class GroupTimes:
    """Seconds of one microbatch, and (third - first quartile) / median of forward + backward."""

    forward: float
    input_grad: float
    weight_grad: float
    spread: float

    @property
    def backward(self) -> float:
        """Seconds of both parts."""
        return self.input_grad + self.weight_grad


@dataclasses.dataclass
class _Timed:
    """A group that is timed: its program, its inputs, and its measured seconds."""

    like: int
    program: StageProgram
    inputs: list[Any]
    forward: list[float] = dataclasses.field(default_factory=list)
    backward: list[float] = dataclasses.field(default_factory=list)
    input_grad: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What :func:`measure_groups` found.

    Attributes:
        times: by kind of group, which is known by its first group's index.
        saved_bytes: by group, what autograd saves.
        kept: bytes that several groups save, with these groups.
    """

    times: dict[int, GroupTimes]
    saved_bytes: list[int]
    kept: list[tuple[int, tuple[int, ...]]]


def measure_groups(
    graph: LossGraph,
    root: nn.Module,
    groups: Sequence[Group],
    device: torch.device,
    *,
    seconds: float,
    parallel: int,
) -> Measured:
    """Times every kind of group, in ``parallel`` threads at once.

    A round runs the forwards of all timed groups in order and then their backwards in reverse
    order, as a stage does: once for all gradients, once for those of the inputs alone. The model's
    buffers and gradients stay as they are.

    Args:
        seconds: how long rounds are repeated; there are at least 5.
    """
    programs = split_into_stages(graph.captured, [group.first for group in groups])
    counter, saved, inputs = _first_pass(graph, root, programs)
    chosen: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        chosen.setdefault(group.like, []).append(index)
    timed = sorted(index for members in chosen.values() for index in _spread_out(members))
    threads_before = torch.get_num_threads()
    barrier = threading.Barrier(parallel)

    def work(number: int) -> list[_Timed]:
        try:
            torch.set_num_threads(max(1, threads_before // parallel))
            here = [_Timed(groups[i].like, programs[i], inputs[i]) for i in timed]
            _rounds(here, _own_copy(root), device, seconds, barrier)
        except BaseException:
            barrier.abort()
            raise
        return here

    try:
        if parallel == 1:
            everyone = work(0)
        else:
            with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
                futures = [pool.submit(work, number) for number in range(parallel)]
            everyone = [item for future in _in_order_of_cause(futures) for item in future.result()]
    finally:
        torch.set_num_threads(threads_before)
    kinds: dict[int, list[_Timed]] = {}
    for item in everyone:
        kinds.setdefault(item.like, []).append(item)
    times = {like: _summary(members) for like, members in kinds.items()}
    return Measured(times, saved, counter.saved_by_several())


def _in_order_of_cause(
    futures: Sequence[concurrent.futures.Future[list[_Timed]]],
) -> list[concurrent.futures.Future[list[_Timed]]]:
    """The results with those last whose thread only found the barrier broken."""
    return sorted(
        futures, key=lambda item: isinstance(item.exception(), threading.BrokenBarrierError)
    )


def _spread_out(members: Sequence[int]) -> list[int]:
    if len(members) <= _MEMBERS:
        return list(members)
    step = (len(members) - 1) / (_MEMBERS - 1)
    return [members[round(step * position)] for position in range(_MEMBERS)]


def _own_copy(root: nn.Module) -> nn.Module:
    """A clone with gradients and buffers of its own over the same weights."""
    own = {old: nn.Parameter(old.detach(), old.requires_grad) for old in root.parameters()}
    return structural_clone(root, own, copies_of_buffers(root))


def _first_pass(
    graph: LossGraph, root: nn.Module, programs: Sequence[StageProgram]
) -> tuple[SavedBytes, list[int], list[list[Any]]]:
    """Runs the model once: what autograd saves in all, bytes by group, and each group's inputs."""
    own = _own_copy(root)
    values: dict[str, Any] = dict(graph.inputs)
    counter = SavedBytes(
        map(storage_of, (*own.parameters(), *own.buffers(), *graph.inputs.values()))
    )
    saved, inputs = [], []
    results = []  # kept until all is counted: a storage is known by its address
    for program in programs:
        inputs.append(as_received([values[name] for name in program.inputs]))
        with counter:
            outputs = program.bind(own)(inputs[-1])
        saved.append(counter.end_part())
        results.append(outputs)
        values.update(zip(program.outputs, outputs, strict=True))
    return counter, saved, inputs


def _rounds(
    timed: Sequence[_Timed],
    root: nn.Module,
    device: torch.device,
    seconds: float,
    barrier: threading.Barrier,
) -> None:
    functions = [item.program.bind(root) for item in timed]
    barrier.wait()
    began = time.perf_counter()
    rounds = 0
    while rounds < _WARMUP_ROUNDS + _FEWEST_ROUNDS or time.perf_counter() < began + seconds:
        for only_inputs in (False, True):
            _round(timed, functions, device, only_inputs=only_inputs)
        rounds += 1
        if rounds == _WARMUP_ROUNDS:
            for item in timed:
                for times in (item.forward, item.backward, item.input_grad):
                    times.clear()


def _round(
    timed: Sequence[_Timed],
    functions: Sequence[Callable[[Sequence[Any]], list[Any]]],
    device: torch.device,
    *,
    only_inputs: bool,
) -> None:
    graphs = []
    for item, function in zip(timed, functions, strict=True):
        leaves = as_received(item.inputs)
        start = time_on(device)
        outputs = function(leaves)
        end = time_on(device)
        if not only_inputs:
            item.forward.append(end - start)
        graphs.append((leaves, [t for t in tensors_in(outputs) if t.requires_grad]))
        del outputs
    for item in reversed(timed):
        leaves, outputs = graphs.pop()
        gradients = [torch.ones_like(output) for output in outputs]
        wanted = [leaf for leaf in tensors_in(leaves) if leaf.requires_grad]
        start = time_on(device)
        if not only_inputs:
            if outputs:
                torch.autograd.backward(outputs, gradients)
            item.backward.append(time_on(device) - start)
        elif outputs and wanted:
            torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            item.input_grad.append(time_on(device) - start)
        else:
            item.input_grad.append(0.0)


def _summary(members: Sequence[_Timed]) -> GroupTimes:
    both = [
        forward + backward
        for item in members
        for forward, backward in zip(item.forward, item.backward, strict=True)
    ]
    quarters = statistics.quantiles(both, n=4)
    middle = statistics.median(both)
    backward = statistics.median(t for item in members for t in item.backward)
    input_grad = min(backward, statistics.median(t for item in members for t in item.input_grad))
    return GroupTimes(
        statistics.median(t for item in members for t in item.forward),
        input_grad,
        backward - input_grad,
        (quarters[-1] - quarters[0]) / middle if middle else 0.0,
    )
