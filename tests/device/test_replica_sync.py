"""Sites with a device each exchange over the hosts, beside what their devices do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.device import checked
from tests.runs.launch import run_ranks
from tests.runs.sites import Setting, SiteResult, assert_expected, expected, train_site

SETTINGS = [
    Setting(),
    Setting(num_stages=1, schedule="1f1b"),
    Setting(precision="bf16", every=3),
    Setting(task="layers", num_stages=4, every=3),
]


def train(rank: int, world: int, folder: str) -> list[SiteResult]:
    checked.set_drains(at_first_use=True, probability=0.05, seed=rank)
    checked.set_timeout(20.0)
    there = [dataclasses.replace(setting, device="checked:0") for setting in SETTINGS]
    with checked.expect_no_errors():
        return train_site(rank, world, folder, there)


def test_sites_on_devices_train_as_the_definition_says(tmp_path: Path) -> None:
    results = run_ranks(train, 2, args=(str(tmp_path),), rendezvous="none", timeout=90)
    for number, setting in enumerate(SETTINGS):
        want = expected(setting, results[0].value[number].stages)
        for result in results:
            assert_expected(setting, result.value[number], want)
