"""Ok-Topk: the largest gradients' mean over replicas, by a bounded volume, as a gradient hook.

S. Li and T. Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, arXiv 2201.07598.
"""
# Annotations are no strings here: DistributedDataParallel compares a hook's with its classes.

import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ..checks import check_number, check_whole_number

MOST_IMBALANCE = 4
"""The greatest share of a rank, over the mean share, that is sent as it is (section 3.1.2)."""

_NOTHING = -0.0
"""Adding to it gives the bits of what is added, also where that is a zero."""

_Result = TypeVar("_Result")

Steps: TypeAlias = Generator[dist.Work, None, _Result]
"""Gives each work that must be done before it goes on."""


@dataclasses.dataclass
class _Bucket:
    """What is kept of one bucket's batches."""

    residual: torch.Tensor
    batch: int = 0  # the next one
    own_threshold: torch.Tensor | None = None  # None: everything is large enough
    common_threshold: torch.Tensor | None = None  # of sums
    regions: list[int] = dataclasses.field(default_factory=list)  # where they begin, and the end


class OkTopkState:
    """The state of :func:`ok_topk_hook` for one stage (or one DistributedDataParallel).

    Of n gradients each replica sends at most k = density * n: those of largest magnitude together
    with what it has not sent so far. About k of the sums come back, the largest. What was not used
    stays in a residual, as large as the gradients. Thresholds that select k are found every
    ``threshold_period`` batches and kept between (but one that selects 2k is not). Each replica
    adds up one region of the bucket; regions are cut such that each gets as many of the k, every
    ``region_period`` batches.

    Args:
        process_group: of the replicas, which add up in the order of their ranks there.
        density: k / n, above 0; 1: the dense mean, with the bits of an ordered sum.
        threshold_period: the paper's tau', in batches.
        region_period: the paper's tau, in batches.

    Attributes:
        bytes_sent: to other replicas so far. A batch sends at most 6k (w - 1) / w words, on the
            average of w replicas. It sends 4k (w - 1) / w where kept thresholds still select k and
            the sums' shares need no balancing. A word is a gradient or an index. Counts come to 7w
            words more, and to 300 where the sums' threshold is found.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        density: float = 0.01,
        *,
        threshold_period: int = 32,
        region_period: int = 64,
    ) -> None:
        check_number("density", density)
        if density > 1:
            raise ValueError(f"density: {density}, it must be at most 1")
        check_whole_number("threshold_period", threshold_period)
        check_whole_number("region_period", region_period)
        self.process_group = process_group
        self.density = density
        self.threshold_period = threshold_period
        self.region_period = region_period
        self.bytes_sent = 0
        self._rank, self._size = process_group.rank(), process_group.size()
        self._buckets: dict[int, _Bucket] = {}

    def residual(self, index: int) -> torch.Tensor:
        """What has not been sent of the bucket of that index, as a part of the mean."""
        return self._buckets[index].residual

    def reduce(self, index: int, gradients: torch.Tensor, count: int) -> Steps[None]:
        """Replaces a replica's gradients, flat, by the sparse mean over all; see ``Steps``.

        Args:
            index: of their bucket.
            gradients: with zeros between parameters.
            count: n, without these.

        Raises:
            ValueError: more of them than the 32 bits of an index can tell apart.
        """
        numel = gradients.numel()
        if numel >= 2**31:
            raise ValueError(f"bucket of {numel} gradients, Ok-Topk takes less than 2**31")
        kept = self._buckets.setdefault(index, _Bucket(torch.full_like(gradients, _NOTHING)))
        k = max(1, round(self.density * count))
        k = k if k < count else numel
        pending = kept.residual.add_(gradients / self._size)
        renews = kept.batch % self.threshold_period == 0 and k < numel
        mine = _large(pending, kept.own_threshold)
        if renews or mine.numel() > 2 * k:
            kept.own_threshold = pending.abs().topk(k).values[-1]
            mine = _large(pending, kept.own_threshold)
        if mine.numel() > k:
            mine = mine[pending[mine].abs().topk(k).indices].sort().values
        if kept.batch % self.region_period == 0:
            kept.regions = yield from self._cut(mine, numel)
        kept.batch += 1
        indices, sums = yield from self._add_up(kept.regions, mine, pending[mine])
        large = _large(sums, kept.common_threshold)
        sizes = yield from self._sizes(large)
        if renews or sum(sizes) > (k if _unequal(sizes) else 2 * k):
            kept.common_threshold, large = yield from self._largest(indices, sums, k)
            sizes = yield from self._sizes(large)
        indices, sums = yield from self._gather(sizes, indices[large], sums[large])
        gradients.zero_()
        gradients[indices] = sums
        pending[mine[torch.isin(mine, indices)]] = _NOTHING

    def _cut(self, mine: torch.Tensor, numel: int) -> Steps[list[int]]:
        """Where regions begin that would share out what all replicas send, on the average."""
        shares = torch.arange(1, self._size, device=mine.device)
        cuts = shares * numel // self._size
        if mine.numel() > 0:
            cuts = mine[shares * mine.numel() // self._size]
        yield from self._add_over_all(cuts)
        return [0, *(cuts // self._size).tolist(), numel]

    def _add_up(
        self, regions: list[int], indices: torch.Tensor, values: torch.Tensor
    ) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
        """The sums of what all replicas give of this one's region, where anybody gives one."""
        edges = torch.tensor(regions, device=indices.device)
        counts = torch.searchsorted(indices, edges).diff()
        give = counts.tolist()
        take = (yield from self._exchange(counts)).tolist()
        places = yield from self._exchange(indices, give, take)
        given = yield from self._exchange(values, give, take)
        begin, end = regions[self._rank : self._rank + 2]
        sums = values.new_full((end - begin,), _NOTHING)
        exists = torch.zeros(end - begin, dtype=torch.bool, device=values.device)
        pieces = (torch.split(tensor, take) for tensor in (places - begin, given))
        for there, some in zip(*pieces, strict=True):
            sums[there] += some
            exists[there] = True
        (found,) = exists.nonzero(as_tuple=True)
        return found + begin, sums[found]

    def _largest(
        self, indices: torch.Tensor, sums: torch.Tensor, k: int
    ) -> Steps[tuple[torch.Tensor, torch.Tensor]]:
        """The k-th largest magnitude of all replicas' sums; the places of this one's down to it.

        No sums travel for it. Three bits of it become known at a time, from how many are larger. Of
        equal ones those of the least indices come first. It is 0 if there are fewer than k.
        """
        magnitudes = sums.abs().float().view(torch.int32).long()
        keys = torch.where(sums != 0, (magnitudes << 32) + 2**31 - indices, -1)
        ordered = keys.sort().values
        digits = torch.arange(1, 8, device=keys.device)
        least = reached = 0
        for shift in range(60, -1, -3):
            edges = least + (digits << shift)
            counts = keys.numel() - torch.searchsorted(ordered, edges, out_int32=True)
            yield from self._add_over_all(counts)
            if digit := int((counts >= k).sum()):
                least += digit << shift
                reached = int(counts[digit - 1])
            if reached == k and shift < 32:  # the magnitude is known, and tells them apart
                break
        threshold = torch.tensor([least >> 32], dtype=torch.int32, device=keys.device)
        (places,) = (keys >= least).nonzero(as_tuple=True)
        return threshold.view(torch.float32), places

    def _sizes(self, tensor: torch.Tensor) -> Steps[list[int]]:
        """How long every replica's is."""
        own = torch.full((self._size,), tensor.numel(), device=tensor.device)
        sizes: list[int] = (yield from self._exchange(own)).tolist()
        return sizes

    def _gather(self, sizes: list[int], *tensors: torch.Tensor) -> Steps[list[torch.Tensor]]:
        """Every replica's tensors, one after the other; all of one replica have one length.

        They are shared out equally first, if one replica has much more than the others.
        """
        total, given = sum(sizes), list(tensors)
        if _unequal(sizes):
            have = [sum(sizes[:rank]) for rank in range(self._size + 1)]
            want = [total * rank // self._size for rank in range(self._size + 1)]
            give = _overlaps(have[self._rank : self._rank + 2], want)
            take = _overlaps(want[self._rank : self._rank + 2], have)
            for i, tensor in enumerate(tensors):
                given[i] = yield from self._exchange(tensor, give, take)
            sizes = [end - begin for begin, end in itertools.pairwise(want)]
        for i, tensor in enumerate(given):
            to_each = [tensor.numel()] * self._size
            given[i] = yield from self._exchange(tensor.repeat(self._size), to_each, sizes)
        return given

    def _add_over_all(self, counts: torch.Tensor) -> Steps[None]:
        self.bytes_sent += 2 * counts.nbytes * (self._size - 1) // self._size
        yield dist.all_reduce(counts, group=self.process_group, async_op=True)

    def _exchange(
        self, given: torch.Tensor, give: Sequence[int] = (), take: Sequence[int] = ()
    ) -> Steps[torch.Tensor]:
        """What all replicas give this one; by default one element of each."""
        dtype = given.dtype
        if dtype == torch.int64:  # indices and counts, which are less than 2**31
            given = given.to(torch.int32)
        give, take = (list(counts) or [1] * self._size for counts in (give, take))
        taken = given.new_empty(sum(take))
        self.bytes_sent += (sum(give) - give[self._rank]) * given.element_size()
        yield dist.all_to_all_single(
            taken, given, take, give, group=self.process_group, async_op=True
        )
        return taken.to(dtype)


def _unequal(sizes: Sequence[int]) -> bool:
    return max(sizes) * len(sizes) > MOST_IMBALANCE * sum(sizes)


def _large(values: torch.Tensor, threshold: torch.Tensor | None) -> torch.Tensor:
    """The places of what is not 0 and not below the threshold (NaN is not); None: of all."""
    if threshold is None:
        return torch.arange(values.numel(), device=values.device)
    (places,) = ((values.abs() < threshold).logical_not_() & (values != 0)).nonzero(as_tuple=True)
    return places


def _overlaps(mine: Sequence[int], edges: Sequence[int]) -> list[int]:
    """How many numbers of an interval are in each of those between the edges."""
    begin, end = mine
    pairs = itertools.pairwise(edges)
    return [max(0, min(end, last) - max(begin, first)) for first, last in pairs]


def ok_topk_hook(state: OkTopkState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the largest gradients over the replicas, for ``register_comm_hook``.

    For instance ``pipe.register_comm_hook(lambda group: pd2.OkTopkState(group, density=0.02),
    pd2.ok_topk_hook)``. Also for ``DistributedDataParallel``.
    """
    gradients = bucket.buffer()
    count = sum(each.numel() for each in bucket.gradients())
    steps = state.reduce(bucket.index(), gradients, count)
    devices: list[int | str | torch.device] = []
    if gradients.device.type != "cpu":  # where work is only enqueued
        devices.append(gradients.device)
        for work in steps:
            work.wait()
    mean: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    def go_on(done: torch.futures.Future[Any] | None) -> None:
        try:
            if done is not None:
                done.wait()  # raises what made it fail
            work = next(steps, None)
        except Exception as error:
            mean.set_exception(error)  # type: ignore[arg-type]
            return
        if work is None:
            mean.set_result(gradients)
        else:
            work.get_future().add_done_callback(go_on)

    go_on(None)
    return mean
