"""Models made on meta take their values from a checkpoint, of which a stage reads its part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.model.checkpoint import open_checkpoint
from tests.runs.trajectory import (
    assert_same,
    assert_same_state,
    by_oracle,
    copy_of,
    do_nothing,
    make_pipeline,
    sgd,
)
from tests.samples.large_models import loadable
from tests.samples.models import TASKS, WIDTH, Task

TASK = Task(loadable, TASKS["mlp"].draw)
State = dict[str, torch.Tensor]


def on_meta(build: Callable[[], nn.Module] = loadable) -> nn.Module:
    with torch.device("meta"):
        return build()


def without_aliases(state: State) -> State:
    """Safetensors hold a shared tensor once."""
    seen: dict[int, str] = {}
    return {
        name: value.contiguous()
        for name, value in state.items()
        if seen.setdefault(value.data_ptr(), name) == name
    }


def write_safetensors(folder: Path, state: State) -> Path:
    save_file(without_aliases(state), folder / "model.safetensors")
    return folder / "model.safetensors"


def write_sharded(folder: Path, state: State) -> Path:
    """As Hugging Face does, with the folder given."""
    state = without_aliases(state)
    names = sorted(state)
    places = {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: state[name] for name in names[i::3]}, folder / file)
        places.update(dict.fromkeys(names[i::3], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def write_torch(folder: Path, state: State) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def write_sharded_torch(folder: Path, state: State) -> Path:
    names = sorted(state)
    for i in range(2):
        torch.save({name: state[name] for name in names[i::2]}, folder / f"{i}.bin")
    places = {name: f"{i % 2}.bin" for i, name in enumerate(names)}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def write_torch_distributed(folder: Path, state: State) -> Path:
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


WRITERS = (
    write_safetensors,
    write_sharded,
    write_torch,
    write_sharded_torch,
    write_torch_distributed,
)


def pipeline(model: nn.Module, num_stages: int = 2, **options: Any) -> pd2.PipelineModule:
    return make_pipeline(TASK, num_stages, 4, TASK.batches([4])[0], model=model, **options)


@pytest.mark.parametrize("write", WRITERS)
def test_a_checkpoint_gives_a_model_on_meta_its_values(
    write: Callable[[Path, State], Path], tmp_path: Path
) -> None:
    source = TASK.model(seed=3)
    path = write(tmp_path, source.state_dict())
    with pipeline(on_meta()) as pipe:
        pipe.load_checkpoint(path)
        assert_same_state(copy_of(pipe.state_dict()), copy_of(source.state_dict()))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["2bw", "gpipe"])
def test_it_trains_as_the_loaded_model_does(num_stages: int, schedule: str, tmp_path: Path) -> None:
    source = TASK.model(seed=3)
    path = write_safetensors(tmp_path, source.state_dict())
    batches = TASK.batches([8] * 4)
    with pipeline(on_meta(), num_stages, schedule=schedule) as pipe:
        pipe.load_checkpoint(path)
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        state = copy_of(pipe.state_dict())
    want = by_oracle(TASK, batches, 4, sgd, do_nothing, model=source, schedule=schedule)
    assert_same(type(want)([float(loss) for loss in losses], state), want)


class Lazy(Mapping[str, Any]):
    """Notes what is read."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def test_a_mapping_is_asked_once_for_each_entry() -> None:
    source = TASK.model(seed=3)
    lazy = Lazy(source.state_dict())
    with pipeline(on_meta()) as pipe:
        pipe.load_state_dict(lazy)
        assert sorted(lazy.read) == sorted(lazy.state)
        assert_same_state(copy_of(pipe.state_dict()), copy_of(source.state_dict()))


def test_files_are_opened_for_what_is_wanted_only(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, TASK.model().state_dict())
    checkpoint = open_checkpoint(path)
    places = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = [name for name, file in places.items() if "00002" in file]
    (path / "model-00001-of-00003.safetensors").unlink()
    assert checkpoint.read(wanted).keys() == set(wanted)


def test_a_prefix_names_the_entries_and_dtypes_are_converted(tmp_path: Path) -> None:
    source = TASK.model(seed=3)
    half = {
        name: value.half() if value.is_floating_point() else value
        for name, value in source.state_dict().items()
    }
    torch.save({"model": half, "step": 3, "optimizer": {"lr": 0.1}}, tmp_path / "all.pt")
    with pipeline(on_meta()) as pipe:
        pipe.load_checkpoint(tmp_path / "all.pt", prefix="model.")
        want = {name: value.to(source.state_dict()[name].dtype) for name, value in half.items()}
        assert_same_state(copy_of(pipe.state_dict()), want)


def test_values_are_asked_for_before_they_are_used(tmp_path: Path) -> None:
    source = TASK.model(seed=3).state_dict()
    batch = TASK.batches([4])[0]
    part = {name: value for name, value in source.items() if name != "3.weight"}
    torch.save(part, tmp_path / "part.pt")
    with pipeline(on_meta()) as pipe:
        pd2.PipelineOptimizer(sgd(pipe.parameters()))
        missing = r"without values: \d+ \(.*deferred_init"
        with pytest.raises(ValueError, match=missing):
            pipe.train_step(*batch.args, target=batch.target)
        pipe.eval()
        with pytest.raises(ValueError, match=missing):
            pipe(*batch.args)
        with pytest.raises(RuntimeError, match=r"missing keys: \['3.weight'\], unexpected keys: "):
            pipe.load_checkpoint(tmp_path / "part.pt")
        result = pipe.load_checkpoint(tmp_path / "part.pt", strict=False)
        assert result.missing_keys == ["3.weight"]
        with pytest.raises(ValueError, match=r"without values: 1 \(3\.weight\)"):
            pipe(*batch.args)
        pipe.load_state_dict(source)
        pipe(*batch.args)


def test_wrong_checkpoints_are_refused(tmp_path: Path) -> None:
    source = TASK.model(seed=3).state_dict()
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save(source | {"4.weight": torch.zeros(2, WIDTH)}, tmp_path / "shape.pt")
    torch.save(source | {"5.scale": torch.zeros(2)}, tmp_path / "unexpected.pt")
    cases = {
        "nothing": (ValueError, "does not exist"),
        "empty": (ValueError, "has none of model.safetensors"),
        "text.pt": (ValueError, "cannot be read"),
        "shape.pt": (RuntimeError, r"size mismatch for 4.weight.*\[2, 8\].*\[8, 8\]"),
        "unexpected.pt": (RuntimeError, r"missing keys: \[\], unexpected keys: \['5.scale'\]"),
    }
    with pipeline(on_meta()) as pipe:
        for name, (kind, text) in cases.items():
            with pytest.raises(kind, match=text):
                pipe.load_checkpoint(tmp_path / name)


def test_what_no_checkpoint_has_is_refused() -> None:
    class Cached(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            if persistent:
                self.table = torch.arange(WIDTH).sin()
            else:
                self.register_buffer("table", torch.arange(WIDTH).sin(), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.table

    for persistent, text in (
        (False, r"buffer 0\.table: on meta and not persistent"),
        (True, r"module '0': a tensor of shape \(8,\) on meta is neither parameter nor buffer"),
    ):
        model = on_meta(lambda: nn.Sequential(Cached(persistent), nn.Linear(WIDTH, WIDTH)))  # noqa: B023
        with pytest.raises(ValueError, match=text):
            pipeline(model)
