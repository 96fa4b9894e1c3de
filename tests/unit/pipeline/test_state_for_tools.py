"""Of ``pipe.state_dict()`` tied tensors share a storage, and no others: so tools expect it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import pipedream2bw as pd2
from tests.samples.tied_chain import TiedChain, loss

X = torch.arange(64.0).reshape(8, 8).sin()


def tied() -> TiedChain:
    return TiedChain(8, lambda: nn.Linear(8, 8))


def trained(**options: Any) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    pipe = pd2.PipelineModule(tied(), loss, num_microbatches=2, example_args=(X,), **options)
    opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    step(pipe, opt)
    return pipe, opt


def step(pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer) -> None:
    pipe.train_step(X, target=X)
    opt.step()


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 2},
        {"num_stages": 1, "precision": "bf16"},
        {"num_stages": 2, "schedule": "1f1b"},
    ],
)
def test_safetensors_take_tied_weights_alone_for_tied(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    pipe, opt = trained(**options)
    with pipe:
        state = pipe.state_dict()
        storages: dict[int, list[str]] = {}
        for name, tensor in state.items():
            assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        shared = [names for names in storages.values() if len(names) > 1]
        assert shared == [["first.weight", "last.weight"]]
        save_model(pipe, str(tmp_path / "model.safetensors"))
        want = {name: tensor.clone() for name, tensor in state.items()}
        saved = load_file(tmp_path / "model.safetensors")
        assert len(saved) == len(state) - 1
        assert all(torch.equal(tensor, want[name]) for name, tensor in saved.items())
        step(pipe, opt)
        assert not torch.equal(pipe.state_dict()["first.weight"], want["first.weight"])
        assert load_model(pipe, str(tmp_path / "model.safetensors")) == (set(), [])
        assert all(torch.equal(t, want[name]) for name, t in pipe.state_dict().items())


def test_what_is_not_given_of_tied_names_is_told_as_torch_tells_it() -> None:
    pipe, _ = trained(num_stages=2)
    with pipe:
        state = {n: t.clone() for n, t in pipe.state_dict().items() if n != "last.weight"}
        assert pipe.load_state_dict(state).missing_keys == []
        told = pipe.load_state_dict(state, strict=False)
        assert told == tied().load_state_dict(state, strict=False)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_is_written_to_the_state_is_what_the_pipeline_has(precision: str | None) -> None:
    pipe, _ = trained(num_stages=2, precision=precision)
    with pipe:
        state = pipe.state_dict()
        for name in ("between.2.weight", "between.2.bias"):
            state[name].zero_()
        output = pipe.eval()(X)
        assert torch.equal(output.float(), torch.zeros(8, 8))
