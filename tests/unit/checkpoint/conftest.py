"""What tests of several files save to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.runs.object_store import object_store


@pytest.fixture(scope="session")
def _bucket() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture
def s3_url(_bucket: str) -> str:
    """A place in a local object store where nothing is."""
    return f"{_bucket}/{uuid.uuid4()}"
