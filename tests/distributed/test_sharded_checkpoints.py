"""Checkpoints of tensor-parallel stages: saved in one shape, resumed in another, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipedream2bw as pd2
from pipedream2bw.checkpoint.folder import Folder
from pipedream2bw.checkpoint.other_formats import export
from pipedream2bw.checkpoint.source import Source, damage_of
from tests.distributed.test_mesh import M, draw
from tests.exhaustive import exhaustive
from tests.runs.launch import run_ranks
from tests.samples.tensor_parallel import SHARDS_OF_BLOCK, Block, Parallelized

SHAPES = {"tp2.pp2": (1, 2, 2), "pp2": (1, 2, 1), "tp4": (1, 1, 4), "dp2.tp2": (2, 1, 2)}
NUM_BLOCKS, BEFORE, AFTER = 4, 3, 2


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [draw(8).args[0] for _ in range(count)]


class Counting(Block):
    """A buffer differs between the processes of a stage."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__(mesh)
        self.register_buffer("own", torch.tensor(float(dist.get_rank())), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.0 * self.own)


class Run:
    """A training under a mesh; every process makes it."""

    def __init__(self, shape: str, kind: str) -> None:
        sizes = SHAPES[shape]
        order = torch.arange(dist.get_world_size()).reshape(sizes)
        mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "pp", "tp"))
        torch.manual_seed(1)
        tp = mesh["tp"] if sizes[2] > 1 else None
        if kind == "DTensors":
            layers = [Parallelized(mesh["tp"]) for _ in range(NUM_BLOCKS)]
            model = pd2.use_local_shards(nn.Sequential(*layers))
        else:
            block = Counting if kind == "buffers" else Block
            model = nn.Sequential(*(block(tp) for _ in range(NUM_BLOCKS)))
            model = pd2.use_local_shards(model, SHARDS_OF_BLOCK if tp is not None else None)
        if shape != "tp2.pp2":  # what is loaded must not be there before
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
        self.pipe = pd2.PipelineModule(
            model,
            F.mse_loss,
            num_stages=sizes[1],
            num_microbatches=M,
            example_args=(batches(1)[0],),
            mesh=mesh,
            timeout=60.0,
        )
        adamw = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        self.opt = pd2.PipelineOptimizer(adamw, max_grad_norm=0.5, staleness=pd2.ErrorFeedback())

    def train(self, data: list[torch.Tensor]) -> list[float]:
        losses = []
        for x in data:
            losses.append(self.pipe.train_step(x, target=x))
            self.opt.step()
        self.pipe.flush()
        return [float(loss) for loss in losses]


def save(rank: int, world: int, shape: str, kind: str, folder: str) -> dict[str, Any]:
    run = Run(shape, kind)
    with run.pipe:
        run.train(batches(BEFORE))
        pd2.save(folder, run.pipe, run.opt).wait()
        saved = run.pipe.full_state_dict()
        losses = run.train(batches(BEFORE + AFTER)[BEFORE:])
        return {"saved": saved, "losses": losses, "end": run.pipe.full_state_dict()}


def resume(rank: int, world: int, shape: str, kind: str, folder: str) -> dict[str, Any]:
    run = Run(shape, kind)
    with run.pipe:
        pd2.load(folder, run.pipe, run.opt)
        loaded = run.pipe.full_state_dict()
        again = f"{folder}-{shape}"
        pd2.save(again, run.pipe, run.opt).wait()
        losses = run.train(batches(BEFORE + AFTER)[BEFORE:])
        end = run.pipe.full_state_dict()
        step = source_of(folder).name
        if shape == "tp4":  # the newest weights of a checkpoint itself are parts
            with pytest.raises(ValueError, match="one process's part of a tensor"):
                run.pipe.load_checkpoint(f"{folder}/{step}", strict=False)
        run.pipe.load_checkpoint(f"{folder}-exported")
        exported = run.pipe.full_state_dict()
        return {"loaded": loaded, "losses": losses, "end": end, "exported": exported}


def source_of(folder: str) -> Source:
    (name,) = (path.name for path in Path(folder).iterdir() if path.name.startswith("step-"))
    return Source(Folder(folder), name)


def contents(folder: str) -> dict[str, Any]:
    """All weights and states of the folder's checkpoint, put together."""
    source = source_of(folder)
    weights = source.weights()
    return {"weights": weights.read(list(weights.names)), "states": source.states()}


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, dict):
            assert_same(value, theirs[name])
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


def keep_buffers(rank: int, world: int, folder: str) -> str:
    run = Run("tp2.pp2", "buffers")
    with run.pipe:
        run.train(batches(1))
        pd2.save(folder, run.pipe, run.opt).wait()
        with torch.no_grad():
            for buffer in run.pipe.buffers():
                buffer.fill_(-1.0)
        pd2.load(folder, run.pipe, run.opt)
        assert [float(buffer) for buffer in run.pipe.buffers()] == [float(rank)] * 2
    other = Run("tp4", "buffers")
    with other.pipe, pytest.raises(ValueError, match="4 cannot go on with it, 2 can") as refused:
        pd2.load(folder, other.pipe, other.opt)
    return str(refused.value)


@pytest.mark.slow
def test_each_process_of_a_stage_has_its_own_buffers_back(tmp_path: Path) -> None:
    results = run_ranks(keep_buffers, 4, args=(str(tmp_path / "run"),), timeout=120)
    assert all("it differs between the 2 processes" in str(result.value) for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DTensors", *exhaustive("by hand")])
def test_a_run_goes_on_in_another_shape(tmp_path: Path, kind: str) -> None:
    folder = str(tmp_path / "run")
    saved = run_ranks(save, 4, args=("tp2.pp2", kind, folder), timeout=120)[0].value
    whole = contents(folder)
    assert_same(saved["saved"], whole["weights"])
    assert not list(damage_of(Folder(folder), source_of(folder).name, sums=True))
    export(source_of(folder), "hf", f"{folder}-exported")
    for shape in ("tp2.pp2", "pp2", "tp4", "dp2.tp2"):
        world = torch.tensor(SHAPES[shape]).prod().item()
        found = run_ranks(resume, world, args=(shape, kind, folder), timeout=120)[0].value
        assert_same(found["loaded"], saved["saved"])
        assert_same(found["exported"], saved["saved"])
        assert_same(contents(f"{folder}-{shape}"), whole)
        if shape == "tp2.pp2":
            assert found["losses"] == saved["losses"]
            assert_same(found["end"], saved["end"])
        for name, value in found["end"].items():
            assert torch.allclose(value, saved["end"][name], rtol=1e-4, atol=1e-5), name
