"""What docs/planner.md says plans are, by enumeration: every candidate, every set of cuts.

Read from the profile with plain sums. Of the package only the schedules' action lists are used, and
``pd2.simulate`` for the time of stages that send to the next one alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import pipedream2bw as pd2
from pipedream2bw.planner.profiling.profile import MicrobatchProfile, Profile
from tests.references import direct_messages
from tests.samples.schedule_plan import Plan as Lists

Grid = list[list[int]]
"""Devices by rank and replica."""

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}
VS = ("2bw_v", "2bw_v_two_thirds", "2bw_v_half", "2bw_v_min", "zero_bubble_v", "v_half", "v_min")
FLUSHED = ("1f1b", "gpipe", "interleaved", "zero_bubble", "chimera", *VS[4:])
ROUNDING = 1 + 1e-9


@dataclasses.dataclass(frozen=True)
class Problem:
    """What ``pd2.plan`` is asked."""

    profile: Profile
    cluster: pd2.Cluster
    memory: float
    batch: int
    largest_batch: int
    schedules: tuple[str, ...]
    chunks: tuple[int, ...] = (2,)
    recompute: tuple[str, ...] = ("none", "stages")
    optimizer: str = "sgd"
    shard_state: bool = False
    num_stages: int | None = None
    width: int | None = None

    def plan(self) -> pd2.Plan:
        has_chunks = "interleaved" in self.schedules
        return pd2.plan(
            self.profile,
            devices=self.cluster,
            memory=self.memory,
            batch=self.batch,
            largest_batch=self.largest_batch,
            schedules=self.schedules,
            recompute=self.recompute,
            optimizer=self.optimizer,
            shard_state=self.shard_state,
            num_stages=self.num_stages,
            width=self.width,
            unequal_replicas=False,
            stages_per_rank=self.chunks if has_chunks else (2, 4),
        )

    @property
    def num_layers(self) -> int:
        return len(self.profile.layers)

    def type_of(self, device: int) -> pd2.DeviceType:
        types = [each for each in self.cluster.types for _ in range(each.count)]
        return types[device]

    def memory_of(self, device: int) -> float:
        own = self.type_of(device).memory
        return self.memory if own is None else float(own)

    def slowness(self, devices: Sequence[int]) -> float:
        return max(1 / self.type_of(each).throughput for each in devices)

    def link(self, a: int, b: int) -> tuple[float, float]:
        """Latency and bandwidth."""
        each = self.cluster.sizes[0]
        return self.cluster.links[0 if a // each == b // each else 1]


@dataclasses.dataclass(frozen=True)
class Candidate:
    schedule: str
    width: int
    ranks: int
    stages_per_rank: int
    num_microbatches: int
    size: int
    """Which of the profile's microbatches."""
    recompute: str

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def stages_on(self, rank: int) -> list[int]:
        placement = lists_of(self).placement
        return [s % self.num_stages for s, holder in enumerate(placement) if holder == rank]

    def ranks_of(self, stage: int) -> list[int]:
        return lists_of(self).placement[stage :: self.num_stages]


def lists_of(candidate: Candidate) -> Lists:
    return _lists(
        candidate.schedule,
        candidate.num_stages,
        candidate.num_microbatches,
        candidate.stages_per_rank,
    )


@functools.cache
def _lists(schedule: str, num_stages: int, num_microbatches: int, stages_per_rank: int) -> Lists:
    made = pd2.make_schedule(schedule, num_stages, num_microbatches, stages_per_rank)
    return Lists.read(str(made))


@functools.cache
def _is_made(schedule: str, num_stages: int, num_microbatches: int) -> bool:
    try:
        _lists(schedule, num_stages, num_microbatches, 2)
    except ValueError:
        return False
    return True


@functools.cache
def most_held(candidate: Candidate) -> tuple[list[int], list[int]]:
    """Of each stage: microbatches from F to B or W, and from a recomputed forward to B or W."""
    lists = lists_of(candidate)
    flights, again = [0] * lists.num_stages, [0] * lists.num_stages
    most_flights, most_again = list(flights), list(again)
    num_batches = max(3, lists.num_stages + 1)  # until the pipeline is full, with m = 1
    for rank in lists.ranks:
        for stage, kind, _ in direct_messages.unrolled(rank, lists.num_microbatches, num_batches):
            flights[stage] += (kind == "F") - (kind in "BW")
            most_flights[stage] = max(most_flights[stage], flights[stage])
            again[stage] += kind in "BI"
            most_again[stage] = max(most_again[stage], again[stage])
            again[stage] -= kind in "BW"
    d = candidate.num_stages
    return (
        [max(most_flights[k::d]) for k in range(d)],
        [max(most_again[k::d]) for k in range(d)],
    )


