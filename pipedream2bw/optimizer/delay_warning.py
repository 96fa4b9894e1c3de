"""Warns of optimizers that a delay of the gradients costs much, if nothing is done about it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from ..runtime.session import Session
from .staleness import Remedies

_LOW_BETA1 = 0.9
"""torch's default; a longer average feels the delay less (arXiv 2606.30634)."""


def warn_of_delay(
    session: Session,
    optimizers: Sequence[torch.optim.Optimizer],
    remedies: Remedies,
    *,
    stacklevel: int,
) -> None:
    """Warns on rank 0 if all optimizers are Adam or AdamW with a low beta1, and no remedy is given.

    With one of another kind, such as Muon, it is the user's choice what Adam steps beside it.

    Args:
        stacklevel: of the caller, as ``warnings.warn`` counts.
    """
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    if remedies or session.grid.rank != 0 or not any(session.schedule.delay):
        return
    if not all(isinstance(optimizer, kinds) for optimizer in optimizers):
        return
    beta1 = min(float(group["betas"][0]) for each in optimizers for group in each.param_groups)
    if beta1 <= _LOW_BETA1:
        name, schedule = type(optimizers[0]).__name__, session.schedule.name
        warnings.warn(
            f'{name} with beta1 {beta1:g} under "{schedule}", whose gradients are late, ends at a '
            "higher loss than without the delay; staleness=pipedream2bw.ErrorFeedback() makes up "
            "for half of that or more: docs/which_optimizer.md",
            stacklevel=stacklevel + 1,
        )
