"""The engine (csrc/bindings).

Classes of fields alone are C++ structs. Those that are dataclasses here are made from keywords;
Python only reads the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket

from .errors import StageError

class Schedule:
    name: Final[str]
    num_pipelines: Final[int]
    depth: Final[int]
    num_stages: Final[int]
    num_microbatches: Final[int]
    total_microbatches: Final[int]
    delay: Final[list[int]]
    placement: Final[list[int]]
    num_versions: Final[list[int]]
    def number_in_batch(self, stage: int, microbatch: int) -> int: ...
    def validate(self) -> None: ...
    def to_csv(self) -> str: ...
    forward_batches_behind: Final[int]
    def check_global_updates(self) -> None: ...
    def check_joint_updates(self, joint: Sequence[Sequence[int]], why: str) -> None: ...
    def max_in_flight(self, stage: int) -> int: ...
    def update_order(self, rank: int) -> list[int]: ...
    has_one_delay: Final[bool]
    most_batches_behind: Final[int]

def make_schedule(
    name: str, num_stages: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule: ...
def schedule_from_text(text: str) -> Schedule: ...
def schedule_names() -> list[str]: ...
def action_kinds() -> dict[str, str]: ...

class ScheduleMethod:
    name: str
    has_chunks: bool
    is_v: bool
    is_bidirectional: bool
    is_planned: bool
    size_rules: list[str]

def schedule_methods() -> list[ScheduleMethod]: ...
def draw_seed() -> int: ...
def mix_seed(seed: int, value: int) -> int: ...
def number_draws(number: int, count: int) -> None: ...
def is_keyed() -> bool: ...
def random_place() -> tuple[int, int, int, int] | None: ...
def set_random_place(place: tuple[int, int, int, int] | None) -> None: ...

ALL_DRAWS: Final[int]

class KeyedRandom:
    def __init__(
        self,
        place: tuple[int, int, int, int],
        *,
        repeats: bool = False,
        counts_fakes: bool = False,
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

@dataclass(frozen=True, kw_only=True)
class LayerCost:
    forward: float = ...
    input_grad: float = ...
    weight_grad: float = ...
    activation_bytes: float = ...
    parameter_bytes: float = ...
    trained_bytes: float = ...

@dataclass(frozen=True, kw_only=True)
class Edge:
    producer: int
    consumer: int
    bytes: int

@dataclass(frozen=True, kw_only=True)
class Value:
    producer: int
    consumers: Sequence[int]
    bytes: float = ...
    seconds: float = ...
    kept_bytes: float = ...
    trained_bytes: float = ...
    frozen_bytes: float = ...

def split_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    can_cut: Sequence[bool],
    values: Sequence[Value],
) -> list[int]: ...

@dataclass(frozen=True, kw_only=True)
class StageCosts:
    forward: float
    input_grad: float
    weight_grad: float
    recompute: float
    all_reduce: float
    update: float
    activation_bytes: float
    input_bytes: float
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float

@dataclass(frozen=True, kw_only=True)
class EdgeCosts:
    latency: float
    bandwidth: float
    message_bytes: float

@dataclass(frozen=True, kw_only=True)
class HostCosts:
    down: float
    up: float
    buckets: int
    one_buffer: bool

class SimulatedAction:
    stage: int
    kind: str
    batch: int
    microbatch: int
    version: int
    start: float
    end: float

class Simulation:
    timeline: list[list[SimulatedAction]]
    makespan: float
    period: float
    bubbles: list[float]
    most_in_flight: list[int]
    peak_bytes: list[float]

def simulate(
    schedule: Schedule,
    stages: Sequence[StageCosts],
    edges: Sequence[EdgeCosts],
    num_batches: int,
    host: HostCosts | None,
) -> Simulation: ...
def fastest_v_schedule(
    ranks: int,
    num_microbatches: int,
    in_flight: float,
    stages: Sequence[StageCosts],
    edges: Sequence[EdgeCosts],
) -> Schedule: ...

@dataclass(frozen=True, kw_only=True)
class ProfiledRows:
    rows: int
    layers: Sequence[LayerCost]
    edges: Sequence[Edge]
    shared: Sequence[Value]

@dataclass(frozen=True, kw_only=True)
class Block:
    first: int
    end: int

@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    microbatches: Sequence[ProfiledRows]
    can_cut: Sequence[bool]
    blocks: Sequence[Block]
    seconds_per_update_byte: float
    seconds_per_action: float

@dataclass(frozen=True, kw_only=True)
class Link:
    latency: float
    bandwidth: float

@dataclass(frozen=True, kw_only=True)
class Servers:
    devices_per_server: int
    inside: Link
    outside: Link

@dataclass(frozen=True, kw_only=True)
class Mesh:
    rows: int
    columns: int
    row: Link
    column: Link

@dataclass(frozen=True, kw_only=True)
class LinkMatrix:
    num_devices: int
    links: Sequence[Link]

@dataclass(frozen=True, kw_only=True)
class Price:
    from_hour: float
    per_hour: float

@dataclass(frozen=True, kw_only=True)
class PlannedType:
    name: str
    slowness: float
    memory_bytes: float
    prices: Sequence[Price]

@dataclass(frozen=True, kw_only=True)
class AllReduceTime:
    ranks: int
    bytes: float
    seconds: float

@dataclass(frozen=True, kw_only=True)
class PlannedCluster:
    types: Sequence[PlannedType]
    type_of: Sequence[int]
    topology: Servers | Mesh | LinkMatrix
    all_reduce: Sequence[AllReduceTime]

@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    batch: int
    largest_batch: int
    width: int
    num_stages: int
    schedules: Sequence[str]
    stages_per_rank: Sequence[int]
    recompute: Sequence[str]
    objective: str
    slack: float
    num_batches: float
    start_within: float
    gradient: float
    state: float
    shares_state: bool
    steps_on_host: bool
    microbatches_behind: int
    unequal_replicas: bool
    reserved: float

class PlannedStage:
    first: int
    end: int
    devices: list[int]
    costs: StageCosts
    message: float
    frozen_bytes: float
    message_bytes: float
    most_in_flight: int
    peak_bytes: float
    memory_limit: float
    blocks: list[int]

class FoundPlan:
    schedule: str
    num_versions: int
    width: int
    num_stages: int
    stages_per_rank: int
    microbatch_rows: int
    num_microbatches: int | tuple[int, ...]
    batch: int
    recompute: str
    seconds_per_batch: float
    rows_per_second: float
    bubble: float
    price_per_hour: float
    start_hour: float
    total_price: float
    peak_bytes: float
    stages: list[PlannedStage]

class BestPlans:
    plans: list[FoundPlan]
    bound_by: str
    lost_by: list[str]

def best_plans(
    model: ProfiledModel, cluster: PlannedCluster, options: PlanOptions
) -> BestPlans: ...
def planned_schedules() -> list[str]: ...

class PlannedShape:
    num_versions: int
    most_in_flight: list[int]
    most_recomputed: list[int]
    recomputes_together: bool
    stages_of_ranks: list[list[int]]
    in_flight_of_ranks: list[list[list[int]]]

def planned_shape(
    name: str, num_stages: int, num_microbatches: int, stages_per_rank: int
) -> PlannedShape: ...

class GroupOptions:
    def __init__(
        self,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        maximize: bool = False,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        amsgrad: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None: ...
    def with_lr_divided(self, divisor: float) -> GroupOptions: ...
    def with_feedback(self, coefficient: float) -> GroupOptions: ...

@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    offset: int
    numel: int
    group: int

class FusedOptimizer:
    def __init__(
        self,
        kind: str,
        slices: Sequence[ParameterSlice],
        flat_example: torch.Tensor,
        keeps_bfloat16: bool = False,
    ) -> None: ...
    def step(
        self,
        *,
        w: torch.Tensor,
        gradient: torch.Tensor,
        w_out: torch.Tensor,
        groups: Sequence[GroupOptions],
        has_gradient: Sequence[bool],
        master: torch.Tensor | None = None,
    ) -> None: ...

class CopySum:
    def __init__(self) -> None: ...

class TiedSum:
    def __init__(self, processes: Sequence[int], group: str) -> None: ...

@dataclass(frozen=True, kw_only=True)
class StageBytes:
    weights: int
    masters: int
    gradients: int
    optimizer_state: int
    padding: int
    kept_gradients: int
    replica_sums: int
    host_copies: int
    on_host: int

def register_device_passes(device_type: int, what: object) -> None: ...

class StageStreams:
    def __init__(self, device: torch.device) -> None: ...
    device: Final[torch.device]
    inputs: Final[torch.Stream | None]
    def use(self, tensors: Sequence[torch.Tensor]) -> None: ...

def use_here(tensors: Sequence[torch.Tensor]) -> None: ...

class Stage:
    def __init__(
        self,
        *,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        num_versions: int,
        replica_group: str = "",
        sum_order: Sequence[int] = (),
        bucket_bytes: int = 0,
        copy_sum: CopySum | None = None,
        copy: int = 0,
        dtypes: Sequence[torch.dtype] = (),
        split_master: bool = False,
        gradient_dtype: torch.dtype | None = None,
        has_spare: bool = False,
        streams: StageStreams | None = None,
        steps_on_host: bool = False,
    ) -> None: ...
    def weight(self, slot: int, parameter: int) -> torch.Tensor: ...
    def master(self, slot: int, parameter: int) -> torch.Tensor: ...
    def hides_master(self, parameter: int) -> bool: ...
    def whole_masters(self, fault: Fault) -> list[torch.Tensor | None]: ...
    def master_buffers(self) -> list[torch.Tensor]: ...
    def round_masters(self, slot: int) -> None: ...
    def set_master(self, parameter: int, value: torch.Tensor) -> None: ...
    def gradient(self, parameter: int) -> torch.Tensor: ...
    def has_gradient(self, parameter: int) -> bool: ...
    def slot_buffers(self, slot: int) -> list[torch.Tensor]: ...
    def tie(self, sum: TiedSum, copy: int, parameters: Sequence[int]) -> None: ...
    def attach(self, parameter: int, slot_parameter: torch.Tensor) -> None: ...
    newest_version: Final[int]
    newest_slot: Final[int]
    num_versions: Final[int]
    num_slots: Final[int]
    most_live_versions: Final[int]
    def set_optimizers(
        self, groups_by_kind: Mapping[str, Sequence[int]], keeps_bfloat16: bool = False
    ) -> None: ...
    def optimizer_state(self, name: str, parameter: int) -> torch.Tensor | None: ...
    def set_optimizer_state(self, name: str, parameter: int, value: torch.Tensor) -> None: ...
    def step_count(self, parameter: int) -> int: ...
    def set_step_count(self, parameter: int, count: int) -> None: ...
    def is_fused(self, parameter: int) -> bool: ...
    def kept_step(self, parameter: int) -> torch.Tensor | None: ...
    def set_kept_step(self, parameter: int, value: torch.Tensor | None) -> None: ...
    def arrange(self, reads_first: bool, waits: bool, fault: Fault) -> None: ...
    def share(self, shares: bool, may_cut: Sequence[bool], norms: bool, fault: Fault) -> None: ...
    def settle(self, fault: Fault) -> None: ...
    is_shared: Final[bool]
    def owns(self, parameter: int) -> bool: ...
    def leads(self, parameter: int) -> bool: ...
    def owners(self, parameter: int) -> list[tuple[int, int, int]]: ...
    def restart_delay(self) -> None: ...
    def show(self) -> None: ...
    frees_gradients: Final[bool]
    def keeps_version_of(self, batch: int) -> bool: ...
    def load_versions(self, oldest: int, newest: int) -> None: ...
    def slot_of(self, version: int) -> int: ...
    def bytes(self) -> StageBytes: ...

def hooked_buckets(stage: Stage) -> list[list[tuple[int, int, int]]]: ...
def set_hook(stage: Stage, hook: Callable[[list[torch.Tensor], float | None], bool]) -> None: ...
def make_bucket(
    *,
    index: int,
    count: int,
    buffer: torch.Tensor,
    places: Sequence[tuple[int, int, int]],
    parameters: Sequence[torch.Tensor],
) -> GradBucket: ...

class AwaitedNumbers:
    def done(self) -> bool: ...
    def wait(self) -> list[float]: ...

class LossScale:
    def __init__(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        version: int,
    ) -> None: ...
    def of_version(self, version: int) -> float: ...
    growth_tracker: Final[int]
    def set(self, version: int, scale: float, growth_tracker: int) -> None: ...

class GradientNorm:
    def __init__(
        self,
        *,
        fault: Fault,
        num_parameters: int,
        num_stages: int,
        num_readers: int,
        norm_type: float,
        is_double: bool,
        stays_on_devices: bool,
        group: str,
        shared: SharedBoard | None,
        loss_scale: LossScale | None,
    ) -> None: ...
    def expect(self, run: int) -> AwaitedNumbers: ...

class Clipping:
    def __init__(
        self,
        *,
        norm: GradientNorm | None,
        max_norm: float,
        parameters: Sequence[int],
        gives_norms: bool,
        max_value: float | None,
        loss_scale: LossScale | None,
    ) -> None: ...

class Sender:
    def send(self, layout: int, tensors: Sequence[torch.Tensor]) -> None: ...

class Receiver:
    def expect(self, layout: int) -> None: ...
    def post(self) -> None: ...
    def receive(self) -> list[torch.Tensor]: ...

class LocalChannel(Sender, Receiver):
    def __init__(self, *, source: torch.device, destination: torch.device) -> None: ...

class SharedRing:
    @staticmethod
    def create(num_slots: int, timeout: float) -> SharedRing | None: ...
    @staticmethod
    def open(address: str, timeout: float) -> SharedRing | None: ...
    address: Final[str]

class SharedBoard:
    @staticmethod
    def create(num_ranks: int, row_size: int, timeout: float) -> SharedBoard | None: ...
    @staticmethod
    def open(address: str, rank: int, timeout: float) -> SharedBoard | None: ...
    address: Final[str]
    def begin_exchange(self, row: Sequence[int]) -> None: ...
    def finish_exchange(self, timeout: float) -> list[int] | None: ...
    def leave(self) -> None: ...

class ProcessGroupSender(Sender):
    def __init__(
        self,
        *,
        group: str,
        peer: int,
        peer_rank: int,
        device: torch.device,
        ring: SharedRing | None,
        headers: tuple[str, int, int] | None,
        max_unawaited: int,
    ) -> None: ...
    def connect(self) -> None: ...

class ProcessGroupReceiver(Receiver):
    def __init__(
        self,
        *,
        group: str,
        peer: int,
        peer_rank: int,
        device: torch.device,
        ring: SharedRing | None,
        headers: tuple[str, int, int] | None,
        posted_ahead: int,
        pins_memory: bool,
    ) -> None: ...
    def connect(self) -> None: ...

class StagedSender(Sender):
    def __init__(self, *, hosts: Sender, device: torch.device, fault: Fault) -> None: ...

class StagedReceiver(Receiver):
    def __init__(self, *, hosts: Receiver, device: torch.device) -> None: ...

class DeviceRingSender(Sender):
    @staticmethod
    def create(
        *, device: torch.device, num_slots: int, peer_rank: int, timeout: float
    ) -> DeviceRingSender | None: ...
    address: Final[str]
    is_idle: Final[bool]

class DeviceRingReceiver(Receiver):
    @staticmethod
    def open(
        address: str, *, device: torch.device, peer_rank: int, timeout: float
    ) -> DeviceRingReceiver | None: ...
    is_idle: Final[bool]

def register_device_memory_sharing(device_type: int, what: object) -> None: ...
def abort_on_fault(fault: Fault, group: str) -> None: ...

class Fault:
    def __init__(self, *, rank: int = 0) -> None: ...
    def raise_(self, error: StageError) -> None: ...
    rank: Final[int]
    raised: Final[bool]
    error: Final[StageError | None]
    kept: Final[int]

class Discards:
    def __init__(self, shared: SharedBoard | None) -> None: ...
    def discard(self, batch: int, error: StageError) -> None: ...
    first: Final[int | None]
    batch: Final[int | None]
    error: Final[StageError | None]
    kept: Final[int]
    def go_on(self) -> None: ...

class BatchVerdicts:
    def __init__(
        self,
        *,
        num_stages: int,
        discards: Discards,
        group: str,
        shared: SharedBoard | None,
    ) -> None: ...
    def forget(self) -> None: ...
    def drop_connections(self) -> None: ...

class LossBoard:
    def __init__(
        self,
        *,
        fault: Fault,
        group: str,
        shared: SharedBoard | None,
        ranks: Sequence[int],
        replica: int,
        num_replicas: int,
        num_parts: int,
        first_part: int,
        num_numbers: int,
        runs_behind: int,
    ) -> None: ...
    def expect(self, run: int) -> AwaitedNumbers: ...
    def drain(self) -> None: ...
    def finish(self, timeout: float) -> bool: ...
    def close(self) -> None: ...

class Message(NamedTuple):
    structure: bytes  # how to rebuild the values; empty: each is one tensor
    tensors: list[torch.Tensor]

class ForwardCall(NamedTuple):
    run: int
    microbatch: int
    slot: int
    inbound: list[Message]
    again: bool
    loss_scale: float
    given: list[torch.Tensor] | None

class GivenInputs(NamedTuple):
    tensors: list[torch.Tensor]
    kind: int
    refusal: str

class ForwardResult(NamedTuple):
    outbound: Sequence[Message] = ()
    loss: torch.Tensor | None = None
    bytes_kept: int = 0
    metrics: torch.Tensor | None = None

class GraphSetup:
    def __init__(
        self,
        *,
        always: bool = False,
        look: Callable[[ForwardCall], GivenInputs] | None = None,
        most_bytes: int | None = None,
    ) -> None: ...

@dataclass(frozen=True, kw_only=True)
class GraphReport:
    num_graphs: int = 0
    bytes: int = 0
    forwards: int = 0
    backwards: int = 0
    others: dict[str, int] = ...

def has_device_graphs(device: torch.device) -> bool: ...
def register_device_graphs(device_type: int, what: object) -> None: ...

class StageSetup:
    def __init__(
        self,
        *,
        index: int,
        stage: Stage,
        forward: Callable[[ForwardCall], ForwardResult],
        recompute: bool,
        graphs: GraphSetup = ...,
    ) -> None: ...

class InboundEdge:
    def __init__(self, *, values: Receiver, gradients: Sender, producer: int) -> None: ...

class OutboundEdge:
    def __init__(self, *, values: Sender, gradients: Receiver, consumer: int) -> None: ...

@dataclass(frozen=True, kw_only=True)
class LossWeights:
    divisor: int = ...
    factors: Sequence[float] = ...

@dataclass(frozen=True, kw_only=True)
class Run:
    id: int
    wiring: int
    layouts: Sequence[int]
    loss_weights: LossWeights = ...
    batch: int = ...
    begins_batch: bool = ...
    ends_batch: bool = ...
    num_averaged: int = ...
    replica_weight: float = ...
    first_microbatch: int = ...
    seed: int | None = ...

class ExecutedAction:
    stage: int
    kind: str
    run: int
    microbatch: int
    version: int
    start: float
    end: float

class Executor:
    def __init__(
        self,
        *,
        schedule: Schedule,
        rank: int,
        replica: int,
        num_replicas: int,
        num_threads: int,
        warmup_batches: int,
        stages: Sequence[StageSetup],
        fault: Fault,
        discards: Discards,
        discards_reach_all: bool,
        losses: LossBoard,
        keep_error: Callable[[BaseException], int],
    ) -> None: ...
    def set_wiring(
        self,
        *,
        stage: int,
        id: int,
        inbound: Sequence[InboundEdge],
        outbound: Sequence[OutboundEdge],
    ) -> None: ...
    def set_clipping(self, stage: int, clipping: Clipping | None) -> None: ...
    def set_verdicts(self, verdicts: BatchVerdicts | None, hold_up_forwards: bool) -> None: ...
    def take_back(self, batch: int, run: int) -> None: ...
    def count_anew(self) -> None: ...
    def join_here(self) -> None: ...
    def plan_receives(
        self, *, wiring: int, edges: Sequence[tuple[int, int]], joint: Sequence[Sequence[int]]
    ) -> None: ...
    def drop_connections(self) -> None: ...
    def close(self) -> None: ...
    def submit_run(self, run: Run) -> int: ...
    def submit_evaluation(self, run: Run) -> int: ...
    def submit_drain(self) -> int: ...
    def submit_update(
        self,
        *,
        stage: int,
        run: int,
        groups: Sequence[GroupOptions],
        step: Callable[[int], None] | None,
    ) -> int: ...
    def submit_copy(self, *, stage: int, version: int, copy: Callable[[], None]) -> int: ...
    def wait(self, ticket: int) -> None: ...
    last_ticket: Final[int]
    def record(self, on: bool) -> None: ...
    def take_record(self) -> list[ExecutedAction]: ...
    def version_of_batch(self, stage: int, batch: int) -> int: ...
    def most_bytes_in_flight(self, stage: int) -> int: ...
    def most_in_flight(self, stage: int) -> int: ...
    def graph_report(self, stage: int) -> GraphReport: ...
    def most_bytes_behind(self, stage: int) -> int: ...
    def message_buffer_bytes(self, stage: int) -> int: ...
