"""torch.compile(backend="pipedream2bw") with each stage on a device of its own."""

from __future__ import annotations

import torch
from torch import nn

from pipedream2bw.extras.dynamo.backend import pipedream2bw
from tests.device import checked


class Rows(nn.Module):
    """Element by element: splitting rows changes no bit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(5)) for _ in range(2))
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.first).tanh() + self.offset) * self.last


def test_weights_are_copied_to_devices_when_they_change() -> None:
    torch._dynamo.reset()
    devices = [torch.device(checked.NAME, index) for index in range(2)]
    options = {"num_stages": 2, "num_microbatches": 4, "devices": devices}
    model, x = Rows(), torch.randn(8, 5)
    run = torch.compile(model, backend=pipedream2bw, options=options)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.last.mul_(2), lambda: model.offset.add_(1)):
            change()
            assert torch.equal(run(x), model(x))
