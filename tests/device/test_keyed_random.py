"""What a device draws by key, it draws again, and its default generator does not notice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import pipedream2bw as pd2


@pytest.mark.parametrize("given", [False, True], ids=["default", "named default"])
def test_draws_of_a_device_follow_the_key_alone(given: bool) -> None:
    x = torch.ones(64, device="checked:1")
    generator = torch.checked.default_generators[1] if given else None  # type: ignore[attr-defined]

    def drawn(microbatch: int) -> torch.Tensor:
        with pd2.reference_random(seed=5, train_step=0, microbatch=microbatch):
            dropped = F.dropout(x)
            return torch.stack([dropped, torch.empty_like(x).uniform_(generator=generator)]).cpu()

    torch.checked.manual_seed_all(1)  # type: ignore[attr-defined]
    before = torch.checked.get_rng_state(1)  # type: ignore[attr-defined]
    first = drawn(0)
    assert torch.equal(torch.checked.get_rng_state(1), before)  # type: ignore[attr-defined]
    torch.checked.manual_seed_all(2)  # type: ignore[attr-defined]
    assert torch.equal(drawn(0), first)
    assert not torch.equal(drawn(1)[0], first[0])
    assert not torch.equal(drawn(1)[1], first[1])
