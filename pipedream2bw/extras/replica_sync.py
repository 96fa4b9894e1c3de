"""Pipelines on several sites that train apart and average their weights seldom."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from ..checks import check_whole_number
from ..ranks.operations import Announcement, Operation
from ..rules import exclusions, instance
from ..runtime.extension import Extension, HeldBytes, Kept, Update
from ..runtime.session import Session
from ..runtime.stage_values import held_tensors
from ..runtime.stage_weights import StageWeights
from .model_traveling import measured_loss, newest_of, replaced
from .sites import SiteLink
from .skew_scout import Costs, SkewScout
from .stage_sync import Outer, StageSync, check_outer

AVERAGE = functools.partial(torch.optim.SGD, lr=1.0)
"""The outer optimizer that makes an anchor the mean of the sites' weights."""


class ReplicaSync(Extension):
    """Lets pipelines on several sites train apart: DiLoCo (arXiv 2311.08105), by stages.

    A site is a pipeline with processes, data and an optimizer of its own, such as one ``torchrun``.
    Every H batches each stage averages over the n sites how far it has come from its anchor A.
    It steps A by the outer optimizer and goes on from there:

        D = (1/n) * sum over the sites, in their order, of (A - W(t+1))
        A := outer(A, D),   W(t+1) := A,

    where W(t+1) is what the site's own optimizer has made of batch t. The exchange belongs to the
    update: under ``"2bw"`` it runs beside batch t+1, which still reads the site's own W(t), and
    whose gradient then steps A; batch t+2 is the first that reads A. A stage is a fragment of
    Streaming DiLoCo (arXiv 2501.18512): stage s exchanges after the batches t with
    (t + 1) mod H = floor(s H / d). So one stage at a time uses the link between the sites. Moments
    and buffers (BatchNorm) stay each site's own. Anchors and the outer optimizer's state are in the
    host's memory.

    Give it to ``PipelineOptimizer(..., replica_sync=)``, which waits for the other sites; weights
    begin as those of site 0. ``pipe.state_dict()``, ``unsplit()``, evaluation and checkpoints are
    the site's own; :meth:`anchors` is what all have in common. A failure of one site ends all.
    docs/replica_sync.md has an example.

    Args:
        every: H, the same on all sites; or a :class:`SkewScout`, which chooses it.
        store: that the processes of all sites reach, such as a ``torch.distributed.TCPStore``.
        site: this one's number, from 0.
        num_sites: n, at least 2.
        outer: makes a torch optimizer of a list of tensors, a stage's anchors; stepped by itself
            for each stage, and so made for values that do not depend on each other. The default
            averages: SGD of lr 1. DiLoCo's momentum counts exchanges and is for an H of hundreds.
        staggered: False: all stages exchange after the same batch.

    Attributes:
        every: H at present.
        stages: those of this process; tools read them.

    Raises:
        ValueError, TypeError: naming the rule and the values; from ``PipelineOptimizer``, on every
            rank and, where sites differ, on all sites.
    """

    name = "replica_sync"
    excludes = exclusions(
        """
replica_sync: given, shard_state: True |
    replicas of one site then lack masters that an exchange steps => leave out one of them
replica_sync: given, optimizer_device: given |
    weights are stepped where the exchange does not reach them => it must be None
replica_sync: given, split_master: True |
    an exchange steps whole masters => it must be False
replica_sync: given, loss_scale: given |
    a batch that overflows on one site makes no step there => train in 'bf16', which needs none
replica_sync: given, staleness: a correction |
    it corrects steps by the one before, which anchors replace => LearningRateDiscount goes with it
replica_sync: given, schedule: of two pipelines |
    the copies of a stage would exchange apart => choose a schedule of one pipeline
""",
        {"a correction": lambda remedies: remedies.correction is not None},
    )

    def __init__(
        self,
        every: int | SkewScout,
        *,
        store: Store,
        site: int,
        num_sites: int,
        outer: Outer = AVERAGE,
        staggered: bool = True,
    ) -> None:
        self._scout = every if isinstance(every, SkewScout) else None
        self.every: int = every.intervals[0] if isinstance(every, SkewScout) else every
        self._since = 0  # the batch from which H counts
        self._costs: Costs = {}
        self._store, self._site, self._num_sites = store, site, num_sites
        self._outer, self._staggered = outer, staggered
        self._session: Callable[[], Session | None] = lambda: None
        self._link: SiteLink | None = None  # of rank 0
        self.stages: dict[int, StageSync] = {}
        self._is_loaded = False  # its state, since the last step
        self._must_meet = False
        self._depth = 1  # of the pipeline

    # ------------------------------------------------------------------ what PipelineOptimizer does

    def check(self, session: Session, options: Mapping[str, Any]) -> None:
        """Raises ValueError or TypeError, naming the rule and both values."""
        what = self.name
        check_whole_number(f"{what}: every", self.every)
        check_whole_number(f"{what}: num_sites", self._num_sites, at_least=2)
        check_whole_number(f"{what}: site", self._site, at_least=0, at_most=self._num_sites - 1)
        instance("a torch.distributed.Store", Store).check(f"{what}: store", self._store)
        optimizer = instance("a torch.optim.Optimizer", torch.optim.Optimizer)
        optimizer.check(f"{what}: what outer makes", self._outer([torch.zeros(1)]))
        if self._session() is not None:
            raise ValueError(f"{what}: given to 2 PipelineOptimizers, it belongs to 1")

    def __repr__(self) -> str:
        return f"every: {self.every}"

    def settings(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks of a site."""
        return {"replica_sync": f"{self._common_settings()}, site {self._site}"}

    def _common_settings(self) -> dict[str, Any]:
        return {
            "every": str(self._scout or self.every),
            "num_sites": self._num_sites,
            "outer": " ".join(repr(self._outer([torch.zeros(1)])).split()),
            "staggered": self._staggered,
        }

    def join(self, session: Session) -> None:
        """Waits for the other sites and takes site 0's weights. Drained; every rank calls it."""
        stages = weakref.ref(session.stages)
        control = session.control

        def link(name: str) -> SiteLink:
            made = SiteLink(
                self._store,
                name,
                site=self._site,
                num_sites=self._num_sites,
                deadline=control.deadline,
                is_needed=lambda: stages() is not None,
            )
            control.close_too(made.close)
            return made

        def meet() -> None:
            self._link = link("first ranks")
            given = {**self._common_settings(), **_settings_of(session)}
            for name, value in given.items():
                self._link.agree(f"replica_sync: {name}", value)

        def join_stages() -> None:
            for stage in session.stages:
                weights = stage.weights
                place = f"{stage.index}.{session.grid.replica}.{session.grid.shard}"
                to_others = link(f"stage {place}")
                to_others.agree(
                    f"replica_sync: parameters of stage {stage.index} (their SHA-256)",
                    _fingerprint(weights),
                )
                to_others.take_first(held_tensors(weights))
                weights.engine.restart_delay()
                weights.show_newest()
                self.stages[stage.index] = StageSync(weights, to_others, self._outer)

        control.from_first(meet)
        control.together(join_stages)
        self._session, self._depth = weakref.ref(session), session.schedule.depth

    def before_step(self, batch: int) -> None:
        """Before a batch's update: after a load sites meet again. Every rank calls it.

        Raises:
            ValueError: on all sites: they are at different batches, or have different anchors.
        """
        if not self._must_meet:
            return
        session = self._open_session()
        with session.ending.lost_ranks_close():
            session.control.from_first(lambda: self._first_link.agree("replica_sync: batch", batch))
            session.control.together(self._compare_anchors)
        self._must_meet = self._is_loaded = False

    def _compare_anchors(self) -> None:
        for index, stage in self.stages.items():
            stage.link.agree(
                f"replica_sync: anchors of stage {index} (their CRC-32)", stage.checksum()
            )

    def acts_in(self, update: Update) -> bool:
        """Whether parameters of the stage are exchanged after the batch."""
        return bool(self._due(update))

    def _due(self, update: Update) -> list[int]:
        """The positions of the parameters that are exchanged after the batch."""
        weights, after = update.weights, update.batch + 1 - self._since
        return [
            i
            for i, name in enumerate(weights.trainable)
            # A tied parameter's copies exchange together.
            if after % self.every == self._offset(weights.stages_of(name)[0])
        ]

    def _offset(self, stage: int) -> int:
        return stage * self.every // self._depth if self._staggered else 0

    def after_update(self, update: Update, slot: int) -> None:
        """Exchanges; what is due is as it was in :meth:`acts_in`, as H changes drained."""
        self.stages[update.weights.index].exchange(slot, self._due(update))

    def bytes_of(self, stage: int) -> HeldBytes:
        found = self.stages.get(stage)
        return HeldBytes() if found is None else HeldBytes(on_host=found.nbytes())

    def kept(self, weights: StageWeights) -> Kept:
        return self.stages[weights.index].state()

    def saved(self) -> dict[str, Any]:
        """What is saved beside the anchors."""
        costs = [[interval, *cost] for interval, cost in self._costs.items()]
        outer = type(self._outer([torch.zeros(1)])).__name__
        return {"outer": outer, "every": self.every, "since": self._since, "costs": costs}

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        check_outer(self.saved()["outer"], saved["outer"])

    def load(
        self, saved: Mapping[str, Any] | None, kept: Kept, stages: Sequence[StageWeights]
    ) -> None:
        """Takes what was saved. Drained.

        Raises:
            ValueError: it is another outer optimizer's, or of other shapes.
        """
        if saved is None:
            return
        self.check_saved(saved)
        self._is_loaded = self._must_meet = True
        for stage in self.stages.values():
            stage.load(kept)
        if self._scout is not None and saved["every"] in self._scout.intervals:
            self.every, self._since = saved["every"], saved["since"]
            self._costs = {interval: (cost, age) for interval, cost, age in saved["costs"]}

    def weights_loaded(self) -> None:
        """Drained, after weights were loaded: anchors that were loaded with them stay."""
        self._must_meet = True
        if not self._is_loaded:
            for stage in self.stages.values():
                stage.restart()

    def known_everywhere(self, steps: Sequence[int]) -> list[int]:
        """Gives those of some steps that all sites know. Rank 0 of every site calls it."""
        others = self._first_link.gather(list(steps))
        return [step for step in steps if all(step in of_site for of_site in others)]

    # ------------------------------------------------------------------ what users do

    def anchors(self) -> dict[str, torch.Tensor]:
        """The anchors of this process's parameters by their names, as copies. Drains.

        They are equal on all sites after the same batch. Every rank calls it.
        """
        self._open_session().flush_to_read(Operation.optimizer_state_dict)
        return {
            name: anchor.clone()
            for stage in self.stages.values()
            for name, anchor in stage.anchors().items()
        }

    @contextlib.contextmanager
    def evaluating_anchors(self) -> Iterator[None]:
        """Inside, the pipeline evaluates the anchors. Drains.

        Then the weights are the site's own again, to the bit. Every rank enters it.

        Raises:
            ValueError: inside, from ``train_step``, ``opt.step``, :meth:`measure`, saving and
                loading, which would take other weights for the site's; on every rank.
        """
        session = self._open_session()
        session.flush_for(Operation.optimizer_state_dict)
        with contextlib.ExitStack() as shown:
            shown.enter_context(session.accumulation.weights_lent_to("evaluating_anchors()"))
            for stage in self.stages.values():
                values = list(stage.anchors().values())
                shown.enter_context(replaced(newest_of(stage.weights), values))
            yield

    def measure(self, evaluate: Callable[[], float | None]) -> float:
        """Measures the accuracy loss between the sites, and lets :class:`SkewScout` choose H.

        Model traveling (arXiv 1910.00189, section 7): each site evaluates its own model, and then
        that of the site before it, on its own data. Moves as many bytes as the weights and buffers
        have. Every rank of every site calls it, after the same batch. Drains.

        Args:
            evaluate: runs evaluations, ``pipe(...)``, on this site's data: rows that sites do not
                train on, if the loss is not to count what models know by heart. Gives the accuracy
                in [0, 1] in the process of the last stage (:attr:`PipelineModule.gives_output`).
                Called twice on every rank, and must not train; what it raises ends all sites.

        Returns:
            The mean accuracy of the sites' models on their own data, less that of the same models
            on the next site's.

        Raises:
            ValueError: ``every`` is a number; a batch waits for its ``opt.step()``; sites are at
                different batches.
            TypeError: ``evaluate`` gave no number.
        """
        session = self._open_session()
        scout = self._scout

        def check() -> Announcement:
            if scout is None:
                raise ValueError(f"measure: every: {self.every}, it must be a SkewScout")
            session.accumulation.check_between_batches("measure")
            return Announcement()

        session.flush_for(Operation.measure_skew, check)
        assert scout is not None
        with session.ending.failing_closes():
            loss = measured_loss(session, self.stages, self._link, evaluate)
        self.every, self._costs = scout.choose(self.every, loss, self._costs)
        self._since = session.accumulation.num_updates
        return loss

    def _open_session(self) -> Session:
        session = self._session()
        if session is None:
            raise ValueError("replica_sync: given to 0 open PipelineOptimizers, it needs 1")
        return session

    @property
    def _first_link(self) -> SiteLink:
        assert self._link is not None
        return self._link


def _settings_of(session: Session) -> dict[str, Any]:
    """What must be the same on all sites: else their stages would not exchange in one order."""
    schedule = session.schedule
    return {
        "schedule": schedule.name,
        "num_stages": schedule.depth,
        "stages of each rank": list(schedule.placement),
        "width": session.grid.width,
        "batch": session.accumulation.num_updates,
    }


def _fingerprint(weights: StageWeights) -> str:
    """Gives a text that only the same tensors have, of those that sites exchange."""
    described = [
        (name, tuple(p.shape), str(p.dtype))
        for name, p in (*weights.trainable.items(), *weights.frozen.items())
    ]
    described += [(n, tuple(b.shape), str(b.dtype)) for n, b in weights.named_buffers().items()]
    return hashlib.sha256(repr(described).encode()).hexdigest()
