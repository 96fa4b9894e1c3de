"""Variables that CUDA and NCCL read are set for GPUs, and the user's come first."""

from __future__ import annotations

import os

import pytest
import torch

from pipedream2bw._environment import set_variables

QUEUES, RECORDS, OLD_RECORDS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)


@pytest.mark.parametrize(
    ("cuda", "before", "after"),
    [
        (None, {}, {}),
        ("13.0", {}, {QUEUES: "32", RECORDS: "0"}),
        ("13.0", {QUEUES: "1", RECORDS: "7"}, {QUEUES: "1", RECORDS: "7"}),
        ("13.0", {OLD_RECORDS: "7"}, {QUEUES: "32", OLD_RECORDS: "7"}),
    ],
)
def test_variables_are_set_where_the_user_has_set_none(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in (QUEUES, RECORDS, OLD_RECORDS):
        monkeypatch.setenv(name, "")  # is put back at the end
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    set_variables()
    found = {
        name: os.environ[name] for name in (QUEUES, RECORDS, OLD_RECORDS) if name in os.environ
    }
    assert found == after
