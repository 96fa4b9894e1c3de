"""``pipedream2bw checkpoint``, on checkpoints of a run with tied weights and buffers."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.__main__ import main
from pipedream2bw.model.checkpoint import open_checkpoint
from tests.runs.saved import saved

WIDTH = 6


class Model(nn.Sequential):
    """Two tied layers, buffers, and something that only ``get_extra_state`` gives."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
        super().__init__(*layers, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self[4].weight = self[0].weight
        self.note = seed

    def get_extra_state(self) -> Any:
        return [self.note, 0.5]

    def set_extra_state(self, state: Any) -> None:
        self.note = state[0]


class Plain(Model):
    """Without what Hugging Face's format cannot hold."""

    get_extra_state = nn.Module.get_extra_state


def make(
    seed: int, kind: type[Model] = Model
) -> tuple[Model, pd2.PipelineModule, pd2.PipelineOptimizer]:
    model = kind(seed)
    pipe = pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=2, example_args=(torch.zeros(3, WIDTH),)
    )
    return model, pipe, pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01))


class Run:
    """A run of two batches with a checkpoint after each, and what it came to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _, pipe, opt = make(seed=7)
        generator = torch.Generator().manual_seed(0)
        with pipe:
            for _ in range(2):
                x = torch.randn(6, WIDTH, generator=generator)
                pipe.train_step(x, target=x)
                opt.step()
                pd2.save(folder, pipe, opt).wait()
            self.weights = {
                name: value.clone() if torch.is_tensor(value) else value
                for name, value in pipe.state_dict().items()
            }
            names = {id(p): name for name, p in pipe.named_parameters()}
            opt.state_dict()
            self.moments = {
                f"{names[id(p)]}.{key}": value.clone()
                for p, state in opt.state.items()
                for key, value in state.items()
            }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Path:
    """The run's folder, to be damaged."""
    return Path(shutil.copytree(run.folder, tmp_path / "copied"))


