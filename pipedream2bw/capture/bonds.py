"""Layers that have to be on one stage, and where a cut does not part them."""

from __future__ import annotations

import dataclasses

from .captured import Captured


@dataclasses.dataclass(frozen=True)
class _Tie:
    """Layers first..last have to be on one stage because of ``what``."""

    first: int
    last: int
    what: str


class Ties:
    """What holds layers together, and where a cut does not part them."""

    def __init__(self, ties: list[_Tie], num_layers: int) -> None:
        self.ties = ties
        self._forbidden = [0] * (num_layers + 1)
        for tie in ties:
            for cut in range(tie.first + 1, tie.last + 1):
                self._forbidden[cut] = 1

    def allows(self, cut: int) -> bool:
        """Whether a stage may begin at layer ``cut``."""
        return not self._forbidden[cut]


def held_together(captured: Captured) -> Ties:
    """The layers that have to be on one stage."""
    # Parameters may be on several stages, and so may buffers that are only read.
    users: dict[str, list[int]] = {}
    for layer, names in enumerate(captured.layer_buffers):
        for name in names:
            if name in captured.costs.written_buffers:
                users.setdefault(name, []).append(layer)
    ties = [
        _Tie(layers[0], layers[-1], f"buffer {name!r}")
        for name, layers in users.items()
        if layers[0] != layers[-1]
    ]
    ties.extend(
        _Tie(first, last, f"value {name!r}, which is written in place,")
        for first, last, name in captured.costs.written_values
        if first != last
    )
    return Ties(ties, len(captured.layers))
