"""PipeDream-2BW for PyTorch: pipelined training that never empties the pipeline.

``PipelineModule`` splits one ``nn.Module`` over stages, ``PipelineOptimizer`` wraps any torch
optimizer; see their docstrings, and docs/design.md for how it works.
"""

import importlib
from typing import TYPE_CHECKING

from ._build_check import check_loaded_torch

check_loaded_torch()

from ._torch_internals import check_torch_internals

check_torch_internals()

from ._environment import set_variables

set_variables()

from . import errors
from ._C import Schedule
from .capture.device_figures import DeviceFigures
from .checkpoint.checkpointer import Checkpointer
from .checkpoint.load import load
from .checkpoint.preemption import Preempted
from .checkpoint.sampler import ResumableSampler
from .checkpoint.save import save
from .checkpoint.saving import Saving
from .checkpoint.seeded_rows import SeededRows
from .model.added_loss import add_loss, collect_losses
from .model.deferred import deferred_init
from .model.local_shards import use_local_shards
from .model.random_numbers import reference_random
from .optimizer.loss_scale import LossScale
from .optimizer.optimizer import PipelineOptimizer
from .optimizer.staleness import ErrorFeedback, LearningRateDiscount, NesterovCorrection
from .pipeline.module import PipelineModule
from .runtime.extension import Extension, HeldBytes, Update
from .runtime.lazy_numbers import Loss
from .runtime.microbatch import Microbatch
from .runtime.stage_memory import MemoryReport, StageMemory
from .runtime.timeline import Timeline
from .schedules.events import Event
from .schedules.load import load_schedule, make_schedule, schedule_names

if TYPE_CHECKING:
    from .extras import *
    from .pictures import *
    from .planner import *

__version__ = "0.1.0"
__all__ = [
    "KNOWN_DEVICES",
    "ActionTraffic",
    "Alternative",
    "BubbleWork",
    "Calibration",
    "Checkpointer",
    "Cluster",
    "DataStalls",
    "DeviceFigures",
    "DeviceType",
    "ErrorFeedback",
    "Event",
    "Extension",
    "HeldBytes",
    "HostCosts",
    "IdleSlot",
    "InBubbles",
    "LearningRateDiscount",
    "Loss",
    "LossScale",
    "MemoryReport",
    "Microbatch",
    "NesterovCorrection",
    "OkTopkState",
    "Picture",
    "PipelineModule",
    "PipelineOptimizer",
    "Plan",
    "Preempted",
    "Profile",
    "ReplicaSync",
    "ResumableSampler",
    "Saving",
    "Schedule",
    "SeededRows",
    "Simulation",
    "SkewScout",
    "StageMemory",
    "StagePlan",
    "StageTraffic",
    "Timeline",
    "TrafficReport",
    "Update",
    "add_loss",
    "calibrate",
    "collect_losses",
    "data_stalls",
    "deferred_init",
    "draw_plan",
    "draw_text",
    "draw_timeline",
    "errors",
    "fastest_v_schedule",
    "idle_slots",
    "linear_cross_entropy",
    "load",
    "load_schedule",
    "make_schedule",
    "ok_topk_hook",
    "place_work",
    "plan",
    "profile",
    "read_events",
    "reference_random",
    "save",
    "schedule_names",
    "simulate",
    "stream_weights",
    "traffic_report",
    "use_local_shards",
    "write_events",
    "write_trace",
]


def __getattr__(name: str) -> object:
    """Loads pictures, planner and extras when one of their names is first asked for."""
    if name in __all__:
        for house in ("pictures", "planner", "extras"):
            module = importlib.import_module(f".{house}", __name__)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
