"""What a choice of the tensor-parallel degree wins: rows a second over those of whole layers.

A transformer and a VGG, from a V100's figures, on two clusters of 16 devices: servers of four with
fast links inside and slow ones between them, and one network for all. Batches are small and large,
memory is ample and tight. No time is measured: all figures are the plans'. How near a plan is to
the best of all by enumeration is tested in tests/unit/planning/test_plan_tensor_parallel.py.

    python benchmarks/degrees.py [--smoke] [--json PATH]
"""

from __future__ import annotations

import itertools

import torch
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from torch import nn

import pipedream2bw as pd2

DEGREES = (1, 2, 4, 8)
CLUSTERS = {
    "servers of 4": pd2.Cluster.servers(
        16, devices_per_server=4, inside="130GB/s", outside="3GB/s"
    ),
    "one network": pd2.Cluster.servers(
        16, devices_per_server=16, inside="12GB/s", outside="12GB/s"
    ),
}
MEMORY = {"transformer": ("16GB", "900MB"), "vgg": ("16GB", "2GB")}
BATCHES = (4, 64)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, 64)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.second, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        made: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second(x))))
        return x + made


def transformer(blocks: int, width: int) -> tuple[nn.Sequential, torch.Tensor]:
    layers = [nn.Linear(width, width), *(Block(width) for _ in range(blocks))]
    return nn.Sequential(*layers), torch.empty(4, 512, width)


class VGG(nn.Module):
    """Of pairs of convolutions: the first is cut by its outputs, the second by its inputs."""

    def __init__(self, planes: int, size: int) -> None:
        super().__init__()
        wide = [3, *(planes * 2**k for k in range(4))]
        self.first = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1) for a, b in itertools.pairwise(wide))
        self.then = nn.ModuleList(nn.Conv2d(b, b, 3, 1, 1) for b in wide[1:])
        self.wide = nn.Linear(wide[-1] * (size // 16) ** 2, 4096)
        self.narrow = nn.Linear(4096, 4096)
        self.head = nn.Linear(4096, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, then in zip(self.first, self.then, strict=True):
            x = nn.functional.max_pool2d(then(first(x).relu()).relu(), 2)
        made: torch.Tensor = self.head(self.narrow(self.wide(x.flatten(1)).relu()).relu())
        return made


def vgg(planes: int, size: int) -> tuple[nn.Module, torch.Tensor]:
    return VGG(planes, size), torch.empty(4, 3, size, size)


CUT = {
    "transformer": (["*.query", "*.key", "*.value", "*.up"], ["*.out", "*.down"]),
    "vgg": (["first.*", "wide"], ["then.*", "narrow"]),
}


def rows_per_second(
    profile: pd2.Profile, name: str, cluster: str, memory: str, batch: int, degrees: tuple[int, ...]
) -> tuple[float, str]:
    """Of the best plan, and its mesh; 0 if the model does not fit."""
    sharded, summed = CUT[name]
    try:
        plan = pd2.plan(
            profile,
            devices=CLUSTERS[cluster],
            memory=memory,
            batch=batch,
            tensor_parallel=degrees,
            sharded=sharded,
            summed=summed,
        )
    except pd2.errors.DoesNotFit:
        return 0.0, "none"
    return plan.rows_per_second, " x ".join(map(str, plan.mesh.values()))


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=1).parse_args()
    where = machine()
    print(describe(where), flush=True)
    sizes = {"transformer": (2, 128), "vgg": (8, 32)} if options.smoke else {}
    makers = {"transformer": transformer, "vgg": vgg}
    figures = []
    for name, full in (("transformer", (12, 1024)), ("vgg", (64, 224))):
        model, x = makers[name](*sizes.get(name, full))
        target = torch.empty_like(model.to("meta")(x.to("meta")), device="cpu")
        profile = pd2.profile(
            model,
            nn.functional.mse_loss,
            example_args=(x,),
            target=target,
            microbatch_rows=(1, 2, 4),
            dry=pd2.KNOWN_DEVICES["v100"],
        )
        for cluster, memory, batch in itertools.product(CLUSTERS, MEMORY[name], BATCHES):
            alone, whole = rows_per_second(profile, name, cluster, memory, batch, (1,))
            best, mesh = rows_per_second(profile, name, cluster, memory, batch, DEGREES)
            setting = f"{name}, {cluster}, {memory}, batch {batch}: {whole} to {mesh}"
            if alone:
                gain = best / alone
                figures.append(Figure(setting, "rows/s over whole layers'", [gain], at_least=0.999))
            else:
                figures.append(Figure(setting, "rows/s, whole layers fit on no plan", [best]))
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures, smoke=options.smoke)


if __name__ == "__main__":
    main()
