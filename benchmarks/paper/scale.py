"""2BW in a line, 2BW in a V, and schedules with flushes on 8 to 4,096 devices, simulated.

The best way to train with each is looked for.

All (t, w, d, v, b, recompute) are looked through: t devices share each layer, w replicas have d
ranks of v stages, b sequences are a microbatch. They are simulated in the order of a lower bound on
their seconds, until no bound is below the best. What is assumed stands in docs/scale.md.

    python benchmarks/paper/scale.py [--smoke] [--json PATH]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipedream2bw as pd2
from benchmarks.measuring.report import Figure, arguments, machine, write_json
from benchmarks.paper.devices import H100_CLUSTER, Cluster, Constants
from benchmarks.paper.scale_costs import TWO_VERSIONS, Candidate, Costs, costs, is_v
from benchmarks.paper.shapes import Gpt

CONSTANTS = Constants(efficiency=0.5, launch=20e-6)
SEQUENCE = 4096
BATCH = 1024  # sequences of all replicas: 4 Mi tokens
MODELS = (
    Gpt("7B", layers=32, hidden=4096, heads=32, sequence=SEQUENCE),
    Gpt("70B", layers=80, hidden=8192, heads=64, sequence=SEQUENCE),
    Gpt("1T", layers=128, hidden=25600, heads=160, sequence=SEQUENCE),
)
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SCHEDULES = (
    "2bw",
    "2bw_v_two_thirds",
    "2bw_v_half",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "v_half",
)


def candidates(
    model: Gpt, devices: int, schedule: str, cluster: Cluster, batch: int = BATCH
) -> Iterator[Candidate]:
    """All that the schedule's rules allow."""
    powers = [2**i for i in range(13)]
    chunks = [2, 4, 5, 8, 10] if schedule == "interleaved" else [2] if is_v(schedule) else [1]
    for t, d, v, b, recompute in itertools.product(
        [p for p in powers if p <= cluster.devices_per_server],
        powers,
        chunks,
        powers[:4],
        (False, True),
    ):
        width, over = divmod(devices, t * d)
        if over or width * b > batch or d * v > model.layers:
            continue
        candidate = Candidate(model, schedule, t, width, d, v, b, recompute, batch)
        m = candidate.microbatches
        if schedule == "2bw" and m < d:
            continue
        if schedule == "interleaved" and (m % d or d == 1):
            continue
        if is_v(schedule) and (d == 1 or m < least_of_v(schedule, d)):
            continue
        yield candidate


@functools.cache
def least_of_v(schedule: str, ranks: int) -> int:
    """The fewest microbatches that the V takes."""
    if schedule not in TWO_VERSIONS:
        return 1
    for m in range(1, 2 * ranks + 1):
        with contextlib.suppress(ValueError):
            pd2.make_schedule(schedule, 2 * ranks, m, 2)
            return m
    raise AssertionError(schedule)


def least_seconds(candidate: Candidate, of: Costs) -> float:
    """A lower bound on a batch's: no message takes time."""
    m, p = candidate.microbatches, candidate.ranks

    def of_rank(*kinds: list[float]) -> list[float]:
        """Seconds of a batch's."""
        held = [candidate.stages_on(rank) for rank in range(p)]
        return [m * sum(seconds[i] for seconds in kinds for i in stages) for stages in held]

    whole = of_rank(of.forward, of.input_grad, of.weight_grad, of.recompute)
    if candidate.schedule in TWO_VERSIONS:
        return max(whole)
    # From a rank's first forward of a batch to that of the next, stage 0's update is in between: on
    # the stages before, the last gradient has to come to it, and then the first forward from it.
    # Second forwards may be done while that is under way, and where W is apart so may W.
    ways = [f + i for f, i in zip(of.forward, of.input_grad, strict=True)]
    if candidate.is_split:
        between = of_rank(of.forward, of.input_grad)
    else:
        between = whole
        ways = [way + w for way, w in zip(ways, of.weight_grad, strict=True)]
    return max(max(whole), *(between[rank] + sum(ways[:rank]) for rank in range(p)))


