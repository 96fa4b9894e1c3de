"""What the paper reports (PAPER.md: read from its bar charts, to about a unit)."""

from __future__ import annotations

import dataclasses

from benchmarks.paper.shapes import GPT_1_3B, GPT_2_2B, GPT_3_8B, Gpt
from benchmarks.paper.systems import SYSTEMS, Setting


@dataclasses.dataclass(frozen=True)
class Bars:
    """Sequences per second of each of the five systems."""

    model: Gpt
    devices: int
    depth: int
    batch: int
    values: tuple[float, float, float, float, float]

    @property
    def label(self) -> str:
        return f"{self.model.name}, {self.devices} devices, B={self.batch}"

    def setting(self, rows: int) -> Setting:
        return Setting(self.model, self.devices, self.depth, rows, self.batch)

    def by_system(self) -> dict[str, float]:
        return dict(zip(SYSTEMS, self.values, strict=True))


# The constants are fitted on the first row alone.
THROUGHPUT = (
    Bars(GPT_2_2B, 8, 8, 64, (7, 25, 18, 26, 43)),
    Bars(GPT_2_2B, 8, 8, 256, (7, 26, 18, 38, 44)),
    Bars(GPT_2_2B, 64, 8, 512, (11, 88, 80, 110, 160)),
    Bars(GPT_2_2B, 64, 8, 2048, (12, 155, 80, 145, 168)),
    Bars(GPT_3_8B, 64, 16, 512, (10, 8, 38, 75, 127)),
    Bars(GPT_3_8B, 64, 16, 2048, (12, 8, 38, 115, 135)),
)
ROWS = 8  # of a microbatch, in the authors' sweep over the five systems

# Of the first row's setting, in GB; GPipe runs out of memory.
MEMORY = {"one at a time": 8.6, "tensor parallel": 7.4, "1f1b": 10.1, "2bw": 11.3}

# By depth, billions of parameters; 64 devices, blocks of the 28.3B model.
LARGEST = {1: 1.2, 2: 1.7, 4: 2.5, 8: 4.5, 16: 8.6, 32: 15.5, 64: 28.5}

# Of 2BW's sequences per second, GPT 1.3B on 64 devices: the ends of the curves.
CHOICES = (
    (Setting(GPT_1_3B, 64, 4, 1, 64), 85),
    (Setting(GPT_1_3B, 64, 8, 1, 64), 120),
    (Setting(GPT_1_3B, 64, 4, 1, 2048), 235),
    (Setting(GPT_1_3B, 64, 8, 1, 2048), 160),
    (Setting(GPT_1_3B, 64, 8, 32, 2048), 285),
)

# Zero bubble's 6.2B model, p = 8, m = 24: samples per device and second, GB. Our schedule's name,
# stages a rank.
ZERO_BUBBLE = {
    ("1f1b", 1): (3.50, 39),
    ("interleaved", 4): (4.01, 48),
    ("zero_bubble", 1): (3.88, 42),
    ("zero_bubble_2p", 1): (4.32, 70),
}

# GPT 1.56B on 8 A800, d = 8, thousands of tokens per second by microbatches: 2BW, 1F1B.
A800 = {32: (70.3, 57.0), 128: (71.6, 67.5)}
