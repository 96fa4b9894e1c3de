"""Whatever is damaged in a checkpoint is noticed, and nothing else changes.

``python -m tests.damage`` does the same at length.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive
from tests.runs.damaging import KINDS, Victim


@pytest.fixture(params=[KINDS[-1], *exhaustive(*KINDS[:-1])])
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Victim]:
    with contextlib.closing(Victim(tmp_path, request.param)) as made:
        yield made


def test_every_damage_is_refused_by_name_and_the_older_checkpoint_taken(victim: Victim) -> None:
    victim.flip(100, random.Random(str(victim.files)), loads=0.5, resumes=0.1)
    victim.cut(4096)
    assert victim.counts.made > 100 + 2 * len(victim.files)
    victim.lose_and_replace()
    victim.lie_about_headers()
    victim.lie_about_sums()
    victim.add_foreign_files()
    assert victim.counts.loaded > 100
