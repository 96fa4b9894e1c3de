"""What sites exchange, each of them a thread here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from pipedream2bw import _C
from pipedream2bw.extras import sites
from pipedream2bw.extras.sites import SiteLink
from pipedream2bw.ranks.deadline import Deadline

Call = Callable[[SiteLink], Any]


class Sites:
    """Links of so many sites, whose calls are made together."""

    def __init__(self, number: int) -> None:
        store = HashStore()
        self._threads = ThreadPoolExecutor(number)

        def link(site: int) -> SiteLink:
            return SiteLink(
                store,
                "test",
                site=site,
                num_sites=number,
                deadline=Deadline(20.0, _C.Fault()),
                is_needed=lambda: True,
            )

        self.links = list(self._threads.map(link, range(number)))

    def call(self, *calls: Call) -> list[Any]:
        return list(self._threads.map(lambda call, link: call(link), calls, self.links))

    def close(self) -> None:
        for link in self.links:
            link.close()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def of_number() -> Iterator[Callable[[int], Sites]]:
    made: dict[int, Sites] = {}

    def get(number: int) -> Sites:
        if number not in made:
            made[number] = Sites(number)
        return made[number]

    yield get
    for each in made.values():
        each.close()


@settings(deadline=None, max_examples=60)
@given(
    number=st.integers(2, 4),
    numel=st.integers(0, 40),
    part=st.integers(1, 17),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_a_mean_is_added_up_in_the_order_of_the_sites(
    of_number: Callable[[int], Sites],
    number: int,
    numel: int,
    part: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    g = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(numel, generator=g).to(dtype) for _ in range(number)]
    want = vectors[0]
    for vector in vectors[1:]:
        want = want + vector
    want = want / number
    made = [vector.clone() for vector in vectors]
    with mock.patch.object(sites, "_PART", part):
        of_number(number).call(*(lambda link, v=v: link.average(v) for v in made))
    for each in made:
        assert torch.equal(each, want)


@pytest.mark.parametrize("number", [2, 3])
def test_tensors_travel_to_the_next_site_and_from_the_first_to_all(
    of_number: Callable[[int], Sites], number: int
) -> None:
    tensors = [
        [torch.full((2, 3), float(site)), torch.tensor(site), torch.empty(0)]
        for site in range(number)
    ]
    found = of_number(number).call(*(lambda link, t=t: link.take_previous(t) for t in tensors))
    for site in range(number):
        for got, expected in zip(found[site], tensors[site - 1], strict=True):
            assert torch.equal(got, expected)
    of_number(number).call(*(lambda link, t=t: link.take_first(t) for t in tensors))
    for mine in tensors:
        for got, expected in zip(mine, tensors[0], strict=True):
            assert torch.equal(got, expected)
    assert float(tensors[-1][0][0, 0]) == 0.0


def test_sites_tell_each_other_values_and_find_those_that_differ(
    of_number: Callable[[int], Sites],
) -> None:
    values: list[Any] = [{"a": [1, None]}, "a longer text, of which there are more bytes", 2.5]
    found = of_number(3).call(*(lambda link, v=v: link.gather(v) for v in values))
    assert found == [values] * 3
    of_number(3).call(*[lambda link: link.agree("depth", 2)] * 3)

    def differ(link: SiteLink) -> str:
        with pytest.raises(ValueError, match="depth must be the same on every site") as raised:
            link.agree("depth", 2 + (link.site == 2))
        return str(raised.value)

    assert (
        of_number(3).call(*[differ] * 3)
        == ["depth must be the same on every site, got site 0: 2, site 1: 2, site 2: 3"] * 3
    )
