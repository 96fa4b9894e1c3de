"""Messages that take their time, as between machines: for benchmarks and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from pipedream2bw import _C, stages
from pipedream2bw.wiring import Channels


@contextlib.contextmanager
def delayed_messages(
    shortest: float, longest: float | None = None, seed: int = 0
) -> Iterator[None]:
    """In pipelines made inside, every message between two ranks arrives some seconds later.

    Sender and receiver go on meanwhile. Each delay is drawn evenly between ``shortest`` and
    ``longest`` (by default the same) from a sequence of the edge and direction.
    """

    class Delayed(Channels):
        def _direction(
            self, source: int, destination: int
        ) -> tuple[_C.Sender | None, _C.Receiver | None]:
            sender, receiver = super()._direction(source, destination)
            if sender is not None and not self._grid.share_a_rank(source, destination):
                own_seed = hash((seed, source, destination)) % 2**64
                latest = shortest if longest is None else longest
                sender = _C.DelayedSender(sender, shortest, latest, own_seed)
            return sender, receiver

    with mock.patch.object(stages, "Channels", Delayed):
        yield
