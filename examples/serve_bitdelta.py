"""Makes one bit a weight of what fine-tuning changed, and serves both models in one pipeline.

    python examples/serve_bitdelta.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/serve_bitdelta.py     one process per stage

BitDelta (arXiv 2402.10193, section 3): of W_fine - W_base each matrix of the blocks keeps the
signs and one scale, the mean size, which is the best one by least squares. Each stage does so with
its own part. Each row of a batch says which model it asks: the base's product serves both, and that
of the signs is added for the fine-tuned one. The paper also tunes the scales by distillation; this
example does not. Prints the losses of all models on held-out text like that of the fine-tuning, and
the bytes of the change, and draws the losses of training into ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sysconfig
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from byte_text import RandomBatches, load_text
from gpt import GPT, Block, next_token_loss
from loss_curve import draw_losses, mean_of_last
from torch import nn

import pipedream2bw as pd2

State = Mapping[str, torch.Tensor]


class WithDelta(nn.Linear):
    """A layer of two models; ``asks`` [rows, 1, 1] is 1.0 for rows of the fine-tuned one."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_buffer("bits", torch.zeros(inputs * outputs // 8, dtype=torch.uint8))
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, x: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        signs = 2.0 * unpacked(self.bits).view_as(self.weight) - 1.0
        return F.linear(x, self.weight, self.bias) + asks * self.scale * F.linear(x, signs)


class ServedBlock(Block):
    """A block whose linear layers are those of two models."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.query_key_value = WithDelta(width, 3 * width, bias=False)
        self.projection = WithDelta(width, width, bias=False)
        self.mlp[0] = WithDelta(width, 4 * width, bias=True)
        self.mlp[2] = WithDelta(4 * width, width, bias=True)

    def forward(self, x: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        together = self.query_key_value(self.attention_norm(x), asks).chunk(3, dim=-1)
        query, key, value = (self.heads(each) for each in together)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2), asks)
        inside = F.gelu(self.mlp[0](self.mlp_norm(x), asks), approximate="tanh")
        return x + self.mlp[2](inside, asks)


class Served(GPT):
    def __init__(self, *, width: int, num_heads: int, **sizes: int) -> None:
        super().__init__(width=width, num_heads=num_heads, **sizes)
        self.blocks = nn.ModuleList(ServedBlock(width, num_heads) for _ in self.blocks)

    def forward(self, tokens: torch.Tensor, asks: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, asks)
        return self.head(self.norm(x))


def unpacked(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [n] as 0 and 1 [8 n]."""
    return ((bits[:, None] >> torch.arange(8, device=bits.device)) & 1).flatten()


def is_changed(name: str) -> bool:
    """Whether a parameter is a matrix of a block, which fine-tuning trains."""
    return name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name


def checksum(state: State) -> int:
    """A number that other weights do not have."""
    crc = 0
    for name in sorted(state):
        crc = zlib.crc32(state[name].contiguous().view(-1).view(torch.uint8).numpy().data, crc)
    return crc


def delta_of(base: State, fine: State) -> dict[str, torch.Tensor]:
    """The signs as bits, and the scale, of each matrix that was changed; and of which model."""
    delta = {"of": torch.tensor(checksum(base))}
    for name in filter(is_changed, base):
        change = fine[name] - base[name]
        signs = (change.flatten() > 0).unflatten(0, (-1, 8))
        layer = name.removesuffix("weight")
        delta[f"{layer}bits"] = (signs * (1 << torch.arange(8))).sum(1).to(torch.uint8)
        delta[f"{layer}scale"] = change.abs().mean()
    return delta


def with_delta(base: State, delta: State) -> dict[str, torch.Tensor]:
    """The state of a stage that serves both models.

    Raises:
        ValueError: the delta is of another model.
    """
    here, there = checksum(base), int(delta["of"])
    if here != there:
        raise ValueError(
            f"delta: of weights with the CRC-32 {there:08x}, these have {here:08x}: it can only be "
            "added to the weights that it was taken from"
        )
    return {**base, **{name: value for name, value in delta.items() if name != "of"}}


