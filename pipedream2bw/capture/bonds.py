"""Layers that have to be on one stage, and where a cut does not part them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .captured import Captured


@dataclasses.dataclass(frozen=True)
class Bond:
    """Layers first..last have to be on one stage because of ``what``."""

    first: int
    last: int
    what: str


class Bonds:
    """The bonds of a model's layers."""

    def __init__(self, bonds: Sequence[Bond]) -> None:
        self._bonds = bonds
        self._parting = {cut for bond in bonds for cut in range(bond.first + 1, bond.last + 1)}

    def __iter__(self) -> Iterator[Bond]:
        return iter(self._bonds)

    def allow(self, cut: int) -> bool:
        """Tells whether a stage may begin at layer ``cut``."""
        return cut not in self._parting


def bonds_of(captured: Captured) -> Bonds:
    """Finds the layers that have to be on one stage.

    These share a buffer that one of them writes, or a value that one of them writes in place.
    Parameters may be on several stages, and so may buffers that are only read.
    """
    users: dict[str, list[int]] = {}
    for layer, names in enumerate(captured.layer_buffers):
        for name in names:
            if name in captured.costs.written_buffers:
                users.setdefault(name, []).append(layer)
    found = [Bond(layers[0], layers[-1], f"buffer {name!r}") for name, layers in users.items()]
    found.extend(
        Bond(first, last, f"value {name!r}, which is written in place,")
        for first, last, name in captured.costs.written_values
    )
    return Bonds([bond for bond in found if bond.first != bond.last])
