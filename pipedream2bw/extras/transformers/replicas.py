"""Data and results by replica: the ranks of one read the same batches and count once."""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader

from .arguments import Arrangement


class ReplicaAccelerator(Accelerator):
    """An Accelerator to which a replica is one process, however many ranks it has."""

    arrangement: Arrangement

    @classmethod
    def adopt(cls, accelerator: Accelerator, arrangement: Arrangement) -> None:
        """Makes one of these of an Accelerator, whose class the Trainer has chosen."""
        accelerator.__class__ = cls
        accelerator.arrangement = arrangement
        if accelerator.dispatch_batches is None:  # else rank 0 reads what iterates, for all ranks
            accelerator.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """The number of replicas, by which data are sharded and losses averaged."""
        return self.arrangement.width

    @property
    def process_index(self) -> int:
        """The number of this rank's replica."""
        return int(self.state.process_index) // self.arrangement.ranks_per_replica

    def gather(self, tensor: Any) -> Any:
        """Gathers what each replica has, of which all its ranks have the same."""
        shape = (self.arrangement.width, self.arrangement.ranks_per_replica, -1)

        def once(gathered: torch.Tensor) -> torch.Tensor:
            return gathered.reshape(*shape, *gathered.shape[1:])[:, 0].flatten(0, 1)

        return recursively_apply(once, super().gather(tensor))


class Sharing:
    """Gives all ranks of a replica what the rank of the last stage has.

    Every rank makes it, and calls it as often.

    Args:
        has_results: whether this is the rank whose values the others get.
        timeout: seconds that a rank waits for another one.
    """

    def __init__(self, arrangement: Arrangement, *, has_results: bool, timeout: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._source = 0
        if arrangement.ranks_per_replica > 1:
            size = arrangement.ranks_per_replica
            patience = datetime.timedelta(seconds=timeout)
            self._group, _ = dist.new_subgroups(size, timeout=patience)  # type: ignore[no-untyped-call]
            have: list[Any] = [None] * size
            dist.all_gather_object(have, has_results, group=self._group)
            self._source = dist.get_global_rank(self._group, have.index(True))

    def __call__(self, make: Callable[[], Any], device: torch.device) -> Any:
        """Returns what ``make`` gives on the rank that has results, nested as it may be.

        Raises:
            RuntimeError: it raised there; that rank raises what it raised.
        """
        if self._group is None:
            return make()
        shared: list[Any] = [None, None]
        error: Exception | None = None
        if dist.get_rank() == self._source:
            try:
                shared[0] = send_to_device(make(), "cpu")
            except Exception as raised:
                error = raised
                shared[1] = f"rank {self._source}: {type(error).__name__}: {error}"
        dist.broadcast_object_list(shared, src=self._source, group=self._group)
        if error is not None:
            raise error
        if shared[1] is not None:
            raise RuntimeError(shared[1])
        return send_to_device(shared[0], device)


def raise_together(check: Callable[[], object]) -> None:
    """Calls ``check``; a ValueError of one rank is raised on all of them."""
    found: list[str | None] = [None]
    try:
        check()
    except ValueError as error:
        found = [str(error)]
    if dist.is_initialized():
        mine, found = found[0], [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    for text in filter(None, found):
        raise ValueError(text)


def step_only(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Leaves an optimizer these parameters, of those that it was made with."""
    mine = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in mine]


def first_batch(loader: Any) -> Any:
    """The first batch of what will be iterated over later, from its beginning."""
    # Not by the loader's own __iter__: Accelerate would take it for the one in use.
    batches = DataLoader.__iter__(loader) if isinstance(loader, DataLoader) else iter(loader)
    return next(batches)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Leaves the default generators as they were: data draw from them what they always draw."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
