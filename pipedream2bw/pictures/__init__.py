"""Pictures of schedules, recorded runs and plans; events as files. The core does not need them."""

from .canvas import Picture
from .text import draw_text
from .timeline import draw_timeline
from .trace import read_events, write_events, write_trace

__all__ = [
    "Picture",
    "draw_text",
    "draw_timeline",
    "read_events",
    "write_events",
    "write_trace",
]
