"""What hangs on a pipeline, stands in for a class of another library, or is a loss of its own.

The core does not know it; docs/extending.md shows how one is made.
"""

from .bubbles import BubbleWork, IdleSlot, InBubbles, idle_slots, place_work
from .chunked_cross_entropy import linear_cross_entropy
from .ok_topk import OkTopkState, ok_topk_hook
from .replica_sync import ReplicaSync
from .skew_scout import SkewScout
from .stalls import DataStalls, data_stalls
from .streaming import stream_weights
from .traffic import ActionTraffic, StageTraffic, TrafficReport
from .traffic_count import traffic_report

__all__ = [
    "ActionTraffic",
    "BubbleWork",
    "DataStalls",
    "IdleSlot",
    "InBubbles",
    "OkTopkState",
    "ReplicaSync",
    "SkewScout",
    "StageTraffic",
    "TrafficReport",
    "data_stalls",
    "idle_slots",
    "linear_cross_entropy",
    "ok_topk_hook",
    "place_work",
    "stream_weights",
    "traffic_report",
]
