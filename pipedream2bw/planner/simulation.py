"""Time and memory of a schedule without running it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

from .. import _C, svg
from .._C import Schedule
from ..checks import check_whole_number
from ..schedules.events import Event
from ..schedules.load import schedule_for
from ..schedules.small_picture import timeline_html
from ..table import table
from ..units import format_bytes

PerStage = float | Sequence[float]
"""Costs of stages, or of edges, as users give them: one number for all, or one for each."""

_OF_STAGES = (
    *("forward", "input_grad", "weight_grad", "recompute", "all_reduce", "update"),
    *("activation_bytes", "input_bytes", "weight_bytes", "gradient_bytes", "state_bytes"),
)
_OF_EDGES = ("latency", "bandwidth", "message_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Optimizers that step in the host's memory (``optimizer_device="cpu"``), for :func:`simulate`.

    A stage's gradients (``gradient_bytes``) go down, the host steps (``update`` seconds), and the
    weights that it makes (``weight_bytes``) come up, beside what the device computes. Each rank has
    a copy engine for either direction and one host, which take its stages in the order of their
    updates. Where that is slow, the first forward that reads the new version waits, and with
    ``one_buffer`` also the next batch's first backward.

    Attributes:
        down: bytes per second from a device to the host; 0 or infinite: bytes take no time.
        up: bytes per second from the host to a device.
        buckets: pieces of equal size in which gradients, step and weights follow each other. The
            batch's last backward makes them at an even pace, and each goes down when it is made;
            the first weights come up when all gradients are down.
        one_buffer: a batch's gradients are added up where those of the batch before were, as with
            16-bit weights. In float32 two versions' slots take turns, and nothing waits.
    """

    down: float = 0.0
    up: float = 0.0
    buckets: int = 1
    one_buffer: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of :func:`simulate`.

    Attributes:
        events: every action, rank by rank in order, in seconds from the run's start;
            :func:`draw_timeline` draws them.
        makespan: seconds from the first action's start to the last one's end.
        period: seconds per batch in the steady state, at the slowest rank. Measured between two
            late batches, in a longer run if ``num_batches`` are too few: it does not depend on
            them (to about one percent where messages are exposed).
        bubbles: of each rank, the share of the period in which it does no action.
        peak_bytes: of each rank, the most memory held at once: all weight versions, gradients,
            optimizer state, and activations from a forward's start to the end of its backward.
        most_in_flight: of each stage, the most microbatches whose activations it holds at once.
        late_share: of all forwards, those that read W(t-1): 1 under ``"2bw"``, 0 without a delay.
    """

    events: list[Event] = dataclasses.field(repr=False)
    makespan: float
    period: float
    bubbles: list[float]
    peak_bytes: list[float]
    most_in_flight: list[int]
    late_share: float = dataclasses.field(default=0.0, repr=False)

    @property
    def in_words(self) -> str:
        """A line that says how long a batch takes, and how idle ranks are."""
        worst = 100 * max(self.bubbles)
        idle = f"{self.period:.4g} s a batch, ranks are idle for at most {worst:.1f} % of it"
        return f"{idle}, {100 * self.late_share:.0f} % of forwards are late"

    def __str__(self) -> str:
        rows = [
            [f"{rank}", f"{100 * idle:.1f} %", format_bytes(size) if size else "-"]
            for rank, (idle, size) in enumerate(zip(self.bubbles, self.peak_bytes, strict=True))
        ]
        ranks = table("ranks, in the steady state", ("rank", "idle", "peak memory"), rows)
        most = ", ".join(map(str, self.most_in_flight))
        return f"{self.in_words}\n\n{ranks}\nmicrobatches in flight by stage, at most: {most}"

    def _repr_html_(self) -> str:
        drawn = timeline_html(self.events, self.in_words, unit=" of the costs' unit")
        return f"<div>{drawn}{svg.printed(str(self))}</div>"


def simulate(
    schedule: Schedule | str | os.PathLike[str],
    *,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    stages_per_rank: int = 1,
    update_slots: int | None = None,
    forward: PerStage = 1.0,
    backward: PerStage | None = None,
    input_grad: PerStage | None = None,
    weight_grad: PerStage | None = None,
    recompute: PerStage = 0.0,
    update: PerStage = 0.0,
    all_reduce: PerStage = 0.0,
    activation_bytes: PerStage = 0.0,
    input_bytes: PerStage = 0.0,
    weight_bytes: PerStage = 0.0,
    gradient_bytes: PerStage = 0.0,
    state_bytes: PerStage = 0.0,
    latency: PerStage = 0.0,
    bandwidth: PerStage = math.inf,
    message_bytes: PerStage = 0.0,
    num_batches: int = 4,
    host_costs: HostCosts | None = None,
) -> Simulation:
    """Runs a schedule's actions with given costs, as discrete events, and measures it.

    Every rank executes its list strictly in order; an action begins when its rank is free and the
    message that it needs has arrived. The run begins with an empty pipeline and ends with a drain.

    >>> simulation = pd2.simulate("2bw", num_stages=4, num_microbatches=8)
    >>> simulation.period, simulation.bubbles  # 8 forwards of 1 second, 8 backwards of 2
    (24.0, [0.0, 0.0, 0.0, 0.0])
    >>> picture = pd2.draw_timeline(simulation.events, "2bw.png")

    Times are in seconds, or in any one unit. Costs of stages are one number, or one for each
    stage; costs of edges one number, or one for each pair of neighbours (``num_stages - 1``).

    Args:
        schedule: a name of :func:`schedule_names`, or one's own: what :func:`load_schedule` takes.
        num_stages: the model's stages d; in a schedule of two pipelines stage d + i of the result
            is the second one's copy of stage i and costs the same. A schedule of one's own has
            its own, which this must equal if given.
        num_microbatches: microbatches of a batch, which must equal such a schedule's own if given.
        stages_per_rank: for schedules by name that allow more than one.
        update_slots: as of :class:`PipelineModule`: forwards that an update of so many slots need
            not delay are not late. None: as the schedule says.
        forward: seconds of a forward of one microbatch.
        backward: seconds of a backward, half of it the input gradient; 2.0 if nothing is said.
        input_grad: instead of ``backward``, together with ``weight_grad``: seconds of the part
            that the previous stage waits for.
        weight_grad: seconds of the other part.
        recompute: seconds of running a forward again before its backward, while that one's message
            may be under way; 0: activations are kept instead.
        update: seconds of an optimizer step. Where a stage keeps several weight versions it goes on
            beside other actions, until a forward reads what it made.
        all_reduce: seconds that replicas, and a stage's two copies, take to add up a batch's
            gradients, before each update.
        activation_bytes: kept for each microbatch in flight, with ``recompute`` only from that on.
        input_bytes: with ``recompute``, kept for each microbatch in flight.
        weight_bytes: one version of the weights.
        gradient_bytes: the gradients.
        state_bytes: the optimizer's state.
        latency: seconds that a message takes however short, in either direction.
        bandwidth: bytes per second in each direction; messages of one edge and direction occupy
            it one after another. 0 or infinite: bytes take no time.
        message_bytes: a microbatch's activations between two stages, and their gradients. An edge
            between two stages of one rank costs nothing.
        num_batches: batches to run before the drain.
        host_costs: optimizers step in the host's memory. Every update then goes on beside other
            actions and ends with the last copy to its device.

    Raises:
        ScheduleError: the schedule is illegal; Deadlock if its ranks wait for each other.
        ValueError: an unknown schedule, numbers of values that do not fit, or costs that are
            negative or not finite.
    """
    given = locals()
    made = schedule_for(schedule, num_stages, num_microbatches, stages_per_rank)
    check_whole_number("num_batches", num_batches)
    if update_slots is not None:
        check_whole_number("update_slots", update_slots)
        made = made.with_late_forwards(made.late_for_slots(update_slots, []))
    d = made.depth
    halves = halves_of_backward(backward, input_grad, weight_grad, d)
    given |= dict(zip(("input_grad", "weight_grad"), halves, strict=True))
    found = _C.simulate(
        made,
        stage_costs({name: given[name] for name in _OF_STAGES}, d),
        edge_costs({name: given[name] for name in _OF_EDGES}, d),
        num_batches,
        _host_costs(host_costs),
    )
    first_numbers = [made.number_in_batch(stage, 0) for stage in range(made.num_stages)]
    return Simulation(
        events=[
            Event(
                stage=action.stage,
                replica=0,
                kind=action.kind,
                batch=action.batch,
                microbatch=first_numbers[action.stage] + action.microbatch,
                version=action.version,
                start=action.start,
                end=action.end,
                rank=rank,
            )
            for rank, actions in enumerate(found.timeline)
            for action in actions
        ],
        makespan=found.makespan,
        period=found.period,
        bubbles=found.bubbles,
        peak_bytes=found.peak_bytes,
        most_in_flight=found.most_in_flight,
        late_share=made.late_share,
    )


def _host_costs(given: HostCosts | None) -> _C.HostCosts | None:
    if given is None:
        return None
    if not isinstance(given, HostCosts):
        raise TypeError(f"host_costs: {given!r} given, it must be HostCosts")
    check_whole_number("host_costs.buckets", given.buckets)
    return _C.HostCosts(**dataclasses.asdict(given))


def halves_of_backward(
    backward: PerStage | None,
    input_grad: PerStage | None,
    weight_grad: PerStage | None,
    num_stages: int,
) -> tuple[list[float], list[float]]:
    """Returns the seconds of the input gradients and of the weight gradients."""
    if input_grad is None and weight_grad is None:
        whole = one_each("backward", 2.0 if backward is None else backward, num_stages)
        for stage, seconds in enumerate(whole):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"backward[{stage}]: {seconds}: a cost must be finite and >= 0")
        halves = [seconds / 2 for seconds in whole]
        return halves, halves
    if backward is not None or input_grad is None or weight_grad is None:
        raise ValueError(
            f"backward: {backward}, input_grad: {input_grad}, weight_grad: {weight_grad}: give "
            "backward alone, or both of the others"
        )
    return (
        one_each("input_grad", input_grad, num_stages),
        one_each("weight_grad", weight_grad, num_stages),
    )


def stage_costs(given: Mapping[str, PerStage], num_stages: int) -> list[_C.StageCosts]:
    """Returns what each stage costs, of costs by the names of ``_C.StageCosts``."""
    values = {name: one_each(name, of_all, num_stages) for name, of_all in given.items()}
    return [_C.StageCosts(**{n: values[n][i] for n in values}) for i in range(num_stages)]


def edge_costs(given: Mapping[str, PerStage], num_stages: int) -> list[_C.EdgeCosts]:
    """Returns what each pair of neighbours costs, of costs by the names of ``_C.EdgeCosts``."""
    values = {
        name: one_each(name, of_all, num_stages, of_edges=True) for name, of_all in given.items()
    }
    return [_C.EdgeCosts(**{n: values[n][i] for n in values}) for i in range(num_stages - 1)]


def one_each(name: str, given: PerStage, num_stages: int, *, of_edges: bool = False) -> list[float]:
    """Returns one value for each stage, or for each edge."""
    expected = num_stages - 1 if of_edges else num_stages
    if isinstance(given, (int, float)):
        return [float(given)] * expected
    values = [float(value) for value in given]
    if len(values) != expected:
        what = "pair of neighbouring stages" if of_edges else "stage"
        raise ValueError(
            f"{name}: {len(values)} values, num_stages: {num_stages}: give one number, or one for "
            f"each {what}"
        )
    return values
