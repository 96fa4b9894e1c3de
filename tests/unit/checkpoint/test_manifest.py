"""A manifest that says what cannot be is refused, at once."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from pipedream2bw.checkpoint.folder import MANIFEST, Folder, name_of
from pipedream2bw.checkpoint.manifest import read_manifest
from pipedream2bw.errors import DamagedCheckpoint
from tests.fuzz.formats import corpus_of


@pytest.mark.parametrize("num_ranks", [0, 2, 10**12, 10**30])
def test_a_manifest_of_other_ranks_than_it_says_is_refused(tmp_path: Path, num_ranks: int) -> None:
    document = json.loads(corpus_of("manifest")[0])
    del document["sum"]
    document["settings"]["num_ranks"] = num_ranks
    rest = json.dumps(document)[1:].encode()
    place = tmp_path / name_of(40, "a")
    place.mkdir()
    (place / MANIFEST).write_bytes(b'{"sum": "%08x",' % zlib.crc32(rest) + rest)
    with pytest.raises(DamagedCheckpoint, match=f"ranks 0, there must be {num_ranks}"):
        read_manifest(Folder(tmp_path), place.name)
