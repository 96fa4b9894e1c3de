"""The question which streams share a hardware queue, asked of a device that has three of them."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu_check import queues


class Hardware:
    """Streams take queues in turn; what is behind a wait for a word is not done until then."""

    def __init__(self, num_queues: int) -> None:
        self.num_queues = num_queues
        self.num_streams = 0
        self.current: Stream | None = None
        self.waits: dict[int, tuple[int, int]] = {}
        """By queue the word's address and the value that it must have."""

    def is_blocked(self, queue: int) -> bool:
        if queue not in self.waits:
            return False
        address, value = self.waits[queue]
        return ctypes.c_uint32.from_address(address).value < value


hardware = Hardware(1)


class Stream:
    def __init__(self, priority: int = 0) -> None:
        assert priority <= 0
        self.cuda_stream = 1 + hardware.num_streams
        self.queue = hardware.num_streams % hardware.num_queues
        hardware.num_streams += 1

    def wait_stream(self, other: object) -> None:
        """Nothing is under way then."""


class Event:
    def record(self, stream: Stream) -> None:
        self.queue = stream.queue

    def query(self) -> bool:
        return not hardware.is_blocked(self.queue)


class Driver:
    """What of libcuda is called, with the arguments that it is declared with."""

    def cuMemHostGetDevicePointer_v2(  # noqa: N802
        self, found: Any, host: ctypes.c_void_p, flags: ctypes.c_uint
    ) -> int:
        assert flags.value == 0
        found._obj.value = host.value
        return 0

    def cuStreamWaitValue32_v2(  # noqa: N802
        self,
        stream: ctypes.c_void_p,
        address: ctypes.c_uint64,
        value: ctypes.c_uint32,
        flags: ctypes.c_uint,
    ) -> int:
        assert flags.value == 0
        assert stream.value is not None
        queue = (stream.value - 1) % hardware.num_queues
        hardware.waits[queue] = (address.value, value.value)
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The device with as many queues as the test says."""
    hardware.__init__(request.param)  # type: ignore[misc]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        yield

    def synchronize() -> None:
        assert not any(map(hardware.is_blocked, hardware.waits)), "it would wait for ever"
        hardware.waits.clear()

    zeros = torch.zeros
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda: None,
        "synchronize": synchronize,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options)
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(queues, "PATIENCE", 0.01)


@pytest.mark.parametrize(("made", "behind"), [(8, 7), (32, 1), (128, 0)], indirect=["made"])
def test_streams_behind_one_that_waits_are_counted(
    made: None, behind: int, capsys: pytest.CaptureFixture[str]
) -> None:
    queues.main()
    found = [queues.Behind(*each) for each in json.loads(capsys.readouterr().out)]
    assert [each.priority for each in found] == ["low"] * 3 + ["high"] * 3
    assert {each.low + each.high for each in found} == {behind}


@pytest.mark.parametrize("made", [8], indirect=True)
def test_the_word_is_written_whatever_is_raised_meanwhile(
    made: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: Event, stream: Stream) -> None:
        raise RuntimeError("on purpose")

    word = queues.Word()
    streams: list[Any] = [Stream() for _ in range(16)]
    values = [torch.zeros(8) for _ in streams]
    monkeypatch.setattr(Event, "record", fail)
    with pytest.raises(RuntimeError, match="on purpose"):  # and not that it would wait for ever
        queues.count_behind(word, streams, values, 0)
