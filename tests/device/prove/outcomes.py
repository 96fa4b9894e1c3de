"""What may be left out of a training, and what may become of it."""

from __future__ import annotations

import torch

from tests.device import checked

NUM_BATCHES, NUM_JUDGED = 6, 3
"""What is left out in the last batches may be for those that would come after them."""
KINDS = [checked.Ordering.STREAM_WAIT, checked.Ordering.RECORD_STREAM, checked.Ordering.HOST_WAIT]
FOUND, NOT_REACHED, IMPLIED, UNNEEDED, MISSED = WORDS = (
    "found",
    "not reached",
    "implied",
    "unneeded",
    "missed",
)
VERDICTS = {
    None: NOT_REACHED,
    checked.Verdict.IMPLIED: IMPLIED,
    checked.Verdict.UNNEEDED: UNNEEDED,
    checked.Verdict.OPEN: MISSED,
}

Outcome = tuple[checked.Ordering, int, str]
"""The n-th of a kind, and what became of the training without it."""


def synchronize() -> None:
    """Waits until all devices are idle."""
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