def candidates(problem: Problem) -> Iterator[Candidate]:
    """But the ways to recompute blocks."""
    devices = problem.cluster.num_devices
    most = 1 + sum(layer.can_cut_after for layer in problem.profile.layers)
    for width in range(1, devices + 1) if problem.width is None else (problem.width,):
        for ranks in range(1, min(devices // width, most) + 1):
            for schedule in problem.schedules:
                for v in _stages_per_rank(problem, schedule, ranks):
                    if ranks * v > most or (schedule == "chimera" and ranks % 2):
                        continue
                    if problem.num_stages not in (None, ranks * v):
                        continue
                    for size, item in enumerate(problem.profile.microbatches):
                        rows = width * item.rows
                        m = _least_microbatches(schedule, ranks, math.ceil(problem.batch / rows))
                        if rows * m > problem.largest_batch:
                            continue
                        for way in problem.recompute:
                            if way != "blocks":
                                yield Candidate(schedule, width, ranks, v, int(m), size, way)


def _stages_per_rank(problem: Problem, schedule: str, ranks: int) -> tuple[int, ...]:
    if schedule in VS:
        return (2,) if ranks > 1 else ()
    return problem.chunks if schedule == "interleaved" and ranks > 1 else (1,)


def _least_microbatches(schedule: str, ranks: int, at_least: int) -> float:
    if schedule == "pipedream":
        return 1 if at_least == 1 else math.inf
    if schedule in VS:
        return next(m for m in itertools.count(at_least) if _is_made(schedule, 2 * ranks, m))
    least = {"2bw": ranks, "2bw_eager": 2 * ranks - 1}.get(schedule, 1)
    multiple = {"interleaved": ranks, "chimera": 2}.get(schedule, 1)
    return math.ceil(max(least, at_least) / multiple) * multiple


def all_cuts(problem: Problem, num_stages: int) -> Iterator[tuple[int, ...]]:
    """First layers of the stages."""
    places = [i + 1 for i, layer in enumerate(problem.profile.layers) if layer.can_cut_after]
    for cuts in itertools.combinations(places, num_stages - 1):
        yield (0, *cuts)


def grids(problem: Problem, candidate: Candidate) -> list[Grid]:
    """Whatever type of device comes first; adjacent: a replica's ranks, or a rank's replicas."""
    w, p = candidate.width, candidate.ranks
    found: list[Grid] = []
    for types in itertools.permutations(problem.cluster.types):
        order = [
            device
            for each in types
            for device in range(problem.cluster.num_devices)
            if problem.type_of(device) == each
        ]
        found.append([[order[replica * p + rank] for replica in range(w)] for rank in range(p)])
        found.append([[order[rank * w + replica] for replica in range(w)] for rank in range(p)])
    return found


def messages(
    item: MicrobatchProfile, firsts: Sequence[int], num_layers: int
) -> dict[tuple[int, int], float]:
    """Bytes by sender and receiver; a value goes once to each stage that reads it."""
    stage_of = stages_of_layers(firsts, num_layers)
    values: dict[tuple[int, int], int] = {}
    for producer, consumer, size in item.edges:
        key = (producer, stage_of[consumer])
        values[key] = max(values.get(key, 0), size)
    sums: dict[tuple[int, int], float] = {}
    for (producer, to), size in values.items():
        if stage_of[producer] != to:
            sums[stage_of[producer], to] = sums.get((stage_of[producer], to), 0.0) + size
    return sums


def stages_of_layers(firsts: Sequence[int], num_layers: int) -> list[int]:
    return [sum(first <= layer for first in firsts) - 1 for layer in range(num_layers)]


def stages(
    problem: Problem,
    candidate: Candidate,
    firsts: Sequence[int],
    grid: Grid,
    blocks: Sequence[Mapping[str, tuple[int, int]]] = (),
) -> list[dict[str, float]]:
    """What a plan says of its stages; ``blocks``: by stage, the layers of those run again."""
    profile, n = problem.profile, problem.num_layers
    item = profile.microbatches[candidate.size]
    action = profile.seconds_per_action
    is_split = candidate.schedule == "zero_bubble" or candidate.schedule in VS
    again = candidate.recompute == "stages"
    is_stashed = candidate.schedule == "pipedream"
    flights, most_again = most_held(candidate)
    sent = messages(item, firsts, n)
    found = []
    for k, (first, end) in enumerate(itertools.pairwise([*firsts, n])):
        layers = range(first, end)
        versions = candidate.num_stages - k if is_stashed else 2
        versions = 1 if candidate.schedule in FLUSHED else versions
        devices = [device for rank in candidate.ranks_of(k) for device in grid[rank]]
        slow = problem.slowness(devices)
        trained = float(sum(profile.layers[i].trained_bytes for i in layers))
        whole = float(sum(profile.layers[i].parameter_bytes for i in layers))
        for shared in profile.shared_parameters:  # its first layer has counted it
            if shared.layers[0] < first and any(i in layers for i in shared.layers):
                trained += shared.trained_bytes
                whole += shared.parameter_bytes
        kept = float(sum(item.activation_bytes[i] for i in layers))
        if not again:  # what is run again is made of the inputs
            for size, holders in item.kept:
                if holders[0] < first and any(i in layers for i in holders):
                    kept += size
        forward = slow * sum(item.forward[i] for i in layers)
        block_seconds = largest_block = 0.0
        for a, b in (blocks[k] if blocks else {}).values():
            block = float(sum(item.activation_bytes[a:b]))
            read: dict[int, int] = {}
            for producer, consumer, size in item.edges:
                if producer < a <= consumer < b:
                    read[producer] = max(read.get(producer, 0), size)
            kept -= block - sum(read.values())
            largest_block = max(largest_block, block)
            block_seconds += slow * sum(item.forward[a:b])
        received = float(sum(size for (_, to), size in sent.items() if to == k)) if again else 0.0
        # Each replica has, and steps, its share, and gives the others the weights in place of sums.
        state = STATES[problem.optimizer] * trained
        stepped = trained
        if problem.shard_state:
            state, stepped = state / candidate.width, trained / candidate.width
        stage = {
            "forward": forward + action,
            "input_grad": slow * sum(item.input_grad[i] for i in layers) + action + block_seconds,
            "weight_grad": slow * sum(item.weight_grad[i] for i in layers)
            + (action + block_seconds if is_split else 0),
            "recompute": forward if again else 0.0,
            "message": max(
                (
                    latency + size / bandwidth
                    for (sender, _), (latency, bandwidth, size) in links(
                        problem, candidate, sent, grid
                    ).items()
                    if sender == k
                ),
                default=0.0,
            ),
            "update": slow * stepped * profile.seconds_per_update_byte.get(problem.optimizer, 0.0),
            "all_reduce": ring_seconds(problem, devices, trained),
            "num_versions": versions,
            "weight_bytes": trained,
            "frozen_bytes": whole - trained,
            "gradient_bytes": trained,
            "state_bytes": state,
            "most_in_flight": flights[k],
            "activation_bytes": kept,
            "input_bytes": received,
            "message_bytes": 0.0,
        }
        if profile.device.type != "cpu":  # a value comes once, a gradient from each stage
            stage["message_bytes"] = 3 * sum(size for ends, size in sent.items() if k in ends)
        stage["of_microbatch"] = received if again else kept
        stage["kept"] = flights[k] * stage["of_microbatch"]
        stage["again"] = most_again[k] * (kept if again else largest_block)
        stage["held"] = (versions + 1) * trained + state + (whole - trained) + stage["kept"]
        stage["held"] += stage["message_bytes"]
        stage["peak_bytes"] = stage["held"] + stage["again"]
        found.append(stage)
    return found


def links(
    problem: Problem, candidate: Candidate, sent: Mapping[tuple[int, int], float], grid: Grid
) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Latency, bandwidth and bytes of each message: at its slowest replica, in either pipeline."""
    found = {}
    for (sender, receiver), size in sent.items():
        slowest = (0.0, math.inf, size)
        for a, b in zip(candidate.ranks_of(sender), candidate.ranks_of(receiver), strict=True):
            for one, other in zip(grid[a], grid[b], strict=True):
                latency, bandwidth = problem.link(one, other)
                if a != b and latency + size / bandwidth > slowest[0] + size / slowest[1]:
                    slowest = (latency, bandwidth, size)
        if size > 0:
            found[sender, receiver] = slowest
    return found


def ring_seconds(problem: Problem, devices: Sequence[int], size: float) -> float:
    n = len(devices)
    if n < 2 or size == 0:
        return 0.0
    hops = [problem.link(a, b) for a, b in zip(devices, [*devices[1:], devices[0]], strict=True)]
    return 2 * (n - 1) * max(latency + size / n / bandwidth for latency, bandwidth in hops)


def bytes_of_ranks(candidate: Candidate, made: Sequence[Mapping[str, float]]) -> list[float]:
    """One stage of a rank runs forwards again at a time; in a V both keep it until their W."""
    if candidate.schedule in VS:
        return [
            sum(made[k]["held"] - made[k]["kept"] + made[k]["again"] for k in on)
            + most_kept_together(candidate, rank, [stage["of_microbatch"] for stage in made])
            for rank, on in enumerate(map(candidate.stages_on, range(candidate.ranks)))
        ]
    return [
        sum(made[k]["held"] for k in on) + max(made[k]["again"] for k in on)
        for on in map(candidate.stages_on, range(candidate.ranks))
    ]


def most_kept_together(candidate: Candidate, rank: int, of_microbatch: Sequence[float]) -> float:
    """Bytes of all microbatches that a rank's stages have in flight at once."""
    lists = lists_of(candidate)
    now = most = 0.0
    for stage, kind, _ in direct_messages.unrolled(lists.ranks[rank], lists.num_microbatches, 3):
        now += of_microbatch[stage] * ((kind == "F") - (kind in "BW"))
        most = max(most, now)
    return most


def fits(
    problem: Problem, candidate: Candidate, made: Sequence[Mapping[str, float]], grid: Grid
) -> bool:
    return all(
        held <= problem.memory_of(device) * ROUNDING
        for held, devices in zip(bytes_of_ranks(candidate, made), grid, strict=True)
        for device in devices
    )


def work(stage: Mapping[str, float]) -> float:
    return sum(stage[part] for part in ("forward", "input_grad", "weight_grad", "recompute"))


def busiest(candidate: Candidate, made: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a batch in which some rank computes."""
    share = 0.5 if candidate.schedule == "chimera" else 1.0
    flushed = candidate.schedule in FLUSHED
    return max(
        sum(
            share * candidate.num_microbatches * work(made[k])
            + made[k]["update"]
            + (made[k]["all_reduce"] if flushed else 0)
            for k in candidate.stages_on(rank)
        )
        for rank in range(candidate.ranks)
    )


def seconds(
    problem: Problem,
    candidate: Candidate,
    firsts: Sequence[int],
    made: Sequence[Mapping[str, float]],
    grid: Grid,
) -> float:
    """Of a batch."""
    item = problem.profile.microbatches[candidate.size]
    sent = links(problem, candidate, messages(item, firsts, problem.num_layers), grid)
    if any(to != sender + 1 for sender, to in sent):
        period = direct_messages.period(lists_of(candidate), made, sent)
    else:
        edges = [
            sent.get((k, k + 1), (0.0, math.inf, 0.0)) for k in range(candidate.num_stages - 1)
        ]
        parts = ("forward", "input_grad", "weight_grad", "recompute", "update", "all_reduce")
        period = pd2.simulate(
            candidate.schedule,
            num_stages=candidate.num_stages,
            num_microbatches=candidate.num_microbatches,
            stages_per_rank=candidate.stages_per_rank,
            latency=[edge[0] for edge in edges],
            bandwidth=[edge[1] for edge in edges],
            message_bytes=[edge[2] for edge in edges],
            num_batches=1,
            **{part: [stage[part] for stage in made] for part in parts},  # type: ignore[arg-type]
        ).period
    return max(period, busiest(candidate, made))


def rows(problem: Problem, candidate: Candidate) -> int:
    size = problem.profile.microbatches[candidate.size].rows
    return candidate.width * candidate.num_microbatches * size
