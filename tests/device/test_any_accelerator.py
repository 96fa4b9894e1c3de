"""What the package does beside training knows the accelerator of the machine, whatever its type."""

from __future__ import annotations

import types

import pytest
import torch

from pipedream2bw.capture.tracing import _ambient_modes
from pipedream2bw.checkpoint.save import generator_states, set_generators
from pipedream2bw.model.surroundings import plain_modes
from pipedream2bw.planner.profiling.profiler import _this_device
from pipedream2bw.planner.profiling.timing import time_on

DEVICE = torch.device("checked:0")


def test_saved_generators_include_the_devices() -> None:
    states = generator_states()
    first = torch.rand(8, device=DEVICE).cpu()
    set_generators(states)
    assert torch.equal(torch.rand(8, device=DEVICE).cpu(), first)


def test_a_clock_is_read_when_the_device_is_done() -> None:
    with torch.Stream(DEVICE):
        x = torch.ones(8, device=DEVICE)
    time_on(DEVICE)
    assert x.sum().item() == 8  # by another stream: a race if nobody had waited


def test_a_stage_runs_without_the_callers_autocast() -> None:
    with torch.autocast("checked", dtype=torch.bfloat16), plain_modes():
        assert not torch.is_autocast_enabled("checked")


def test_a_capture_notices_the_devices_autocast() -> None:
    before = _ambient_modes()
    with torch.autocast("checked", dtype=torch.bfloat16):
        assert _ambient_modes() != before


def test_a_profile_says_what_the_device_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    of_itself = types.SimpleNamespace(name="a device", total_memory=7 << 30)
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "get_device_properties", lambda device: of_itself, raising=False)
    found = _this_device(DEVICE)
    assert (found.name, found.type, found.memory_bytes) == ("a device", "checked", 7 << 30)
