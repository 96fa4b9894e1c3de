"""Forwards and backwards that are recorded as graphs of a stage's device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from .. import _C
from .microbatch_kinds import MicrobatchKinds, refusal
from .run_again import with_tensors
from .runner import MicrobatchInputs, RunInputs, StageOptions, StageRunner, while_alive
from .stage_weights import StageWeights

_SHARE_OF_MEMORY = 4
"""The graphs of a process take up to this part of its device's memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageGraphs:
    """What the graphs of one stage have done since the pipeline was made.

    Attributes:
        num_graphs: how many there are now.
        bytes: of device memory that belongs to them, now: the activations of recorded microbatches
            and what is computed between.
        forwards, backwards: how many have been given to the device as a graph.
        others: by reason, how many actions were executed as usual.
    """

    num_graphs: int
    bytes: int
    forwards: int
    backwards: int
    others: Mapping[str, int]


def graphs_of(report: _C.GraphReport) -> StageGraphs:
    """Reads the engine's report, which has the same names."""
    names = [field.name for field in dataclasses.fields(StageGraphs)]
    return StageGraphs(**{name: getattr(report, name) for name in names})


class _Looked(NamedTuple):
    """What has been taken out of a run's inputs for a forward that comes next, or never."""

    run: int
    microbatch: int
    inputs: RunInputs
    given: MicrobatchInputs


class RecordingRunner(StageRunner):
    """A runner some of whose forwards are recorded, and are not called again for their kind."""

    def __init__(
        self, stage: int, num_stages: int, weights: StageWeights, options: StageOptions
    ) -> None:
        super().__init__(stage, num_stages, weights, options)
        self._kinds = MicrobatchKinds(self.buffer_places)
        self._looked: _Looked | None = None

    def look(self, call: _C.ForwardCall) -> _C.GivenInputs:
        """Takes what a microbatch of a train_step is given, before :meth:`forward` or instead."""
        inputs, given = self.take(call)
        self._looked = _Looked(call.run, call.microbatch, inputs, given)
        if call.microbatch == 0:
            self._kinds.look_at_buffers()
        share = inputs.sizes[call.microbatch] / inputs.total_rows if self._metrics else None
        leaves, structure = pytree.tree_flatten((given.values, given.target))
        # Of a forward that has called add_loss() the weight is a constant, too.
        weight = given.loss_weight if self.adds_losses else None
        kind = self._kinds.number(leaves, structure, weight, share)
        return _C.GivenInputs(given.tensors(), kind, self._kinds.refusal or refusal(leaves))

    def forward(self, call: _C.ForwardCall) -> _C.ForwardResult:
        """Runs one microbatch."""
        looked = self._looked
        if call.given is not None:
            assert looked is not None, "look() comes before a recording"
            given = with_tensors(looked.given, call.given)
            with self._kinds.recording():
                return self.train(looked.inputs, given, call)
        if call.again:
            return super().forward(call)
        self._looked = None
        if looked is not None and (looked.run, looked.microbatch) == (call.run, call.microbatch):
            return self.train(looked.inputs, looked.given, call)
        return super().forward(call)


def graph_setup(runner: StageRunner, options: StageOptions, num_stages: int) -> _C.GraphSetup:
    """How a stage, one of so many of this process, uses graphs."""
    if not isinstance(runner, RecordingRunner):
        return _C.GraphSetup()
    return _C.GraphSetup(
        always=options.pipeline.graphs is True,
        look=while_alive(runner.look),
        most_bytes=most_bytes_of(runner.device, num_stages),
    )


def most_bytes_of(device: torch.device, num_stages: int) -> int | None:
    """What the graphs of one of so many stages may take up; None: there is no bound."""
    if device.type != "cuda":
        return None
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return memory // _SHARE_OF_MEMORY // num_stages
