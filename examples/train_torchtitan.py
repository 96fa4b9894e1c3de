"""Trains torchtitan's own Llama, cut by its own plan of tensor and sequence parallelism.

    pip install torchtitan==0.1.0 tensorboard tyro     later versions import Triton
    python examples/train_torchtitan.py               one thread per stage, no shards
    torchrun --standalone --nproc-per-node 4 examples/train_torchtitan.py --shards 2

Of torchtitan come the model and ``apply_tp``; its stages, schedule, clipping and loop go. Processes
beyond stages * shards are replicas. Prints the first replica's losses.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import apply_tp

import pipedream2bw as pd2

VOCABULARY, CONTEXT, ROWS = 64, 32, 8


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1, help="tensor-parallel degree")
    parser.add_argument("--schedule", default="2bw_fresh")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
    model: torch.nn.Module = Transformer(
        TransformerModelArgs(vocab_size=VOCABULARY, max_seq_len=CONTEXT, **sizes)
    )
    model.init_weights()  # type: ignore[operator]
    mesh = None
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        replicas = processes // (options.stages * options.shards)
        shape = (replicas, options.stages, options.shards)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
    if mesh is not None and options.shards > 1:
        apply_tp(
            model,
            mesh["tp"],
            loss_parallel=False,
            enable_float8_tensorwise_tp=False,
            enable_async_tp=False,
        )
        model = pd2.use_local_shards(model)

    replica = 0 if mesh is None else mesh.get_local_rank("dp")
    drawn = torch.Generator().manual_seed(1 + replica)
    text = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1), generator=drawn)  # learnt by heart
    tokens, target = text[:, :-1], text[:, 1:]
    with pd2.PipelineModule(
        model,
        cross_entropy,
        num_stages=options.stages,
        num_microbatches=4,
        schedule=options.schedule,
        mesh=mesh,
        example_args=(tokens,),
    ) as pipe:
        adamw = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        opt = pd2.PipelineOptimizer(adamw, max_grad_norm=1.0)
        losses = []
        for _ in range(options.steps):
            losses.append(pipe.train_step(tokens, target=target))
            opt.step()
        if mesh is None or mesh.get_rank() == 0:
            print(f"loss: {float(losses[0]):.5f} -> {float(losses[-1]):.5f}")


if __name__ == "__main__":
    main()
