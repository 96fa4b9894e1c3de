"""Processes of several sites that do the same work: how they meet, and what they exchange.

A site is a pipeline with processes of its own. Sites share no process group, only a store.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from ..errors import StageError
from ..ranks.boards import finish
from ..ranks.deadline import Deadline, leave
from ..ranks.first_failure import FirstFailure
from ..ranks.joining import store_of_this_life

_PART = 2**24
"""Elements whose mean is made at once, for which there is room twice."""

_Result = TypeVar("_Result")


class SiteLink:
    """Joins one process of each site.

    The calls of the main thread and those of an update have a group each, so that neither waits for
    the other. What lies between sites is slow and no device's own link: all goes over the hosts.
    The first failure of a site's pipeline becomes that of all.

    Args:
        store: that all sites reach.
        name: of the link, the same on all sites.
        site: this one's number.
        deadline: of this site's pipeline; ends waiting.
        is_needed: says whether the pipeline is still there; False ends waiting.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        site: int,
        num_sites: int,
        deadline: Deadline,
        is_needed: Callable[[], bool],
    ) -> None:
        self.site, self.num_sites = site, num_sites
        self._deadline = deadline
        self._is_needed = is_needed
        join = functools.partial(deadline.wait, "waiting for other sites")
        own = join(
            lambda: store_of_this_life(
                PrefixStore(f"pipedream2bw/sites/{name}", store),
                site,
                num_sites,
                0.9 * deadline.seconds,  # before this site's other ranks give up
                called="site",
            )
        )
        timeout = datetime.timedelta(seconds=deadline.seconds)
        self._groups: dict[str, Any] = {}  # whose methods torch's stubs do not know
        for use in ("calls", "updates"):
            part = PrefixStore(use, own)
            self._groups[use] = join(
                functools.partial(ProcessGroupGloo, part, site, num_sites, timeout)
            )
        self._failures = FirstFailure(own, "sites", deadline.fault)

    def _lost(self, error: RuntimeError, start: float) -> StageError:
        """What to raise as waiting since ``start`` has failed: the first failure of any site."""
        text = f"another site was lost: {error}"
        return self._failures.report(self._deadline.kind_of_loss(start)(text, cause=text))

    def _wait(self, call: Callable[[], _Result]) -> _Result:
        """Waits in the main thread."""
        start = time.monotonic()

        def run() -> _Result:
            try:
                return call()
            except RuntimeError as error:
                raise self._lost(error, start) from error

        try:
            return self._deadline.wait("waiting for other sites", run)
        except StageError as failure:
            self._deadline.fault.raise_(failure)
            raise

    # ------------------------------------------------------------------ of the main thread

    def gather(self, value: Any) -> list[Any]:
        """Every site's value, of JSON's types. The processes of the link call it together."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)

        def run() -> list[Any]:
            group, n = self._groups["calls"], self.num_sites
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(n)]
            group.allgather([sizes], [torch.tensor([text.numel()])]).wait()
            mine = text.new_zeros(max(int(size) for size in sizes))
            mine[: text.numel()] = text
            texts = [torch.empty_like(mine) for _ in range(n)]
            group.allgather([texts], [mine]).wait()
            each = zip(texts, map(int, sizes), strict=True)
            return [json.loads(bytes(theirs[:size].tolist())) for theirs, size in each]

        return self._wait(run)

    def agree(self, what: str, value: Any) -> None:
        """Raises ValueError, on all sites, if they have different values of something."""
        values = self.gather(value)
        if any(each != values[0] for each in values):
            listed = ", ".join(f"site {site}: {each}" for site, each in enumerate(values))
            raise ValueError(f"{what} must be the same on every site, got {listed}")

    def take_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes tensors those of site 0, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0

        def run() -> None:
            for tensor in tensors:
                there = _on_host(tensor)
                if there.numel() > 0:
                    self._groups["calls"].broadcast([_bytes_of(there)], options).wait()
                tensor.copy_(there)

        self._wait(run)

    def take_previous(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the site before this one, on the host; the first one's is the last."""
        to, previous = (self.site + 1) % self.num_sites, (self.site - 1) % self.num_sites

        def run() -> list[torch.Tensor]:
            group, received = self._groups["calls"], []
            for tensor in tensors:
                mine = _on_host(tensor)
                theirs = torch.empty_like(mine)
                if mine.numel() > 0:
                    sent = group.send([_bytes_of(mine)], to, 0)
                    group.recv([_bytes_of(theirs)], previous, 0).wait()
                    sent.wait()
                received.append(theirs)
            return received

        return self._wait(run)

    # ------------------------------------------------------------------ of an update

    def average(self, flat: torch.Tensor) -> None:
        """Makes a vector on the host the mean over the sites, added up in their order, in place.

        Each site adds up a part and gives the others its mean: 2 (n - 1) / n of the vector leave
        each of n sites.

        Raises:
            PeerLost, PeerTimeout: another site is gone or silent.
            StageError: the pipeline has failed meanwhile.
        """
        n = self.num_sites
        for part in torch.split(flat, _PART):
            given = part.new_zeros(n, -(-part.numel() // n))
            given.view(-1)[: part.numel()] = part
            received = torch.empty_like(given)
            self._finish("alltoall_base", _bytes_of(received), _bytes_of(given), [], [])
            first, *others = received.unbind()
            for other in others:
                first.add_(other)
            first.div_(n)
            self._finish("allgather", [list(_bytes_of(given).chunk(n))], [_bytes_of(first)])
            part.copy_(given.view(-1)[: part.numel()])

    def _finish(self, collective: str, *arguments: Any) -> None:
        """Waits for a collective; no frame of an error's traceback refers to its group."""
        start = time.monotonic()
        try:
            work = getattr(self._groups["updates"], collective)(*arguments)
            while not finish(work):
                failure = self._deadline.fault.error
                if failure is not None:
                    raise failure
                if not self._is_needed():
                    raise RuntimeError("the pipeline is gone")
        except RuntimeError as error:
            failure = self._deadline.fault.error
            if failure is not None:
                raise failure from error
            raise self._lost(error, start) from error

    def close(self) -> None:
        """Leaves; sites that wait for this one get an error, which it has told them before."""
        self._failures.close()
        # A group waits for what is under way to end, which it does when other sites leave, too.
        groups, self._groups = self._groups, {}
        leave("leaves other sites", groups.clear)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: gloo does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