def train(
    pipe: pd2.PipelineModule, batches: RandomBatches, steps: int, learning_rate: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and this process's part of the weights at the end."""
    trained = [p for p in pipe.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW([{"params": trained}], lr=learning_rate, betas=(0.95, 0.99))
    opt = pd2.PipelineOptimizer(adamw, staleness=pd2.ErrorFeedback())
    losses = []
    for tokens, target in itertools.islice(batches, steps):
        losses.append(pipe.train_step(tokens, target=target))
        opt.step()
    pipe.flush()
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    return [float(loss) for loss in losses], state


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model and its fine-tuned one at once.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    library = Path(sysconfig.get_path("stdlib"))
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's library")
    add("--fine-tune-data", type=Path, default=library / "encodings", help="the same")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png")
    add("--stages", type=int, default=max(2, world))
    add("--steps", type=int, default=200, help="of training")
    add("--fine-tune-steps", type=int, default=60)
    add("--rows", type=int, default=16, help="per batch")
    add("--context", type=int, default=64, help="bytes per row")
    add("--width", type=int, default=64, help="a multiple of 8")
    add("--layers", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"num_layers": options.layers, "width": options.width, "num_heads": 4}
    sizes["context"] = options.context
    other = load_text(options.fine_tune_data)
    held_out = RandomBatches(other[-len(other) // 10 :], 64, options.context, seed=2)
    tokens, target = next(held_out)

    def pipeline(model: nn.Module, *example: torch.Tensor) -> pd2.PipelineModule:
        stages = options.stages
        return pd2.PipelineModule(
            model,
            next_token_loss,
            num_stages=stages,
            num_microbatches=2 * stages,
            schedule="2bw_fresh",
            split=[f"blocks.{i * options.layers // stages}" for i in range(1, stages)],
            example_args=example,
        )

    def loss_of(pipe: pd2.PipelineModule, *inputs: torch.Tensor) -> float:
        with torch.no_grad():
            return float(pipe.eval_step(*inputs, target=target))

    batches = RandomBatches(load_text(options.data), options.rows, options.context, seed=0)
    with pipeline(GPT(**sizes), tokens) as pipe:
        losses, base = train(pipe, batches, options.steps, 3e-3)
        alone = {"base": loss_of(pipe, tokens)}
    model = GPT(**sizes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_changed(name))
    batches = RandomBatches(other[: -len(other) // 10], options.rows, options.context, seed=1)
    with pipeline(model, tokens) as pipe:
        pipe.load_state_dict(base)
        tuned, fine = train(pipe, batches, options.fine_tune_steps, 1e-3)
        alone["fine-tuned"] = loss_of(pipe, tokens)

    delta = delta_of(base, fine)
    rows = len(tokens)
    asking = {"base": torch.zeros(rows, 1, 1), "one bit a weight": torch.ones(rows, 1, 1)}
    with pipeline(Served(**sizes), tokens, asking["base"]) as pipe:
        pipe.load_state_dict(with_delta(base, delta))
        served = {name: loss_of(pipe, tokens, asks) for name, asks in asking.items()}
        if pipe.rank == 0:
            draw_losses(losses + tuned, options.out / "loss.png")
            print(f"loss: {losses[0]:.3f} -> {mean_of_last(losses):.3f}")
            print("held-out loss on the text of the fine-tuning:")
            for name, loss in alone.items():
                print(f"  {name}: {loss:.4f}")
            for name, loss in served.items():
                print(f"  served, {name}: {loss:.4f}")
            whole = sum(fine[name].nbytes for name in filter(is_changed, fine))
            bits = sum(value.nbytes for value in delta.values())
            print(f"what was changed on stage 0: {whole:,} bytes, as bits {bits:,}", flush=True)


if __name__ == "__main__":
    main()
