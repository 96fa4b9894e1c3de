"""Seconds of a batch, and bytes of a stage, of the five systems that the paper compares.

All have what the authors' code (github.com/msr-fiddle/pipedream, megatron/) does, see README.md:
activations are recomputed block by block in the backward; messages are waited for, and a server's
messages share its link in both directions (the 2 |A^inp+out| of the paper's section 3.3); replicas
add up half-precision gradients when a batch's backwards are done, and those of the embedding that
the first and the last stage share, which 2BW leaves out; then all update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pipedream2bw as pd2
from benchmarks.paper.devices import Cluster, Constants, ring_seconds
from benchmarks.paper.shapes import HALF, SINGLE, Gpt

SYSTEMS = ("one at a time", "tensor parallel", "gpipe", "1f1b", "2bw")
UPDATE_TRAFFIC = 72  # bytes that a step reads and writes, of each parameter
# Half-precision weights and gradients, single-precision master, its gradient, two moments.
PARAMETER_BYTES = 20
SECOND_VERSION_BYTES = 4  # of the master


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of a run: ``depth`` stages, or devices that share each layer, of ``width`` replicas."""

    model: Gpt
    devices: int
    depth: int
    rows: int  # of a microbatch
    batch: int  # rows of all replicas

    @property
    def width(self) -> int:
        return self.devices // self.depth

    @property
    def microbatches(self) -> int:
        return self.batch // (self.width * self.rows)

    @property
    def layers(self) -> list[int]:
        """Blocks of each stage."""
        each, more = divmod(self.model.layers, self.depth)
        return [each + (stage < more) for stage in range(self.depth)]


@dataclasses.dataclass(frozen=True)
class Network:
    """Who sends through what: a stage's replicas are neighbours, then come the next stage's."""

    cluster: Cluster
    setting: Setting

    @property
    def senders(self) -> int:
        """Pipelines whose messages go through one server's link."""
        return min(self.setting.width, self.cluster.devices_per_server)

    @property
    def message_bandwidth(self) -> float:
        """Of one pipeline, while nothing comes back; of its slowest edge, as bwdth_depth is."""
        if self.setting.devices > self.cluster.devices_per_server:
            return self.cluster.between / self.senders
        return self.cluster.pair

    def sum_seconds(self, members: int, size: float, *, rings: int, crosses: bool) -> float:
        """All-reduce of ``size`` bytes by each of ``rings`` rings through the same links."""
        bandwidth = self.cluster.between / rings if crosses else self.cluster.inside
        return ring_seconds(members, size, bandwidth, self.cluster.latency)


def stage_parameters(setting: Setting) -> list[int]:
    """The embedding is on the first stage and, for the head, on the last."""
    counts = [layers * setting.model.block_parameters for layers in setting.layers]
    counts[0] += setting.model.embedding_parameters
    if setting.depth > 1:
        counts[-1] += setting.model.vocabulary * setting.model.hidden
    return counts


def stage_seconds(
    setting: Setting, cluster: Cluster, constants: Constants
) -> tuple[list[float], list[float]]:
    """Forwards and backwards of a microbatch; the latter with the blocks' second forwards."""
    model, rows = setting.model, setting.rows
    block = constants.block_seconds(cluster, model.block_flops(rows))
    head = model.head_flops(rows) / (constants.efficiency * cluster.flops)
    forward = [layers * block for layers in setting.layers]
    backward = [3 * seconds for seconds in forward]
    forward[-1] += head
    backward[-1] += 2 * head
    return forward, backward


def stage_bytes(setting: Setting, system: str, in_flight: Sequence[int]) -> list[float]:
    """The most that each stage holds, with ``in_flight`` microbatches."""
    model, rows = setting.model, setting.rows
    of_parameter = PARAMETER_BYTES + (SECOND_VERSION_BYTES if system == "2bw" else 0)
    if setting.microbatches == 1 or system == "one at a time":
        of_parameter -= HALF  # the gradients come when the activations go
    logits = model.logit_values(rows)
    sizes = []
    for stage, (layers, parameters) in enumerate(
        zip(setting.layers, stage_parameters(setting), strict=True)
    ):
        kept = layers * model.hidden_bytes(rows)
        passing = model.kept_bytes(rows)  # of the block that is being differentiated
        if stage == setting.depth - 1:
            kept += SINGLE * logits  # the loss keeps its softmax,
            passing = max(passing, (HALF + SINGLE) * logits)  # made of logits in both precisions
        sizes.append(of_parameter * parameters + in_flight[stage] * kept + passing)
    return sizes


def tensor_bytes(setting: Setting) -> float:
    """What a device holds that has 1/depth of each layer."""
    model, rows, t = setting.model, setting.rows, setting.depth
    logits = model.logit_values(rows) / t
    kept = model.layers * model.hidden_bytes(rows) + SINGLE * logits
    passing = max(model.kept_bytes(rows, t), (HALF + SINGLE) * logits)
    return PARAMETER_BYTES * model.parameters / t + kept + passing


def peak_bytes(setting: Setting, system: str) -> float:
    """On the device that holds most."""
    if system == "tensor parallel":
        return tensor_bytes(setting)
    if system == "one at a time":
        return max(stage_bytes(setting, system, [1] * setting.depth))
    schedule = pd2.make_schedule(system, setting.depth, setting.microbatches)
    in_flight = [schedule.max_in_flight(stage) for stage in range(setting.depth)]
    return max(stage_bytes(setting, system, in_flight))


