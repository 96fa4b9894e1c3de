"""PipelineModule: one nn.Module, split over stages and trained without emptying the pipeline."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .._C import Schedule
from ..capture.chain import as_root
from ..checks import check_whole_number
from ..json_document import given_or_loaded
from ..model.checkpoint import Checkpoint, open_checkpoint
from ..model.materialize import home_of, materialize
from ..model.metrics import Metric, check_metrics
from ..model.precision import Precision
from ..model.refusals import check_example, check_loadable, check_parameters
from ..planning.plan import Plan
from ..profiling.profile import Profile
from ..ranks.agreement import Announcement, ControlPlane, Operation
from ..ranks.grid import RankGrid, join_world
from ..ranks.mesh import mesh_of
from ..runtime.accumulation import Accumulation, check_same_part
from ..runtime.ending import Ending
from ..runtime.intake import Batch, Intake
from ..runtime.lazy_numbers import Loss
from ..runtime.local_model import LocalPart
from ..runtime.local_stages import LocalStage, LocalStages
from ..runtime.microbatch import join_outputs
from ..runtime.stage_memory import StageMemory
from ..runtime.timeline import Timeline
from ..schedules.load import check_runnable
from ..stages.compile import compile_options
from ..stages.modes import Mode, Modes
from ..stages.tied import check_ties, find_ties
from .arrangement import DEFAULT_SCHEDULE, Layout, check_model
from .auto_plan import plan_for_devices_at_hand
from .options import bucket_bytes, check_settings, stage_devices, what_to_recompute

_names = itertools.count()


_PLACEHOLDER = "_placeholder"


class PipelineModule(nn.Module):
    """Trains ``model`` as a pipeline of ``num_stages`` stages.

    Without a process group each stage is a thread of this process; under ``torchrun`` each stage of
    each replica is a process (world size ``width * num_stages``, the ranks of a replica adjacent).
    With ``stages_per_rank`` > 1, and with two pipelines, stages share a thread or a process.
    The pipeline takes the model over: its parameters become views of the pipeline's buffers, which
    show the newest weights whenever the pipeline is drained.

    With ``schedule="2bw"`` (PipeDream-2BW, arXiv 2006.09503, section 3.1) every microbatch of batch
    t uses weights W(max(t-1, 0)) on all stages and the pipeline is never drained between batches:
    W(t+1) = step(W(t), gradient at W(max(t-1, 0))). ``"2bw_eager"`` does the same with twice the
    microbatches in flight, which hides messages that take up to half of a stage's forward and
    backward. ``"pipedream"`` (weight stashing, arXiv 1806.03377) updates after every microbatch:
    stage i reads W(max(t-(d-1-i), 0)) and keeps d-i versions. ``"1f1b"`` (PipeDream-Flush, section
    3.2), ``"gpipe"``, ``"interleaved"`` (arXiv 2104.04473, section 2.2: 1f1b over
    ``stages_per_rank`` chunks) and ``"looped_bfs"`` (arXiv 2211.05953: gpipe over them) drain at
    every batch and train as plain gradient accumulation does; ``"interleaved_2bw"`` does not drain
    and trains as ``"2bw"`` does.

    ``"chimera"`` (arXiv 2107.06925) runs two pipelines in opposite directions over one model: rank
    r holds stage r and a copy of stage d-1-r; a batch's first half goes through one pipeline, the
    second half through the other. It drains at every batch and trains as plain accumulation does,
    but that the gradient is the first half's sum plus the second half's. The ranks 0 and d-1 of a
    replica are both first and last: both need the arguments and the target. ``"chimera_doubled"``
    is its forward doubling. BatchNorm statistics are each pipeline's own; the first one's are shown
    and saved, and it alone evaluates.

    Args:
        model: the module, or a list of ``num_stages`` modules to be chained (a tuple is passed on
            as positional arguments).
        loss_fn: ``loss_fn(output, target)`` gives the mean over its microbatch's rows, a scalar;
            ``output`` is what the model returns, of any structure. What arises in inner stages is
            returned by the model, or added by :func:`add_loss`.
        plan: what :func:`plan` made, or the path where it was saved, in place of num_stages,
            num_microbatches, schedule, stages_per_rank, split, width and recompute: these may be
            given besides if they say the same. Processes are the plan's devices in the order of
            their numbers. The predictions hold for batches of ``plan.batch // plan.width`` rows.
        num_stages: the depth d; may be left out for a list of modules. ``"auto"``: the model is
            profiled, and planned for all processes, or in one process for all ``devices``. The
            plan keeps to ``schedule`` (so what is trained does not depend on it) and to
            num_microbatches, width and stages_per_rank if they are given; a replica's batch has
            the rows of ``example_target``. It takes some seconds: two for each of up to three
            sizes of microbatches, and between processes one more for each process.
        num_microbatches: m, per ``train_step`` and replica; a schedule of one's own, a plan and
            ``"auto"`` know it. ``"2bw"`` needs m >= d, ``"2bw_eager"``
            m >= 2d-1, ``"pipedream"`` m = 1, ``"chimera"`` even m and d.
        schedule: ``"2bw"``, ``"2bw_eager"``, ``"2bw_split"``, ``"pipedream"``, ``"1f1b"``,
            ``"gpipe"``, ``"zero_bubble"``, ``"zero_bubble_2p"``, ``"chimera"``,
            ``"chimera_doubled"``; with several stages per rank ``"interleaved"``,
            ``"interleaved_2bw"``, ``"looped_bfs"`` or ``"interleaved_zero_bubble"``. Or one's own:
            what :func:`load_schedule` takes.
        stages_per_rank: v; stage s is on rank s mod d/v, so that a rank has chunks from all over
            the model and the pipeline fills v times as fast.
        example_args, example_kwargs: a call of the model: structure, dtypes and trailing shapes,
            any number of rows >= 1.
        example_target: with ``num_stages="auto"``: a batch's target.
        profile: with ``num_stages="auto"``: used in place of measuring. The path of a file that
            does not exist: what is measured is saved there. So are links between processes that
            it lacks.
        split: ``"auto"`` (balanced by cost), or the num_stages - 1 qualified names of modules (or
            layers) where stages 1, 2, ... begin.
        width: replicas w, each fed its own batches; gradients are averaged over them.
        mesh: which process is which, in place of ``width`` and adjacent ranks: of all processes,
            with the dimensions "pp" (stages), and "dp" (replicas) where there are several. With
            "tp" every stage of a replica is that many processes, each with the shard of it that the
            model it was given holds: the stages' modules do the collectives among these, in
            forward and backward, and hold plain tensors (no DTensor). All of them are given the
            same batches.
        devices: in one process, the device of each stage; the model's own if None. A copy of a
            stage is on the device of the stage that shares its rank.
        replicated: names of arguments that every microbatch gets whole; other tensors are split
            along dimension 0.
        recompute: True: every stage keeps of a microbatch in flight only what it received, and
            runs its forward again before the backward, while the gradient is still under way
            (arXiv 1604.06174); the same random numbers are drawn, and buffers change once.
            ``"auto"``: the stages that hold several microbatches at once. Or one bool per stage,
            or names of modules: of each of these only the inputs are kept, and it runs again when
            its gradient arrives.
            Hooks run twice, and so does Python code with effects of its own; where a schedule has I
            and W, those of named modules three times. Inside there may be no torch.utils.checkpoint
            around what draws random numbers, and no torch.Generator of the model's own.
        accumulate: n; n ``train_step`` calls are one batch, followed by one ``opt.step()``. Its
            gradient is the mean of theirs (their sum under ``loss_reduction="sum"``), t counts
            batches, and each call gives its own loss. Replicas add up their gradients once per
            batch, which is what DDP's ``no_sync`` is for; see :meth:`no_sync` for numbers of calls
            that vary. Schedules drain no more and no less than without it.
        loss_reduction: ``"mean"``, or ``"sum"`` if ``loss_fn`` sums over its rows: then losses and
            gradients of the microbatches are added without a weight.
        metrics: names -> ``fn(output, target)``, called on the last stage for every microbatch of
            a training batch, without gradients; a number, the mean over the microbatch's rows.
            Their means over the batch are in ``train_step(...).metrics``, on every rank.
        warmup_batches: n: the first n batches of the pipeline's life are trained without a delay,
            v(t) = t, the pipeline drained before each (PipeMare's T3, arXiv 1910.05124). Then the
            schedule's rule, counted from there: batch t reads W(max(t - delay, n - 1)) on a stage.
            Batch n reads what batch n - 1 read, and so follows it without a drain. Weights that
            are loaded begin no new warm-up.
        compile: True, or a dict of ``torch.compile``'s options: each stage's forward and backward
            are compiled when they first run, once for all weight versions. Not with ``recompute``.
        bucket_cap_mb: with several replicas (or copies of a stage), MiB of gradients that they add
            up at once, beginning while the batch's last microbatch still gives others (arXiv
            2006.15704, section 3.2.3). Everything at the end: ``math.inf``.
        precision: ``"bf16"`` or ``"fp16"``: stages compute with weights of that dtype, as after
            ``model.to(dtype)``: floating-point parameters, buffers and arguments are converted;
            BatchNorm and InstanceNorm modules with statistics stay in float32. What is trained
            has a float32 master, float32 gradients (added up over the microbatches) and moments,
            and each version is the master's rounding (arXiv 1710.03740). ``loss_fn`` gets outputs
            of the stages' dtype, and targets as they are. ``parameters()``,
            ``state_dict()``, ``load_state_dict()`` and ``unsplit()`` give and take the masters, so
            that nothing is lost between. ``"fp32"``: everything is float32. None: the model's
            own dtypes, stepped in them. A dtype in which the device multiplies no matrices is
            refused; another operator that it lacks in that dtype ends the first microbatch that
            comes to it, with an error that names the stage and the operator.
        split_master: with ``"bf16"``, keeps of each master the 16 bits that the newest weight does
            not have: 18 bytes per parameter with Adam and ``"2bw"`` in place of 20. A master half
            way between two bfloat16 has the weight of larger magnitude, not the even one; all else
            is the same to the bit. ``parameters()`` are the bfloat16 weights then, and optimizers
            must be SGD, Adam or AdamW.
        autocast: ``torch.bfloat16`` or ``torch.float16``: forwards and ``loss_fn`` run under
            ``torch.autocast`` of that dtype, recomputed ones and evaluations too, without its cache
            of cast weights: every use casts anew, and a weight's gradients add up in its own dtype.
        timeout: seconds that a rank waits for another before the pipeline fails.

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
        num_microbatches: int | None = None,
        schedule: str | os.PathLike[str] | Schedule = DEFAULT_SCHEDULE,
        stages_per_rank: int | None = None,
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        example_target: Any = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        split: str | Sequence[str] | None = None,
        width: int | None = None,
        mesh: DeviceMesh | None = None,
        devices: Sequence[torch.device | str] | None = None,
        replicated: Sequence[str] = (),
        recompute: bool | str | Sequence[bool] | Sequence[str] | None = None,
        accumulate: int = 1,
        loss_reduction: str = "mean",
        metrics: Mapping[str, Metric] | None = None,
        warmup_batches: int = 0,
        compile: bool | Mapping[str, Any] = False,
        bucket_cap_mb: float = 25.0,
        precision: str | None = None,
        split_master: bool = False,
        autocast: torch.dtype | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        error: Exception | None = None
        model_device = torch.device("cpu")
        is_auto = isinstance(num_stages, str) and num_stages == "auto" and plan is None
        given = layout = Layout(
            None if is_auto else num_stages,  # type: ignore[arg-type]
            num_microbatches,
            schedule,
            stages_per_rank,
            split,
            width,
            recompute,
            mesh,
        )
        if is_auto:
            plan = plan_for_devices_at_hand(
                model,
                loss_fn,
                given,
                example_args=example_args,
                example_kwargs=example_kwargs,
                example_target=example_target,
                replicated=replicated,
                profile=profile,
                devices=devices,
                precision=precision,
                split_master=split_master,
                timeout=timeout,
            )
        try:
            made_plan = None if plan is None else given_or_loaded("plan", plan, Plan)
            layout = given.complete(model, made_plan)
            if made_plan is not None:
                given.check_agreement(made_plan)
            layout = layout.on_mesh()
            check_settings(
                layout.width,
                loss_fn,
                loss_reduction,
                timeout,
                replicated,
                bucket_cap_mb,
            )
            self._accumulation = Accumulation(accumulate, averages=loss_reduction == "mean")
            check_whole_number("warmup_batches", warmup_batches, at_least=0)
            check_example(example_args, example_kwargs)
            self._metrics = check_metrics(metrics)
            self._schedule = layout.made()
            check_runnable(self._schedule)
            self._recompute, blocks = what_to_recompute(layout.recompute, self._schedule)
            root = as_root(model)
            check_parameters(root, loss_fn)
            example = (tuple(example_args), dict(example_kwargs or {}))
            check_loadable(root)
            model_device = home_of(root, example)
            recomputes = bool(blocks) or any(self._recompute)
            self._compile = compile_options(compile, model_device, recomputes=recomputes)
            self._precision = Precision(root, precision, split_master, autocast, model_device.type)
            if made_plan is not None:
                check_model(made_plan, root, example, tuple(replicated), self._precision)
            self._modes = Modes(
                root,
                self._schedule.depth,
                example,
                layout.split if isinstance(layout.split, str) else tuple(layout.split or ()),
                tuple(replicated),
                blocks,
                self._precision,
            )
        except Exception as raised:
            error = raised
        self._timeout = timeout
        self._mesh = mesh
        self._fault = _C.Fault()
        self._control = ControlPlane(
            join_world(model_device.type),
            timeout if isinstance(timeout, (int, float)) and timeout > 0 else 60.0,
            self._fault,
            f"pipeline{next(_names)}",
        )
        settings = {
            **layout.settings(),
            "accumulate": accumulate,
            "loss_reduction": loss_reduction,
            "replicated": str(replicated),
            "compile": str(compile),
            "bucket_cap_mb": bucket_cap_mb,
            "metrics": str(list(metrics) if isinstance(metrics, Mapping) else metrics),
            "precision": str(precision),
            "split_master": str(split_master),
            "autocast": str(autocast),
            "warmup_batches": warmup_batches,
            "timeout": timeout,
            "torch version": torch.__version__,
            "type of the model's device": model_device.type,
        }
        # Whatever waits for other ranks comes after this: it relies on these being the same.
        with self._closing_control_on_error():
            self._control.agree_on_objects(error, settings)
            self._grid = RankGrid(
                self._schedule.placement,
                self._schedule.num_pipelines,
                layout.width or 1,
                timeout,
                mesh,
                layout.order,
            )
            self._control.place = f"rank {self.rank} (stage {', '.join(map(str, self.stages))})"
        self._device_type = model_device.type
        # A tuple, so that nn.Module does not register the model as a submodule.
        self._held = (model, root)
        self._intake = Intake(
            self._grid,
            self._schedule.total_microbatches,
            tuple(replicated),
            losses_are_means=loss_reduction == "mean",
        )
        self._placeholder = nn.Parameter(torch.empty(0, 0))  # a matrix, which Muon takes
        self._batch = 0  # the next train_step's number
        self._evaluations = 0
        self._warmup_batches = warmup_batches
        self._optimizer: Callable[[], object] = lambda: None  # the one in charge, while it lives
        self._drained = True
        self._mode_of_last_batch = root.training
        try:
            in_processes = dist.get_world_size() if self._grid.in_processes else 1
            places = stage_devices(devices, self.num_stages, in_processes, model_device)
            mode = self._modes.capture(root.training)
            check_ties(self._schedule, find_ties(mode.programs), root)
            without_values = materialize(root, self._modes.names_in(self.stages))
        except Exception as raised:
            error = raised
        with self._closing_control_on_error():
            self._control.agree_on_objects(error, self._modes.settings())
        self._precision.take_over()
        self._stages = LocalStages(
            root,
            self._modes.first,
            self._schedule,
            self._grid,
            places,
            self._control,
            self._fault,
            loss_fn,
            self._metrics,
            self._compile,
            self._recompute,
            bool(blocks),
            bucket_bytes(bucket_cap_mb),
            self._precision,
            warmup_batches,
            timeout,
        )
        # Without a reference to the pipeline: it goes when nobody holds it.
        place = functools.partial(_place, weakref.ref(self), self._control.place)
        self._ending = Ending(self._stages, self._control, self._fault, place, timeout)
        self._part = LocalPart(
            root, self._stages, without_values, has_first_stage=0 in self._grid.stages
        )
        self.training = root.training
        _all.add(self)

    # ------------------------------------------------------------------ what the user reads

    @property
    def num_stages(self) -> int:
        return self._schedule.depth

    @property
    def num_microbatches(self) -> int:
        return self._schedule.total_microbatches

    @property
    def width(self) -> int:
        return self._grid.width

    @property
    def mesh(self) -> DeviceMesh:
        """The processes, with the dimensions "dp" and "pp" (or those of the mesh that was given).

        Made when first asked for: every rank asks for it.

        Raises:
            RuntimeError: in one process, where there is none.
        """
        if self._mesh is None:
            if not self._grid.in_processes:
                raise RuntimeError("mesh: 1 process, a mesh needs several: run under torchrun")
            self._ending.check_open()
            self._mesh = mesh_of(self._grid.places, self._device_type)
        return self._mesh

    @property
    def schedule(self) -> str:
        return self._schedule.name

    @property
    def rank(self) -> int:
        """This process among all: without a mesh replica * ranks + the schedule's rank."""
        return self._grid.rank

    @property
    def replica(self) -> int:
        return self._grid.replica

    @property
    def stages(self) -> list[int]:
        """The model's stages that this process runs, in whichever pipeline."""
        return sorted({stage % self.num_stages for stage in self._grid.stages})

    @property
    def is_first_stage(self) -> bool:
        """Whether this process runs stage 0, which needs the arguments of ``train_step``.

        With ``"chimera"`` both ranks that do: 0 and d-1 of a replica.
        """
        return 0 in self.stages

    @property
    def is_last_stage(self) -> bool:
        """Whether this process runs the last stage, which needs the target of ``train_step``.

        With ``"chimera"`` both ranks that do: 0 and d-1 of a replica.
        """
        return self.num_stages - 1 in self.stages

    @property
    def gives_output(self) -> bool:
        """Whether calling the pipeline gives the model's output in this process.

        It does where the last stage is; of two pipelines the first one evaluates.
        """
        return self.num_stages - 1 in self._grid.stages

    # ------------------------------------------------------------------ training

    def train_step(self, *args: Any, target: Any = None, **kwargs: Any) -> Loss:
        """Forward and backward of one batch, pipelined; returns before they are done.

        Every rank calls it. The rank of stage 0 needs ``args`` and ``kwargs``, the rank of the last
        stage ``target`` (with two pipelines both ranks that run the stage; they must be given the
        same batch); the others may pass the same or leave them out. Every tensor is split
        along dimension 0 into ``num_microbatches`` parts, as ``torch.tensor_split`` does, unless
        its name is in ``replicated``. The microbatches are views of these tensors and are read
        after this call has returned: write to them only after the loss of the batch after the next
        (``"pipedream"``: the d-th next), or a :meth:`flush`. Call ``step()`` of the
        :class:`PipelineOptimizer` once after each, or after ``accumulate`` of them.

        Raises:
            ValueError: on every rank: fewer rows than microbatches, tensors of different numbers of
                rows, other arguments than the example's, a missing ``opt.step()``, some ranks under
                :meth:`no_sync` and others not.
            RuntimeError: the pipeline has failed; names stage, microbatch, action and cause.
        """
        self._ending.check_open()
        with self._ending.failing_closes():
            # The batches that the schedule keeps unfinished, and one to go on with.
            self._stages.wait_for_room(max(2, self._schedule.most_batches_behind + 1))
            batch, mode, sizes, layouts = self._take(args, kwargs, target, training=True)
            self._mode_of_last_batch = self.training
            slot = self._stages.losses.expect(self._batch)
            assert batch.part is not None
            for stage in self._stages:
                inputs = self._intake.inputs(batch, stage, mode, sizes, layouts)
                stage.runner.runs[self._batch] = inputs
            self._stages.submit_batch(
                self._batch, mode.wiring, layouts, self._intake.weighing_rows(sizes), batch.part
            )
            self._accumulation.take(batch.part)
            self._drained = False
            loss = Loss(self, self._stages.losses, slot, self._batch, list(self._metrics))
            self._batch += 1
            return loss

    def _steps_until_finished(self, batch: int) -> int:
        """How many more ``train_step`` calls the batch's last backward on every stage needs."""
        if self._drained:
            return 0
        return batch + self._schedule.most_batches_behind + 1 - self._batch

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``train_step`` calls need no ``opt.step()``: their batch goes on.

        As ``DistributedDataParallel.no_sync``: what they compute is added (not averaged) to the
        gradient of the next ``train_step`` outside, and replicas add up theirs only then::

            with pipe.no_sync():
                pipe.train_step(*first, target=...)
            pipe.train_step(*second, target=...)
            opt.step()

        For a mean over n calls divide the loss by n, in ``loss_fn``; ``accumulate=n`` does so by
        itself. Every rank enters it, under any schedule.

        Raises:
            ValueError: ``accumulate`` is more than 1.
        """
        return self._accumulation.no_sync()

    def flush(self) -> None:
        """Drains the pipeline: every batch's backward is done when this returns.

        Every rank calls it. Changes timing, never numbers. An update whose ``opt.step()`` has not
        been called yet waits for it.
        """
        self._flush_for(Operation.flush)

    def _flush_for(self, operation: Operation) -> None:
        """Drains as the first part of ``operation``."""
        self._ending.check_open()
        with self._ending.failing_closes():
            self._control.agree(operation, self._batch, Announcement)
            self._drain()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output on the newest weights, computed by the pipeline without gradients.

        Every rank calls it, under ``torch.no_grad()`` or after ``eval()``. Drains first. Returns
        the output in the process of the last stage, None elsewhere; the rank of stage 0 needs the
        arguments. Of two pipelines the first one does it, see :attr:`gives_output`. Any number of
        rows; outputs are joined along dimension 0, floating-point numbers averaged over the rows.

        Raises:
            RuntimeError: in training mode with gradients enabled: use :meth:`train_step`.
        """
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "calling the pipeline computes no gradients: use train_step() to train, or call it "
                "under torch.no_grad() or after eval()"
            )
        self._ending.check_open()
        with self._ending.failing_closes():
            batch, mode, sizes, layouts = self._take(args, kwargs, None, training=False)
            self._drain()
            run = ~self._evaluations  # never a batch's number
            self._evaluations += 1
            stages = self._stages.of_first_pipeline()
            for stage in stages:
                inputs = self._intake.inputs(batch, stage, mode, sizes, layouts)
                stage.runner.runs[run] = inputs
            self._stages.submit_evaluation(run, mode.wiring, layouts)
            self._stages.finish_submitted()
            outputs = [stage.runner.runs.pop(run).outputs for stage in stages]
        return join_outputs(outputs[-1], sizes) if self.gives_output else None

    def train(self, mode: bool = True) -> PipelineModule:
        """As ``nn.Module.train``: sets the mode of the model's modules on every stage."""
        if mode != self.training:
            self._ending.check_open()
            with self._ending.failing_closes():
                self._stages.finish_submitted()  # what was submitted in one mode runs in it
            self._held[1].train(mode)
            for stage in self._stages:
                stage.state.copy_training_flags()
            self.training = mode
        return self

    # ------------------------------------------------------------------ weights

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's own names; drained, the newest weights.

        Each once in one process. With two pipelines two processes hold each, and all processes that
        run a tied one's stages hold that, with the same bits. A process that has none to train
        gives one more of no elements, ``_placeholder``, so that the same script can build its
        optimizer there. A list that a process may find empty otherwise (say, no matrices there) has
        to be given to the optimizer as a group, ``[{"params": list}]``: torch takes an empty group,
        but no empty list.
        """
        yield from self._part.named_parameters(prefix, recurse, remove_duplicate)
        if not self._part.has_trainable:
            yield f"{prefix}.{_PLACEHOLDER}" if prefix else _PLACEHOLDER, self._placeholder

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This process's buffers under the model's own names."""
        return self._part.named_buffers(prefix, recurse, remove_duplicate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine owns the gradients and starts each batch's anew."""

    def state_dict(  # type: ignore[override]
        self, *, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This process's part of the model's ``state_dict``, newest weights, after a drain.

        Every rank calls it. Tensors are the live ones, as in ``nn.Module.state_dict``.
        """
        self._flush_for(Operation.state_dict)
        return self._part.state(prefix, keep_vars)

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's ``state_dict`` on CPU on rank 0, {} on the other ranks. Drains.

        Raises:
            ValueError: with tensor-parallel stages, of which every process has a shard.
        """
        if self._grid.num_shards > 1:
            raise ValueError(
                f"full_state_dict(): 'tp' of the mesh: {self._grid.num_shards}, it must be 1: no "
                "process knows how shards are put together; save state_dict() of every process"
            )
        self._flush_for(Operation.full_state_dict)
        # Copies, as a view would be sent with the whole buffer that it is a part of.
        mine = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in self._part.state().items()
        }
        if self.replica > 0:
            mine = {}
        parts = self._control.gather(mine)
        merged = {name: value for part in parts for name, value in part.items()}
        order = self._held[1].state_dict().keys()
        return {name: merged[name] for name in order if name in merged}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the unsplit model's ``state_dict`` (each process takes its part). Drains.

        Sets every weight version, so the delay starts anew. Raises as ``nn.Module`` does, but takes
        one entry for enough if a parameter has several names. Of a mapping that reads when it is
        asked, a process asks for its part only.
        """
        if assign:
            raise ValueError("assign: True, only False is supported: the pipeline owns the memory")
        return self._load(lambda: Checkpoint.of(state_dict), strict)

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, prefix: str = "", strict: bool = True
    ) -> Any:
        """Loads the unsplit model's ``state_dict`` from files, of which a process reads its part.

        Every rank calls it. Drains, and sets every weight version, so the delay starts anew.

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
        return self._load(lambda: open_checkpoint(path, prefix), strict)

    def _load(self, opened: Callable[[], Checkpoint], strict: bool) -> Any:
        self._flush_for(Operation.load_state_dict)
        error: Exception | None = None
        result: Any = None
        try:
            result = self._part.load(opened(), strict)
        except Exception as raised:
            error = raised
        has_failed = True
        try:
            self._control.agree_on_objects(error, {})
            has_failed = False
        finally:  # some may have loaded a part before they found an error
            if self._fault.cause is None:
                self._stages.restart_delay(replicas_too=has_failed)
        return result

    def unsplit(self) -> nn.Module | Sequence[nn.Module]:
        """Drains, closes the pipeline and gives the whole model back with the newest weights.

        Raises:
            RuntimeError: under torchrun, where no process has the whole model.
        """
        if self._grid.in_processes:
            raise RuntimeError(
                "unsplit() works in one process; under torchrun use full_state_dict()"
            )
        self.flush()
        for stage in self._stages.of_first_pipeline():
            stage.state.give_back()
        self._precision.give_back()
        self.close()
        return self._held[0]

    # ------------------------------------------------------------------ reports

    def memory_report(self) -> dict[int, StageMemory]:
        """Bytes by kind for each stage of this process. Drains nothing; reads what has been.

        With two pipelines stage d + i is the second one's copy of stage i.
        """
        return {stage.index: StageMemory.of(stage.state, stage.executor) for stage in self._stages}

    @contextlib.contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Records the actions executed inside the ``with`` block; drains at its end."""
        self._ending.check_open()
        timeline = Timeline(self._control, self._schedule.placement)
        self._stages.record(True)
        try:
            yield timeline
            self._flush_for(Operation.end_of_timeline)
        finally:
            self._stages.record(False)
            records = self._stages.take_records()
            timeline.add(self.replica, records if self._grid.shard == 0 else [])

    def extra_repr(self) -> str:
        mode = self._modes.first
        lines = [
            f"schedule={self.schedule!r}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches}, width={self.width}",
            f"model={type(self._held[1]).__name__}, captured by {mode.captured.how}",
            *(f"  {note}" for note in mode.captured.notes),
            *self._part.describe(mode),
        ]
        return "\n".join(lines)

    # ------------------------------------------------------------------ ending

    def __enter__(self) -> PipelineModule:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._ending.closed_because is None:
            if kind is None:
                self.flush()
                self.close()
            else:
                self._ending.abort(f"an exception left the with block: {kind.__name__}")

    def close(self) -> None:
        """Ends the pipeline's threads and connections once what was submitted is done.

        Every rank calls it. Batches whose backward needs a later batch or a :meth:`flush` to
        proceed are dropped.
        """
        if self._ending.closed_because is not None:
            return
        with self._ending.failing_closes():
            self._ending.finish_submitted()
            self._control.agree(Operation.close, self._batch, Announcement)
        self._ending.end("close() was called")

    # ------------------------------------------------------------------ parts of the above

    @contextlib.contextmanager
    def _closing_control_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._control.close()
            raise

    def _take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, training: bool
    ) -> tuple[Batch, Mode, list[int], list[int]]:
        """A checked batch, the mode to run it in, rows and layout of each microbatch."""
        batch = Batch(training)

        def check() -> Announcement:
            if training:
                batch.part = self._accumulation.next()
            first = self._modes.first
            self._part.check_values()
            self._stages.check_before_batch(self._modes.get(self.training), training=training)
            return self._intake.take(batch, first, self.training, args, kwargs, target)

        operation = Operation.train_step if training else Operation.evaluation
        number = self._batch if training else self._evaluations
        announced = self._control.agree(operation, number, check)
        check_same_part(announced)
        sizes, layouts = self._intake.microbatches(announced, training=training)
        return batch, self._mode_in_use(), sizes, layouts

    def _mode_in_use(self) -> Mode:
        """The capture for the current mode; made when first used, on all ranks together."""
        if self._mode_of_last_batch != self.training:
            # The modes' stages may be wired differently; and torch.fx, if this mode has yet to be
            # captured, traces by replacing nn.Module's call for all threads.
            self._drain()
        if self.training not in self._modes:
            others = self._stages.others
            error: Exception | None = None
            try:
                with others.in_place() if others else contextlib.nullcontext():
                    self._modes.capture(self.training)
            except Exception as raised:
                error = raised
            self._control.agree_on_objects(error, {})
            self._stages.connect(self._modes[self.training])
        return self._modes[self.training]

    def _drain(self) -> None:
        if not self._drained:
            self._stages.drain()
            self._drained = True
        self._stages.finish_submitted()  # updates submitted after the last drain
        for stage in self._stages:
            stage.state.show_newest()

    # ------------------------------------------------------------------ for PipelineOptimizer

    def _submit_updates(self, submit: Callable[[LocalStage, int], int]) -> None:
        """Registers the update of the last batch on every local stage."""
        with self._ending.failing_closes():
            for stage in self._stages.in_update_order():
                submit(stage, self._batch - 1)
        self._accumulation.take_update()

    def _check_update_is_due(self) -> None:
        self._ending.check_open()
        self._accumulation.check_update()


def _place(pipeline: weakref.ref[PipelineModule], place: str) -> str:
    """In front of a cause that other ranks are told."""
    alive = pipeline()
    return f"{place}, batch {alive._batch}: " if alive and alive._grid.in_processes else ""


def open_pipelines() -> list[PipelineModule]:
    """The pipelines of this process that have not been closed."""
    return [pipe for pipe in _all if pipe._ending.closed_because is None]


_all: weakref.WeakSet[PipelineModule] = weakref.WeakSet()
