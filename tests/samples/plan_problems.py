"""Random problems for the planner: profiles, servers of devices, batches."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw.planner.profiling.profile import (
    Kept,
    MicrobatchProfile,
    Profile,
    ProfiledDevice,
    ProfiledLayer,
    SharedParameter,
)
from tests.references.plan_oracle import Problem

KB = 1000


def made_profile(
    random: Random,
    *,
    layers: tuple[int, int] = (3, 10),
    is_chain: bool = True,
    largest_message: int = 4000,
    updates: tuple[float, ...] = (0.0, 1e-10),
) -> Profile:
    """Times are whole tenths of a millisecond, so that splits tie; sizes are in kilobytes.

    In other models than chains later layers read values, too, or they alone do.
    """
    n = random.randint(*layers)

    def several(low: int, high: int) -> list[int]:
        return [random.randint(low, high) for _ in range(n)]

    times = [several(1, random.choice([3, 20])) for _ in range(3)]
    trained, frozen, kept_bytes = several(0, 2000), several(0, 500), several(0, 1000)
    if random.random() < 0.5:
        kept_bytes = [10 * size for size in kept_bytes]
    edges = [(i, i + 1, random.randint(0, largest_message)) for i in range(n - 1)]
    kept: list[Kept] = []
    shared: list[SharedParameter] = []
    if n > 2 and not is_chain:
        for _ in range(random.randint(1, 3)):
            producer = random.randint(0, n - 3)
            reader = random.randint(producer + 2, n - 1)
            edges.append((producer, reader, random.choice([100, edges[producer][2]])))
            kept.append((random.randint(0, 500), (producer, reader)))
            kept_bytes[producer] += kept[-1][0]
        if random.random() < 0.5:  # nothing goes from some layer to the next
            del edges[random.randint(0, n - 2)]
        if random.random() < 0.5:
            size, is_trained = random.randint(1, 1000), random.random() < 0.5
            (trained if is_trained else frozen)[0] += size
            shared.append(SharedParameter(KB * size, KB * size * is_trained, (0, n - 1)))
    microbatches = []
    for rows in random.choice([(1,), (1, 2), (2, 3)]):
        forward, input_grad, weight_grad = (
            tuple(1e-4 * each * (1 + 0.5 * rows) for each in part) for part in times
        )
        microbatches.append(
            MicrobatchProfile(
                rows=rows,
                forward=forward,
                input_grad=input_grad,
                weight_grad=weight_grad,
                activation_bytes=tuple(KB * rows * each for each in kept_bytes),
                kept=tuple((KB * rows * size, holders) for size, holders in kept),
                spread=(0.0,) * n,
                edges=tuple((a, b, KB * rows * size) for a, b, size in sorted(edges)),
            )
        )
    return Profile(
        model_name="Made",
        parameters=("weight [1] torch.float32",),
        device=ProfiledDevice("made", "cpu", 2**34, False),
        torch_version="0",
        loss="loss",
        layers=tuple(
            ProfiledLayer(
                name=f"layers.{i // 2}.part{i % 2}",
                parameter_bytes=KB * (trained[i] + frozen[i]),
                trained_bytes=KB * trained[i],
                can_cut_after=i + 1 < n and random.random() < 0.85,
                repeats=None,
            )
            for i in range(n)
        ),
        shared_parameters=tuple(shared),
        microbatches=tuple(microbatches),
        seconds_per_update_byte={"adamw": random.choice(updates)},
        seconds_per_action=random.choice([0.0, 5e-5]),
        links=None,
        all_reduce=(),
    )


def made_problem(
    random: Random,
    *,
    schedules: tuple[str, ...],
    devices: tuple[int, int] = (1, 8),
    most_types: int = 2,
    recompute: tuple[str, ...] = ("none", "stages"),
    shard_state: bool = False,
    kinds: tuple[str, ...] = ("cpu",),
    **of_profile: Any,
) -> Problem:
    """On servers with fast links inside and slower ones between them, of one or two types."""
    profile = made_profile(random, **of_profile)
    count = random.randint(*devices)
    fast = random.randint(0, count - 1) if random.randint(1, most_types) > 1 else 0
    # Of what one microbatch of the whole model takes: little makes pipelines deep.
    of_layers = sum(4 * layer.trained_bytes + layer.parameter_bytes for layer in profile.layers)
    whole = of_layers + sum(profile.microbatches[0].activation_bytes)
    memory, own = (max(1.0, whole * random.choice([0.3, 0.6, 1, 10])) for _ in range(2))
    types = [pd2.DeviceType("slow", count - fast, memory=own if fast else None)]
    if fast:
        types.append(pd2.DeviceType("fast", fast, throughput=random.choice([1.5, 2.0])))
    cluster = pd2.Cluster.servers(
        types,
        devices_per_server=random.randint(1, 4),
        inside=1e11,
        outside=random.choice([5e8, 2e9, 1e10]),
        inside_latency=1e-6,
        outside_latency=random.choice([0.0, 5e-5]),
    )
    pieces = 1 + sum(layer.can_cut_after for layer in profile.layers)
    deep = {"num_stages": random.randint(1, min(pieces, count))}
    batch = random.choice([4, 8, 12])
    if schedules == ("pipedream",):  # of one microbatch
        batch //= 4
    problem = Problem(
        profile,
        cluster,
        memory,
        batch,
        batch * random.choice([1, 1, 2]),
        schedules,
        chunks=random.choice([(2,), (2, 3)]),
        recompute=recompute,
        optimizer=random.choice(["sgd", "momentum", "adamw"]),
        shard_state=shard_state,
        **random.choice([{}, {"width": 1}, {} if "interleaved" in schedules else deep]),
    )
    # On a GPU, which may be behind its host, messages take memory, too.
    device = dataclasses.replace(profile.device, type=random.choice(kinds))
    return dataclasses.replace(problem, profile=dataclasses.replace(profile, device=device))


def problems(**options: Any) -> st.SearchStrategy[Problem]:
    """Of :func:`made_problem`."""
    return st.integers(0, 2**32).map(lambda seed: made_problem(Random(seed), **options))
