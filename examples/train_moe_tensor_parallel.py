"""Trains a mixture of experts that the processes of a tensor-parallel stage share out.

    python examples/train_moe_tensor_parallel.py        one thread per stage, no shards
    torchrun --standalone --nproc-per-node 4 examples/train_moe_tensor_parallel.py --shards 2

PPMoE (arXiv 2304.11414, section 3): all processes of a stage have all tokens, as under tensor
parallelism, and each computes those of its own experts. The sum over the processes, which a plain
MLP needs there, too, brings the experts' outputs together. No token travels, so the two all-to-alls
of expert parallelism do not arise. Prints the losses, and what a process sends in a forward beside
what it would in the all-to-alls: tokens whose experts are elsewhere, by this run's gates. The sum
is counted as a ring's, 2 (t - 1) / t of the tensor for t processes. A backward sends as much again.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from train_tensor_parallel import CONTEXT, VOCABULARY, batch_of, loss_fn

import pipedream2bw as pd2

CHOSEN = 2  # experts for a token


class Whole(torch.autograd.Function):
    """The same values on all processes; their gradients are added up (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """The sum over the processes; each has its gradient (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Experts(nn.Module):
    """Adds to each token what its experts make of it: [rows, context, width].

    Args:
        group: the processes that share out the experts; None: all are here.

    The buffer ``travelling`` counts the last microbatch's choices of experts that are on another
    process than the token would be, were the tokens shared out.
    """

    def __init__(self, width: int, num_experts: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, num_experts, bias=False)
        whole = torch.randn(2, num_experts, 2 * width, width) * 0.1
        number, count = (0, 1) if group is None else (group.rank(), group.size())
        self.expand, self.contract = map(nn.Parameter, whole.chunk(count, dim=1)[number].clone())
        self.num_experts, self.group = num_experts, group
        self.register_buffer("travelling", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        odds = self.gate(normed).softmax(dim=-1)
        chosen = F.one_hot(odds.topk(CHOSEN, dim=-1).indices, self.num_experts).sum(dim=-2)
        gates = odds * chosen
        gates = gates / gates.sum(dim=-1, keepdim=True)
        self.count(chosen)
        if self.group is not None:
            normed, gates = Whole.apply(normed, self.group), Whole.apply(gates, self.group)
            gates = gates.chunk(self.group.size(), dim=-1)[self.group.rank()]
        added = torch.zeros_like(x)
        for i in range(len(self.expand)):  # those that are here
            added = added + gates[..., i : i + 1] * self.one(normed, i)
        return x + (added if self.group is None else Summed.apply(added, self.group))

    def one(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return F.relu(x @ self.expand[i].T) @ self.contract[i]

    @torch.no_grad()
    def count(self, chosen: torch.Tensor) -> None:
        """Counts what would travel, were the tokens shared out among the processes, in order."""
        if self.group is not None:
            size = self.group.size()
            of_process = chosen.flatten(0, 1).unflatten(-1, (size, -1)).sum(dim=-1)
            at_home = sum(part[:, i].sum() for i, part in enumerate(of_process.tensor_split(size)))
            self.travelling.copy_(of_process.sum() - at_home)


class Head(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))


class Mixing(nn.Module):
    """Lets each token see the ones before it: their running mean, [rows, context, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
        return x + self.linear(x.cumsum(dim=1) / lengths[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains experts that a tensor group shares out.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1, help="processes of each stage")
    parser.add_argument("--experts", type=int, default=4, help="of each layer")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.experts % options.shards != 0:
        parser.error(f"--experts: {options.experts}, --shards: {options.shards} must divide it")

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if options.shards > 1 and processes != options.stages * options.shards:
        parser.error(
            f"--stages: {options.stages}, --shards: {options.shards}, processes: {processes}: each "
            "shard of a stage needs one: torchrun --nproc-per-node, the product of both"
        )

    torch.manual_seed(0)
    mesh, tp = None, None
    if processes > 1:
        sizes = (1, options.stages, options.shards)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
        tp = mesh["tp"] if options.shards > 1 else None
    width, group = options.width, None if tp is None else tp.get_group()
    layers = [
        layer
        for _ in range(options.stages)
        for layer in (Mixing(width), Experts(width, options.experts, group))
    ]
    layers = [nn.Embedding(VOCABULARY, width), *layers, Head(width)]
    cuts = [round(i * len(layers) / options.stages) for i in range(options.stages + 1)]
    model = nn.Sequential(*(nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(cuts)))
    if tp is not None:
        model = pd2.use_local_shards(model, {"*.expand": ("tp", 0), "*.contract": ("tp", 0)})
    pipe = pd2.PipelineModule(
        list(model),
        loss_fn,
        num_microbatches=4,
        schedule="2bw_fresh",
        example_args=(batch_of(0, options.rows)[0],),
        mesh=mesh,
    )
    with pipe:
        adamw = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        opt = pd2.PipelineOptimizer(adamw, max_grad_norm=1.0, staleness=pd2.ErrorFeedback())
        losses = []
        for step in range(options.steps):
            tokens, targets = batch_of(step, options.rows)
            losses.append(pipe.train_step(tokens, target=targets))
            opt.step()
        values = [float(loss) for loss in losses]
        travelling = [v for n, v in pipe.state_dict().items() if n.endswith("travelling")]
        if pipe.rank == 0:
            print(f"loss: {values[0]:.5f} -> {values[-1]:.5f}", flush=True)
        if pipe.rank == 0 and tp is not None:
            t, tokens_of_one = options.shards, options.rows // 4 * CONTEXT
            summed = 2 * (t - 1) / t * tokens_of_one * width * 4
            both_ways = 2 * float(travelling[0]) / t * width * 4
            print(f"a process sends in a layer's forward, of {tokens_of_one} tokens:")
            print(f"all-reduce, as of a plain MLP: {summed:,.0f} bytes")
            print(f"two all-to-alls instead: {both_ways:,.0f} bytes", flush=True)


if __name__ == "__main__":
    main()
