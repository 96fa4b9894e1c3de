"""One stage of pipelines that train apart: the anchors, and how its weights come back to them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..runtime.stage_weights import StageWeights
from .sites import SiteLink

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Makes the outer optimizer of a stage's anchors."""

ANCHOR = "anchor"
"""The name of a parameter's anchor beside what the outer optimizer keeps of it."""


def check_outer(ours: str, saved: str) -> None:
    """Raises ValueError if what one outer optimizer keeps is no other's; they are given by kind."""
    if ours != saved:
        raise ValueError(f"replica_sync: outer: {ours}, what was saved has {saved}'s state")


class StageSync:
    """The anchors of one stage's parameters, in the host's memory, and their outer optimizer.

    Args:
        weights: the stage's, whose newest are the first anchors. Drained.
        link: to the stage on the other sites.
    """

    def __init__(self, weights: StageWeights, link: SiteLink, outer: Outer) -> None:
        self.weights = weights
        self.link = link
        self._anchors = [master.clone() for master in self._masters()]
        self._optimizer = outer(self._anchors) if self._anchors else None

    def _masters(self) -> list[torch.Tensor]:
        """The newest weights on the host, as they are stepped."""
        engine = self.weights.engine
        slot = engine.newest_slot
        masters = (engine.master(slot, i) for i in range(len(self.weights.handles)))
        return [master.detach().to("cpu").contiguous() for master in masters]

    def restart(self) -> None:
        """Makes the newest weights the anchors. Drained."""
        for anchor, master in zip(self._anchors, self._masters(), strict=True):
            anchor.copy_(master)

    @torch.no_grad()
    def exchange(self, slot: int, positions: Sequence[int]) -> None:
        """Within an update: steps some parameters' anchors; the weights in ``slot`` become these.

        All sites call it after the same batch.
        """
        assert self._optimizer is not None
        engine, anchors = self.weights.engine, [self._anchors[i] for i in positions]
        masters = [engine.master(slot, i) for i in positions]
        gradients = [
            anchor - master.to("cpu") for anchor, master in zip(anchors, masters, strict=True)
        ]
        for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
            self._average([gradient for gradient in gradients if gradient.dtype == dtype])
        for anchor, gradient in zip(anchors, gradients, strict=True):
            anchor.grad = gradient
        self._optimizer.step()
        for i, anchor, master in zip(positions, anchors, masters, strict=True):
            anchor.grad = None
            master.copy_(anchor)
            weight = engine.weight(slot, i)
            if weight.dtype != master.dtype:
                weight.copy_(master)

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Makes them the mean over the sites."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.link.average(flat)
        means = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def nbytes(self) -> int:
        """Bytes of the anchors and of what the outer optimizer keeps."""
        kept = self.state().values()
        return sum(t.nbytes for each in kept for t in each.values() if isinstance(t, torch.Tensor))

    def checksum(self) -> int:
        """A number that other anchors do not have; CRC-32."""
        crc = 0
        for anchor in self._anchors:
            crc = zlib.crc32(anchor.view(-1).view(torch.uint8).numpy().data, crc)
        return crc

    def anchors(self) -> dict[str, torch.Tensor]:
        """The anchors by the parameters' names, live."""
        return dict(zip(self.weights.trainable, self._anchors, strict=True))

    def state(self) -> dict[str, dict[str, Any]]:
        """By the parameters' names: the anchor, and what the outer optimizer keeps of it; live."""
        kept = {} if self._optimizer is None else self._optimizer.state
        return {
            name: {
                ANCHOR: anchor,
                **{key: value for key, value in kept.get(anchor, {}).items() if value is not None},
            }
            for name, anchor in self.anchors().items()
        }

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes what :meth:`state` gave; parameters that are not there keep what they have.

        Raises:
            ValueError: an anchor has another shape than its parameter.
        """
        for name, anchor in self.anchors().items():
            kept = dict(state.get(name, {}))
            saved = kept.pop(ANCHOR, None)
            if saved is None:
                continue
            if saved.shape != anchor.shape:
                raise ValueError(
                    f"replica_sync: anchor of {name}: shape {list(saved.shape)}, the parameter has "
                    f"{list(anchor.shape)}: they must be equal"
                )
            anchor.copy_(saved)
            assert self._optimizer is not None
            self._optimizer.state[anchor] = {
                key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                for key, value in kept.items()
            }
