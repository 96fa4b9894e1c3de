"""How a pipeline is opened: join, arrange, check, place, capture, start."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from .. import _C
from .._C import Schedule
from ..accelerator import with_index
from ..capture.chain import as_root, device_type_of
from ..checks import check_whole_number
from ..model.fingerprint import sampled_values
from ..model.local_shards import shapes_of_shards, shard_dimensions
from ..model.materialize import home_of, materialize
from ..model.precision import Precision
from ..model.random_numbers import follow_threads
from ..model.refusals import refuse_synchronized, refuse_untrainable, refuse_valueless
from ..options import EXCLUSIONS, Options
from ..ranks.agreement import ControlPlane, join
from ..ranks.devices import agree_on_devices
from ..ranks.grid import RankGrid
from ..ranks.mesh import mesh_of
from ..rules import FUNCTION, check_values, refuse, settings
from ..runtime.local_stages import LocalStages
from ..runtime.runner import StageOptions
from ..runtime.session import Session
from ..runtime.tied_copies import check_ties, find_ties
from ..schedules.load import check_room
from ..stages.compile import compile_options
from ..stages.kept_activations import refuse_kept_activations
from ..stages.modes import Modes
from .arrangement import Arrangement, what_to_recompute

_numbers = itertools.count()  # of the pipelines of this process; ranks make them in one order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A model and options that go together. Nothing has been changed."""

    arrangement: Arrangement
    schedules: Sequence[Schedule]  # of each replica
    modes: Modes
    stage_options: StageOptions


def open_session(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    options: Options,
    arrange: Callable[[ControlPlane], Callable[[], Arrangement]] | None = None,
) -> Session:
    """Opens a pipeline; every rank calls it, and raises what any of them finds.

    Args:
        arrange: makes the arrangement in place of the options' own. Every rank calls it with the
            control plane, and then what it returns.
    """
    device_type = device_type_of(model, options.example_args, options.example_kwargs)
    control = join(f"pipeline{next(_numbers)}", device_type, options.timeout)
    with contextlib.ExitStack() as opened:
        opened.callback(control.close)
        own = functools.partial(Arrangement.of, options, model)
        arrangement = control.together(
            own if arrange is None else arrange(control),
            same=lambda made: {
                **settings(options),
                **made.settings(),
                "torch version": torch.__version__,
                "type of the model's device": device_type,
            },
        )
        checked = control.together(
            lambda: check(model, loss_fn, options, arrangement, control.size),
            same=lambda made: {"shards, and their shapes": shapes_of_shards(made.modes.root)},
        )
        agree_on_devices(control, checked.stage_options.devices, summed=_what_is_summed(checked))
        # What waits for other ranks comes after this: it relies on equal settings.
        with control.errors_told():
            grid = place(checked, control)
        opened.callback(grid.close)
        without_values = control.together(
            lambda: capture(checked, grid), same=lambda _: checked.modes.settings()
        )
        if grid.width > 1 or grid.num_shards > 1:
            check_replicas_alike(checked, grid, control, without_values)
        # Takes the model over: weights into the engine's buffers, threads, channels.
        with control.errors_told():
            checked.stage_options.precision.convert()
            stages = LocalStages(
                root=checked.modes.root,
                mode=checked.modes.first,
                schedule=checked.schedules[grid.replica],
                grid=grid,
                control=control,
                options=checked.stage_options,
            )
            seed = None
            if options.random == "keyed":
                follow_threads()
                drawn = _C.draw_seed()  # on every rank, so that their generators stay alike
                seed = control.from_first(lambda: drawn)
            session = Session(
                model=model,
                modes=checked.modes,
                stages=stages,
                without_values=without_values,
                random_seed=seed,
            )
        opened.pop_all()
        return session


def check(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    options: Options,
    arrangement: Arrangement,
    num_processes: int,
) -> Checked:
    """Raises ValueError or TypeError unless the model and the options go together."""
    check_values(Options, vars(options))
    FUNCTION.check("loss_fn", loss_fn)
    is_torchs = type(loss_fn).__module__ == "torch.nn.modules.loss"
    own, wanted = getattr(loss_fn, "reduction", None) if is_torchs else None, options.loss_reduction
    if own in ("mean", "sum") and own != wanted:
        both = f"reduction of loss_fn: {own!r}, loss_reduction: {wanted!r}: they must be equal"
        raise ValueError(f"{both}. Give loss_reduction={own!r}, or another loss_fn")
    check_whole_number("width", arrangement.width)
    schedules = arrangement.schedules()
    schedule = max(schedules, key=lambda each: each.num_microbatches)
    recompute, blocks = what_to_recompute(arrangement.recompute, schedule)
    root = as_root(model)
    refuse_valueless(root)
    refuse_untrainable(root, loss_fn)
    example = (tuple(options.example_args), dict(options.example_kwargs or {}))
    home = home_of(root, example)
    devices = _stage_devices(options.devices, schedule.depth, home)
    update_slots = options.update_slots if any(schedule.delay) else None
    if update_slots is None and arrangement.is_fresh:
        update_slots = 1
    facts = {
        "schedule": schedule,
        "late forwards of one's own": schedule.has_fresh_forwards and not arrangement.is_fresh,
        "recompute": arrangement.recompute if blocks or any(recompute) else False,
        "processes": num_processes,
        "device": home,
        "devices of the stages": devices,
    }
    refuse(EXCLUSIONS, {**vars(options), **facts})
    if isinstance(update_slots, int):
        for each in schedules:
            late = each.late_for_slots(update_slots, [])
            check_room(update_slots, late, each.num_microbatches)
    compiling = compile_options(options.compile, home)
    precision = Precision(root, options, home.type)
    check_layers = arrangement.check_layers
    if check_layers is not None:
        check_layers = functools.partial(check_layers, root=root, precision=precision)
    split = arrangement.split
    return Checked(
        arrangement=arrangement,
        schedules=schedules,
        modes=Modes(
            root=root,
            num_stages=schedule.depth,
            example=example,
            split=split if isinstance(split, str) else tuple(split),
            replicated=tuple(options.replicated),
            recomputed_blocks=blocks,
            dynamic_shapes=options.dynamic_shapes,
            numbers_draws=options.random == "keyed" and not compiling,
            precision=precision,
            check_layers=check_layers,
        ),
        stage_options=StageOptions(
            pipeline=options,
            loss_fn=loss_fn,
            precision=precision,
            devices=devices,
            recompute=recompute,
            compile_options=compiling,
            microbatches_of_replicas=arrangement.microbatches_of_replicas,
            update_slots=update_slots,
        ),
    )


