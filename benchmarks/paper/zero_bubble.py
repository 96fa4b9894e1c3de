"""Zero bubble's 6.2B model (arXiv 2401.10241): simulated throughput and memory of its schedules.

30 blocks on eight A100: the first and the last rank have one block fewer, in place of the embedding
and the head. Nothing is recomputed; messages go on beside the work.
"""

from __future__ import annotations

import pipedream2bw as pd2
from benchmarks.paper.devices import A100_SERVER, Constants
from benchmarks.paper.shapes import GPT_6_2B, HALF, SINGLE

RANKS = 8
MICROBATCHES = 24
ROWS = 3
PARAMETER_BYTES = 18  # half-precision weights; gradients, master and moments in single precision


def blocks_of_stages(stages_per_rank: int) -> list[int]:
    """32 places, of which the embedding and the head take the first and the last."""
    stages = RANKS * stages_per_rank
    places = (GPT_6_2B.layers + 2) // stages
    blocks = [places] * stages
    blocks[0] -= 1
    blocks[-1] -= 1
    return blocks


def simulate(name: str, stages_per_rank: int, constants: Constants) -> pd2.Simulation:
    """The schedule, with the seconds and bytes of this model's stages."""
    model, cluster = GPT_6_2B, A100_SERVER
    blocks = blocks_of_stages(stages_per_rank)
    flops = model.block_flops(ROWS)
    forward, inputs, weights = (
        [count * constants.block_seconds(cluster, part * flops) for count in blocks]
        for part in (1, 1 + model.attention_share, 1 - model.attention_share)
    )
    head = model.head_flops(ROWS) / (constants.efficiency * cluster.flops)
    for seconds in (forward, inputs, weights):
        seconds[-1] += head
    kept = [count * model.kept_bytes(ROWS) for count in blocks]
    kept[-1] += (HALF + SINGLE) * model.logit_values(ROWS)
    parameters = [count * model.block_parameters for count in blocks]
    parameters[0] += model.embedding_parameters
    parameters[-1] += model.vocabulary * model.hidden
    return pd2.simulate(
        name,
        num_stages=len(blocks),
        num_microbatches=MICROBATCHES,
        stages_per_rank=stages_per_rank,
        forward=forward,
        input_grad=inputs,
        weight_grad=weights,
        activation_bytes=kept,
        weight_bytes=[PARAMETER_BYTES * count for count in parameters],
        latency=cluster.latency,
        bandwidth=cluster.pair,
        message_bytes=model.hidden_bytes(ROWS),
    )


def samples_per_device(simulation: pd2.Simulation) -> float:
    """Per second."""
    return MICROBATCHES * ROWS / simulation.period / RANKS


def flush_over_2bw(num_stages: int, num_microbatches: int) -> float:
    """1F1B's throughput over 2BW's, of equal stages and free messages."""
    flushed, steady = (
        pd2.simulate(name, num_stages=num_stages, num_microbatches=num_microbatches).period
        for name in ("1f1b", "2bw")
    )
    return steady / flushed
