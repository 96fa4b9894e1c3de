"""Models that travel: how accurate each site's is on its own data, and on another's.

Hsieh et al., The Non-IID Data Quagmire of Decentralized Machine Learning, arXiv 1910.00189,
section 7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from .sites import SiteLink
from .stage_sync import StageSync


def measured_loss(
    session: Session,
    stages: Mapping[int, StageSync],
    link: SiteLink | None,
    evaluate: Callable[[], float | None],
) -> float:
    """The accuracy loss, on every rank of all sites, which call it after the same batch. Drained.

    Args:
        stages: of this process.
        link: rank 0's to that of the other sites.
        evaluate: gives the accuracy of the newest weights where the last stage is.

    Raises:
        ValueError: sites are at different batches.
        TypeError: ``evaluate`` gave no number on a site.
    """
    control, batch = session.control, session.accumulation.num_updates

    def check_batch() -> None:
        assert link is not None
        link.agree("measure: batch", batch)

    def compare(told: Sequence[Sequence[Any] | None]) -> float:
        assert link is not None
        everyone = link.gather([each for each in told if each is not None])
        pairs = [pair for of_site in everyone for pair in of_site]
        for pair in pairs:
            for value in pair:
                if not isinstance(value, float):
                    raise TypeError(f"measure: evaluate gave {value}, it must give a float")
        return float(sum(at_home - abroad for at_home, abroad in pairs) / len(pairs))

    control.from_first(check_batch)
    lent = session.accumulation.weights_lent_to("measure()")
    with lent, control.errors_told():  # else other sites would wait
        at_home = evaluate()
        with contextlib.ExitStack() as shown:
            for stage in stages.values():
                mine = [*newest_of(stage.weights), *stage.weights.buffers]
                shown.enter_context(replaced(mine, stage.link.take_previous(mine)))
            abroad = evaluate()
    pair = [value if isinstance(value, float) else repr(value) for value in (at_home, abroad)]
    told = control.gather(pair if session.gives_output else None)
    return control.from_first(lambda: compare(told))


def newest_of(weights: StageWeights) -> list[torch.Tensor]:
    """The newest version of the trainable parameters, which evaluations read. Drained."""
    engine = weights.engine
    return [engine.weight(engine.newest_slot, i) for i in range(len(weights.handles))]


@contextlib.contextmanager
def replaced(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Meanwhile tensors have other values."""
    before = [tensor.clone() for tensor in tensors]
    _set(tensors, values)
    try:
        yield
    finally:
        _set(tensors, before)


@torch.no_grad()
def _set(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
