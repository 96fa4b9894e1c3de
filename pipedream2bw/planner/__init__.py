"""A plan for a model and devices: profiled, searched and simulated. The core does not need it."""

from .fastest_v import fastest_v_schedule
from .pictures import draw_plan
from .planning.calibration import Calibration, calibrate
from .planning.cluster import Cluster, DeviceType
from .planning.plan import Alternative, Plan, StagePlan
from .planning.planner import plan
from .profiling.peaks import KNOWN_DEVICES
from .profiling.profile import Profile
from .profiling.profiler import profile
from .simulation import HostCosts, Simulation, simulate

__all__ = [
    "KNOWN_DEVICES",
    "Alternative",
    "Calibration",
    "Cluster",
    "DeviceType",
    "HostCosts",
    "Plan",
    "Profile",
    "Simulation",
    "StagePlan",
    "calibrate",
    "draw_plan",
    "fastest_v_schedule",
    "plan",
    "profile",
    "simulate",
]
