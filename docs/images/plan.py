"""Draws plan.png: a GPT of 1.3 billion parameters on a server of eight V100, from figures alone.

python docs/images/plan.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import pipedream2bw as pd2

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))
CONTEXT = 1024


def main() -> None:
    """Profiles without measuring, plans and draws."""
    from gpt import GPT, next_token_loss

    with torch.device("meta"):
        model = GPT(num_layers=24, width=2048, num_heads=16, context=CONTEXT)
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64)
    profile = pd2.profile(
        model,
        next_token_loss,
        example_args=(tokens,),
        target=tokens,
        microbatch_rows=(1, 2, 4),
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    cluster = pd2.Cluster.servers(8, devices_per_server=8, inside="130GB/s", outside="12GB/s")
    plan = pd2.plan(profile, devices=cluster, memory="16GB", batch=128, schedules=("2bw",))
    pd2.draw_plan(plan, HERE / "plan.png")


if __name__ == "__main__":
    main()
