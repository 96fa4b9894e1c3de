"""Sites that average seldom train as the definition says, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs.launch import run_ranks
from tests.runs.sites import Setting, assert_expected, expected, train_site

THREADS = [
    Setting(num_stages=1),
    Setting(),
    Setting(num_stages=4, every=3),
    Setting(schedule="1f1b"),
    Setting(num_stages=4, every=3, staggered=False),
    Setting(every=1, momentum=0.0),
    Setting(precision="bf16"),
    Setting(precision="bf16", schedule="1f1b"),
    Setting(task="layers", num_stages=4, every=3),
    Setting(task="drawing"),
]
FOUR_SITES = [Setting(num_sites=4), Setting(num_sites=4, num_stages=1, schedule="1f1b")]
PROCESSES = [
    Setting(in_processes=True),
    Setting(in_processes=True, schedule="1f1b", precision="bf16"),
]
REPLICAS = [Setting(in_processes=True, num_stages=1, width=2)]


@pytest.mark.parametrize(
    "settings", [THREADS, FOUR_SITES, PROCESSES, REPLICAS], ids=lambda s: f"{s[0]}"
)
def test_sites_train_as_the_definition_says(settings: list[Setting], tmp_path: Path) -> None:
    ranks = settings[0].num_sites * settings[0].ranks
    results = run_ranks(
        train_site, ranks, args=(str(tmp_path), settings), rendezvous="none", timeout=120
    )
    for number, setting in enumerate(settings):
        want = expected(setting, results[0].value[number].stages)
        for result in results:
            assert_expected(setting, result.value[number], want)
