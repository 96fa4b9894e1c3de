"""What a run's Checkpointer asks of all ranks, by the way of what these agree on anyhow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(eq=False)
class Wishes:
    """A number that each rank tells with each batch and evaluation; the greatest is what all do.

    Attributes:
        saves_to: where the Checkpointer saves; None: there is none.
        mine: gives this rank's number.
        before_evaluation: is called when all ranks have agreed on an evaluation.
        agreed: the greatest of all ranks, when the last batch or evaluation began.
    """

    saves_to: str | None = None
    mine: Callable[[], int] = lambda: 0
    before_evaluation: Callable[[], None] = lambda: None
    agreed: int = 0