def assert_same_weights(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


def called(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_gives_a_line_for_each_checkpoint_and_names_what_has_another_size(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    of_one, of_two = called(capsys, "ls", copied).splitlines()[2:]
    for number, line in ((1, of_one), (2, of_two)):
        words = line.split()
        assert words[:2] == [str(number), "whole"]
        assert words[-4:] == ["2bw", "2", "1", saved(copied, number).name]
        assert len(line) <= 100
    with open(saved(copied, 2) / "older-1-00001-of-00001.safetensors", "ab") as file:
        file.write(b"0")
    (saved(copied, 1) / "checkpoint.json").write_text("{}")
    out = called(capsys, "ls", copied)
    assert out.count(" damaged ") == 2
    assert f"{saved(copied, 2).name}/older-1-00001-of-00001.safetensors: " in out
    assert f"{saved(copied, 1).name}/checkpoint.json: " in out


def test_verify_names_each_damaged_tensor_and_file(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    assert called(capsys, "verify", copied).count("whole") == 2
    newest = saved(copied, 2)
    for kind in ("model", "optimizer"):
        path = newest / f"{kind}-00001-of-00001.safetensors"
        last = list(load_file(path))[-1]  # the header is sorted by place
        flip_last_bit(path)
        lines = called(capsys, "verify", copied, "--step", 2, code=1).splitlines()
        assert any(line.startswith(f"{newest.name}/{path.name}: ") for line in lines)
        assert last in lines[-1] or last in lines[0]
    assert len(lines) == 2
    assert called(capsys, "ls", copied).count("whole") == 2  # sizes are as before
    assert "whole" in called(capsys, "verify", copied, "--step", 1)
    (newest / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (newest / "rank-00001-of-00001.safetensors").unlink()
    out = called(capsys, "verify", copied, code=1)
    assert f"{newest.name}/model.safetensors.index.json: " in out
    assert f"{newest.name}/rank-00001-of-00001.safetensors: " in out
    assert f"{saved(copied, 1).name}: whole" in out


def test_show_gives_the_manifest_and_every_tensor(
    capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    out = called(capsys, "show", run.folder, "--step", 1)
    name = saved(run.folder, 1).name
    assert out.startswith(f"{name}: 1 optimizer steps, 1 train_steps\nschedule 2bw, 2 stages")
    assert "precision None, torch" in out
    assert "AdamW: lr=0.01, betas=(0.9, 0.999), " in out
    assert "4.weight is 0.weight" in out
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "0.weight float32 [6, 6] model-00001-of-00001.safetensors" in lines
    assert "0.weight/exp_avg float32 [6, 6] optimizer-00001-of-00001.safetensors" in lines
    assert saved(run.folder, 2).name in called(capsys, "show", run.folder)


def test_exports_are_read_by_those_whose_formats_they_are(
    capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path
) -> None:
    called(capsys, "export", run.folder, "--to", "torch", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same_weights(state, run.weights)
    model = Model(seed=1)
    model.load_state_dict(state)
    assert model.note == 7
    assert model[4].weight is model[0].weight

    called(capsys, "export", run.folder, "--to", "hf", tmp_path / "hf")
    opened = open_checkpoint(tmp_path / "hf")
    tensors = {n for n, value in run.weights.items() if isinstance(value, torch.Tensor)}
    assert set(opened.names) == tensors - {"4.weight"}  # tied ones once, as is usual there
    assert_same_weights(
        opened.read(list(opened.names)), {name: run.weights[name] for name in opened.names}
    )

    called(capsys, "export", run.folder, "--to", "dcp", tmp_path / "dcp")
    template = {f"optimizer.state.{name}": torch.zeros_like(v) for name, v in run.moments.items()}
    given: dict[str, Any] = {"model": Model(seed=1).state_dict(), **template}
    given["optimizer.param_groups.0.weight.lr"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loading without other processes
        load_distributed(given, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_same_weights(given["model"], run.weights)
    assert given["optimizer.param_groups.0.weight.lr"] == 0.01
    for name, value in run.moments.items():
        assert torch.equal(given[f"optimizer.state.{name}"], value), name
    assert len(run.moments) == 3 * len(list(Model(1).parameters()))


def test_an_export_of_a_damaged_checkpoint_or_over_something_is_refused(
    capsys: pytest.CaptureFixture[str], copied: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.pt").write_text("mine")
    error = refused(capsys, "export", copied, "--to", "torch", tmp_path / "model.pt")
    assert "it exists" in error
    assert (tmp_path / "model.pt").read_text() == "mine"
    assert "it exists" in refused(capsys, "export", copied, "--to", "hf", copied)
    flip_last_bit(saved(copied, 2) / "model-00001-of-00001.safetensors")
    for to in ("hf", "torch", "dcp"):
        error = refused(capsys, "export", copied, "--to", to, tmp_path / f"new-{to}")
        assert f"{saved(copied, 2).name}/model-00001-of-00001.safetensors: " in error
        called(capsys, "export", copied, "--step", 1, "--to", to, tmp_path / f"older-{to}")
    assert "no checkpoint 3, there are 2, 1" in refused(capsys, "show", copied, "--step", 3)
    assert "no checkpoint, or no such folder" in refused(capsys, "ls", tmp_path / "nowhere")


@pytest.mark.parametrize("form", ["torch", "hf", "dcp", "memory"])
def test_a_run_begins_with_weights_that_were_imported(
    capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path, form: str
) -> None:
    weights, out = tmp_path / "weights", str(tmp_path / "new")
    options: list[str] = []
    if form == "memory":
        out = f"memory://{tmp_path.name}"
        save_file(load_file(saved(run.folder, 2) / "model-00001-of-00001.safetensors"), weights)
        weights = weights.rename(tmp_path / "weights.safetensors")
    else:
        called(capsys, "export", run.folder, "--to", form, weights)
        options = ["--prefix", "model."] if form == "dcp" else []
    called(capsys, "import", weights, out, *options)
    assert "whole" in called(capsys, "verify", out)
    assert "imported" in called(capsys, "ls", out)
    assert "imported" in called(capsys, "show", out)

    has_all = form in ("torch", "dcp")
    model, pipe, opt = make(seed=1, kind=Model if has_all else Plain)
    sampler = pd2.ResumableSampler(12, batch=6, seed=1)
    with pipe, pd2.Checkpointer(out, pipe, opt, data=sampler, every=10) as checkpointer:
        assert checkpointer.resume() == 0
        assert_same_weights(
            {n: v for n, v in pipe.state_dict().items() if n != "_extra_state"},
            {n: v for n, v in run.weights.items() if n != "_extra_state"},
        )
        assert not any(opt.state_dict()["state"].values())
        pipe.train_step(torch.ones(6, WIDTH), target=torch.ones(6, WIDTH))
        opt.step()
    assert model.note == (7 if has_all else 1)


def test_an_import_of_what_is_no_weights_or_over_checkpoints_is_refused(
    capsys: pytest.CaptureFixture[str], run: Run, tmp_path: Path
) -> None:
    weights, new = tmp_path / "weights.pt", tmp_path / "new"
    torch.save({"model": {"weight": torch.ones(2)}, "epoch": 3}, weights)
    assert "epoch: int, it must be a tensor" in refused(capsys, "import", weights, new)
    assert not list(new.iterdir())
    assert "begins with 'other.'" in refused(capsys, "import", weights, new, "--prefix", "other.")
    assert "2 checkpoints, there must be none" in refused(capsys, "import", weights, run.folder)
    assert "does not exist" in refused(capsys, "import", tmp_path / "nothing", new)
    called(capsys, "import", weights, new, "--prefix", "model.")
    _, pipe, opt = make(seed=1)
    with pipe, pytest.raises(RuntimeError, match=r"unexpected keys: \['weight'\]"):
        pd2.load(new, pipe, opt)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    return json.loads(called(capsys, *arguments, "--json", code=code))


def test_ls_verify_and_show_are_json_as_well(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    first, second = as_json(capsys, "ls", copied)["checkpoints"]
    assert (first["step"], second["step"]) == (1, 2)
    assert (first["schedule"], first["stages"], first["width"]) == ("2bw", 2, 1)
    assert first["parameters"] == sum(p.numel() for p in Model(0).parameters())
    assert first["damage"] == []
    assert second["folder"] == saved(copied, 2).name
    whole = as_json(capsys, "verify", copied)["checkpoints"]
    assert {each["step"]: each["bytes"] for each in whole} == {
        each["step"]: each["bytes"] for each in (first, second)
    }
    shown = as_json(capsys, "show", copied, "--step", 1)
    assert shown["settings"]["num_stages"] == 2
    assert shown["optimizers"][0]["kind"] == "AdamW"
    assert shown["tied"] == {"4.weight": "0.weight"}
    assert {
        "name": "0.weight",
        "dtype": "float32",
        "shape": [6, 6],
        "file": "model-00001-of-00001.safetensors",
    } in shown["tensors"]

    flip_last_bit(saved(copied, 2) / "model-00001-of-00001.safetensors")
    second, first = as_json(capsys, "verify", copied, code=1)["checkpoints"]
    assert first["damage"] == []
    assert len(second["damage"]) == 1
    assert second["bytes"] is None
