"""What is counted while autograd saves it is freed with its graph."""

from __future__ import annotations

import gc
import weakref

import torch

from pipedream2bw.capture.saved_bytes import SavedBytes


def test_a_graph_without_a_backward_is_freed() -> None:
    given = torch.ones(3, requires_grad=True)
    with SavedBytes(()) as saved:
        result = given.tanh().exp()  # each saves its own result
    assert saved.total == 2 * given.nbytes
    seen = weakref.ref(result)
    del result
    gc.collect()
    assert seen() is None
