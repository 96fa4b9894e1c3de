"""Sees that the processes of a tensor-parallel stage train what they all hold alike."""

from __future__ import annotations

import torch

from ..runtime.extension import Extension, TakenBack, Update
from ..runtime.session import Session

_SAMPLE = 256  # of a parameter's elements
_FAR = 0.1  # of the way that a parameter has gone; without an error, rounding is all there is

_Key = tuple[int, int, str]
"""An update, the stage and the name of a parameter."""


class EqualCopies(Extension):
    """Compares parameters that are no shards between the processes of a stage.

    Sequence parallelism, for one, leaves each process a part of the gradients of norms
    (arXiv 2205.05198, section 4.2.2). Where a model's own code does not add them up, copies of the
    weights drift apart. They are compared after 2, 4, 8, ... updates of a run, since a learning
    rate may begin at zero: how far apart they are, over how far they have come since the comparison
    before.
    """

    def __init__(self, session: Session) -> None:
        grid, parts = session.grid, session.local_model.parts()
        self._control = session.control  # not the pipeline, which the engine would hold
        self._place = (grid.replica, tuple(grid.stages))  # alike in the processes of a stage
        self._alike = set(session.local_model.trainable_names()) - parts.keys()
        self._first: int | None = None  # batch since the weights were loaded
        self._before: dict[tuple[int, str], torch.Tensor] = {}  # by stage and parameter
        self._moved: dict[_Key, tuple[torch.Tensor, float]] = {}  # not compared yet

    def acts_in(self, update: Update) -> bool:
        return (update.batch + 1 - (self._first or 0)).bit_count() == 1

    def after_update(self, update: Update, slot: int) -> None:
        weights = update.weights
        for number, name in enumerate(weights.trainable):
            if name not in self._alike:
                continue
            weight = weights.engine.weight(slot, number).detach().flatten()
            sample = weight[:: max(1, len(weight) // _SAMPLE)].to("cpu", torch.float64, copy=True)
            before = self._before.get((weights.index, name))
            if before is not None:
                moved = sample, float((sample - before).norm())
                self._moved[update.batch + 1, weights.index, name] = moved
            self._before[weights.index, name] = sample

    def before_step(self, batch: int) -> None:
        """Raises ValueError if copies differ after the updates that all have made by now."""
        if self._first is None:
            self._first = batch
        done = batch - self._first
        if done < 4 or (done - 2).bit_count() != 1:  # under "2bw" the newest has just been made
            return
        everyone = self._control.told_by_all((self._place, dict(self._moved)))
        for rank, (place, theirs) in enumerate(everyone):
            first = next(i for i, (other, _) in enumerate(everyone) if other == place)
            of_first = everyone[first][1]
            for key in sorted(theirs.keys() & of_first.keys()):
                if place == self._place:
                    self._moved.pop(key, None)
                (mine, way), (other, _) = theirs[key], of_first[key]
                apart = float((mine - other).norm())
                if apart > _FAR * way:
                    raise ValueError(
                        f"shards: {key[2]} after {key[0]} updates: the values of rank {rank} and "
                        f"rank {first} of one stage are {apart:.1e} apart, and have moved by "
                        f"{way:.1e}, what is no shard must be equal on all. Each has a gradient of "
                        "its own, as of norms under sequence parallelism: add the gradients up in "
                        "the module's backward. Or name the parameter in use_local_shards(model, "
                        "shards={...}) if it is a shard"
                    )

    def weights_loaded(self) -> None:
        self._first = None
        self._before.clear()
        self._moved.clear()

    def taken_back(self, taken: TakenBack) -> None:
        self.weights_loaded()
