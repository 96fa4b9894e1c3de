"""How a pipeline is opened: join, arrange, check, place, capture, start."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .._C import Schedule
from ..capture.chain import as_root, device_type_of
from ..json_document import given_or_loaded
from ..model.materialize import home_of, materialize
from ..model.metrics import check_metrics
from ..model.precision import Precision
from ..model.refusals import check_example, refuse_untrainable, refuse_valueless
from ..planning.plan import Plan
from ..ranks.agreement import ControlPlane, join
from ..ranks.grid import RankGrid
from ..runtime.accumulation import Accumulation
from ..runtime.local_stages import LocalStages
from ..runtime.session import Session
from ..runtime.stage_options import StageOptions
from ..schedules.load import check_runnable
from ..stages.compile import compile_options
from ..stages.modes import Modes
from ..stages.tied import check_ties, find_ties
from .arrangement import Arrangement, check_model, is_auto
from .auto_plan import plan_for_devices_at_hand
from .options import Options, check_options, stage_devices, what_to_recompute

_numbers = itertools.count()  # of the pipelines of this process; ranks make them in one order


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The arguments of :class:`PipelineModule`."""

    model: nn.Module | Sequence[nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    options: Options

    @property
    def device_type(self) -> str:
        """The type of the device where the model is, "cpu" if it is no model."""
        options = self.options
        return device_type_of(self.model, options.example_args, options.example_kwargs)


@dataclasses.dataclass(frozen=True)
class Arranged:
    """The arguments, with the arrangement that all ranks have agreed on."""

    wanted: Wanted
    arrangement: Arrangement
    plan: Plan | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A model and options that go together. Nothing has been changed."""

    wanted: Wanted
    arrangement: Arrangement
    root: nn.Module
    schedule: Schedule
    modes: Modes
    accumulation: Accumulation
    stage_options: StageOptions


@dataclasses.dataclass(frozen=True)
class Captured:
    """The captured model, whose tensors that this process runs have memory."""

    checked: Checked
    grid: RankGrid
    without_values: set[str]


def open_session(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    options: Options,
) -> Session:
    """Opens a pipeline; every rank calls it, and raises what any of them finds."""
    wanted = Wanted(model, loss_fn, options)
    control = join(f"pipeline{next(_numbers)}", wanted.device_type, options.timeout)
    with control.closed_on_error():
        arranged = arrange(wanted, control)
        checked = control.together(lambda: check(arranged, control.size))
        # What waits for other ranks comes after this: it relies on equal settings.
        grid = place(checked, control)
        captured = control.together(
            lambda: capture(checked, grid), same=lambda made: made.checked.modes.settings()
        )
        return start(captured, control)


def arrange(wanted: Wanted, control: ControlPlane) -> Arranged:
    """Agrees on the arrangement, which is planned for ``num_stages="auto"``, and on settings."""
    model, options = wanted.model, wanted.options
    given = Arrangement.given(options)
    planned = (
        plan_for_devices_at_hand(model, wanted.loss_fn, options, control)
        if is_auto(options)
        else options.plan
    )

    def complete() -> Arranged:
        plan = None if planned is None else given_or_loaded("plan", planned, Plan)
        return Arranged(wanted, given.complete(model, plan), plan)

    return control.together(
        complete,
        same=lambda made: {
            **made.arrangement.settings(),
            **options.settings(),
            "type of the model's device": wanted.device_type,
        },
    )


def check(arranged: Arranged, num_processes: int) -> Checked:
    """Checks the model and the options, and that they go together.

    Raises:
        ValueError, TypeError: naming the rule and both values.
    """
    wanted, arrangement = arranged.wanted, arranged.arrangement
    loss_fn, options = wanted.loss_fn, wanted.options
    check_options(options, loss_fn, arrangement.width)
    accumulation = Accumulation(options.accumulate, averages=options.loss_reduction == "mean")
    check_example(options.example_args, options.example_kwargs)
    metrics = check_metrics(options.metrics)
    schedule = arrangement.made()
    check_runnable(schedule)
    recompute, blocks = what_to_recompute(arrangement.recompute, schedule)
    root = as_root(wanted.model)
    refuse_untrainable(root, loss_fn)
    example = (tuple(options.example_args), dict(options.example_kwargs or {}))
    refuse_valueless(root)
    home = home_of(root, example)
    recomputes = bool(blocks) or any(recompute)
    compiling = compile_options(options.compile, home, recomputes=recomputes)
    precision = Precision(
        root=root,
        precision=options.precision,
        split_master=options.split_master,
        autocast=options.autocast,
        device_type=home.type,
    )
    replicated = tuple(options.replicated)
    if arranged.plan is not None:
        check_model(arranged.plan, root, example, replicated, precision)
    split = arrangement.split
    return Checked(
        wanted=wanted,
        arrangement=arrangement,
        root=root,
        schedule=schedule,
        modes=Modes(
            root=root,
            num_stages=schedule.depth,
            example=example,
            split=split if isinstance(split, str) else tuple(split or ()),
            replicated=replicated,
            recomputed_blocks=blocks,
            precision=precision,
        ),
        accumulation=accumulation,
        stage_options=StageOptions(
            loss_fn=loss_fn,
            precision=precision,
            devices=stage_devices(options.devices, schedule.depth, num_processes, home),
            recompute=recompute,
            recomputes_blocks=bool(blocks),
            metrics=metrics,
            compile_options=compiling,
            bucket_cap_mb=options.bucket_cap_mb,
            warmup_batches=options.warmup_batches,
        ),
    )


def place(checked: Checked, control: ControlPlane) -> RankGrid:
    """Gives each process its stages, and joins those that hold the same ones."""
    arrangement, schedule = checked.arrangement, checked.schedule
    grid = RankGrid(
        placement=schedule.placement,
        num_pipelines=schedule.num_pipelines,
        width=arrangement.width or 1,
        world=control.size,
        timeout=control.timeout,
        mesh=arrangement.mesh,
        order=arrangement.order,
    )
    stages = ", ".join(map(str, grid.stages_of_model))
    control.place = f"rank {grid.rank} (stage {stages})"
    return grid


def capture(checked: Checked, grid: RankGrid) -> Captured:
    """Captures the model in its present mode, and gives this process's part of it memory.

    Raises:
        ValueError, TypeError: the model cannot be captured or cut into these stages.
    """
    root = checked.root
    mode = checked.modes.capture(root.training)
    check_ties(checked.schedule, find_ties(mode.programs), root)
    names = checked.modes.names_in(grid.stages_of_model)
    return Captured(checked, grid, materialize(root, names))


def start(captured: Captured, control: ControlPlane) -> Session:
    """Takes the model over: weights into the engine's buffers, threads, channels."""
    checked = captured.checked
    checked.stage_options.precision.convert()
    stages = LocalStages(
        root=checked.root,
        mode=checked.modes.first,
        schedule=checked.schedule,
        grid=captured.grid,
        control=control,
        options=checked.stage_options,
    )
    return Session(
        model=checked.wanted.model,
        modes=checked.modes,
        stages=stages,
        accumulation=checked.accumulation,
        replicated=tuple(checked.wanted.options.replicated),
        without_values=captured.without_values,
    )
