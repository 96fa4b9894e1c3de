"""Text from a model in a pipeline, one token a forward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from word_text import Text

import pipedream2bw as pd2

PROMPT = b"\nThis"


def write_text(pipe: pd2.PipelineModule, text: Text, context: int, num_tokens: int) -> bytes:
    """Continues PROMPT with the model and returns the same text on every rank.

    Each token takes one forward through the pipeline on the newest weights. Attention is causal:
    the last token does not see what follows it, so short texts are padded with zeros.
    """
    pipe.eval()
    written = text.encode(PROMPT)
    generator = torch.Generator().manual_seed(0)
    speaker = torch.tensor(pipe.rank if pipe.gives_output else -1)
    if dist.is_initialized():
        dist.all_reduce(speaker, dist.ReduceOp.MAX)
    for _ in range(num_tokens):
        window = written[-context:]
        tokens = torch.zeros(1, context, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(window)
        logits = pipe(tokens)  # None in processes without the last stage
        following = torch.zeros(1, dtype=torch.int64)
        if logits is not None:
            odds = torch.softmax(logits[0, len(window) - 1].float() / 0.7, dim=0)
            following = torch.multinomial(odds, 1, generator=generator)
        if dist.is_initialized():
            dist.broadcast(following, src=int(speaker))
        written.append(int(following))
    pipe.train()
    return text.decode(written)
