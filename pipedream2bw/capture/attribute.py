"""What generated code refers to of a model's modules, parameters and buffers."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Something that the code takes from the module it is bound to.

    kind: "module", "parameter", "buffer" (looked up at every call, since a module may assign a new
    tensor), "constant" (``value``, the same for every clone) or "block" (what runs the part of a
    stage that belongs to the module ``target``, and runs it again for its backward).
    """

    kind: str
    target: str
    value: Any = None
