"""Stages of several devices each: what a profile and a cluster are where t devices share a layer.

The planner puts stages on groups of t adjacent devices as it does on single ones. Which layers are
cut is given, as in Megatron-LM (arXiv 1909.08053, section 3); the degree is searched together with
replicas and stages, as in AutoDDL (arXiv 2301.06813).
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import math
from collections.abc import Sequence, Set

from ...model.fingerprint import name_and_shape
from ..profiling.profile import MicrobatchProfile, Profile
from .cluster import Cluster, DeviceType, Link


@dataclasses.dataclass(frozen=True)
class Shards:
    """The layers of a profile that t devices share.

    Attributes:
        holders: whose parameters are cut.
        workers: these, and every layer that reads a part of a value: each device computes a part.
        adders: whose results the devices add up. What other workers make stays in parts.
    """

    holders: Set[int]
    workers: Set[int]
    adders: Set[int]

    @classmethod
    def of(cls, profile: Profile, sharded: Sequence[str], summed: Sequence[str]) -> Shards:
        """Finds the layers between those that are named.

        What several layers read of the model's inputs counts as made by the first layer.

        Args:
            sharded, summed: as :func:`plan` has them.

        Raises:
            ValueError: a pattern names no layer, both name one, or the loss would be of a part.
        """
        names = [layer.name for layer in profile.layers]
        adders = _matching("summed", summed, names)
        holders = _matching("sharded", sharded, names)
        if both := sorted(holders & adders):
            raise ValueError(
                f"sharded: {list(sharded)}, summed: {list(summed)}: both name {names[both[0]]!r}: "
                "what a layer makes either stays in parts or is added up. Name it in one of them"
            )
        holders |= adders
        workers = set(holders)
        for producer, consumer, _ in sorted(
            profile.microbatches[0].edges, key=lambda edge: edge[1]
        ):
            if producer in workers and producer not in adders:
                workers.add(consumer)
        last = len(names) - 1
        if last in workers - adders:
            raise ValueError(
                f"summed: {list(summed)}, the last layer is {names[last]!r}: it reads a part of a "
                "value, or is one of sharded, and must read whole ones. A layer before must be one "
                "of summed"
            )
        return cls(holders, workers, adders)

    def check_parts(self, profile: Profile, degree: int) -> None:
        """Raises ValueError unless so many devices can have equal parts of what they cut.

        Which of a parameter's dimensions a script cuts is not known, so that any may be the one.
        What devices add up gets a bias once, which stays whole.
        """
        for line in profile.parameters:
            name, shape = name_and_shape(line)
            if math.prod(shape) == 1 or any(size % degree == 0 for size in shape):
                continue
            for i in self.holders - self.adders if len(shape) == 1 else self.holders:
                layer = profile.layers[i].name
                if name.startswith(f"{layer}."):
                    raise ValueError(
                        f"tensor_parallel: {degree}, layer {layer!r}: shape of {name}: {shape}: "
                        "parts are equal, so the degree must divide one of these sizes. Give "
                        "another degree, or leave the layer whole"
                    )

    def gives_part(self, layer: int) -> bool:
        """Whether each device has a part of what the layer makes."""
        return layer in self.workers and layer not in self.adders


def _matching(name: str, patterns: Sequence[str], layers: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for pattern in patterns:
        matching = {i for i, layer in enumerate(layers) if fnmatch.fnmatchcase(layer, pattern)}
        if not matching:
            some = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
            raise ValueError(f"{name}: {pattern!r}, layers of the profile: {some}: it names none")
        found |= matching
    return found


def grouped(cluster: Cluster, degree: int) -> tuple[Cluster, list[Link]]:
    """The cluster whose devices are groups of adjacent ones, and the links of rings within these.

    Raises:
        ValueError: the degree does not divide the devices, or the types differ in speed.
    """
    if degree == 1:
        return cluster, []
    for each in cluster.types:
        _check_divides(degree, f"devices of type {each.name}", each.count)
    speeds = sorted({each.throughput for each in cluster.types})
    if len(speeds) > 1:
        raise ValueError(
            f"tensor_parallel: {degree}, throughputs of the devices: {speeds}: they must be equal"
        )
    types = tuple(_group(each, degree) for each in cluster.types)
    sizes, links, rings = cluster.sizes, list(cluster.links), list(cluster.links[:1])
    if cluster.topology == "matrix":
        links, rings = _of_matrix(cluster, degree)
    elif cluster.topology == "mesh":
        _check_divides(degree, "columns", sizes[1])
        sizes = (sizes[0], sizes[1] // degree)
    elif degree < sizes[0]:
        _check_divides(degree, "devices_per_server", sizes[0])
        sizes = (sizes[0] // degree,)
    else:
        _check_divides(sizes[0], "tensor_parallel", degree, of="devices_per_server")
        rings = list(links) if degree > sizes[0] > 1 else [links[degree > sizes[0]]]
        sizes = (1,)
    return Cluster(types, cluster.topology, sizes, tuple(links)), rings


def _check_divides(degree: int, what: str, size: int, *, of: str = "tensor_parallel") -> None:
    if size % degree:
        raise ValueError(f"{of}: {degree}, {what}: {size}: the first must divide the second")


def _group(each: DeviceType, degree: int) -> DeviceType:
    prices = [(hour, degree * price) for hour, price in each.prices()]
    return dataclasses.replace(each, count=each.count // degree, price_per_hour=prices)


def _of_matrix(cluster: Cluster, degree: int) -> tuple[list[Link], list[Link]]:
    """Each device of a group sends to one of another; the slowest of these links counts."""
    n, t = cluster.num_devices, degree

    def slowest(pairs: list[tuple[int, int]]) -> Link:
        links = [cluster.links[a * n + b] for a, b in pairs]
        return max(link[0] for link in links), min(link[1] for link in links)

    between = [
        slowest([(a + i, b + i) for i in range(t)]) for a in range(0, n, t) for b in range(0, n, t)
    ]
    around = [
        slowest([(a + i, a + (i + 1) % t), (a + (i + 1) % t, a + i)])
        for a in range(0, n, t)
        for i in range(t)
    ]
    return between, around


def divided(
    profile: Profile, shards: Shards, degree: int, rings: Sequence[Link], throughput: float
) -> Profile:
    """The profile of a device that has a part of the shards.

    Its times are those of the profiled device, sums included: ``throughput`` times as long as the
    rings take. Of what a worker keeps for its backward, the values that it reads whole stay whole.
    """

    def sum_seconds(size: int) -> float:
        slowest = max(latency + size / degree / bandwidth for latency, bandwidth in rings)
        return 2 * (degree - 1) * slowest * throughput

    def part(size: int, *holders: int) -> int:
        return math.ceil(size / degree) if all(i in shards.holders for i in holders) else size

    # By a value in parts, which no other stage can read, or by a sum that may still be under way.
    crossed = [False] * len(profile.layers)
    for producer, consumer, _ in profile.microbatches[0].edges:
        if producer in shards.workers:
            crossed[producer:consumer] = [True] * (consumer - producer)

    def microbatch(item: MicrobatchProfile) -> MicrobatchProfile:
        sizes: dict[int, int] = {}  # of what each layer makes
        first: dict[int, int] = {}  # worker that reads it
        for producer, consumer, size in item.edges:
            sizes[producer] = max(sizes.get(producer, 0), size)
            if consumer in shards.workers:
                first[producer] = min(first.get(producer, consumer), consumer)
        forward, input_grad = list(item.forward), list(item.input_grad)
        weight_grad, kept = list(item.weight_grad), list(item.activation_bytes)
        whole: collections.Counter[int] = collections.Counter()  # bytes that each worker reads
        for producer, consumer, size in item.edges:
            if consumer in shards.workers and not shards.gives_part(producer):
                whole[consumer] += size
        for i in shards.workers:
            for times in (forward, input_grad, weight_grad):
                times[i] /= degree
            stays = min(kept[i], whole[i])
            kept[i] = stays + math.ceil((kept[i] - stays) / degree)
        for i in shards.adders:
            forward[i] += sum_seconds(sizes.get(i, 0))
        for producer, reader in first.items():  # its gradient is a sum of the devices'
            if not shards.gives_part(producer):
                input_grad[reader] += sum_seconds(sizes[producer])
        return dataclasses.replace(
            item,
            forward=tuple(forward),
            input_grad=tuple(input_grad),
            weight_grad=tuple(weight_grad),
            activation_bytes=tuple(kept),
        )

    return dataclasses.replace(
        profile,
        layers=tuple(
            dataclasses.replace(
                layer,
                parameter_bytes=part(layer.parameter_bytes, i),
                trained_bytes=part(layer.trained_bytes, i),
                can_cut_after=layer.can_cut_after and not crossed[i],
            )
            for i, layer in enumerate(profile.layers)
        ),
        shared_parameters=tuple(
            dataclasses.replace(
                each,
                parameter_bytes=part(each.parameter_bytes, *each.layers),
                trained_bytes=part(each.trained_bytes, *each.layers),
            )
            for each in profile.shared_parameters
        ),
        microbatches=tuple(microbatch(item) for item in profile.microbatches),
    )
