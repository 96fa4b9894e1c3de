"""Delays messages, as a network between machines does: for benchmarks and tests."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from pipedream2bw.ranks import boards, groups
from pipedream2bw.ranks.channels import Channels
from pipedream2bw.runtime import local_stages

try:
    from . import _delays
except ImportError as error:
    raise ImportError(
        "benchmarks/measuring/_delays is not built: make builds it for tests and benchmarks, or "
        "PIPEDREAM2BW_TESTING=1 python setup.py build_ext --inplace"
    ) from error

_numbers = itertools.count()  # of backends


@contextlib.contextmanager
def delayed_messages(
    shortest: float, longest: float | None = None, seed: int = 0
) -> Iterator[None]:
    """In pipelines made inside, every message between two ranks arrives some seconds later.

    Sender and receiver go on meanwhile. Each delay is drawn evenly between ``shortest`` and
    ``longest`` (by default the same) from a sequence of the edge and direction.
    """

    class Delayed(Channels):
        def _make(self, source: int, destination: int) -> None:
            super()._make(source, destination)
            sender = self.senders.get((source, destination))
            if sender is not None and not self._grid.share_a_rank(source, destination):
                own_seed = hash((seed, source, destination)) % 2**64
                latest = shortest if longest is None else longest
                self.senders[source, destination] = _delays.DelayedSender(
                    sender=sender, shortest=shortest, longest=latest, seed=own_seed
                )

    with mock.patch.object(local_stages, "Channels", Delayed):
        yield


@contextlib.contextmanager
def delayed_collectives(shortest: float, longest: float, seed: int = 0) -> Iterator[None]:
    """In pipelines made inside, collectives between processes begin some seconds later.

    That is the sums over replicas, of tied weights and of norms, the ranks' agreement and losses,
    also where shared memory would do. Each process draws delays of its own for each group, evenly
    between ``shortest`` and ``longest``, so that processes come to one sum at different times.
    """

    def make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Backend:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        own_seed = hash((seed, dist.get_rank(), next(_numbers))) % 2**64
        return _delays.delayed_backend(
            backend=gloo, shortest=shortest, longest=longest, seed=own_seed
        )

    backend = f"delayed{next(_numbers)}"
    dist.Backend.register_backend(backend, make, devices=["cpu"])
    join_members = groups.join_members

    def join_delayed(
        members: list[int], name: str, _: str | None, timeout: datetime.timedelta, options: Any
    ) -> dist.ProcessGroup:
        return join_members(members, name, backend, timeout, options)

    with (
        mock.patch.object(groups, "join_members", join_delayed),
        mock.patch.object(boards, "machine_id", return_value=f"of rank {dist.get_rank()}"),
    ):
        yield


@contextlib.contextmanager
def delays_everywhere(longest: float, seed: int = 0) -> Iterator[None]:
    """Both, evenly between 0 and ``longest``."""
    with delayed_messages(0.0, longest, seed), delayed_collectives(0.0, longest, seed):
        yield
