"""Seconds and bytes of the stages of one way to train a model on many devices."""

from __future__ import annotations

import dataclasses
import itertools

from benchmarks.paper.devices import Cluster, Constants, ring_seconds
from benchmarks.paper.shapes import HALF, SINGLE, Gpt

# A parameter: weights in half precision (2bw: two versions), gradient, master and two moments.
STATE_BYTES = 4 * SINGLE
UPDATE_TRAFFIC = 30  # of a fused step


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train ``model``."""

    model: Gpt
    schedule: str
    tensor: int  # t
    width: int
    ranks: int  # d, of a replica
    stages_per_rank: int  # v
    rows: int  # b
    recompute: bool
    batch: int  # sequences of all replicas

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def microbatches(self) -> int:
        return self.batch // (self.width * self.rows)

    @property
    def versions(self) -> int:
        return 2 if self.schedule == "2bw" else 1

    def describe(self) -> str:
        chunks = f" v={self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        again = ", recompute" if self.recompute else ""
        return f"t={self.tensor} w={self.width} d={self.ranks}{chunks} b={self.rows}{again}"


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of each stage: seconds of a microbatch and of a batch, and bytes, on one device."""

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    recompute: list[float]
    all_reduce: list[float]
    update: list[float]
    weight_bytes: list[float]
    other_bytes: list[float]  # gradients, masters, moments
    activation_bytes: list[float]
    input_bytes: list[float]
    message_bytes: float
    bandwidth: float
    latency: float


def balanced(layers: int, num_stages: int, head: float) -> list[int]:
    """Blocks of each stage, where the last one also has the head, worth ``head`` blocks."""
    most = next(
        most
        for most in itertools.count(-(-layers // num_stages))
        if (num_stages - 1) * most + max(0, int(most - head)) >= layers
    )
    last = min(layers, max(0, int(most - head))) if num_stages > 1 else layers
    if num_stages == 1:
        return [last]
    # No more on the last than on the others.
    last = min(last, layers // num_stages)
    each, more = divmod(layers - last, num_stages - 1)
    return [each + (stage < more) for stage in range(num_stages - 1)] + [last]


def costs(candidate: Candidate, cluster: Cluster, constants: Constants) -> Costs:
    model, t, rows = candidate.model, candidate.tensor, candidate.rows
    product = constants.block_seconds(cluster, model.block_flops(rows) / t)
    share = model.attention_share
    summed = ring_seconds(t, model.hidden_bytes(rows), cluster.inside, cluster.latency)
    forward = product + 2 * summed
    weight = constants.block_seconds(cluster, (1 - share) * model.block_flops(rows) / t)
    inputs = constants.block_seconds(cluster, (1 + share) * model.block_flops(rows) / t)
    head = model.head_flops(rows) / t / (constants.efficiency * cluster.flops)
    blocks = balanced(model.layers, candidate.num_stages, head / product)
    parameters = [count * model.block_parameters / t for count in blocks]
    parameters[0] += model.embedding_parameters / t
    if candidate.num_stages > 1:
        parameters[-1] += model.vocabulary * model.hidden / t
    last = [0.0] * (candidate.num_stages - 1) + [1.0]
    kept = model.kept_bytes(rows, scores=False) / t  # sequences are split where layers are not
    logits = model.logit_values(rows) / t
    devices = t * candidate.ranks
    one_server = cluster.devices_per_server
    outside = cluster.between / one_server  # of a device
    reduced = cluster.inside if devices * candidate.width <= one_server else outside
    return Costs(
        forward=[n * forward + is_last * head for n, is_last in zip(blocks, last, strict=True)],
        input_grad=[
            n * (inputs + 2 * summed) + is_last * head
            for n, is_last in zip(blocks, last, strict=True)
        ],
        weight_grad=[n * weight + is_last * head for n, is_last in zip(blocks, last, strict=True)],
        recompute=[n * forward * candidate.recompute for n in blocks],
        all_reduce=[
            ring_seconds(candidate.width, SINGLE * count, reduced, cluster.latency)
            for count in parameters
        ],
        update=[UPDATE_TRAFFIC * count / cluster.memory_bandwidth for count in parameters],
        weight_bytes=[HALF * count for count in parameters],
        other_bytes=[STATE_BYTES * count for count in parameters],
        # One block at a time is recomputed; where W comes later, all of them are kept until then.
        activation_bytes=[
            max(kept, is_last * (HALF + SINGLE) * logits)
            if candidate.recompute and candidate.schedule != "zero_bubble"
            else n * kept + is_last * (HALF + SINGLE) * logits
            for n, is_last in zip(blocks, last, strict=True)
        ],
        input_bytes=[
            candidate.recompute * (n * model.hidden_bytes(rows) / t + is_last * SINGLE * logits)
            for n, is_last in zip(blocks, last, strict=True)
        ],
        message_bytes=model.hidden_bytes(rows) / t,  # each of the t devices sends its part
        bandwidth=cluster.pair if devices <= one_server else outside,
        latency=cluster.latency,
    )
