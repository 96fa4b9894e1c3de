"""PipelineModule: one nn.Module, split over stages and trained without emptying the pipeline."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import svg
from .._C import Schedule
from ..errors import PeerLost
from ..model.checkpoint import Checkpoint, open_checkpoint
from ..model.local_shards import put_together, refuse_unknown_shards
from ..model.metrics import Metric
from ..options import Options
from ..ranks.mesh import mesh_of
from ..ranks.operations import Announcement, Operation
from ..runtime.closing import close, give_back
from ..runtime.comm_hook import CommHook, StageHook, register_comm_hook, replica_group
from ..runtime.discard_batch import discard_batch, discard_left
from ..runtime.evaluation import evaluate, evaluate_loss
from ..runtime.graphs import StageGraphs, graphs_of
from ..runtime.lazy_numbers import Loss
from ..runtime.loading import load_model
from ..runtime.microbatch import Microbatch
from ..runtime.stage_memory import MemoryReport, memory_of
from ..runtime.step_data import StepArguments
from ..runtime.timeline import Timeline, recording
from ..schedules.load import warn_without_delay
from .opening import open_session

if TYPE_CHECKING:
    from ..planner.planning.plan import Plan
    from ..planner.profiling.profile import Profile
else:
    Plan = Profile = Any  # for typing.get_type_hints()


_PLACEHOLDER = "_placeholder"

_OWNS_THE_MEMORY = (
    "the pipeline owns the memory of the weights: change the model before the pipeline is made, or "
    "load values by load_state_dict()"
)

_Self = TypeVar("_Self", bound="PipelineModule")


class PipelineModule(nn.Module):
    """Trains ``model`` as a pipeline of ``num_stages`` stages.

    Without a process group each stage is a thread of this process; under ``torchrun`` each stage of
    each replica is a process (world size ``width * num_stages``, the ranks of a replica adjacent).
    With ``stages_per_rank`` > 1, and with two pipelines, stages share a thread or a process.
    The pipeline takes the model over: its parameters become views of the pipeline's buffers, which
    show the newest weights whenever the pipeline is drained.

    With ``schedule="2bw"`` (PipeDream-2BW, arXiv 2006.09503, section 3.1) every microbatch of batch
    t uses weights W(max(t-1, 0)) on all stages. The pipeline is never drained between batches:
    W(t+1) = step(W(t), gradient at W(max(t-1, 0))).

    docs/reference/options.md says of each schedule and each option what exactly it does.

    Args:
        model: the module, or a list of ``num_stages`` modules to be chained.
        loss_fn: ``loss_fn(output, target)`` gives the mean over its microbatch's rows, a scalar.
        plan: what :func:`plan` made, or its path, in place of the options that say how to cut.
        num_stages: the depth d, or ``"auto"``: as a plan says that is made for this model.
        num_microbatches: m, per ``train_step`` and replica; ``"2bw"`` needs m >= d.
        schedule: the name of a method, or a schedule of one's own; None: ``"2bw"``.
        stages_per_rank: v; stage s is on rank s mod d/v, in a V on rank min(s, d-1-s).
        update_slots: how many slots (a forward and a backward) an update takes. Forwards that can
            then read W(t) do; ``"auto"`` measures it. None: 1 with ``"2bw_fresh"``, else all are
            late.
        example_args, example_kwargs: a call of the model, with any number of rows >= 1.
        example_target: a batch's target, for ``num_stages="auto"``.
        profile: in place of measuring, or the path to save it at, for ``num_stages="auto"``.
        split: ``"auto"`` (balanced by cost), or the names of the layers where stages 1... begin.
        width: replicas w, each fed its own batches; gradients are averaged over them.
        mesh: which process is which ("pp", "dp", "tp"), in place of ``width`` and adjacent ranks: a
            DeviceMesh, or sizes: ``{"dp": 2, "pp": 4}``.
        devices: in one process, the device of each stage; None: the model's own.
        replicated: arguments that every microbatch gets whole; others are split along dimension 0.
        dynamic_shapes: whether torch.export leaves all sizes open that the model leaves open.
        recompute: which stages or modules run their forward again in the backward (arXiv
            1604.06174), to keep their inputs only; ``"auto"``: stages of several microbatches.
        accumulate: n ``train_step`` calls are one batch, followed by one ``opt.step()``.
        loss_reduction: ``"mean"``, or ``"sum"`` if ``loss_fn`` sums over its rows.
        normalizer: a number that summed losses are divided by: True: each ``train_step`` is given
            it, or a function of the target. Its sum over the batch divides gradient and loss.
        metrics: names -> ``fn(output, target)``, means over rows; see ``train_step(...).metrics``.
        warmup_batches: the first so many are trained without a delay (arXiv 1910.05124).
        compile: True, or a dict of ``torch.compile``'s options, for each stage.
        bucket_cap_mb: MiB of gradients that replicas add up at once (arXiv 2006.15704).
        replica_sums: ``"ordered"``: in the replicas' order, or ``"all_reduce"``: in the backend's.
        precision: ``"bf16"`` or ``"fp16"``: stages compute in it, with float32 masters (arXiv
            1710.03740); ``"fp32"``: everything is float32; None: the model's own dtypes.
        split_master: with ``"bf16"``, keeps of masters what the newest weights do not have.
        gradient_dtype: ``torch.bfloat16``, with ``"bf16"``: of the sums of gradients.
        optimizer_device: ``"cpu"``: the optimizer steps in the host's memory.
        autocast: ``torch.bfloat16`` or ``torch.float16``, for forwards and ``loss_fn``.
        random: ``"keyed"``: what training draws follows from :attr:`random_seed` and the draw's
            place, the same at every depth. ``"torch"``: from torch's default generators.
        graphs: ``"auto"`` or True: forwards and backwards become a device's graphs (CUDA).
        timeout: seconds that a rank waits for another before the pipeline fails.

    Attributes:
        session: this process's part of the open pipeline: its stages, schedule and processes. Tools
            and tests read it; scripts that train do not need it.

    Raises:
        ValueError, TypeError: on every rank, naming the rule and both values.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        plan: Plan | str | os.PathLike[str] | None = None,
        num_stages: int | str | None = None,
        num_microbatches: int | Sequence[int] | None = None,
        schedule: str | os.PathLike[str] | Schedule | None = None,
        stages_per_rank: int | None = None,
        update_slots: int | str | None = None,
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        example_target: Any = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        split: str | Sequence[str] | None = None,
        width: int | None = None,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
        devices: Sequence[torch.device | str] | None = None,
        replicated: Sequence[str] = (),
        dynamic_shapes: bool = False,
        recompute: bool | str | Sequence[bool] | Sequence[str] | None = None,
        accumulate: int = 1,
        loss_reduction: str = "mean",
        normalizer: bool | Callable[[Any], Any] = False,
        metrics: Mapping[str, Metric] | None = None,
        warmup_batches: int = 0,
        compile: bool | Mapping[str, Any] = False,
        bucket_cap_mb: float = 25.0,
        replica_sums: str = "ordered",
        precision: str | None = None,
        split_master: bool = False,
        gradient_dtype: torch.dtype | None = None,
        optimizer_device: str | torch.device | None = None,
        autocast: torch.dtype | None = None,
        random: str = "keyed",
        graphs: bool | str = False,
        timeout: float = 1800.0,
    ) -> None:
        given = locals()
        options = Options(**{name: given[name] for name in Options.__annotations__})
        arrange = None
        if plan is not None or num_stages == "auto":
            from ..planner.arranging import arrange_as_planned  # the planner is loaded for it alone

            arrange = functools.partial(arrange_as_planned, model, loss_fn, options)
        session = open_session(model, loss_fn, options, arrange)
        super().__init__()
        idle = {"update_slots": update_slots, "warmup_batches": warmup_batches}
        warn_without_delay(session.schedule, session.grid.rank, idle)
        self.session = session
        self._hooks: Sequence[StageHook] = ()

    # ------------------------------------------------------------------ what the user reads

    @property
    def num_stages(self) -> int:
        return self.session.schedule.depth

    @property
    def random_seed(self) -> int | None:
        """Where the random numbers of training begin: drawn from torch's default generator.

        It was drawn when the pipeline was made, on rank 0, after ``torch.manual_seed(...)`` always
        the same. None with ``random="torch"``.
        """
        return self.session.random_seed

    @property
    def num_microbatches(self) -> int:
        return self.session.schedule.total_microbatches

    @property
    def width(self) -> int:
        return self.session.grid.width

    @property
    def mesh(self) -> DeviceMesh:
        """The processes: the mesh that was given, or one of "dp", "pp" and, with shards, "tp".

        Made when first asked for: every rank asks for it.

        Raises:
            RuntimeError: in one process, where there is none.
        """
        session = self.session
        if session.grid.mesh is None:
            if not session.grid.in_processes:
                raise RuntimeError("mesh: 1 process, a mesh needs several: run under torchrun")
            session.ending.check_open()
            device_type = session.stages.options.devices[0].type
            with session.ending.failing_closes():
                session.agree(Operation.new_mesh, session.num_train_steps, Announcement)
                places, deadline = session.grid.places, session.control.deadline
                session.grid.mesh = mesh_of(places, device_type, deadline)
        return session.grid.mesh

    @property
    def schedule(self) -> str:
        return self.session.schedule.name

    @property
    def training(self) -> bool:
        """The model's own mode."""
        return self.session.root.training if "session" in vars(self) else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "session" in vars(self):
            self.session.root.training = mode

    @property
    def late_forwards(self) -> tuple[int, ...]:
        """By stage, how many of a batch's first forwards read W(t-1); the others read W(t).

        Under ``"2bw"`` all, with ``update_slots="auto"`` also before the update has been measured.
        A :class:`PipelineOptimizer` sets them: clipping makes more of them late.
        """
        return tuple(self.session.schedule.late_forwards)

    @property
    def rank(self) -> int:
        """This process among all: without a mesh replica * ranks + the schedule's rank."""
        return self.session.grid.rank

    @property
    def replica(self) -> int:
        return self.session.grid.replica

    @property
    def stages(self) -> list[int]:
        """The model's stages that this process runs, in whichever pipeline."""
        return self.session.grid.stages_of_model

    @property
    def is_first_stage(self) -> bool:
        """Whether this process runs stage 0, which needs the arguments of ``train_step``.

        With ``"chimera"`` both ranks that do: 0 and d-1 of a replica.
        """
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """Whether this process runs the last stage; ``train_step`` needs the target there."""
        return self.num_stages - 1 in self.stages

    @property
    def gives_output(self) -> bool:
        """Whether calling the pipeline gives the model's output in this process.

        It does where the last stage is; of two pipelines the first one evaluates.
        """
        return self.session.gives_output

    # ------------------------------------------------------------------ training

    def train_step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Iterable[Microbatch] | None = None,
        normalizer: Any = None,
        **kwargs: Any,
    ) -> Loss:
        """Forward and backward of one batch, pipelined; returns before they are done.

        Every rank calls it. The rank of stage 0 needs ``args`` and ``kwargs``, the rank of the last
        stage ``target`` (with two pipelines both ranks that run the stage; they must be given the
        same batch); the others may pass the same or leave them out. Every tensor is split
        along dimension 0 into ``num_microbatches`` parts, as ``torch.tensor_split`` does, unless
        its name is in ``replicated``. So are NumPy arrays in a target, and lists without
        tensors, which have an entry for each row. Fewer rows make fewer microbatches, of one row
        each, with the same mean. The microbatches are views of these tensors and are read
        after this call has returned: write to them only after the loss of the batch after the next
        (``"pipedream"``: the d-th next), or a :meth:`flush`. Call ``step()`` of the
        :class:`PipelineOptimizer` once after each, or after ``accumulate`` of them.

        Args:
            microbatches: in place of a batch ready-made ones, at most ``num_microbatches``, each
                with its own number of rows and shapes: lengths may differ, if the captured model
                stands that. Their losses are weighted by their rows, as those of a batch are.
            normalizer: of a pipeline with ``normalizer=True``: the whole number, at least 0, of
                what this replica's losses are sums over, in all of the batch: all its calls are
                given the same one. Only the last stage's rank needs it.

        Raises:
            ValueError: on every rank: no rows, tensors of different numbers of rows or that need
                gradients, or other arguments than the example's; a missing ``opt.step()``; ranks
                under ``no_grad()``, or some under :meth:`no_sync` and others not; a missing
                normalizer, or one too many.
            StageError: the pipeline has failed; its attributes say where and why.
        """
        discard_left(self.session)
        arguments = StepArguments(
            Microbatch(*args, target=target, **kwargs), microbatches, normalizer
        )
        return Loss(self.session, self.session.train_step(arguments))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``train_step`` calls need no ``opt.step()``: their batch goes on.

        As ``DistributedDataParallel.no_sync``: what they compute is added (not averaged) to the
        gradient of the next ``train_step`` outside, and replicas add up theirs only then.

        >>> with pipe.no_sync():
        ...     first = pipe.train_step(x, target=y)
        >>> second = pipe.train_step(x, target=y)
        >>> opt.step()

        For a mean over n calls divide the loss by n, in ``loss_fn``; ``accumulate=n`` does so by
        itself. Every rank enters it, under any schedule.

        Raises:
            ValueError: ``accumulate`` is more than 1.
        """
        return self.session.accumulation.no_sync()

    def flush(self) -> None:
        """Drains the pipeline: every batch's backward is done when this returns.

        Every rank calls it. Changes timing, never numbers.

        Raises:
            StageError: the pipeline has failed.
        """
        self.session.flush_for(Operation.flush)

    def discard_batch(self) -> tuple[int, ...]:
        """Takes back the ``train_step`` calls since the last ``opt.step()``; gives their numbers.

        Every rank calls it; drains. The next batch reads the newest weights. After an interrupt the
        next ``train_step`` does it by itself.
        """
        return discard_batch(self.session)

    def forward(
        self, *args: Any, microbatches: Iterable[Microbatch] | None = None, **kwargs: Any
    ) -> Any:
        """The model's output on the newest weights, computed by the pipeline without gradients.

        Every rank calls it, under ``torch.no_grad()`` or after ``eval()``. Drains first. Returns
        the output where :attr:`gives_output`, None elsewhere; the rank of stage 0 needs the
        arguments. Any number of rows; outputs are joined along dimension 0, numbers averaged.

        Args:
            microbatches: in place of a batch ready-made ones, at most ``num_microbatches``, of any
                rows and shapes as those of :meth:`train_step`, without targets. Returns a list of
                their outputs, each what the unsplit model returns.

        Raises:
            RuntimeError: in training mode with gradients enabled: use :meth:`train_step`.
        """
        self._check_evaluates("calling the pipeline")
        arguments = StepArguments(Microbatch(*args, **kwargs), microbatches, has_target=False)
        return evaluate(self.session, arguments)

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: Iterable[Microbatch] | None = None,
        normalizer: Any = None,
        **kwargs: Any,
    ) -> Loss:
        """The loss and the metrics of one batch on the newest weights, without gradients.

        They are those that :meth:`train_step` would give, on every rank. Every rank calls it, under
        ``torch.no_grad()`` or after ``eval()``, with what ``train_step`` is given. The batch is not
        trained on, and no ``opt.step()`` follows. Drains first, and is through when it returns. Of
        two pipelines the first one evaluates, whose last stage alone needs the target.

        >>> with torch.no_grad():
        ...     held_out = pipe.eval_step(x, target=y)

        Raises:
            RuntimeError: in training mode with gradients enabled.
            ValueError: as :meth:`train_step` does.
            StageError: a forward or ``loss_fn`` failed; the pipeline goes on.
        """
        self._check_evaluates("eval_step()")
        arguments = StepArguments(
            Microbatch(*args, target=target, **kwargs), microbatches, normalizer
        )
        return Loss(self.session, evaluate_loss(self.session, arguments))

    def _check_evaluates(self, what: str) -> None:
        self.session.ending.check_open()
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"{what} computes no gradients: use train_step() to train, or call it under "
                "torch.no_grad() or after eval()"
            )

    def unsplit(self) -> nn.Module | Sequence[nn.Module]:
        """Drains, closes the pipeline and gives the whole model back with the newest weights.

        Raises:
            RuntimeError: under torchrun, where no process has the whole model.
        """
        if self.session.grid.in_processes:
            raise RuntimeError(
                "unsplit() works in one process; under torchrun use full_state_dict()"
            )
        give_back(self.session)
        return self.session.model

    # ------------------------------------------------------------------ reports

    def extra_repr(self) -> str:
        session = self.session
        schedule, mode = session.schedule, session.modes.first
        lines = [
            f"schedule={schedule.name!r}, num_stages={schedule.depth}, "
            f"num_microbatches={schedule.total_microbatches}, width={session.grid.width}",
            f"model={type(session.root).__name__}, captured by {mode.captured.how}",
            *(f"  {note}" for note in mode.captured.notes),
            *session.local_model.describe(mode),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        first, *lines = self.extra_repr().split("\n")
        return svg.html(
            f"{type(self).__name__}({first})",
            *map(svg.note, lines),
            self.memory_report().bars(),
        )

    def memory_report(self) -> MemoryReport:
        """Bytes by kind for each stage of this process. Drains nothing; reads what has been.

        With two pipelines stage d + i is the second one's copy of stage i.
        """
        return MemoryReport(
            (stage.index, memory_of(stage, self.session.extensions))
            for stage in self.session.stages
        )

    def timeline(self) -> contextlib.AbstractContextManager[Timeline]:
        """Records the actions executed inside the ``with`` block; drains at its end."""
        return recording(self.session)

    def graph_report(self) -> dict[int, StageGraphs]:
        """What each stage of this process has recorded with ``graphs=``, and what not and why.

        Of a device's memory graphs take a microbatch's activations for each that is in flight,
        times the stage's weight versions.
        """
        stages = self.session.stages
        return {each.index: graphs_of(each.executor.graph_report(each.index)) for each in stages}

    # ------------------------------------------------------------------ replicas

    @property
    def microbatches_per_replica(self) -> tuple[int, ...]:
        """The number of microbatches that each replica makes of its rows of a batch."""
        session = self.session
        equal = (session.schedule.total_microbatches,) * session.grid.width
        return session.stages.options.microbatches_of_replicas or equal

    def replica_group(self, stage: int | None = None) -> dist.ProcessGroup:
        """The processes that hold a stage of this process, one in each replica.

        For the state of a gradient hook: its collectives are made over this group. Nothing but
        hooks may use it while the pipeline is open. On devices the pipeline's timeout ends its
        transfers, which have none of their own.

        Args:
            stage: may be left out where the process runs one.

        Raises:
            ValueError: there is one replica, or the process does not run the stage.
        """
        return replica_group(self.session, stage)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Makes ``hook(state, bucket)`` do what else adds up gradients over the replicas.

        As ``DistributedDataParallel.register_comm_hook``, whose hooks run as they are; see
        docs/gradient_hooks.md. Every rank calls it, once, between batches. Drains. The state is not
        part of checkpoints: residuals begin at zero in a run that goes on.

        Args:
            state: what the hook gets first. None: the stage's :meth:`replica_group`. A function (or
                class) is called with that group, for each stage of this process. Anything else is
                given as it is, where the process runs one stage.
            hook: the same on every rank. It gives a ``torch.futures.Future`` of the mean over the
                replicas of the ``torch.distributed.GradBucket`` that it gets.

        Raises:
            ValueError: on every rank: what a hook does not go with, or a batch that waits for its
                ``opt.step()``; there is a hook; another ``process_group``; ranks differ.
            TypeError: on every rank: ``hook`` cannot be called with two arguments.
        """
        self._hooks = register_comm_hook(self.session, state, hook)

    # ------------------------------------------------------------------ modules

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """The pipeline, the model and the model's modules."""
        yield self
        for _, module in self.session.root.named_modules(remove_duplicate=remove_duplicate):
            yield module

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """The pipeline and the model's modules, under the model's own names."""
        seen = set() if memo is None else memo
        if self in seen:
            return
        seen.add(self)
        yield prefix, self
        root = self.session.root
        for name, module in root.named_modules(seen, prefix, remove_duplicate):
            if module is not root:  # whose name is the pipeline's
                yield name, module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's children, under its own names."""
        return self.session.root.named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """The model's module of that name; the pipeline itself for an empty one."""
        return self.session.root.get_submodule(target) if target else self

    def train(self: _Self, mode: bool = True) -> _Self:
        """As ``nn.Module.train``: sets the mode of the model's modules on every stage."""
        self.session.ending.check_open()
        self.session.root.train(mode)
        return self

    # ------------------------------------------------------------------ what a pipeline refuses

    def _apply(self: _Self, fn: Callable[..., Any], recurse: bool = True) -> _Self:
        """Changes nothing if every tensor already is as ``to()``, ``half()`` and the like want it.

        Raises:
            TypeError: a tensor would change, which a pipeline cannot do; names what can.
        """
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not tensor.is_floating_point():
                continue
            probe = torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
            wanted = fn(probe)
            if wanted.device != probe.device:
                raise TypeError(
                    f"to(): {wanted.device}, {name} is on {probe.device}: the pipeline owns the "
                    "memory of the weights. Move the model before the pipeline is made, or give "
                    "devices= in one process"
                )
            if wanted.dtype != probe.dtype:
                raise TypeError(
                    f"to(): {wanted.dtype}, {name} is {probe.dtype}: the pipeline owns the memory "
                    "of the weights. Give precision='bf16' or 'fp16' for 16-bit weights, "
                    "autocast= for autocast, or convert the model before the pipeline is made"
                )
            if wanted is not probe:  # to_empty(), to(memory_format=)
                raise TypeError(_OWNS_THE_MEMORY)
        return self

    def share_memory(self) -> NoReturn:
        """Refuses with a TypeError: the pipeline owns the memory of the weights."""
        raise TypeError(_OWNS_THE_MEMORY)

    def apply(self: _Self, fn: Callable[[nn.Module], None]) -> _Self:
        """Refuses with a TypeError: stages compute with copies of the model's modules."""
        raise TypeError(
            f"apply({getattr(fn, '__name__', fn)}): stages compute with copies of the model's "
            "modules, which apply() would not reach. Call model.apply() before the pipeline is "
            "made, or load_state_dict() with new values"
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuses with a TypeError: stages are compiled one by one."""
        raise TypeError("compile(): give PipelineModule compile=True, or a dict of the options")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # DistributedDataParallel reads it before it gives every process rank 0's weights.
        raise TypeError(
            "DistributedDataParallel(pipe): the pipeline adds up its replicas' gradients itself. "
            "Train it as it is, and give PipelineModule width= for replicas"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "copy.deepcopy(pipe): threads and connections cannot be copied. Copy the model before "
            "the pipeline is made, or load pipe.full_state_dict() into another model. An average "
            "of the weights (AveragedModel) is made of such a copy: see docs/guide/evaluate.md"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "pickle of a pipeline: threads and connections cannot be saved. Save "
            "pipe.state_dict() or pipe.full_state_dict()"
        )

    # ------------------------------------------------------------------ parameters and state

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's own names; drained, the newest weights.

        With two pipelines two processes hold each, and all processes that run a tied one's stages
        hold that, with the same bits. A process that has none to train gives one more of no
        elements, ``_placeholder``, for its optimizer. A list that may be empty has to be given to
        that as a group, ``[{"params": list}]``: torch takes an empty group, but no empty list.
        """
        local = self.session.local_model
        yield from local.named_parameters(prefix, recurse, remove_duplicate)
        if not local.has_trainable:
            yield f"{prefix}.{_PLACEHOLDER}" if prefix else _PLACEHOLDER, local.placeholder

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This process's buffers under the model's own names."""
        return self.session.local_model.named_buffers(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine owns the gradients and begins each batch's with zeros."""

    def state_dict(  # type: ignore[override]
        self, *, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This process's part of the model's ``state_dict``, newest weights, after a drain.

        Every rank calls it. Tensors are the live ones, as in ``nn.Module.state_dict``, but only
        until the next step: with several weight versions that writes the newest elsewhere. Of a
        pipeline that a failure has ended, each rank may read its part: the newest version that each
        of its stages had made whole, of which one may be one ahead of another; with
        ``shard_state`` masters of other replicas are their 16-bit weights then. A closed pipeline
        gives what its process holds, too, but with ``shard_state``. Shards of tensor-parallel
        stages are DTensors, but with ``keep_vars``.

        Raises:
            ValueError: of tensor-parallel stages, :func:`use_local_shards` was not told which
                parameters are shards.
        """
        session = self.session
        refuse_unknown_shards("state_dict()", session.facts)
        with session.ending.one_at_a_time():
            session.flush_to_read(Operation.state_dict)
            is_whole = not session.ending.has_failed
            state = session.local_model.state(prefix, keep_vars, whole=is_whole)
            return state if keep_vars else session.with_dtensors(state, prefix)

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's ``state_dict`` on CPU on rank 0, {} on the other ranks. Drains.

        Raises:
            ValueError: of tensor-parallel stages, :func:`use_local_shards` was not told which
                parameters are shards, or what is none differs between a stage's processes.
        """
        refuse_unknown_shards("full_state_dict()", self.session.facts)
        ending, in_processes = self.session.ending, self.session.grid.in_processes
        if ending.is_closed and in_processes:
            raise RuntimeError(
                "full_state_dict(): the pipeline is closed, and ranks cannot tell each other their "
                "parts any more. Call it before close(), or state_dict() for this rank's part"
            )
        if ending.is_closed:
            ending.check_readable()
        else:
            self.session.flush_for(Operation.full_state_dict)
        # Copies, as a view would be sent with the whole buffer that it is a part of.
        mine = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in self.session.local_model.state().items()
        }
        grid, parts = self.session.grid, self.session.local_model.parts()
        if grid.replica > 0:
            mine = {}
        of_shards: list[dict[str, Any]] = [{} for _ in range(grid.num_shards)]
        for shard, values in self.session.gather((grid.shard, mine)):
            of_shards[shard] |= values
        whole = of_shards[0]
        if grid.num_shards > 1:
            whole = self.session.together(lambda: put_together(of_shards, parts))
        order = self.session.root.state_dict(keep_vars=True).keys()
        return {name: whole[name] for name in order if name in whole}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the unsplit model's ``state_dict`` (each process takes its part). Drains.

        Sets every weight version, so the delay starts again. Raises as ``nn.Module`` does, but one
        entry is enough for a parameter with several names. Of a mapping that reads on demand, a
        process reads its part only.
        """
        if assign:
            raise ValueError("assign: True, only False is supported: the pipeline owns the memory")
        return load_model(self.session, lambda: Checkpoint.of(state_dict), strict=strict)

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, prefix: str = "", strict: bool = True
    ) -> Any:
        """Loads the unsplit model's ``state_dict`` from files, of which a process reads its part.

        Every rank calls it. Drains, and sets every weight version, so the delay starts again.

        Args:
            path: a file of safetensors or of ``torch.save``; the index (``.index.json``) of files
                among which either is split, as Hugging Face writes it; a folder that holds one of
                these under its usual name, or that ``torch.distributed.checkpoint`` has written.
                Shapes must be the model's, dtypes are converted. Nested dictionaries are known by
                the joined name, ``{"model": {"weight": ...}}`` by ``model.weight``.
            prefix: only entries whose names begin with it are read, and known without it:
                ``"model."``.
            strict: as in ``nn.Module.load_state_dict``; of a parameter with several names one
                entry is enough.

        Raises:
            ValueError: there is no such file, or none of these formats; on every rank.
            RuntimeError: missing or unexpected entries, or other shapes; on every rank.
            ImportError: safetensors is not installed (``pip install pipedream2bw[safetensors]``).
        """
        return load_model(self.session, lambda: open_checkpoint(path, prefix), strict=strict)

    # ------------------------------------------------------------------ ending

    def __enter__(self) -> PipelineModule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        if self.session.ending.is_open:
            if kind is None:
                try:
                    self.flush()
                finally:
                    self.close()
            else:
                self.session.ending.abort(
                    f"an exception left the with block: {kind.__name__}: {error}", error=error
                )

    def close(self) -> None:
        """Ends the pipeline's threads and connections once what was submitted is done.

        Every rank calls it. Batches whose backward needs a later batch or a :meth:`flush` to
        proceed are dropped.

        Raises:
            StageError: on every rank: the last batch was discarded. The pipeline is closed.
        """
        close(self.session)

    def abort(self) -> None:
        """Ends this process's part at once, without waiting for any other rank.

        One rank may call it alone; what was submitted is dropped. The others raise a
        :class:`PeerLost` that names this rank, as soon as they wait for anyone, and so does every
        later call here. After that all ranks may build a pipeline again, in the same process group.
        """
        if self.session.ending.is_open:
            self.session.ending.abort("abort() was called", kind=PeerLost)
