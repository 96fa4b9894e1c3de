"""Shapes of GPT models: parameters, operations and bytes of blocks, embedding and head.

Operations are those of matrix products, two for each multiplication and addition (Narayanan et al.
2021, arXiv 2104.04473, section 5.1); bytes kept for the backward are Korthikanti et al.'s (2022,
arXiv 2205.05198, section 4.1), with 2 bytes a value.
"""

from __future__ import annotations

import dataclasses

HALF = 2  # bytes of a value
SINGLE = 4


@dataclasses.dataclass(frozen=True)
class Gpt:
    """``layers`` blocks of ``hidden`` values a token, with an MLP of 4 times that, between an
    embedding and a head that uses the embedding's weights."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 512
    vocabulary: int = 50304  # GPT-2's 50,257, made a multiple of 128

    @property
    def block_parameters(self) -> int:
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and positions."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.embedding_parameters

    def block_flops(self, rows: int) -> float:
        """A block's forward; the backward takes twice that."""
        s, h = self.sequence, self.hidden
        return 24 * rows * s * h**2 * (1 + s / (6 * h))

    @property
    def attention_share(self) -> float:
        """Of a block's operations, those of products without a weight, queries with keys and so on.

        Both gradients of such a product are needed by the stage before.
        """
        attention = self.sequence / (6 * self.hidden)
        return attention / (1 + attention)

    def head_flops(self, rows: int) -> float:
        """The products with the vocabulary, likewise."""
        return 2 * rows * self.sequence * self.hidden * self.vocabulary

    def train_flops(self, rows: int, *, recompute: bool) -> float:
        """Forward and backward of the whole model; blocks' forwards twice with ``recompute``."""
        passes = 4 if recompute else 3
        return passes * self.layers * self.block_flops(rows) + 3 * self.head_flops(rows)

    def hidden_bytes(self, rows: int) -> int:
        """What a block takes and gives: a message, or what recomputation keeps of a block."""
        return HALF * rows * self.sequence * self.hidden

    def kept_bytes(self, rows: int, tensor: int = 1, *, scores: bool = True) -> float:
        """What a block keeps for its backward on each of ``tensor`` devices that share it.

        ``scores``: attention's are kept; not so where a fused kernel computes them again.
        """
        of_scores = 5 * self.heads * self.sequence / self.hidden if scores else 0
        values = 10 + (24 + of_scores) / tensor
        return rows * self.sequence * self.hidden * values

    def logit_values(self, rows: int) -> int:
        return rows * self.sequence * self.vocabulary


# The paper's, as its authors' sweep has them (and PAPER.md).
GPT_1_3B = Gpt("GPT 1.3B", layers=24, hidden=2048, heads=16)
GPT_2_2B = Gpt("GPT 2.2B", layers=32, hidden=2304, heads=32)
GPT_3_8B = Gpt("GPT 3.8B", layers=32, hidden=3072, heads=32)
GPT_28_3B = Gpt("GPT 28.3B", layers=2240, hidden=1024, heads=16)
# Of zero bubble's paper (arXiv 2401.10241).
GPT_6_2B = Gpt("GPT 6.2B", layers=30, hidden=4096, heads=32, sequence=1024)
