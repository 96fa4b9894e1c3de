"""Language models of transformers: causal, masked, sequence to sequence."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .zoo import Example, Model

VOCABULARY = 99
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_LIKE: dict[str, Any] = {
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
}
EXPERTS: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SMALL_POSITIONS: dict[str, Any] = {"max_position_embeddings": 64}
WITHOUT_CACHE: dict[str, Any] = {"use_cache": False}
CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": WITHOUT_CACHE,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "num_layers": 4,
        "num_heads": 2,
        **WITHOUT_CACHE,
    },
    "gpt_neox": {"intermediate_size": 32, **WITHOUT_CACHE},
    "gptj": {"rotary_dim": 4, **WITHOUT_CACHE},
    "gpt_bigcode": WITHOUT_CACHE,
    "codegen": {"rotary_dim": 4, "num_attention_heads": 4, **WITHOUT_CACHE},
    "bloom": WITHOUT_CACHE,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16, **SMALL_POSITIONS, **WITHOUT_CACHE},
    "falcon": {"num_kv_heads": 1, **WITHOUT_CACHE},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 4, **WITHOUT_CACHE},
    "xglm": {"ffn_dim": 32, "num_layers": 4, "attention_heads": 2, **WITHOUT_CACHE},
    "biogpt": {"intermediate_size": 32, **WITHOUT_CACHE},
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "gemma": LLAMA_LIKE,
    "gemma2": LLAMA_LIKE,
    "gemma3_text": LLAMA_LIKE,
    "phi": LLAMA_LIKE,
    "phi3": LLAMA_LIKE,
    "stablelm": LLAMA_LIKE,
    "starcoder2": LLAMA_LIKE,
    "olmo": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "olmo3": LLAMA_LIKE,
    "cohere": LLAMA_LIKE,
    "granite": LLAMA_LIKE,
    "glm": LLAMA_LIKE,
    "glm4": LLAMA_LIKE,
    "smollm3": LLAMA_LIKE,
    "nemotron": LLAMA_LIKE,
    "persimmon": {"intermediate_size": 32, **WITHOUT_CACHE},
    "helium": LLAMA_LIKE,
    "ernie4_5": LLAMA_LIKE,
    "exaone4": LLAMA_LIKE,
    "arcee": LLAMA_LIKE,
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "phimoe": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v3": {
        **EXPERTS,
        "head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
    },
    "mamba": {"state_size": 4, **WITHOUT_CACHE},
    "mamba2": {
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 4,
        **WITHOUT_CACHE,
    },
    "falcon_mamba": {"state_size": 4, **WITHOUT_CACHE},
    "recurrent_gemma": {**LLAMA_LIKE, "lru_width": 16},
    "jamba": {**EXPERTS, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2": LLAMA_LIKE,
    "bert-generation": {"intermediate_size": 32, "is_decoder": True, **WITHOUT_CACHE},
    "xlnet": {"d_model": 16, "n_layer": 4, "n_head": 2, "d_inner": 32},
    "openai-gpt": {},
    "ctrl": {"dff": 32, **WITHOUT_CACHE},
}
ENCODER: dict[str, Any] = {"intermediate_size": 32, **SMALL_POSITIONS}
MASKED: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "albert": {**ENCODER, "embedding_size": 8},
    "distilbert": {"hidden_dim": 32, **SMALL_POSITIONS},
    "electra": {**ENCODER, "embedding_size": 8},
    "deberta": ENCODER,
    "deberta-v2": {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "mpnet": ENCODER,
    "modernbert": {"intermediate_size": 32, "cls_token_id": 1, "sep_token_id": 2},
    "convbert": {**ENCODER, "embedding_size": 16},
    "fnet": ENCODER,
    "squeezebert": {**ENCODER, "embedding_size": 16, "q_groups": 1},
    "roformer": ENCODER,
    "megatron-bert": ENCODER,
    "mobilebert": {**ENCODER, "embedding_size": 16, "intra_bottleneck_size": 8},
    "rembert": {**ENCODER, "input_embedding_size": 8, "output_embedding_size": 8},
    "nystromformer": {**ENCODER, "num_landmarks": 8, "segment_means_seq_len": 8},
    "esm": {**ENCODER, "mask_token_id": 3},
}
SEQUENCE: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
    **SMALL_POSITIONS,
    **WITHOUT_CACHE,
}
T5_LIKE: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    **WITHOUT_CACHE,
}
SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "bart": SEQUENCE,
    "mbart": SEQUENCE,
    "pegasus": SEQUENCE,
    "marian": SEQUENCE,
    "blenderbot": SEQUENCE,
    # How many numbers are drawn depends on which layers are left out.
    "m2m_100": {**SEQUENCE, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "plbart": SEQUENCE,
    "t5": T5_LIKE,
    "mt5": T5_LIKE,
    "umt5": T5_LIKE,
    "switch_transformers": {**T5_LIKE, "num_experts": 2, "num_sparse_encoder_layers": 1}
    # How many numbers are drawn would depend on which experts get tokens.
    | {"dropout_rate": 0.0, "router_jitter_noise": 0.0},
}


def tokens(rows: int, length: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def text(rows: int) -> Example:
    return (), {"input_ids": tokens(rows)}


def padded(rows: int) -> Example:
    mask = torch.ones(rows, 8, dtype=torch.long)
    mask[:, 6:] = 0
    return (), {"input_ids": tokens(rows), "attention_mask": mask}


def translation(rows: int) -> Example:
    return (), {"input_ids": tokens(rows), "decoder_input_ids": tokens(rows, 6)}


def build(model_type: str, auto_class: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **options})
    model = getattr(transformers, auto_class).from_config(config)
    assert isinstance(model, nn.Module)
    return model


def models() -> list[Model]:
    kinds = [
        (CAUSAL, "AutoModelForCausalLM", text),
        (MASKED, "AutoModelForMaskedLM", padded),
        (SEQUENCE_TO_SEQUENCE, "AutoModelForSeq2SeqLM", translation),
    ]
    return [
        Model("transformers", name, functools.partial(build, name, auto_class, options), example)
        for families, auto_class, example in kinds
        for name, options in families.items()
    ]