def update_seconds(setting: Setting, network: Network, *, tied: bool) -> float:
    """After a batch's backwards: sums over replicas and of the embedding's two copies, the step."""
    cluster, model = network.cluster, setting.model
    parameters = max(stage_parameters(setting))
    crosses = setting.width > cluster.devices_per_server
    seconds = network.sum_seconds(setting.width, HALF * parameters, rings=1, crosses=crosses)
    if tied and setting.depth > 1:
        size = HALF * model.vocabulary * model.hidden
        seconds += size / network.message_bandwidth
    return seconds + UPDATE_TRAFFIC * parameters / cluster.memory_bandwidth


def batch_seconds(
    setting: Setting, network: Network, constants: Constants, schedule: str, microbatches: int
) -> float:
    """Of so many microbatches, simulated, without the update.

    The directions share a link while a stage has messages in both, which is in the steady state:
    all of 2BW, nothing of GPipe, and 1F1B but for its filling and draining.
    """
    if schedule == "gpipe":
        return _simulated(setting, network, constants, schedule, microbatches, False)
    shared = _simulated(setting, network, constants, "2bw", microbatches, True)
    if schedule == "2bw":
        return shared
    flushed, steady = (
        _simulated(setting, network, constants, name, microbatches, False)
        for name in (schedule, "2bw")
    )
    return shared + flushed - steady


@functools.lru_cache(maxsize=4096)
def _simulated(
    setting: Setting,
    network: Network,
    constants: Constants,
    schedule: str,
    microbatches: int,
    shares_links: bool,
) -> float:
    """Sends block: a stage works on when its message has arrived, so that counts as its work."""
    forward, backward = stage_seconds(setting, network.cluster, constants)
    users = 2 if shares_links else 1
    size = setting.model.hidden_bytes(setting.rows)
    message = size * users / network.message_bandwidth + network.cluster.latency
    return pd2.simulate(
        schedule,
        num_stages=setting.depth,
        num_microbatches=microbatches,
        forward=[*(seconds + message for seconds in forward[:-1]), forward[-1]],
        backward=[backward[0], *(seconds + message for seconds in backward[1:])],
        num_batches=1,
    ).period


def gpipe_microbatches(setting: Setting, memory: float) -> int:
    """The most, of those that divide the batch, whose activations fit; 0 if one's do not."""
    fits = [
        m
        for m in range(1, setting.microbatches + 1)
        if setting.microbatches % m == 0
        and max(stage_bytes(setting, "gpipe", [m] * setting.depth)) <= memory
    ]
    return max(fits, default=0)


def sequences_per_second(
    setting: Setting, system: str, cluster: Cluster, constants: Constants
) -> float | None:
    """None if it does not fit the memory."""
    network = Network(cluster, setting)
    if system == "tensor parallel":
        seconds = tensor_seconds(setting, network, constants)
        return setting.batch / seconds if tensor_bytes(setting) <= cluster.memory else None
    if system == "gpipe":  # as many flushes as it takes
        most = gpipe_microbatches(setting, cluster.memory)
        if most == 0:
            return None
        flush = batch_seconds(setting, network, constants, system, most)
        flushes = setting.microbatches // most
        return setting.batch / (flushes * flush + update_seconds(setting, network, tied=True))
    if peak_bytes(setting, system) > cluster.memory:
        return None
    if system == "one at a time":
        seconds = one_at_a_time_seconds(setting, network, constants)
        return setting.width * setting.rows / seconds
    seconds = batch_seconds(setting, network, constants, system, setting.microbatches)
    return setting.batch / (seconds + update_seconds(setting, network, tied=system != "2bw"))


def one_at_a_time_seconds(setting: Setting, network: Network, constants: Constants) -> float:
    """Of one microbatch: the stages in turn, there and back, and an update."""
    forward, backward = stage_seconds(setting, network.cluster, constants)
    size = setting.model.hidden_bytes(setting.rows)
    message = size / network.message_bandwidth + network.cluster.latency
    messages = 2 * (setting.depth - 1) * message
    update = update_seconds(setting, network, tied=True)
    return sum(forward) + sum(backward) + messages + update


def tensor_seconds(setting: Setting, network: Network, constants: Constants) -> float:
    """Of a batch whose layers are each shared by ``depth`` devices (Megatron, arXiv 1909.08053)."""
    cluster, model, rows, t = network.cluster, setting.model, setting.rows, setting.depth
    block = constants.block_seconds(cluster, model.block_flops(rows) / t)
    head = model.head_flops(rows) / t / (constants.efficiency * cluster.flops)
    # Two in a block's forward, again when it is recomputed, two in its backward; one after the
    # embedding, one for the head's input.
    sums = 6 * model.layers + 2
    crosses = t > cluster.devices_per_server
    each = network.sum_seconds(t, model.hidden_bytes(rows), rings=1, crosses=crosses)
    microbatch = 4 * model.layers * block + 3 * head + sums * each
    parameters = model.parameters / t
    rings = min(t, cluster.devices_per_server)  # every device of a server has replicas elsewhere
    gradients = network.sum_seconds(
        setting.width, HALF * parameters, rings=rings, crosses=setting.width > 1
    )
    update = UPDATE_TRAFFIC * parameters / cluster.memory_bandwidth
    return setting.microbatches * microbatch + gradients + update
