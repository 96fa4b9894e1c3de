"""Seconds and bytes of the stages of one way to train a model on many devices."""

from __future__ import annotations

import dataclasses
import itertools

from benchmarks.paper.devices import Cluster, Constants, ring_seconds
from benchmarks.paper.shapes import HALF, SINGLE, Gpt

# A parameter: weights in half precision (2bw: two versions), gradient, master and two moments.
STATE_BYTES = 4 * SINGLE
UPDATE_TRAFFIC = 30  # of a fused step


TWO_VERSIONS = ("2bw", "2bw_v_two_thirds", "2bw_v_half")


def is_v(schedule: str) -> bool:
    """Whether rank r holds the stages r and 2 d - 1 - r."""
    return "v_" in schedule


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
        return 2 if self.schedule in TWO_VERSIONS else 1

    @property
    def is_split(self) -> bool:
        """Whether W is an action of its own, before which a second forward's activations wait."""
        return self.schedule == "zero_bubble" or is_v(self.schedule)

    def stages_on(self, rank: int) -> list[int]:
        if is_v(self.schedule):
            return [rank, self.num_stages - 1 - rank]
        return list(range(rank, self.num_stages, self.ranks))

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
    if num_stages == 1:
        return [layers]
    most = next(
        most
        for most in itertools.count(-(-layers // num_stages))
        if (num_stages - 1) * most + max(0, int(most - head)) >= layers
    )
    # No more on the last than on the others.
    last = min(max(0, int(most - head)), layers // num_stages)
    each, more = divmod(layers - last, num_stages - 1)
    return [each + (stage < more) for stage in range(num_stages - 1)] + [last]


def costs(candidate: Candidate, cluster: Cluster, constants: Constants) -> Costs:
    model, t, rows = candidate.model, candidate.tensor, candidate.rows
    share = model.attention_share
    summed = 2 * ring_seconds(t, model.hidden_bytes(rows), cluster.inside, cluster.latency)
    flops = model.block_flops(rows) / t
    forward, inputs, weights = (
        constants.block_seconds(cluster, part * flops) + sums
        for part, sums in ((1, summed), (1 + share, summed), (1 - share, 0))
    )
    again = candidate.recompute * forward
    head = model.head_flops(rows) / t / (constants.efficiency * cluster.flops)
    blocks = balanced(
        model.layers, candidate.num_stages, 3 * head / (forward + inputs + weights + again)
    )

    def of_stages(of_block: float, of_head: float) -> list[float]:
        values = [count * of_block for count in blocks]
        values[-1] += of_head
        return values

    parameters = of_stages(model.block_parameters / t, 0)
    parameters[0] += model.embedding_parameters / t
    if candidate.num_stages > 1:
        parameters[-1] += model.vocabulary * model.hidden / t
    kept = model.kept_bytes(rows, scores=False) / t  # sequences are split where layers are not
    logits = model.logit_values(rows) / t
    if candidate.recompute and not candidate.is_split:
        # One block at a time. Where W comes later, all of them are kept until then.
        activations = [kept] * candidate.num_stages
        activations[-1] = max(kept, (HALF + SINGLE) * logits)
    else:
        activations = of_stages(kept, (HALF + SINGLE) * logits)
    inputs_of_blocks = of_stages(model.hidden_bytes(rows) / t, SINGLE * logits)
    devices = t * candidate.ranks
    one_server = cluster.devices_per_server
    outside = cluster.between / one_server  # of a device
    reduced = cluster.inside if devices * candidate.width <= one_server else outside
    return Costs(
        forward=of_stages(forward, head),
        input_grad=of_stages(inputs, head),
        weight_grad=of_stages(weights, head),
        recompute=of_stages(again, 0),
        all_reduce=[
            ring_seconds(candidate.width, SINGLE * count, reduced, cluster.latency)
            for count in parameters
        ],
        update=[UPDATE_TRAFFIC * count / cluster.memory_bandwidth for count in parameters],
        weight_bytes=[HALF * count for count in parameters],
        other_bytes=[STATE_BYTES * count for count in parameters],
        activation_bytes=activations,
        input_bytes=[candidate.recompute * size for size in inputs_of_blocks],
        message_bytes=model.hidden_bytes(rows) / t,  # each of the t devices sends its part
        bandwidth=cluster.pair if devices <= one_server else outside,
        latency=cluster.latency,
    )
