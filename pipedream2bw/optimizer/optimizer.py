"""PipelineOptimizer: any torch optimizers, stepped by the pipeline when the gradients are there."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from .. import _C
from ..model.local_shards import as_local, refuse_unknown_shards
from ..ranks.operations import Answer, Operation
from ..runtime.comm_hook import check_hooks
from ..runtime.extension import OPTIMIZER, Extension, Update
from ..runtime.session import Session
from ..runtime.stage_weights import StageWeights
from ..schedules.load import warn_without_delay
from .checks import agreed_session_of, remedies_of
from .clipping import GradNorm, install_clipping
from .equal_copies import EqualCopies
from .fused import fused_options
from .late_forwards import LateForwards
from .loss_scale import LossScale, NewestScale
from .options import OptimizerOptions
from .own_step import changes, keep_from_zeroing, steps_in
from .staleness import Remedy, warn_of_delay
from .state_by_name import OptimizerSnapshot, SharedState, StateByName
from .step_remedies import StepRemedies
from .wrapped import Wrapped

_HOOKS = (
    "register_{}_hook: step() registers an update, which each stage makes later. Register the hook "
    "on the wrapped optimizer, before the PipelineOptimizer is made: it is called in each stage's "
    "update with that stage's parameters"
)


class PipelineOptimizer(torch.optim.Optimizer):
    """Makes ``optimizers`` the optimizers of the pipeline whose parameters they hold.

    One, or several over disjoint parameters: ``PipelineOptimizer(muon, adamw)``. It shares their
    ``param_groups`` and so works with every ``torch.optim.lr_scheduler``, which may be built on it
    or on any of them. ``step()`` registers the update of the last batch with the hyper-parameters
    as they are at that moment; each stage executes it when the batch's gradients are complete. SGD,
    Adam and AdamW run as one fused pass from W(t) to W(t+1) (float32 and float64); any other
    optimizer, and any option that the fused pass lacks (capturable, differentiable, tensor learning
    rates that require grad), steps a copy of W(t).

    docs/reference/options.md says of each option what exactly it does.

    Args:
        optimizers: over ``pipe.parameters()``.
        max_grad_norm: the most that the norm of all gradients may be, over the whole model; ``inf``
            only measures it.
        norm_type: of that norm; may be ``inf``.
        clip_grad_value: instead, the most that each element may be away from 0.
        loss_scale: multiplies losses before their backward; gradients are divided by it.
        staleness: remedies for the schedule's delay: a :class:`LearningRateDiscount`, an
            :class:`ErrorFeedback` or a :class:`NesterovCorrection`, or a list of the first and one
            of the others.
        replica_sync: a :class:`ReplicaSync` between pipelines on several sites.
        extensions: further ones, of your own (docs/extending.md).
        shard_state: each replica keeps masters and state of a share of a stage's parameters only.

    Raises:
        ValueError: parameters that are of no open pipeline, of several, or of a stage that another
            rank runs; not all trainable ones of the pipeline in exactly one group; none trainable;
            a remedy that does not suit the schedule's delays.
        TypeError: an optimizer that needs a closure (LBFGS) or sparse gradients (SparseAdam), or no
            torch optimizer.
    """

    def __init__(
        self,
        *optimizers: torch.optim.Optimizer,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        clip_grad_value: float | None = None,
        loss_scale: LossScale | None = None,
        staleness: Remedy | Sequence[Remedy] = (),
        replica_sync: Extension | None = None,
        extensions: Sequence[Extension] = (),
        shard_state: bool = False,
    ) -> None:
        given = locals()
        options = OptimizerOptions(
            **{name: given[name] for name in OptimizerOptions.__annotations__}
        )
        session = agreed_session_of(optimizers, options)
        remedies = remedies_of(session, options)
        self._session, self._shard_state = session, shard_state
        self._step_remedies = StepRemedies(
            remedies, session.schedule.delay, session.stages.options.pipeline.warmup_batches
        )
        given_extensions = options.all_extensions().values()
        self.replica_sync = replica_sync
        with session.ending.failing_closes():
            session.drain()  # updates that were registered are the former optimizer's
            for former in session.extensions.at(OPTIMIZER):
                if isinstance(former, Wrapped):
                    former.show_states()
            if session.stages.options.update_slots is not None:
                session.stages.set_late_forwards([])  # until it is known who waits for whom
            self._norm, self._scale = install_clipping(session, options)
            slots = session.stages.options.update_slots
            late = (LateForwards(session, slots),) if session.has_fresh_forwards else ()
        copies = (EqualCopies(session),) if session.local_model.parts() else ()
        own = (*late, *copies, self._step_remedies)
        self.extensions: Sequence[Extension] = (*own, *given_extensions)
        self._measures = max_grad_norm is not None
        super().__init__([{"params": []}], {})  # not theirs, to which it would add defaults
        self._wrapped = wrapped = Wrapped(
            session,
            optimizers,
            self.extensions,
            remedies=self._step_remedies,
            scale=self._scale,
        )
        first, *rest = (optimizer.defaults for optimizer in optimizers)
        # What all have, for schedulers that ask whether they can set it.
        self.defaults = {key: first[key] for key in first if all(key in other for other in rest)}
        self._share()
        if shard_state:
            with session.ending.failing_closes():
                session.grid.join_savers()
        # In one order on all ranks: a stage may wait there for its copies.
        for weights in sorted(wrapped.weights, key=lambda weights: weights.index_in_model):
            self._take_over(weights)
        wrapped.make_steppers({})
        if wrapped.first_step is not None:
            wrapped.take_states()
        let_updates_wait(session, wrapped.kinds, has_norm=self._norm is not None)
        session.extensions.put(OPTIMIZER, [wrapped, *self.extensions])
        for optimizer in optimizers:
            keep_from_zeroing(optimizer, session)
        with session.ending.failing_closes():
            for extension in given_extensions:
                extension.join(session)
        warn_without_delay(session.schedule, session.grid.rank, {"staleness": staleness})
        warn_of_delay(session, optimizers, remedies)

    def _take_over(self, weights: StageWeights) -> None:
        """Makes the engine step a stage's weights as these optimizers do."""
        session, wrapped = self._session, self._wrapped
        holders = wrapped.holders()
        with session.ending.failing_closes():
            weights.engine.arrange(
                reads_first=None not in wrapped.kinds,
                waits=self._norm is not None,
                fault=session.control.fault,
            )
            weights.engine.share(
                self._shard_state,
                may_cut=[holders[id(each)][0] is not None for each in weights.originals],
                norms=self._norm is not None,
                fault=session.control.fault,
            )
        weights.show_newest()
        self._step_remedies.take_over(weights)
        wrapped.set_fused(weights, holders)

    def _late_share(self, stage: int) -> float:
        """The share of the last batch's forwards on a stage that are late, in all replicas.

        It is the schedule's, whatever the batch read. Where others are fresh, the first of several
        train_steps alone has late ones.
        """
        session, schedule = self._session, self._session.schedule
        if not schedule.has_fresh_forwards:
            return 1.0
        late = schedule.late_forwards[stage] * session.grid.width
        equal = [schedule.num_microbatches] * session.grid.width
        numbers = session.stages.options.microbatches_of_replicas or equal
        return late / (sum(numbers) * session.accumulation.steps_in_batch)

    def _check_in_charge(self) -> None:
        if self._wrapped not in self._session.extensions.at(OPTIMIZER):
            raise ValueError(
                "this PipelineOptimizer is no longer the pipeline's: another one was made over its "
                "parameters; give several optimizers to one: PipelineOptimizer(first, second)"
            )

    def _share(self) -> None:
        """Takes the very groups of the wrapped ones, so that edits of either are seen by both."""
        optimizers = self._wrapped.optimizers
        if len(optimizers) == 1:
            (optimizer,) = optimizers
            self.param_groups = optimizer.param_groups
            self.state = optimizer.state
        else:
            self.param_groups = [group for each in optimizers for group in each.param_groups]
            self.state = collections.defaultdict(dict)
            for optimizer in optimizers:
                self.state.update(optimizer.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Registers the update of the last ``train_step``'s batch; returns at once.

        Args:
            closure: is called first, once; may make the ``train_step``. What it gives is returned.

        Raises:
            ValueError: called twice, or before the ``train_step`` that ends a batch; a group was
                added; another PipelineOptimizer has taken over.
        """
        result = None if closure is None else torch.enable_grad()(closure)()
        self._check_in_charge()
        wrapped = self._wrapped
        wrapped.check_unchanged()
        fused = [
            _C.GroupOptions() if kind is None else fused_options(optimizer, group)
            for kind, optimizer, group in wrapped.groups()
        ]
        current = wrapped.own_options()
        changed = {number: changes(current[number], wrapped.seen[number]) for number in current}
        batch = self._session.accumulation.num_updates
        for extension in self.extensions:
            extension.before_step(batch)
        with self._session.update() as train_step:
            if self._norm is not None:
                self._wrapped.grad_norm = GradNorm(self._session, self._norm)
            for stage in self._session.stages.in_update_order:
                steppers = [wrapped.steppers[number, stage.index] for number in changed]
                for stepper, groups in zip(steppers, changed.values(), strict=True):
                    stepper.change(batch, groups)
                share = self._late_share(stage.index)
                is_stale = stage.executor.version_of_batch(stage.index, batch) < batch
                update = Update(batch, stage.weights, share if is_stale else 0.0)
                divisor = self._step_remedies.divisor(stage.index, batch, share)
                stage.executor.submit_update(
                    stage=stage.index,
                    run=train_step,
                    groups=self._step_remedies.fused_options(update, divisor, fused),
                    step=steps_in(update, steppers, divisor, self.extensions),
                )
            wrapped.stepped(batch, current)
            for extension in self.extensions:
                extension.step_submitted(batch)
            for optimizer in wrapped.optimizers:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look there
        return result

    @property
    def grad_norm(self) -> GradNorm:
        """The norm of the gradients that the last :meth:`step` uses, before clipping; lazy.

        With ``"2bw"`` it comes during the next ``train_step``: keep this object and read it then.

        Raises:
            ValueError: no ``max_grad_norm`` was given, or no step has been made.
        """
        if not self._measures:
            raise ValueError("grad_norm: max_grad_norm is None, it must be a number (inf measures)")
        if self._wrapped.grad_norm is None:
            raise ValueError("grad_norm: the last step was discarded, or there was none")
        return self._wrapped.grad_norm

    @property
    def loss_scale(self) -> NewestScale:
        """The scale of the version that the last :meth:`step` makes; lazy.

        Raises:
            ValueError: no ``loss_scale`` was given.
        """
        if self._scale is None:
            raise ValueError("loss_scale: None was given, it must be a LossScale")
        return NewestScale(self._session, self._scale, self._wrapped.grad_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine owns the gradients and begins each batch's with zeros."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses with a ValueError: all parameters that the pipeline trains are in a group."""
        if hasattr(self, "_wrapped"):
            raise ValueError(
                "add_param_group: every trainable parameter of the pipeline is in a group already; "
                "make a new PipelineOptimizer to group them in another way"
            )
        super().add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        """Refuses with a ValueError: :meth:`step` registers an update, which is made later."""
        raise ValueError(_HOOKS.format("step_pre"))

    def register_step_post_hook(self, hook: Any) -> NoReturn:
        """Refuses with a ValueError: :meth:`step` registers an update, which is made later."""
        raise ValueError(_HOOKS.format("step_post"))

    def train(self) -> None:
        """Calls ``train()`` of the wrapped optimizers that have it. Drains; every rank calls it.

        For optimizers that evaluate other weights than they train, as schedule-free ones do.
        """
        self._call("train")

    def eval(self) -> None:
        """Calls ``eval()`` of the wrapped optimizers that have it. Drains; every rank calls it."""
        self._call("eval")

    def _call(self, name: str) -> None:
        self._check_in_charge()
        self._session.flush_for(Operation.flush)
        for stepper in self._wrapped.steppers.values():
            stepper.call(name)
        self._wrapped.read_counters()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's ``state_dict`` for this process's parameters. Drains.

        Parameters have their names in the model in place of numbers; stock optimizers load it. Of
        several: ``{"optimizers": [...]}``, theirs in their order. With loss scaling it has an
        entry ``"loss_scale"``; with remedies for the delay ``"staleness"``, between sites
        ``"replica_sync"``. Shards of tensor-parallel stages are DTensors. Every rank calls it.

        Raises:
            ValueError: of tensor-parallel stages, :func:`use_local_shards` was not told which
                parameters are shards.
        """
        self._check_in_charge()
        refuse_unknown_shards("state_dict()", self._session.facts)
        with self._session.ending.one_at_a_time():
            result: dict[str, Any] = self._session.with_dtensors(self._wrapped.state_dict())
            self._share()
            return result

    def init_state(self) -> None:
        """Makes room for ``torch.distributed.checkpoint.load``, which fills what is there. Drains.

        Until the next step or load, :meth:`state_dict` of an optimizer that has made none has the
        kinds of tensors that a step would leave; nothing else changes. Every rank calls it.

        Raises:
            ValueError: with a remedy that corrects steps: its state cannot be known before.
        """
        self._check_in_charge()
        self._wrapped.init_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or a stock optimizer's gave. Drains. Every rank calls it.

        Raises:
            ValueError: it is not of these optimizers; on every rank.
        """
        self._check_in_charge()
        self._session.flush_for(Operation.optimizer_load_state_dict)
        mesh = self._session.grid.mesh_of_shards
        self._session.together(lambda: self._wrapped.load_state_dict(as_local(state_dict, mesh)))
        self._share()

    def snapshot(self) -> OptimizerSnapshot:
        """What the last :meth:`step` will leave, to be read when every stage has made it."""
        self._check_in_charge()
        return self._wrapped.snapshot()

    @property
    def has_own_step(self) -> bool:
        """Whether an optimizer steps by itself, not in a fused pass."""
        return None in self._wrapped.kinds

    def examples(self) -> dict[str, Any]:
        """What checkpoints will have of each optimizer that steps by itself, in kind."""
        return self._wrapped.examples()

    def load_snapshot(self, shared: SharedState, states: StateByName) -> None:
        """Goes on where a snapshot was made, with this process's part of the state. Drained."""
        self._wrapped.load_snapshot(shared, states)
        self._share()

    def __repr__(self) -> str:
        how = {True: "its own step on a copy of the weights", False: "one fused pass"}
        each = zip(self._wrapped.kinds, self._wrapped.optimizers, strict=True)
        return "\n".join(f"PipelineOptimizer({how[kind is None]})\n{opt!r}" for kind, opt in each)


def let_updates_wait(session: Session, kinds: Sequence[str | None], *, has_norm: bool) -> None:
    """Makes updates wait for all stages where that takes neither time nor memory.

    Under a schedule of one delay whose forwards are all late it takes no time. It takes no memory
    where the gradients have a buffer to wait in: where all buffers take turns, or where the stages
    wait for the update. With a norm they wait anyway. Every rank calls it, drained.

    Args:
        kinds: the fused pass of each optimizer; None: its own step.

    Raises:
        ValueError: a gradient hook needs it, and the schedule could not go on.
    """
    engines = [stage.weights.engine for stage in session.stages]
    is_free = (
        session.schedule.has_one_delay
        and not session.has_fresh_forwards
        and all(
            engine.num_versions == 1
            or engine.frees_gradients
            or (None not in kinds and engine.num_slots > engine.num_versions)
            for engine in engines
        )
    )
    mine = has_norm or is_free
    with session.ending.failing_closes():
        announced = session.agree(
            Operation.new_optimizer, session.num_train_steps, lambda: Answer(mine)
        )
        with contextlib.suppress(ValueError):  # then some failures end the pipeline
            session.stages.let_updates_wait(all(each.is_yes for each in announced))
    check_hooks(session)
