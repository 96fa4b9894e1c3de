"""Trains a Llama whose stages are tensor-parallel, as torchtitan's plan cuts its layers.

    python examples/train_tensor_parallel.py        one thread per stage, no shards
    torchrun --standalone --nproc-per-node 4 examples/train_tensor_parallel.py --shards 2

Between the layers each process of a stage has its share of the sequence (sequence parallelism,
arXiv 2205.05198). Processes beyond stages * shards are replicas. ``--folder`` keeps checkpoints: a
run goes on with other numbers of stages, shards and replicas. Prints the first replica's losses.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pipedream2bw as pd2

VOCABULARY, CONTEXT = 64, 32


class Attention(nn.Module):
    """Causal attention; how many of its heads are here follows from the weights that are here."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, head)
        self.feed_norm, self.feed_forward = nn.RMSNorm(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_norm(x))


class Llama(nn.Module):
    def __init__(self, num_layers: int, width: int = 32, head: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, head) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Llama, tp: DeviceMesh) -> None:
    """Cuts the layers over the processes of a stage, and the sequence between them."""
    parallelize_module(
        model,
        tp,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(
            layer,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": whole,
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "feed_norm": SequenceParallel(),
                "feed_forward": whole,
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All replicas' rows; the next token follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    sequence = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    return sequence[:, :-1], sequence[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a Llama of tensor-parallel stages.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1, help="processes of each stage")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="of all replicas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedule", default="2bw_fresh")
    parser.add_argument("--folder", help="for checkpoints")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, mesh = Llama(options.layers), None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        replicas = world // (options.stages * options.shards)
        sizes = (replicas, options.stages, options.shards)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
        if options.shards > 1:
            parallelize(model, mesh["tp"])
            model = pd2.use_local_shards(model)
    rows = options.rows // (1 if mesh is None else mesh["dp"].size())
    pipe = pd2.PipelineModule(
        model,
        loss_fn,
        num_stages=options.stages,
        num_microbatches=4,
        schedule=options.schedule,
        example_args=(batch_of(0, rows)[0],),
        mesh=mesh,
    )
    with pipe:
        adamw = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        opt = pd2.PipelineOptimizer(adamw, max_grad_norm=1.0, staleness=pd2.ErrorFeedback())
        with contextlib.ExitStack() as saving:
            ckpt, first = None, 0
            if options.folder is not None:
                ckpt = saving.enter_context(pd2.Checkpointer(options.folder, pipe, opt, every=20))
                first = ckpt.resume()
            losses = []
            for step in range(first, options.steps):
                whole = batch_of(step, options.rows)
                tokens, targets = (part.chunk(pipe.width)[pipe.replica] for part in whole)
                losses.append(pipe.train_step(tokens, target=targets))
                opt.step()
                if ckpt is not None:
                    ckpt.step()
            values = [float(loss) for loss in losses]
        if pipe.rank == 0:
            print(f"loss: {values[0]:.5f} -> {values[-1]:.5f}", flush=True)


if __name__ == "__main__":
    main()