def _stage_devices(
    devices: Sequence[torch.device | str] | None,
    num_stages: int,
    model_device: torch.device,
) -> list[torch.device]:
    """The device of every stage."""
    if devices is None:
        return [model_device] * num_stages
    if len(devices) != num_stages:
        raise ValueError(
            f"devices: {len(devices)} given, num_stages: {num_stages}: give one for each stage"
        )
    return [with_index(torch.device(device)) for device in devices]


def _what_is_summed(checked: Checked) -> str | None:
    """What makes several processes hold one stage; None if nothing does."""
    if checked.arrangement.width > 1:
        return f"width: {checked.arrangement.width}"
    pipelines = checked.schedules[0].num_pipelines
    return f"pipelines of the schedule: {pipelines}" if pipelines > 1 else None


def place(checked: Checked, control: ControlPlane) -> RankGrid:
    """Gives each process its stages, and joins those that hold the same ones."""
    arrangement, schedule = checked.arrangement, checked.schedules[0]
    grid = RankGrid(
        schedule.placement,
        schedule.num_pipelines,
        control.deadline,
        arrangement.mesh,
        width=arrangement.width,
        world=control.size,
        order=arrangement.order,
    )
    if grid.num_shards > 1 and grid.mesh is None:  # for DTensors
        device_type = checked.stage_options.devices[0].type
        grid.mesh = mesh_of(grid.places, device_type, control.deadline)
    stages = ", ".join(map(str, grid.stages_of_model))
    control.place = f"rank {grid.rank} (stage {stages})"
    return grid


def check_replicas_alike(
    checked: Checked, grid: RankGrid, control: ControlPlane, without_values: Collection[str]
) -> None:
    """Raises ValueError on all ranks if processes have different values that must be alike.

    Those of replicas, as replica 0's would be everybody's, and gradients of different parameters
    would be averaged; and those of a stage's processes, of parameters that are no shards.
    """
    names, root = checked.modes.names_in(grid.stages_of_model), checked.modes.root
    tensors = dict(root.named_parameters()) | dict(root.named_buffers())
    mine = {name: sampled_values(tensors[name]) for name in names if name not in without_values}
    place = (grid.shard, grid.local_ranks)
    told = control.told_by_all((place, grid.replica, mine))
    cut = shard_dimensions(root)
    alike = {name for name, _ in root.named_parameters()} - (cut or {}).keys()
    for rank, (place, replica, values) in enumerate(told):
        if cut is not None:
            whole = next(theirs for (shard, at), _, theirs in told if (shard, at) == (0, place[1]))
            other = sorted(n for n in alike & values.keys() if whole.get(n, values[n]) != values[n])
            if other:
                raise ValueError(
                    f"shards: rank {rank} has other values of {other[0]} and {len(other) - 1} more "
                    "than another process of its stage, what is no shard must be equal on all. "
                    "Name it in use_local_shards(model, shards={...}) if it is one. Else call "
                    "torch.manual_seed() with one seed on every rank before the model is made"
                )
        first = next(theirs for at, number, theirs in told if at == place and number == 0)
        other = [name for name, value in values.items() if first.get(name, value) != value]
        if other:
            raise ValueError(
                f"replicas: rank {rank}, of replica {replica}, has other values of {other[0]} "
                f"and {len(other) - 1} more than replica 0, all replicas train one model. Call "
                "torch.manual_seed() with one seed on every rank before the model is made, or "
                "load one checkpoint"
            )


def capture(checked: Checked, grid: RankGrid) -> set[str]:
    """Captures the model in its present mode, and gives this process's part of it memory.

    Returns the names of parameters and buffers that are to be loaded.

    Raises:
        ValueError, TypeError: the model cannot be captured or cut into these stages.
    """
    root = checked.modes.root
    if grid.in_processes and grid.depth > 1:
        refuse_synchronized(root)
    mode = checked.modes.capture()
    refuse_kept_activations(mode, root, checked.stage_options.loss_fn)
    if ties := find_ties(mode.programs):
        check_ties(checked.schedules[grid.replica], ties, root)
    names = checked.modes.names_in(grid.stages_of_model)
    return materialize(root, names)
