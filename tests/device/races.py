"""What tests of the checked device's order use: work on its streams, and the races it must find."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.device import checked

SIZE = 1000


@contextlib.contextmanager
def race(*names: str) -> Iterator[None]:
    """The block must raise a race between operators of these names, and between them alone."""
    with pytest.raises(RuntimeError, match="race: ") as raised:
        yield
    for name in names:
        assert f"'{name}'" in str(raised.value) or name in str(raised.value)
    assert str(raised.value.args[0]).startswith(checked.errors()[-1])
    checked.clear_errors()


def stream(device: str = "checked:0") -> torch.Stream:
    return torch.Stream(device)


def zeros(device: str = "checked:0") -> torch.Tensor:
    return torch.zeros(SIZE, device=device)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def recorded(on: torch.Stream | None = None) -> torch.Event:
    event = torch.Event("checked")
    event.record(on or current())
    return event
