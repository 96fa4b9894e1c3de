"""The newest weights of a checkpoint, with a config beside them, are a model of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

import pipedream2bw as pd2
from tests.runs.saved import saved

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip(
        "transformers", reason="the transformers library is not installed (pip install -e .[test])"
    )

from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))


def logits_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(("tied", "precision"), [(True, None), (True, "bf16"), (False, None)])
def test_a_trained_gpt2_is_read_by_from_pretrained(
    tied: bool, precision: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2, tie_word_embeddings=tied
    )
    with pd2.PipelineModule(
        GPT2LMHeadModel(config),
        logits_loss,
        num_stages=2,
        num_microbatches=2,
        example_kwargs={"input_ids": TOKENS[:2], "use_cache": False},
        precision=precision,
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.AdamW(pipe.parameters(), lr=0.01))
        with pd2.Checkpointer(tmp_path, pipe, opt, every=2, preempt=()) as ckpt:
            for _ in range(2):
                pipe.train_step(input_ids=TOKENS, use_cache=False, target=TOKENS)
                opt.step()
                ckpt.step()
        folder = saved(tmp_path, 2)
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        weights = [load_file(folder / name) for name in set(index["weight_map"].values())]
        assert set(index["weight_map"]) == {name for each in weights for name in each}
        nbytes = sum(tensor.nbytes for each in weights for tensor in each.values())
        assert index["metadata"] == {"total_size": nbytes}
        config.save_pretrained(folder)
        found, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert (found.lm_head.weight is found.transformer.wte.weight) == tied
        assert ckpt.resume() == 2  # the config changes nothing
        want = pipe.unsplit().state_dict()
    got = found.state_dict()
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype == torch.float32, name
        assert torch.equal(got[name], value), name
