"""Trains a byte-level GPT whose MLPs are mixtures of experts, with a loss that balances them.

    python examples/train_moe.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_moe.py     one process per stage

The balance loss (arXiv 2101.03961, equation 4) arises in every block, on whichever stage that is:
``pd2.add_loss`` adds it there, and nothing is sent to the last stage. Prints the loss and the
shares of tokens that the experts of the last block get, and draws loss.png into ``--out``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from byte_text import RandomBatches, load_text
from gpt import GPT, next_token_loss
from loss_curve import draw_losses, mean_of_last
from torch import nn

import pipedream2bw as pd2

CHOSEN = 2  # experts for a token


class Experts(nn.Module):
    """Sends every token to the experts with the highest gates: [rows, context, width].

    All experts see all tokens, and a token's other experts count nothing: shapes do not depend on
    the data, so torch.fx can trace it. The buffer ``shares`` has the last microbatch's shares.
    """

    def __init__(self, width: int, num_experts: int, balance: float) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.expand = nn.Parameter(torch.randn(num_experts, width, 2 * width) * 0.02)
        self.contract = nn.Parameter(torch.randn(num_experts, 2 * width, width) * 0.02)
        self.num_experts = num_experts
        self.balance = balance
        self.register_buffer("shares", torch.zeros(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odds = self.gate(x).softmax(dim=-1)
        best = odds.topk(CHOSEN, dim=-1).indices
        chosen = F.one_hot(best, self.num_experts).sum(dim=-2).to(odds.dtype)
        gates = odds * chosen
        gates = gates / gates.sum(dim=-1, keepdim=True)
        shares = chosen.mean(dim=(0, 1)) / CHOSEN
        self.shares.copy_(shares)
        even = self.num_experts * (shares * odds.mean(dim=(0, 1))).sum()  # 1 if all are alike
        x = pd2.add_loss(x, self.balance * even)
        inside = torch.einsum("rcw,ewh->rceh", x, self.expand).relu()
        return torch.einsum("rceh,ehw,rce->rcw", inside, self.contract, gates)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a mixture of experts as a pipeline.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's library")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png")
    add("--stages", type=int, default=max(2, world))
    add("--steps", type=int, default=200)
    add("--rows", type=int, default=16, help="per batch")
    add("--context", type=int, default=64, help="bytes per row")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=4)
    add("--balance", type=float, default=0.01, help="weight of the balance loss")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(
        num_layers=options.layers, width=options.width, num_heads=4, context=options.context
    )
    for block in model.blocks:
        block.mlp = Experts(options.width, options.experts, options.balance)
    batches = RandomBatches(load_text(options.data), options.rows, options.context, seed=0)
    tokens, _ = next(batches)
    with pd2.PipelineModule(
        model,
        next_token_loss,
        num_stages=options.stages,
        num_microbatches=2 * options.stages,
        schedule="2bw_fresh",
        example_args=(tokens,),
    ) as pipe:
        adamw = torch.optim.AdamW(pipe.parameters(), lr=3e-3, betas=(0.95, 0.99))
        optimizer = pd2.PipelineOptimizer(adamw, staleness=pd2.ErrorFeedback())
        losses = []
        for _ in range(options.steps):
            tokens, target = next(batches)
            losses.append(pipe.train_step(tokens, target=target))
            optimizer.step()
        values = [float(loss) for loss in losses]
        last = f"blocks.{options.layers - 1}.mlp.shares"
        shares = pipe.full_state_dict()  # of the whole model, on rank 0
        if pipe.rank == 0:
            draw_losses(values, options.out / "loss.png")
            print(f"loss: {values[0]:.3f} -> {mean_of_last(values):.3f}")
            print("shares of the last block's experts:", end=" ")
            print(", ".join(f"{share:.2f}" for share in shares[last].tolist()), flush=True)


if __name__ == "__main__":
    main()
