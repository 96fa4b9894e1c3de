"""PipelineModule: one nn.Module, split over stages and trained without emptying the pipeline."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._C import Schedule
from ..errors import PeerLost
from ..model.metrics import Metric
from ..ranks.agreement import Operation
from ..runtime.given import Call
from ..runtime.lazy_numbers import Loss
from ..runtime.microbatch import Microbatch
from .opening import open_session
from .options import Options
from .session_module import SessionModule

if TYPE_CHECKING:
    from ..planner.planning.plan import Plan
    from ..planner.profiling.profile import Profile


class PipelineModule(SessionModule):
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
    r holds stage r and a copy of stage d-1-r; the gradient is the sum of a batch's first half plus
    that of the second. It drains at every batch. Ranks 0 and d-1 of a replica are both first and
    last: both need the arguments and the target. ``"chimera_doubled"`` is its forward doubling.
    BatchNorm statistics are each pipeline's own; the first one's are shown and saved.

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
            the rows of ``example_target``. It takes some seconds.
        num_microbatches: m, per ``train_step`` and replica; a schedule of one's own, a plan and
            ``"auto"`` know it. ``"2bw"`` needs m >= d, ``"2bw_eager"`` m >= 2d-1, ``"pipedream"`` 1
        schedule: ``"2bw"`` (or None), ``"2bw_eager"``, ``"2bw_split"``, ``"pipedream"``,
            ``"1f1b"``, ``"gpipe"``, ``"zero_bubble"``, ``"zero_bubble_2p"``, ``"chimera"``,
            ``"chimera_doubled"``; with several stages per rank ``"interleaved"``,
            ``"interleaved_2bw"``, ``"looped_bfs"`` or ``"interleaved_zero_bubble"``; with two in a
            V (arXiv 2405.15362) ``"2bw_v"``, ``"2bw_v_two_thirds"``, ``"2bw_v_half"``,
            ``"2bw_v_min"``, drained ``"zero_bubble_v"``, ``"v_half"``, ``"v_min"``. Or one's own:
            what :func:`load_schedule` takes.
        stages_per_rank: v; stage s is on rank s mod d/v, in a V on rank min(s, d-1-s).
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
            model it was given holds, in plain tensors: the stages' modules do the collectives among
            these. All of them are given the same batches.
        devices: in one process, the device of each stage; the model's own if None. A copy of a
            stage is on the device of the stage that shares its rank.
        replicated: arguments that every microbatch gets whole; others are split along dimension 0.
        dynamic_shapes: True: where torch.export captures the model, sizes beside the rows stay open
            where the model leaves them open (lengths of text), which takes up to three times as
            long. False: they are the example's. Other ways of capture leave them to the model.
        recompute: True: every stage keeps of a microbatch in flight only what it received, and
            runs its forward again before the backward (arXiv 1604.06174); the same random numbers
            are drawn, and buffers change once.
            ``"auto"``: the stages that hold several microbatches at once. Or one bool per stage,
            or names of modules: of each of these only the inputs are kept, and it runs again when
            its gradient arrives. Hooks run twice, and Python code with effects of its own; where a
            schedule has I and W, those of named modules three times. Inside there may be no
            torch.Generator of the model's own.
        accumulate: n; n ``train_step`` calls are one batch, followed by one ``opt.step()``. Its
            gradient is the mean of theirs (their sum under ``loss_reduction="sum"``), t counts
            batches, and each call gives its own loss. Replicas add up gradients once per batch, as
            under DDP's ``no_sync``; see :meth:`no_sync` for numbers of calls that vary.
        loss_reduction: ``"mean"``, or ``"sum"`` if ``loss_fn`` sums over its rows: then losses and
            gradients of the microbatches are added, divided by the ``normalizer`` if there is one.
        normalizer: with sums, what they are sums over: gradient and loss of a batch are the sum of
            all its losses, divided by the sum of its replicas' normalizers. So padded or packed
            text has the mean over its tokens, however they lie in microbatches, ``train_step``
            calls and replicas. True: each ``train_step`` is given it. A function of the target
            gives it, not under ``accumulate``. Where it is 0, so are gradients and loss.
        metrics: names -> ``fn(output, target)``, called on the last stage for every microbatch in
            training, without gradients: a mean over its rows. Means over the batch are in
            ``train_step(...).metrics``, on every rank.
        warmup_batches: n: the first n batches of the pipeline's life are trained without a delay,
            v(t) = t, the pipeline drained before each (PipeMare's T3, arXiv 1910.05124). Then the
            schedule's rule, counted from there: batch t reads W(max(t - delay, n - 1)) on a stage.
            Batch n reads what n - 1 read, without a drain. Loaded weights begin no new warm-up.
        compile: True, or a dict of ``torch.compile``'s options: each stage's forward and backward
            are compiled when they first run, once for all weight versions. Not with ``recompute``.
        bucket_cap_mb: with several replicas (or copies of a stage), MiB of gradients that they add
            up at once, beginning while the batch's last microbatch still gives others (arXiv
            2006.15704, section 3.2.3). Everything at the end: ``math.inf``.
        replica_sums: ``"ordered"``: replicas add up their gradients in the replicas' order, to the
            same bits over any backend. ``"all_reduce"``: in the backend's, by as many bytes.
        precision: ``"bf16"`` or ``"fp16"``: stages compute with weights of that dtype, as after
            ``model.to(dtype)``: floating-point parameters, buffers and arguments are converted;
            BatchNorm and InstanceNorm modules with statistics stay in float32. Frozen parameters
            have no masters: they stay as rounded. What is trained has float32 masters, gradients
            and moments; each version is the master's rounding (arXiv 1710.03740). ``loss_fn`` gets
            outputs of the stages' dtype, and targets as they are. ``parameters()``,
            ``state_dict()``, ``load_state_dict()`` and ``unsplit()`` give and take the masters.
            ``"fp32"``: everything is float32. None: the model's own dtypes, stepped in them. A
            dtype in which the device multiplies no matrices is refused.
        split_master: with ``"bf16"``, keeps of each master the 16 bits that the newest weight does
            not have: 18 bytes per parameter with Adam and ``"2bw"`` in place of 20. A master half
            way between two bfloat16 has the weight of larger magnitude, not the even one; all else
            is the same. ``parameters()`` are the bfloat16 weights; optimizers SGD, Adam or AdamW.
        gradient_dtype: ``torch.bfloat16``, with ``"bf16"``: gradients of bfloat16 weights take 2
            bytes per parameter in place of 4. They are added in the order of microbatches, then of
            replicas; every sum is rounded, and what a loss scale or clipping multiplies. Norms are
            float32, and so is the step. None: gradients are float32.
        optimizer_device: ``"cpu"``: the optimizer steps in the host's memory, which has its state
            and the masters; gradients go down in the last microbatch's backward, weights up beside
            the next batch. The device keeps versions and gradients: with Adam, ``"2bw"`` and
            ``"bf16"`` 8 bytes per parameter. The bits are the CPU optimizer's: SGD, Adam or AdamW.
            ``parameters()`` are the stages' weights, as with ``split_master``.
        autocast: ``torch.bfloat16`` or ``torch.float16``: forwards and ``loss_fn`` run under
            ``torch.autocast`` of that dtype, without its cache of cast weights.
        random: ``"keyed"``: the random numbers that training draws (dropout) follow from
            :attr:`random_seed`, the train_step, the microbatch among those of all replicas and the
            draw's number in the unsplit model. So they are the same in threads and processes, under
            every schedule, at every depth and with ``recompute``, and torch's default generators,
            which the script uses, are left alone (but see the README for GPUs).
            :func:`reference_random` makes the unsplit model draw them. ``"torch"``: stages draw
            from those, which all threads share; not with ``recompute``. Evaluation always does.
        spare_buffer: True: under a schedule with a delay, stages keep one more buffer of the size
            of their gradients: a batch is discarded without a trace, whatever failed in it. The
            planner does not count it. Under ``"pipedream"`` updates then wait for all stages, as
            with ``max_grad_norm``: the last stage's forward follows the first one's backward of the
            batch before, so that a batch takes one forward and d backwards, and a loss may need
            more train_steps (:class:`Loss`). In processes with devices two stages may do so.
            False: after some failures (in a backward before the last stage, or with replicas) the
            delay begins anew: the error's ``restarts_delay``, or the pipeline ends.
        graphs: ``"auto"``: forwards and backwards become a device's graphs (CUDA), a launch each
            without Python; see :meth:`graph_report`. True: what cannot be recorded raises.
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
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        example_target: Any = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        split: str | Sequence[str] | None = None,
        width: int | None = None,
        mesh: DeviceMesh | None = None,
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
        spare_buffer: bool = False,
        graphs: bool | str = False,
        timeout: float = 1800.0,
    ) -> None:
        given = locals()
        options = Options(**{name: given[name] for name in Options.__annotations__})
        arrange = None
        if plan is not None or num_stages == "auto":
            from ..planner.arranging import arrange_as_planned  # the planner is loaded for it alone

            arrange = functools.partial(arrange_as_planned, model, loss_fn, options)
        super().__init__(open_session(model, loss_fn, options, arrange))

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
        """The processes, with the dimensions "dp" and "pp" (or those of the mesh that was given).

        Made when first asked for: every rank asks for it.

        Raises:
            RuntimeError: in one process, where there is none.
        """
        return self.session.mesh

    @property
    def schedule(self) -> str:
        return self.session.schedule.name

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
        its name is in ``replicated``; fewer rows make fewer microbatches, of one row each, with the
        same mean. The microbatches are views of these tensors and are read
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
            ValueError: on every rank: no rows, tensors of different numbers of rows, other
                arguments than the example's, a missing ``opt.step()``, some ranks under
                :meth:`no_sync` and others not, a missing normalizer or one too many.
            StageError: the pipeline has failed; its attributes say where and why.
        """
        call = Call(Microbatch(*args, target=target, **kwargs), microbatches, normalizer)
        return Loss(self.session, self.session.train_step(call, is_train=self.training))

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

        Every rank calls it; drains. After an interrupt the next ``train_step`` does it by itself.
        """
        return self.session.discard_batch()

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
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "calling the pipeline computes no gradients: use train_step() to train, or call it "
                "under torch.no_grad() or after eval()"
            )
        call = Call(Microbatch(*args, **kwargs), microbatches)
        return self.session.evaluate(call, is_train=self.training)

    def unsplit(self) -> nn.Module | Sequence[nn.Module]:
        """Drains, closes the pipeline and gives the whole model back with the newest weights.

        Raises:
            RuntimeError: under torchrun, where no process has the whole model.
        """
        if self.session.grid.in_processes:
            raise RuntimeError(
                "unsplit() works in one process; under torchrun use full_state_dict()"
            )
        self.session.give_back()
        return self.session.model

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
        self.session.close()

    def abort(self) -> None:
        """Ends this process's part at once, without waiting for any other rank.

        One rank may call it alone; what was submitted is dropped. The others raise a
        :class:`PeerLost` that names this rank, as soon as they wait for anyone, and so does every
        later call here. After that all ranks may build a pipeline again, in the same process group.
        """
        if self.session.ending.is_open:
            self.session.ending.abort("abort() was called", kind=PeerLost)
