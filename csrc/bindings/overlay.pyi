"""What C++ leaves open of the extension's types: see make_stub.py."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .errors import StageError

class Schedule:
    def __eq__(self, arg0: object) -> bool: ...

class KeyedRandom:
    def __exit__(self, *args: object): ...

class FoundPlan:
    def num_microbatches(self) -> int | tuple[int, ...]: ...

class Stage:
    def __init__(self, copy_sum: CopySum | None, streams: StageStreams | None): ...
    def optimizer_state(self) -> torch.Tensor | None: ...
    def kept_step(self) -> torch.Tensor | None: ...
    def whole_masters(self) -> list[torch.Tensor | None]: ...

def set_hook(hook: Callable[[list[torch.Tensor], float | None], bool]): ...

class GradientNorm:
    def __init__(self, shared: SharedBoard | None, loss_scale: LossScale | None): ...

class Clipping:
    def __init__(self, norm: GradientNorm | None, loss_scale: LossScale | None): ...

class Peer:
    def __init__(self, ring: SharedRing | None): ...

class Fault:
    def raise_(self, error: StageError): ...
    def error(self) -> StageError | None: ...

class Discards:
    def __init__(self, shared: SharedBoard | None): ...
    def discard(self, error: StageError): ...
    def failure(self) -> tuple[int, StageError, int] | None: ...

class BatchVerdicts:
    def __init__(self, shared: SharedBoard | None): ...

class LossBoard:
    def __init__(self, shared: SharedBoard | None): ...

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
    def __init__(self, look: Callable[[ForwardCall], GivenInputs] | None): ...

class StageSetup:
    def __init__(self, forward: Callable[[ForwardCall], ForwardResult]): ...

class Executor:
    def __init__(self, keep_error: Callable[[BaseException], int]): ...
    def set_verdicts(self, verdicts: BatchVerdicts | None): ...
    def submit_update(self, step: Callable[[int], None] | None): ...
    def submit_copy(self, copy: Callable[[], None]): ...
