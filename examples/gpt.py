"""A small GPT over bytes, or over words, which train_gpt.py trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

NUM_BYTES = 256


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a LayerNorm: [rows, context, width]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(
            self.heads(query), self.heads(key), self.heads(value), is_causal=True
        )
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, context, width] -> [rows, heads, context, width / heads]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class GPT(nn.Module):
    """Predicts each next token: [rows, context] int64 -> logits [rows, context, num_tokens].

    This is an ordinary module that knows nothing of pipelines. torch.fx can trace it, because no
    Python branch depends on a tensor. Head and embedding do not share weights.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        width: int,
        num_heads: int,
        context: int,
        num_tokens: int = NUM_BYTES,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        for name, parameter in self.named_parameters():
            # The embedding keeps its unit variance: with a smaller one the model learns little more
            # than the frequency of each byte in the first few hundred batches.
            if parameter.dim() == 2 and name != "embedding.weight":
                deep = name.endswith(("projection.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def for_planning() -> dict[str, Any]:
    """Returns what ``pipedream2bw plan --model gpt:for_planning`` needs, in the default sizes."""
    from word_text import load_words  # beside this file

    tokens = torch.zeros(1, 64, dtype=torch.int64)
    num_tokens = load_words(None).num_tokens
    return {
        "model": GPT(num_layers=4, width=128, num_heads=4, context=64, num_tokens=num_tokens),
        "loss_fn": next_token_loss,
        "example_args": (tokens,),
        "target": tokens,
    }


def next_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy in nats per token; an untrained model has ln(num_tokens)."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
