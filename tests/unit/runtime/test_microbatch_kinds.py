"""What a recorded forward depends on beside its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipedream2bw.runtime.microbatch_kinds import MicrobatchKinds


def test_a_recording_that_replaces_a_buffer_is_refused_and_has_no_effect() -> None:
    buffer = torch.zeros(1)
    holder: dict[str, Any] = {"count": buffer}
    kinds = MicrobatchKinds(lambda: [(holder, "count")])
    with pytest.raises(RuntimeError, match="replaces buffers: count"), kinds.recording():
        holder["count"] = buffer + 1
    assert holder["count"] is buffer


def test_a_recording_that_fails_leaves_buffers_where_they_were() -> None:
    buffer = torch.zeros(1)
    holder: dict[str, Any] = {"count": buffer}
    kinds = MicrobatchKinds(lambda: [(holder, "count")])
    with pytest.raises(ValueError, match="of the user's"), kinds.recording():
        holder["count"] = buffer + 1
        raise ValueError("of the user's")
    assert holder["count"] is buffer
