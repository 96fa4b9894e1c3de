"""PipeDream-2BW for PyTorch: pipelined training that never empties the pipeline.

``PipelineModule`` splits one ``nn.Module`` over stages, ``PipelineOptimizer`` wraps any torch
optimizer; see their docstrings, and docs/design.md for how it works.
"""

from ._build_check import check_loaded_torch

check_loaded_torch()

from .added_loss import add_loss, collect_losses
from .calibration import Calibration, calibrate
from .cluster import Cluster, DeviceType
from .deferred import deferred_init
from .device_figures import KNOWN_DEVICES, DeviceFigures
from .draw import Picture, draw_timeline
from .draw_plan import draw_plan
from .local_shards import use_local_shards
from .loss import Loss
from .loss_scale import LossScale
from .memory import StageMemory
from .optimizer import PipelineOptimizer
from .pipeline import PipelineModule
from .planner import plan
from .plans import Alternative, Plan, StagePlan
from .profile import Profile
from .profiler import profile
from .schedules import Schedule, load_schedule, make_schedule, schedule_names
from .simulate import Simulation, find_deadlock, simulate
from .staleness import ErrorFeedback, LearningRateDiscount, NesterovCorrection
from .text_picture import draw_text
from .timeline import Event, Timeline
from .trace import read_events, write_events, write_trace

__version__ = "0.1.0"
__all__ = [
    "KNOWN_DEVICES",
    "Alternative",
    "Calibration",
    "Cluster",
    "DeviceFigures",
    "DeviceType",
    "ErrorFeedback",
    "Event",
    "LearningRateDiscount",
    "Loss",
    "LossScale",
    "NesterovCorrection",
    "Picture",
    "PipelineModule",
    "PipelineOptimizer",
    "Plan",
    "Profile",
    "Schedule",
    "Simulation",
    "StageMemory",
    "StagePlan",
    "Timeline",
    "add_loss",
    "calibrate",
    "collect_losses",
    "deferred_init",
    "draw_plan",
    "draw_text",
    "draw_timeline",
    "find_deadlock",
    "load_schedule",
    "make_schedule",
    "plan",
    "profile",
    "read_events",
    "schedule_names",
    "simulate",
    "use_local_shards",
    "write_events",
    "write_trace",
]