def least_bytes(candidate: Candidate, of: Costs) -> float:
    """A lower bound on the fullest rank's."""
    p, m = candidate.ranks, candidate.microbatches
    sizes = []
    for rank in range(p):
        stages = candidate.stages_on(rank)
        state = sum(candidate.versions * of.weight_bytes[i] + of.other_bytes[i] for i in stages)
        # Of a V a third of p, of each of two stages.
        in_flight = min(p if candidate.schedule == "zero_bubble" else p - rank, m)
        if is_v(candidate.schedule):
            in_flight = min(2 * p // 3, m)
        kept = of.input_bytes if candidate.recompute else of.activation_bytes
        sizes.append(state + in_flight * min(kept[i] for i in stages))
    return max(sizes)


@dataclasses.dataclass(frozen=True)
class Result:
    """A candidate that was simulated."""

    candidate: Candidate
    seconds: float
    peak_bytes: float

    def tokens_per_device(self, devices: int) -> float:
        """Per second."""
        of = self.candidate
        return of.batch * of.model.sequence / self.seconds / devices


def simulate(candidate: Candidate, of: Costs) -> Result:
    flushes = candidate.schedule not in TWO_VERSIONS
    # A flush hides the sum over replicas behind the last microbatch's backward, 2BW behind work.
    backward = [i + w for i, w in zip(of.input_grad, of.weight_grad, strict=True)]
    exposed = [
        max(0.0, seconds - flushes * hidden)
        for seconds, hidden in zip(of.all_reduce, backward, strict=True)
    ]
    simulation = pd2.simulate(
        candidate.schedule,
        num_stages=candidate.num_stages,
        num_microbatches=candidate.microbatches,
        stages_per_rank=candidate.stages_per_rank,
        forward=of.forward,
        input_grad=of.input_grad,
        weight_grad=of.weight_grad,
        recompute=of.recompute,
        update=of.update,
        all_reduce=exposed,
        activation_bytes=of.activation_bytes,
        input_bytes=of.input_bytes,
        weight_bytes=of.weight_bytes,
        gradient_bytes=of.other_bytes,
        latency=of.latency,
        bandwidth=of.bandwidth,
        message_bytes=of.message_bytes,
        num_batches=1 + flushes,
    )
    return Result(candidate, simulation.period, max(simulation.peak_bytes))


def best(
    model: Gpt,
    devices: int,
    schedule: str,
    cluster: Cluster,
    constants: Constants,
    batch: int = BATCH,
    recompute: bool | None = None,
) -> Result | None:
    """The fastest that fits; None if nothing does. ``recompute``: whether it does; None: either."""
    bounded = []
    for candidate in candidates(model, devices, schedule, cluster, batch):
        of = costs(candidate, cluster, constants)
        is_asked_for = recompute in (None, candidate.recompute)
        if is_asked_for and least_bytes(candidate, of) <= cluster.memory:
            bounded.append((least_seconds(candidate, of), candidate, of))
    fastest: Result | None = None
    for least, candidate, of in sorted(bounded, key=lambda each: each[0]):
        if fastest is not None and least >= fastest.seconds:
            break
        result = simulate(candidate, of)
        if result.peak_bytes > cluster.memory:
            continue
        if fastest is None or result.seconds < fastest.seconds:
            fastest = result
    return fastest


def smallest(
    model: Gpt,
    devices: int,
    schedule: str,
    cluster: Cluster,
    constants: Constants,
    recompute: bool,
) -> Result:
    """What takes the fewest bytes on its fullest device, whether it fits or not."""
    bounded = []
    for candidate in candidates(model, devices, schedule, cluster):
        if candidate.recompute == recompute:
            of = costs(candidate, cluster, constants)
            bounded.append((least_bytes(candidate, of), candidate, of))
    least: Result | None = None
    for bound, candidate, of in sorted(bounded, key=lambda each: each[0]):
        if least is not None and bound >= least.peak_bytes:
            break
        result = simulate(candidate, of)
        if least is None or result.peak_bytes < least.peak_bytes:
            least = result
    assert least is not None
    return least


def with_and_without_recomputation(model: Gpt, devices: int) -> list[dict[str, Any]]:
    """Of each schedule the fastest that fits with each, or the smallest where nothing fits."""
    rows = []
    for schedule, recompute in itertools.product(SCHEDULES, (False, True)):
        given = (model, devices, schedule, H100_CLUSTER, CONSTANTS)
        found = best(*given, recompute=recompute)
        fits = found is not None
        found = found or smallest(*given, recompute=recompute)
        rows.append({**described(found, devices), "fits": fits})
        print(
            f"{model.name:4}{devices:6}  {schedule:18}{'recomputed' if recompute else '':11}"
            f"{found.tokens_per_device(devices):10.1f} tokens/s a device"
            f"{found.peak_bytes / 1e9:7.1f} GB{'' if fits else ', too much'}"
            f"  m={found.candidate.microbatches} {found.candidate.describe()}",
            flush=True,
        )
    return rows


def described(found: Result, devices: int) -> dict[str, Any]:
    """As the results' file has it."""
    of, rate = found.candidate, found.tokens_per_device(devices)
    return {
        **dataclasses.asdict(of),
        "model": of.model.name,
        "devices": devices,
        "microbatches": of.microbatches,
        "tokens_per_device": rate,
        "utilisation": utilisation(of.model, rate, H100_CLUSTER),
        "gb": found.peak_bytes / 1e9,
    }


def utilisation(model: Gpt, tokens_per_device: float, cluster: Cluster) -> float:
    """Of the peak, by the operations of a forward and a backward, without second forwards."""
    return model.train_flops(1, recompute=False) / SEQUENCE * tokens_per_device / cluster.flops


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=None).parse_args()
    models = MODELS[:1] if options.smoke else MODELS
    table = []
    figures: list[Figure] = []
    for model, devices in itertools.product(models, DEVICES[:1] if options.smoke else DEVICES):
        rates = {}
        for schedule in SCHEDULES:
            found = best(model, devices, schedule, H100_CLUSTER, CONSTANTS)
            if found is None:
                continue
            rate = rates[schedule] = found.tokens_per_device(devices)
            used, gb = utilisation(model, rate, H100_CLUSTER), found.peak_bytes / 1e9
            how = found.candidate.describe()
            print(
                f"{model.name:4}{devices:6}  {schedule:18}{rate:10.0f} tokens/s a device"
                f"{100 * used:7.1f} %{gb:7.1f} GB  m={found.candidate.microbatches} {how}",
                flush=True,
            )
            table.append(described(found, devices))
        for other in SCHEDULES[1:]:
            if "2bw" in rates and other in rates:
                setting = f"{model.name}, {devices} devices"
                ratio = rates["2bw"] / rates[other]
                figures.append(Figure(setting, f"2bw over {other}", [ratio]))
    write_json(
        options.json,
        machine(),
        figures,
        models=[dataclasses.asdict(model) | {"parameters": model.parameters} for model in models],
        cluster=dataclasses.asdict(H100_CLUSTER),
        constants=dataclasses.asdict(CONSTANTS),
        batch=BATCH,
        best=table,
        recomputation=[] if options.smoke else with_and_without_recomputation(MODELS[-1], 512),
        smoke=options.smoke,
    )


if __name__ == "__main__":
    main()
