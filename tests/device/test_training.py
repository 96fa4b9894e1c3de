"""Every schedule and model trains on the checked device as the oracle does on the CPU."""

from __future__ import annotations

import pytest

import pipedream2bw as pd2
from tests.device.on_device import check_on_device
from tests.exhaustive import exhaustive
from tests.samples.models import TASKS
from tests.samples.schedule_sizes import sizes_for


@pytest.mark.parametrize(
    ("recompute", "num_devices"), [(False, 2), (True, 1), *exhaustive((False, 1), (True, 2))]
)
@pytest.mark.parametrize("schedule", pd2.schedule_names())
def test_every_schedule(schedule: str, recompute: bool, num_devices: int) -> None:
    for num_stages in (2, 4):
        sizes = next(iter(sizes_for(schedule, num_stages)))
        m = sizes.num_microbatches
        check_on_device(
            TASKS["drawing"],
            num_stages,
            m,
            [2 * m] * (num_stages + 3 if m == 1 else 5),
            num_devices=num_devices,
            schedule=schedule,
            stages_per_rank=sizes.stages_per_rank,
            recompute=recompute,
        )


# nn.LSTM has a kernel of its own on every device of torch's but the CPU.
@pytest.mark.parametrize("name", [name for name in TASKS if name != "lstm"])
def test_every_model(name: str) -> None:
    num_stages = TASKS[name].depths[-1]
    m = num_stages + 1
    check_on_device(TASKS[name], num_stages, m, [2 * m] * 5, num_devices=2)
