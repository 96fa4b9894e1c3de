"""The definition of delayed training, run on the unsplit model by stock PyTorch alone.

    W(t+1) = step(W(t), state(t), g(t)),   g(t) the gradient at W(max(t - delay, 0))

A delay of 1 is PipeDream-2BW (arXiv 2006.09503, section 3.1), 0 plain gradient accumulation. With
PipeDream's weight stashing (arXiv 1806.03377) every parameter has its stage's delay. In a warm-up
of n batches g(t) is the gradient at W(t), afterwards at W(max(t - delay, n - 1)). Of a batch's
microbatches only a parameter's first ones may read that version, the others W(t). With two
pipelines (arXiv 2107.06925) each has half of the microbatches and g(t) is one's sum plus the
other's. Several train_steps may be one batch: g(t) is the mean of theirs, or their sum. A batch of
fewer rows than microbatches has fewer of these, which are shared out among the pipelines. This file
shares nothing with the package: it imports torch only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

LossFunction = Callable[[Any, Any], torch.Tensor]
Drawing = Callable[[int, int], contextlib.AbstractContextManager[None]]
"""Inside, random numbers are those of a train_step and a microbatch among all replicas'."""


class Batch(NamedTuple):
    """What one ``train_step`` is given."""

    args: tuple[Any, ...] = ()
    target: Any = None
    kwargs: Mapping[str, Any] = {}


class ReadyMade(NamedTuple):
    """A batch whose microbatches the caller has made."""

    microbatches: Sequence[Batch]


