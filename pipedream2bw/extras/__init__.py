"""What hangs on an open pipeline, or stands in for a class of another library.

The core does not know it; docs/extending.md shows how one is made.
"""

from .fastest_v import fastest_v_schedule
from .stalls import DataStalls, data_stalls
from .traffic import ActionTraffic, StageTraffic, TrafficReport
from .traffic_count import traffic_report

__all__ = [
    "ActionTraffic",
    "DataStalls",
    "StageTraffic",
    "TrafficReport",
    "data_stalls",
    "fastest_v_schedule",
    "traffic_report",
]
