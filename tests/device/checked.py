"""A device without hardware, for tests: "checked:0" to "checked:3".

Its operators run at once, on the CPU, with the CPU's numbers; vector clocks check that streams,
events and the host order all uses of its memory (docs/design/checked-device.md). To import this
module registers it with torch, for the life of the process: a process has one accelerator.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import Backend, Store

from tests.device import _checked
from tests.device._checked import (
    Asked,
    AskedKind,
    Graph,
    Ordering,
    Verdict,
    access,
    clear_errors,
    count,
    drop_nth,
    errors,
    last_timeout_set,
    num_connections,
    num_drains,
    num_launches,
    priority_of,
    set_clock_rate,
    set_drains,
    set_eager_sends,
    set_one_queue,
    set_sharing_delay,
    set_timeout,
    settle_memory,
    verdict,
)

__all__ = [
    "Asked",
    "AskedKind",
    "Graph",
    "Ordering",
    "Verdict",
    "access",
    "clear_errors",
    "count",
    "drop_nth",
    "errors",
    "expect_no_errors",
    "last_timeout_set",
    "log",
    "make_process_group",
    "num_connections",
    "num_drains",
    "num_launches",
    "priority_of",
    "set_clock_rate",
    "set_drains",
    "set_eager_sends",
    "set_one_queue",
    "set_sharing_delay",
    "set_timeout",
    "settle_memory",
    "verdict",
]

NAME = "checked"


@contextlib.contextmanager
def expect_no_errors() -> Iterator[None]:
    """Raises AssertionError at the end if a race was found and nobody let it through."""
    clear_errors()
    yield
    if found := errors():
        raise AssertionError("\n".join(found))


@contextlib.contextmanager
def log() -> Iterator[list[Asked]]:
    """What host threads ask of the devices meanwhile; the list is filled in at the end."""
    asked: list[Asked] = []
    _checked.start_log()
    try:
        yield asked
    finally:
        asked += _checked.stop_log()


def _index(device: Any = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device if device >= 0 else torch.accelerator.current_device_index()
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _generator(device: Any = None) -> torch.Generator:
    return module.default_generators[_index(device)]


def _manual_seed_all(seed: int) -> None:
    for generator in module.default_generators:
        generator.manual_seed(seed)


def _device_module() -> Any:
    """What torch and its users call as ``torch.checked``."""
    made: Any = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    made.is_available = made.is_initialized = lambda: True
    made._initialized = True  # torch's checkpoints ask for it, and then keep the device's state
    made.init = made._lazy_init = lambda: None
    made._is_in_bad_fork = lambda: False
    made.device_count = lambda: _checked.NUM_DEVICES
    made.current_device = accelerator.current_device_index
    made.set_device = lambda device: accelerator.set_device_index(_index(device))
    made.device = lambda device: accelerator.device_index(_index(device))
    made.synchronize = lambda device=None: accelerator.synchronize(_index(device))
    made.current_stream = lambda device=None: accelerator.current_stream(_index(device))
    made.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE
    )
    made.set_stream = accelerator.set_stream
    made.stream = lambda stream: stream or contextlib.nullcontext()
    made.Stream = lambda device=None, priority=0: torch.Stream(
        torch.device(NAME, _index(device)), priority=priority
    )
    made.Event = lambda **options: torch.Event(NAME, **options)
    made.empty_cache = lambda: None
    made.manual_seed = lambda seed: _generator().manual_seed(seed)
    made.manual_seed_all = _manual_seed_all
    made.initial_seed = lambda: _generator().initial_seed()
    made.get_rng_state = lambda device=None: _generator(device).get_state()
    made.set_rng_state = lambda state, device=None: _generator(device).set_state(state)
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return made


_DEVICE_TYPE = 20  # PrivateUse1's number, which torch.Stream takes

torch.utils.rename_privateuse1_backend(NAME)
module = _device_module()
torch._register_device_module(NAME, module)
sys.modules[f"torch.{NAME}"] = module
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
module.default_generators = tuple(map(_checked.default_generator, range(_checked.NUM_DEVICES)))


def make_process_group(
    store: Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> Backend:
    """What ``init_process_group("checked")`` makes; for ranks that are threads of a process."""
    below = torch.distributed.PrefixStore("gloo", store)
    gloo = torch.distributed.ProcessGroupGloo(below, rank, world_size, timeout)
    return _checked.process_group(store=store, gloo=gloo, timeout=timeout)


torch.distributed.Backend.register_backend(NAME, make_process_group, devices=[NAME])
