"""Tied weights: parameters that several stages hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from .. import _C
from .program import StageProgram


@dataclasses.dataclass(frozen=True)
class Tie:
    """Parameters that the same stages of the model hold.

    Stages are in ascending order: the first one's copy counts as the parameter.
    """

    stages: tuple[int, ...]
    names: tuple[str, ...]


def find_ties(programs: Sequence[StageProgram]) -> list[Tie]:
    """Finds the parameters that layers of several stages use, frozen ones too."""
    stages: dict[str, tuple[int, ...]] = {}
    for program in programs:
        for name in program.parameters:
            stages[name] = (*stages.get(name, ()), program.index)
    names: dict[tuple[int, ...], list[str]] = {}
    for name, holders in stages.items():
        if len(holders) > 1:
            names.setdefault(holders, []).append(name)
    return [Tie(holders, tuple(names[holders])) for holders in sorted(names)]


def check_ties(schedule: _C.Schedule, ties: Sequence[Tie], model: nn.Module) -> None:
    """Raises ValueError if stages with a common trained parameter would deadlock."""
    copies = range(0, schedule.num_stages, schedule.depth)
    joint = []
    described = []
    for tie in ties:
        trained = [name for name in tie.names if model.get_parameter(name).requires_grad]
        if trained:
            joint.append([first + stage for first in copies for stage in tie.stages])
            described.append(f"{trained[0]} (stages {', '.join(map(str, tie.stages))})")
    if joint:
        schedule.check_joint_updates(
            joint,
            f"tied parameters, {', '.join(described)}, need the gradients of batch t of all their "
            "stages before any of these reads version t + 1; a split that puts all uses into one "
            "stage does not",
        )
