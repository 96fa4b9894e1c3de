"""The test doubles (tests/delays)."""

from torch._C._distributed_c10d import Backend

from pipedream2bw._C import Sender

class DelayedSender(Sender):
    def __init__(self, *, sender: Sender, shortest: float, longest: float, seed: int) -> None: ...

def delayed_backend(*, backend: Backend, shortest: float, longest: float, seed: int) -> Backend: ...