class Oracle:
    """Trains ``model`` batch by batch; afterwards it holds the newest weights.

    Every weight version that is still read is kept as plain clones, in ``versions``, oldest first:
    what a run that goes on elsewhere has. With several replicas every batch is a sequence with one
    batch for each. Each replica's gradients, of losses divided by the number of replicas, are added
    up by themselves (each pipeline's, if it has two), and then these sums in the order of the
    replicas. With a number of microbatches for each replica what they are given is one batch, and
    its loss that of one model with all of these microbatches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_microbatches: int | Sequence[int],
        loss_fn: LossFunction,
        delay: int | Sequence[int],
        loss_reduction: str = "mean",
        replicated: Sequence[str] = (),
        num_pipelines: int = 1,
        warmup_batches: int = 0,
        late: Sequence[int] | None = None,
        drawing: Drawing = lambda train_step, microbatch: contextlib.nullcontext(),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self.parameters = list(model.parameters())
        num_parameters = len(self.parameters)
        self.delays = [delay] * num_parameters if isinstance(delay, int) else list(delay)
        assert len(self.delays) == num_parameters
        self.late = late
        self.loss_reduction = loss_reduction
        self.replicated = replicated
        self.num_pipelines = num_pipelines
        self.warmup_left = warmup_batches
        self.drawing = drawing
        self.num_train_steps = 0
        self.restart_delay()

    def restart_delay(self) -> None:
        """Makes the model's weights W(0) of what follows."""
        self.versions = [self._weights()]

    def train_step(self, batch: Batch) -> float:
        return self.train_replicas([batch])[0]

    def train_replicas(self, batches: Sequence[Batch]) -> list[float]:
        """One update from a batch of each replica; the replicas' losses."""
        return self.train_together([batches])[0]

    def train_together(
        self,
        steps: Sequence[Sequence[Batch | ReadyMade]],
        *,
        averages: bool = True,
        normalizer: int | None = None,
    ) -> list[list[float]]:
        """One update from several train_steps of each replica; the losses of each.

        With a normalizer, of all replicas, it is that of one model with all of their microbatches,
        whose losses are sums: divided by it, or nothing where it is 0.
        """
        averages = averages and self.loss_reduction == "mean" and len(steps) > 1
        newest = self.versions[-1]
        if self.warmup_left > 0:
            self.warmup_left -= 1
            self.versions = [newest]
        self._show_for(0)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[list[float]] = []
        sums: list[list[torch.Tensor | None]] = [
            [None for _ in self.parameters] for _ in range(self.num_pipelines * len(steps[0]))
        ]
        for step, batches in enumerate(steps):
            numbers = self._numbers(len(batches))
            parts = [self._microbatches(*each) for each in zip(batches, numbers, strict=True)]
            is_one_batch = not isinstance(self.num_microbatches, int) or normalizer is not None
            sizes = [[self._rows(microbatch) for microbatch in part] for part in parts]
            if is_one_batch:
                sizes = [[size for part in sizes for size in part]] * len(parts)
            losses.append([])
            total: torch.Tensor | None = None
            for replica, part in enumerate(parts):
                if not is_one_batch:
                    total = None
                places = self._places(len(part), numbers[replica])
                for (pipeline, place), microbatch in zip(places, part, strict=True):
                    number = sum(numbers[:replica]) + place  # among those of all replicas
                    mine = sums[replica * self.num_pipelines + pipeline]
                    if self.late is not None:
                        self._show_for(step * numbers[replica] + place)
                    self._set_gradients(mine)
                    with self.drawing(self.num_train_steps, number):
                        loss = self._scaled_loss(microbatch, sizes[replica])
                        if normalizer is not None:
                            loss = loss / normalizer if normalizer else loss * 0
                        share = loss / len(steps) if averages else loss
                        averaged = len(batches) > 1 and not is_one_batch
                        (share / len(batches) if averaged else share).backward()
                    mine[:] = [parameter.grad for parameter in self.parameters]
                    total = loss.detach() if total is None else total + loss.detach()
                assert total is not None
                losses[-1].append(total.item())
            if is_one_batch:
                losses[-1] = losses[-1][-1:] * len(batches)
            self.num_train_steps += 1
        self._set_gradients([_added(of_one) for of_one in zip(*sums, strict=True)])
        self._show(newest)
        self.optimizer.step()
        self.versions = [*self.versions, self._weights()][-max(self.delays) - 1 :]
        return losses

    def _show_for(self, microbatch: int) -> None:
        """Makes each parameter's the version that this microbatch of the batch reads."""
        late = [microbatch + 1] * len(self.delays) if self.late is None else self.late
        delays = [d if microbatch < n else 0 for d, n in zip(self.delays, late, strict=True)]
        self._show(
            [self.versions[max(len(self.versions) - 1 - d, 0)][i] for i, d in enumerate(delays)]
        )

    def _scaled_loss(self, microbatch: Batch, sizes: Sequence[int]) -> torch.Tensor:
        """The loss of one microbatch, weighted by its share of the rows of all these."""
        loss = self.loss_fn(self.model(*microbatch.args, **microbatch.kwargs), microbatch.target)
        if self.loss_reduction == "mean":
            alike = len(set(sizes)) == 1
            loss = loss / len(sizes) if alike else loss * (self._rows(microbatch) / sum(sizes))
        return loss

    def _numbers(self, width: int) -> list[int]:
        """Of microbatches, of each replica."""
        given = self.num_microbatches
        return [given] * width if isinstance(given, int) else list(given)

    def _rows(self, batch: Batch) -> int:
        tensors = [
            leaf
            for path, leaf in pytree.tree_flatten_with_path((batch.args, batch.kwargs))[0]
            if isinstance(leaf, torch.Tensor) and not self._is_whole(path)
        ]
        return tensors[0].shape[0]

    def _places(self, count: int, number: int) -> list[tuple[int, int]]:
        """Of so many microbatches that there are: the pipeline, and the number in a whole batch."""
        room = number // self.num_pipelines
        shares = torch.arange(count).tensor_split(self.num_pipelines)
        return [(p, p * room + i) for p, share in enumerate(shares) for i in range(len(share))]

    def _microbatches(self, batch: Batch | ReadyMade, number: int) -> list[Batch]:
        if isinstance(batch, ReadyMade):
            return list(batch.microbatches)
        number = min(number, self._rows(batch))

        def part(tree: Any, j: int) -> Any:
            def split(path: Any, leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor) or self._is_whole(path):
                    return leaf
                return leaf.tensor_split(number)[j]

            return pytree.tree_map_with_path(split, tree)

        return [
            Batch(part(batch.args, j), part(batch.target, j), part(dict(batch.kwargs), j))
            for j in range(number)
        ]

    def _is_whole(self, path: Any) -> bool:
        return any(getattr(key, "key", None) in self.replicated for key in path)

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _show(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)


def _added(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return sum(present[1:], start=present[0]) if present else None


def run_oracle(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    num_microbatches: int,
    loss_fn: LossFunction,
    delay: int,
    loss_reduction: str = "mean",
) -> list[float]:
    """Trains ``model`` on all batches; returns their losses, leaves the final parameters in it."""
    oracle = Oracle(model, optimizer, num_microbatches, loss_fn, delay, loss_reduction)
    return [oracle.train_step(batch) for batch in batches]
