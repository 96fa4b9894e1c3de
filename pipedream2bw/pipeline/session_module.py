"""The model behind a session, shown as nn.Module shows a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .. import svg
from ..model.checkpoint import Checkpoint, open_checkpoint
from ..ranks.agreement import Operation
from ..runtime.comm_hook import CommHook, CommHooks, register_comm_hook, replica_group
from ..runtime.graphs import StageGraphs, graphs_of
from ..runtime.session import Session
from ..runtime.stage_memory import MemoryReport, memory_of
from ..runtime.timeline import Timeline, recording

_PLACEHOLDER = "_placeholder"

_OWNS_THE_MEMORY = (
    "the pipeline owns the memory of the weights: change the model before the pipeline is made, or "
    "load values by load_state_dict()"
)

_Self = TypeVar("_Self", bound="SessionModule")


class SessionModule(nn.Module):
    """Mode, parameters and state of the model that a session trains.

    Attributes:
        session: the open pipeline.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.training = session.root.training
        self._hooks: CommHooks | None = None

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

        As ``DistributedDataParallel.register_comm_hook``, whose hooks run as they are:
        ``torch.distributed.algorithms.ddp_comm_hooks``, and :func:`ok_topk_hook`. The hook gets a
        ``torch.distributed.GradBucket`` with a part of what this replica computed for the batch,
        and gives a ``torch.futures.Future`` of the mean over the replicas: a flat tensor like
        ``bucket.buffer()``, which it may change. Once a batch, in the stage's update: after the
        batch's last backward, beside the next microbatches, before gradients of tied parameters are
        added up and clipped. A stage's buckets come in the same order on all replicas, one after
        the other is done; ``bucket_cap_mb`` says how large they are. With a loss scale hooks get
        gradients without it, and none of a batch in which a replica's overflowed.

        Every rank calls it, once, between batches. Drains. The state is not part of checkpoints:
        residuals begin at zero in a run that goes on.

        Args:
            state: what the hook gets first. None: the stage's :meth:`replica_group`, as torch's
                hooks take None for the group of all replicas. A function (or class) is called with
                that group, for each stage of this process: ``PowerSGDState``, or ``lambda group:
                PowerSGDState(group, matrix_approximation_rank=2)``. Anything else is given as it
                is, where the process runs one stage.
            hook: the same on every rank. It may not wait for other replicas by itself, if a failure
                is to end it before ``timeout``: what it gives is waited for.

        Raises:
            ValueError: one replica; two pipelines; an optimizer on the host; several stages on
                devices other than CPUs; there is a hook; a batch waits for its ``opt.step()``;
                updates that do not wait for all stages, as a discarded batch would reach the hooks
                of some replicas; a state whose ``process_group`` is not that of the replicas; ranks
                differ. On every rank.
            TypeError: ``hook`` cannot be called with two arguments. On every rank.
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
        if mode != self.training:
            self.session.set_mode(mode)
            self.training = mode
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
                    "memory of the weights; move the model before the pipeline is made, or give "
                    "devices= in one process"
                )
            if wanted.dtype != probe.dtype:
                raise TypeError(
                    f"to(): {wanted.dtype}, {name} is {probe.dtype}: the pipeline owns the memory "
                    "of the weights; give precision='bf16' or 'fp16' for 16-bit weights, "
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
            "modules, which it would not reach; call model.apply() before the pipeline is made, "
            "or load_state_dict() with new values"
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuses with a TypeError: stages are compiled one by one."""
        raise TypeError("compile(): give PipelineModule compile=True, or a dict of the options")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "copy.deepcopy(pipe): threads and connections cannot be copied; copy the model before "
            "the pipeline is made, or load pipe.full_state_dict() into another one. An average of "
            "the weights (AveragedModel) is made of such a copy: see the README, Weights"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "pickle of a pipeline: threads and connections cannot be saved; save "
            "pipe.state_dict() or pipe.full_state_dict()"
        )

    # ------------------------------------------------------------------ parameters and state

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
        ``shard_state`` masters of other replicas are their roundings then.
        """
        self.session.flush_to_read(Operation.state_dict)
        is_whole = not self.session.ending.has_failed
        return self.session.local_model.state(prefix, keep_vars, whole=is_whole)

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's ``state_dict`` on CPU on rank 0, {} on the other ranks. Drains.

        Raises:
            ValueError: with tensor-parallel stages, of which every process has a shard.
        """
        num_shards = self.session.grid.num_shards
        if num_shards > 1:
            raise ValueError(
                f"full_state_dict(): 'tp' of the mesh: {num_shards}, it must be 1: no "
                "process knows how shards are put together; save state_dict() of every process"
            )
        self.session.flush_for(Operation.full_state_dict)
        # Copies, as a view would be sent with the whole buffer that it is a part of.
        mine = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in self.session.local_model.state().items()
        }
        if self.session.grid.replica > 0:
            mine = {}
        parts = self.session.gather(mine)
        merged = {name: value for part in parts for name, value in part.items()}
        order = self.session.root.state_dict().keys()
        return {name: merged[name] for name in order if name in merged}

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
        return self.session.load(lambda: Checkpoint.of(state_dict), strict=strict)

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
        return self.session.load(lambda: open_checkpoint(path, prefix), strict=strict)
