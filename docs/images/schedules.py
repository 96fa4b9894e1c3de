"""Draws schedules.png: schedules on four ranks, simulated; of the V-shaped ones some.

And fresh_forwards.png, 2bw beside 2bw_fresh.

python docs/images/schedules.py
"""

from __future__ import annotations

from pathlib import Path

import pipedream2bw as pd2

RANKS = 4
# Name, microbatches, stages per rank.
CASES = (
    ("2bw", 4, 1),
    ("2bw_eager", 8, 1),
    ("2bw_split", 4, 1),
    ("interleaved_2bw", 8, 2),
    ("2bw_v_half", 8, 2),
    ("2bw_v_min", 8, 2),
    ("pipedream", 1, 1),
    ("1f1b", 4, 1),
    ("gpipe", 4, 1),
    ("interleaved", 4, 2),
    ("looped_bfs", 4, 2),
    ("zero_bubble", 8, 1),
    ("zero_bubble_2p", 8, 1),
    ("interleaved_zero_bubble", 8, 2),
    ("v_half", 8, 2),
    ("chimera", 8, 1),
    ("chimera_doubled", 8, 1),
)


FRESH_CASES = (("2bw", 8, 1), ("2bw_fresh", 8, 1))


def draw(cases: tuple[tuple[str, int, int], ...], picture: str) -> None:
    """Simulates and draws."""
    panels = {}
    for name, m, v in cases:
        simulation = pd2.simulate(
            name,
            num_stages=RANKS * v,
            num_microbatches=m,
            stages_per_rank=v,
            # A rank's work on a microbatch is the same however many stages it has.
            forward=1 / v,
            backward=2 / v,
            num_batches=max(2, 12 // m) + (cases is FRESH_CASES),
        )
        chunks = f", {v} stages a rank" if v > 1 else ""
        idle = max(0.0, *simulation.bubbles)
        late = f", {simulation.late_share:.0%} late" if cases is FRESH_CASES else ""
        panels[f"{name}: m = {m}{chunks}, idle {idle:.0%}{late}"] = simulation.events
    pd2.draw_timeline(
        panels,
        Path(__file__).with_name(picture),
        unit="forwards of a microbatch on a rank",
        width=15,
    )


if __name__ == "__main__":
    draw(CASES, "schedules.png")
    draw(FRESH_CASES, "fresh_forwards.png")
