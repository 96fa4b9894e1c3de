"""Random options together, other ones on each day; ``python -m tests.pairs`` tries more."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.pairs import failures
from tests.runs.rank_process import ROOT


def seed_of_the_day() -> str:
    """The time of the newest commit, so that a commit's cases stay the same; "0" without git."""
    if shutil.which("git") is None:
        return "0"
    command = ["git", "log", "-1", "--format=%ct"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_options_together_train_as_the_definition_says() -> None:
    wrong = [
        f"{case.command}\n{error}"
        for case, error in failures(seed_of_the_day(), range(16))
        if error
    ]
    assert not wrong, "\n\n".join(wrong)
