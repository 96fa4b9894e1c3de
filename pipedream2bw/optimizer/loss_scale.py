"""Dynamic loss scaling, for gradients that float16 would round to zero."""

from __future__ import annotations

import dataclasses
import math

from .. import _C
from ..checks import check_number, check_whole_number
from ..runtime.lazy_numbers import LazyNumber, train_steps_until_finished
from ..runtime.session import Session


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Multiplies losses before their backward (Micikevicius et al., arXiv 1710.03740).

    The rule is ``torch.amp.GradScaler``'s. A scale belongs to a weight version: a batch's loss is
    multiplied by the scale of the version that it reads. Its update divides the gradient by the
    same, and decides the scale of the version that it makes. If a gradient of any parameter, on any
    stage, is infinite or NaN, there is no step: weights, moments and step counts stay, the version
    is a copy of the one before, and its scale is the former one times ``backoff_factor``. After
    ``growth_interval`` updates without such a one it grows by ``growth_factor``. Under ``"2bw"``
    the batch after one that overflows reads the same version, and may overflow, too.

    Attributes:
        init_scale: of W(0), > 0.
        growth_factor: > 1.
        backoff_factor: between 0 and 1.
        growth_interval: at least 1.

    Raises:
        ValueError, TypeError: naming the value.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        check_number("LossScale: init_scale", self.init_scale, below=math.inf)
        check_number("LossScale: growth_factor", self.growth_factor, above=1.0, below=math.inf)
        check_number("LossScale: backoff_factor", self.backoff_factor, below=1.0)
        check_whole_number("LossScale: growth_interval", self.growth_interval)


class NewestScale(LazyNumber):
    """The scale of the version that an update makes, read when it is wanted.

    Args:
        update: what is known once every stage has come to the update; None: there has been none.
    """

    def __init__(self, session: Session, scale: _C.LossScale, update: LazyNumber | None) -> None:
        super().__init__(session)
        self._scale = scale
        self._version = session.accumulation.num_updates
        self._update = update

    def done(self) -> bool:
        """Whether every stage has come to the update."""
        return self._update is None or self._update.done()

    def item(self) -> float:
        """The scale. Waits until the batch's last backward; under "2bw" that is during the next.

        Raises:
            RuntimeError: the pipeline failed before. Or the ``train_step`` during which it comes
                has not been called.
        """
        if self._update is not None:
            self._check_can_come("its", train_steps_until_finished)
            self._update.item()
        return self._scale.of_version(self._version)
