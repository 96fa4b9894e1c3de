"""Forwards and backwards that are recorded as graphs of a stage's device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from .. import _C
from .microbatch_kinds import RecordedForwards
from .runner import StageOptions, StageRunner, while_alive

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
    """Reads the engine's report."""
    return StageGraphs(
        num_graphs=report.num_graphs,
        bytes=report.bytes,
        forwards=report.forwards,
        backwards=report.backwards,
        others=dict(report.others),
    )


def with_graphs(runner: StageRunner, options: StageOptions) -> StageRunner | RecordedForwards:
    """What runs a stage's forwards for the engine: the runner itself, unless some are recorded."""
    if options.pipeline.graphs is False:
        return runner
    return RecordedForwards(runner, has_metrics=bool(options.metrics))


def graph_setup(
    forwards: StageRunner | RecordedForwards,
    graphs: bool | str,
    device: torch.device,
    num_stages: int,
) -> _C.GraphSetup:
    """How a stage, one of so many of this process, uses graphs."""
    if isinstance(forwards, StageRunner):
        return _C.GraphSetup()
    most_bytes = most_bytes_of(device, num_stages)
    look = while_alive(forwards.look)
    return _C.GraphSetup(always=graphs is True, look=look, most_bytes=most_bytes)


def most_bytes_of(device: torch.device, num_stages: int) -> int | None:
    """What the graphs of one of so many stages may take up; None: there is no bound."""
    if device.type != "cuda":
        return None
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return memory // _SHARE_OF_MEMORY // num_stages
