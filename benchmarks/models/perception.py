"""Models of transformers, diffusers and torch_geometric for images, sound and graphs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .text import LLAMA_LIKE, SEQUENCE, build, tokens
from .zoo import Example, Model

PATCHES: dict[str, Any] = {
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 5,
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": PATCHES,
    "deit": {**PATCHES, "architectures": ["DeiTForImageClassification"]},
    "beit": {**PATCHES, "use_relative_position_bias": True},
    "dinov2": PATCHES,
    "vit_msn": PATCHES,
    "swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2]}
    | {"num_attention_heads": [2, 2], "num_hidden_layers": 2, "window_size": 2},
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "convnextv2": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
    "poolformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "segformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    | {"num_attention_heads": [1, 1, 2, 2]},
    "pvt": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32}
    | {"num_attention_heads": [1, 1, 2, 2]},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "levit": {"image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2]}
    | {"depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    | {"architectures": ["LevitForImageClassification"]},
    "focalnet": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]}
    | {"focal_levels": [1, 1], "focal_windows": [3, 3], "use_layerscale": False},
    "siglip_vision_model": PATCHES,
    "clip_vision_model": {**PATCHES, "projection_dim": 8},
}
SOUND: dict[str, Any] = {
    "intermediate_size": 32,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,  # it draws in numpy
    "layerdrop": 0.0,  # how many numbers are drawn would depend on those drawn before
}
WAVES: dict[str, dict[str, Any]] = {
    "wav2vec2": SOUND,
    "hubert": SOUND,
    "wavlm": SOUND,
    "unispeech": SOUND,
    "sew": {**SOUND, "squeeze_factor": 2},
    "data2vec-audio": SOUND,
}


def image(rows: int, size: int = 16) -> Example:
    return (), {"pixel_values": torch.randn(rows, 3, size, size)}


def wave(rows: int) -> Example:
    return (), {"input_values": torch.randn(rows, 256)}


def spectrum(rows: int) -> Example:
    features = torch.randn(rows, 16, 32)
    return (), {"input_features": features, "decoder_input_ids": tokens(rows, 6)}


def speech(rows: int) -> Example:
    features = torch.randn(rows, 32, 16)
    return (), {"input_features": features, "decoder_input_ids": tokens(rows, 6)}


def image_and_text(rows: int) -> Example:
    ids = tokens(rows)
    ids[:, -1] = 2
    return (), {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 16, 16)}


def clip(kind: str) -> nn.Module:
    text = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **PATCHES}
    options: dict[str, Any] = {"text_config": text, "vision_config": vision}
    return build(kind, "AutoModel", {**options, "projection_dim": 8})


def llava() -> nn.Module:
    """Pictures' features in the places of a text's tokens for them."""
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, projection_dim=8, **PATCHES
    )
    language = transformers.LlamaConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **LLAMA_LIKE
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=language, image_token_id=98, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def picture_in_text(rows: int) -> Example:
    ids = torch.randint(3, 98, (rows, 10))
    ids[:, 2:6] = 98  # four patches
    return (), {"input_ids": ids, "pixel_values": torch.randn(rows, 3, 16, 16)}


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def conditional_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def diffusion_transformer() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        norm_num_groups=4,
        sample_size=8,
        num_embeds_ada_norm=10,
    )


def autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=2,
    )


def noisy(rows: int, channels: int = 3) -> Example:
    steps = torch.randint(10, (rows,))
    return (torch.randn(rows, channels, 8, 8), steps), {"return_dict": False}


def noisy_with_text(rows: int) -> Example:
    return (*noisy(rows, 4)[0], torch.randn(rows, 5, 8)), {"return_dict": False}


def noisy_with_class(rows: int) -> Example:
    sample, steps = noisy(rows, 4)[0]
    return (sample,), {
        "timestep": steps,
        "class_labels": torch.randint(10, (rows,)),
        "return_dict": False,
    }


def picture(rows: int) -> Example:
    return (torch.randn(rows, 3, 16, 16),), {"return_dict": False}


class DenseGraphs(nn.Module):
    """Graphs of as many nodes, as a tensor of nodes and one of edges."""

    def __init__(self, kind: str) -> None:
        import torch_geometric.nn.dense as dense

        super().__init__()
        made = getattr(dense, kind)
        self.layers = nn.ModuleList([made(8, 8) for _ in range(3)])

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            nodes = layer(nodes, edges).relu()
        return nodes


def graphs(rows: int) -> Example:
    return (torch.randn(rows, 6, 8), (torch.rand(rows, 6, 6) > 0.5).float()), {}


def models() -> list[Model]:
    made = functools.partial
    image_classes = "AutoModelForImageClassification"
    vision_alone = ("siglip_vision_model", "clip_vision_model")
    found = [
        Model(
            "transformers",
            name,
            made(build, name, "AutoModel" if name in vision_alone else image_classes, options),
            made(
                image,
                size=32 if options.get("image_size") == 32 or "hidden_sizes" in options else 16,
            ),
        )
        for name, options in IMAGES.items()
    ]
    found += [
        Model("transformers", name, made(build, name, "AutoModelForCTC", options), wave)
        for name, options in WAVES.items()
    ]
    whisper = {
        **SEQUENCE,
        "num_mel_bins": 16,
        "max_source_positions": 16,
        "max_target_positions": 8,
    }
    read_aloud = {**SEQUENCE, "input_feat_per_channel": 16, "conv_channels": 8}
    read_aloud |= {"max_source_positions": 16, "max_target_positions": 8}
    sequence = "AutoModelForSpeechSeq2Seq"
    found += [
        Model("transformers", "whisper", made(build, "whisper", sequence, whisper), spectrum),
        Model(
            "transformers",
            "speech_to_text",
            made(build, "speech_to_text", sequence, read_aloud),
            speech,
        ),
        Model("transformers", "clip", made(clip, "clip"), image_and_text),
        Model("transformers", "siglip", made(clip, "siglip"), image_and_text),
        Model("transformers", "llava", llava, picture_in_text),
        Model("diffusers", "UNet2DModel", unet, noisy),
        Model("diffusers", "UNet2DConditionModel", conditional_unet, noisy_with_text),
        Model("diffusers", "DiTTransformer2DModel", diffusion_transformer, noisy_with_class),
        Model("diffusers", "AutoencoderKL", autoencoder, picture),
    ]
    found += [
        Model("torch_geometric", kind, made(DenseGraphs, kind), graphs)
        for kind in ("DenseGCNConv", "DenseSAGEConv", "DenseGraphConv", "DenseGATConv")
    ]
    return found
