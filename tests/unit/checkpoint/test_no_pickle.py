"""Nothing is pickled to save a run, and nothing unpickled to go on from one."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import checkpoints
from pipedream2bw.checkpoint.folder import Folder
from tests.runs.pickling import pickles
from tests.unit.checkpoint.conftest import Run

EXTRA = {"a": [1, torch.ones(1), np.arange(2)], "b": {"c": (2.5, None)}}


def damage_newest(path: Path | str) -> None:
    """Changes a bit of a file of checkpoint 2."""
    folder = Folder(path)
    place = (checkpoints(folder, 2)[0], "model-00001-of-00001.safetensors")
    data = bytearray(folder.read(*place))
    data[-1] ^= 1
    with folder.writing(*place) as file:
        file.write(data)


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_saving_and_resuming_pickles_nothing_also_past_a_damaged_checkpoint(
    where: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    path = tmp_path / "run" if where == "folder" else f"memory://{uuid.uuid4()}"
    with pickles() as found:
        run = start(path, extra=EXTRA)
        run.train(2)
        run.ckpt.close()
        assert start(path, seed=4, extra=EXTRA).ckpt.resume() == 2
        damage_newest(path)
        resumed = start(path, seed=5, extra=EXTRA)
        assert resumed.ckpt.resume() == 1
        resumed.ckpt.close()
        pd2.load(path, resumed.pipe, resumed.opt)
        pd2.load(path, resumed.pipe)
    assert found == []


class Named:
    """What an unpickler has to look for."""


def test_what_is_unpickled_is_found_in_any_thread() -> None:
    def work(data: bytes, load: Any) -> None:
        load(data)

    with pickles() as found:
        pickle.loads(pickle.dumps(1))
        data = pickle.dumps(Named())
        thread = threading.Thread(target=work, args=(data, pickle.loads))
        thread.start()
        thread.join()
    assert {stack[0] for stack in found} == {
        "_pickle.dumps",
        "_pickle.loads",
        f"pickle.find_class {__name__} Named",
    }
    assert all(f"{Path(__file__).name}:work" in stack for stack in found if "Named" in stack[0])
