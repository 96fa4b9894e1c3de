"""Models of the transformers library, tiny and with random weights: captured by torch.export."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from pipedream2bw.capture.capture import capture
from pipedream2bw.stages.boundaries import block_around, choose_boundaries, place_like
from pipedream2bw.stages.cut import split_into_stages
from tests.exhaustive import exhaustive
from tests.runs.staged_run import (
    assert_same,
    check_split_equals_whole,
    cut,
    run_staged,
    run_whole,
    sum_of_squares,
)

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") == "1":
    import transformers
else:
    transformers = pytest.importorskip(
        "transformers", reason="the transformers library is not installed (pip install -e .[test])"
    )

VOCABULARY = 99
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(rows: int, length: int = 7) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def tied_gpt2() -> nn.Module:
    model = gpt2()
    model.lm_head.weight = model.transformer.wte.weight
    return model


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=VOCABULARY, intermediate_size=32, **SMALL)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            intermediate_size=32,
            use_cache=False,
            tie_word_embeddings=False,
            **SMALL,
        )
    )


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCABULARY,
            intermediate_size=32,
            num_key_value_heads=1,
            num_local_experts=4,
            use_cache=False,
            tie_word_embeddings=False,
            **SMALL,
        )
    )


def t5() -> nn.Module:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    # Some versions tie the output layer whatever the configuration says.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(intermediate_size=32, image_size=16, patch_size=8, **SMALL)
    )


def text(rows: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(rows)}


def masked(rows: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, 7, dtype=torch.long)
    mask[:, 5:] = 0
    return {"input_ids": tokens(rows), "attention_mask": mask}


def translation(rows: int) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": tokens(rows, 5), "input_ids": tokens(rows)}


def image(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16)}


MODELS = {
    "gpt2": (gpt2, text),
    "gpt2-mask": (gpt2, masked),
    "bert": (bert, masked),
    "llama": (llama, text),
    "mixtral": (mixtral, text),
    "t5": (t5, translation),
    "vit": (vit, image),
}
SIMPLER = ("gpt2-mask", "llama", "bert", "gpt2")


def test_an_export_does_not_note_where_operators_are_called() -> None:
    config = pytest.importorskip("torch.fx.config")
    if not hasattr(config, "do_not_emit_stack_traces"):
        pytest.skip("this torch has no such setting")
    captured = capture(gpt2(), num_stages=2, example_args=(tokens(2),))
    assert captured.how == "export"
    assert not any("modeling_gpt2" in (node.stack_trace or "") for node in captured.graph.nodes)
    assert config.do_not_emit_stack_traces is False


@pytest.mark.parametrize(
    # Others have masks, and other models of theirs are trained.
    "name",
    [*(name for name in MODELS if name not in SIMPLER), *exhaustive(*SIMPLER)],
)
def test_captured_in_both_modes_and_equal_to_the_whole(name: str) -> None:
    build, inputs = MODELS[name]
    model = build().train()
    # Every decoder layer of T5 reads the encoder's output: three or more consumers of a value,
    # whose gradients add up in another order. Mixtral's heads share keys: traced, transformers
    # repeats them and autograd adds their gradients; otherwise the attention operator does both.
    exact = name not in ("t5", "mixtral")
    captured, programs = check_split_equals_whole(
        model,
        4,
        kwargs=inputs(3),
        loss=lambda output: output.logits.square().mean(),
        exact=exact,
        how="export",
    )
    assert all(program.parameters for program in programs), captured.layers
    model.eval()
    other = capture(model, num_stages=4, example_kwargs=inputs(1))
    others = split_into_stages(other, place_like(other, programs))
    for here, there in zip(programs, others, strict=True):
        assert set(here.parameters) == set(there.parameters)
    for rows in (1, 2, 5):
        kwargs: dict[str, Any] = inputs(rows)
        got = run_staged(model, other, others, kwargs=kwargs, loss=sum_of_squares)
        assert_same(got, run_whole(model, kwargs=kwargs, loss=sum_of_squares), exact=exact)


def test_gpt2_is_exported_and_cut_at_its_blocks_by_name() -> None:
    captured, programs = cut(
        gpt2(), 3, kwargs=text(2), split=["transformer.h.1", "transformer.ln_f"]
    )
    assert captured.how == "export"
    assert "transformer" in captured.notes[0]
    assert {name.split(".")[2] for name in programs[1].parameters} == {"1"}
    assert programs[2].parameters == (
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    )
    # After the last block only the hidden state travels, and sizes are read off it.
    assert programs[2].receives.keys() == {1}
    assert len(programs[1].sends[2]) == 1
    assert not captured.found.sizes & {name for p in programs for name in p.outputs}


def test_both_lookups_of_t5s_shared_table_are_on_the_first_stage() -> None:
    _, programs = cut(t5(), 3, kwargs=translation(2))
    assert [program.index for program in programs if "shared.weight" in program.parameters] == [0]
    assert not any(name.startswith("decoder.block.1") for name in programs[0].parameters)
    assert any(name.startswith("decoder.block.0") for name in programs[1].parameters)


def test_tied_embeddings_are_on_the_first_and_on_the_last_stage() -> None:
    _, programs = check_split_equals_whole(
        tied_gpt2(), 3, kwargs=text(2), loss=lambda out: out.logits.square().mean(), exact=False
    )
    tied = ["transformer.wte.weight" in program.parameters for program in programs]
    assert tied == [True, False, True]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_automatic_cuts_are_where_the_models_own_plan_has_them(name: str) -> None:
    build, inputs = MODELS[name]
    model = build()
    (blocks,) = [key for key in model.config.base_model_pp_plan if key.endswith("layers")]
    captured = capture(model, num_stages=2, example_kwargs=inputs(2))
    boundaries = choose_boundaries(captured, 2)
    assert block_around(captured, boundaries[1]) == f"model.{blocks}.1"
    assert block_around(captured, boundaries[1] - 1) == f"model.{blocks}.0"
