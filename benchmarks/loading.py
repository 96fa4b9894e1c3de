"""How much memory a rank takes to get the values of its stage, by how the model is constructed.

A model of transformer blocks, |W| bytes of float32 weights, d stages in d processes, 2bw. Growth is
VmHWM (the peak of resident memory, mapped files included) once the pipeline can train less VmRSS
before the model was constructed, in a fresh process that has made a pipeline of one small layer a
stage before. A rank has buffers for two weight versions and gradients, 3 |W|/d, and for a time the
values that go there, |W|/d.

    whole         every rank constructs the whole model
    deferred      deferred_init(): the stage's part is initialised as in the whole construction
    safetensors   constructed on meta, the stage's part read from a file
    sharded       the same from four files of safetensors and their index
    torch         the same from a file of torch.save
    distributed   the same from a folder of torch.distributed.checkpoint

    python benchmarks/loading.py [--smoke] [--json PATH]
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measuring.memory import resident_bytes
from measuring.ranks import run_on_ranks
from measuring.report import Figure, arguments, describe, machine, print_table, write_json
from measuring.stages import TransformerBlock
from safetensors.torch import save_file
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.model.storages import return_freed_memory

NUM_STAGES = 4
WAYS = ("whole", "deferred", "safetensors", "sharded", "torch", "distributed")
IDEAL_GROWTH_OVER_PART = 4.0
MAX_GROWTH_OVER_PART = 4.25
"""The libraries, and the largest parameter, come on top."""


@dataclasses.dataclass(frozen=True)
class Size:
    hidden: int
    layers: int  # of the model

    def build(self) -> nn.Module:
        heads = max(1, self.hidden // 64)
        return nn.Sequential(*(TransformerBlock(self.hidden, heads) for _ in range(self.layers)))


SIZE = Size(hidden=1024, layers=16)
SMOKE_SIZE = Size(hidden=64, layers=4)


def write_checkpoints(folder: Path, size: Size) -> int:
    """Writes the same model in every format; gives its bytes."""
    torch.manual_seed(0)
    state = size.build().state_dict()
    save_file(state, folder / "safetensors.safetensors")
    torch.save(state, folder / "torch")
    dcp.save(dict(state), checkpoint_id=folder / "distributed", no_dist=True)
    (folder / "sharded").mkdir()
    places = {}
    for i in range(4):
        names = list(state)[i * len(state) // 4 : (i + 1) * len(state) // 4]
        save_file({name: state[name] for name in names}, folder / "sharded" / f"{i}.safetensors")
        places.update(dict.fromkeys(names, f"{i}.safetensors"))
    index = folder / "sharded" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return sum(value.nbytes for value in state.values())


def construct(way: str, build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    if way == "whole":
        return build()
    if way == "deferred":
        return pd2.deferred_init(build)
    with torch.device("meta"):
        return build()


def pipeline(model: nn.Module, hidden: int) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        model,
        nn.functional.mse_loss,
        num_stages=NUM_STAGES,
        num_microbatches=NUM_STAGES,
        example_args=(torch.zeros(1, 4, hidden),),
    )


def measure(rank: int, world_size: int, way: str, size: Size, folder: Path) -> dict[str, float]:
    """Runs on every rank: growth, seconds, and whether the values are the model's."""
    with pipeline(construct("whole", Size(64, NUM_STAGES).build), 64) as small:
        small.flush()
    return_freed_memory()
    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    pipe = pipeline(construct(way, size.build), size.hidden)
    if way not in ("whole", "deferred"):
        file = "safetensors.safetensors" if way == "safetensors" else way
        pipe.load_checkpoint(folder / file)
    seconds = time.perf_counter() - start
    growth = resident_bytes("VmHWM") - before
    stored = torch.load(folder / "torch", mmap=True, weights_only=True)
    equal = all(torch.equal(value, stored[name]) for name, value in pipe.state_dict().items())
    pipe.close()
    return {"growth": growth, "seconds": seconds, "equal": equal}


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=None).parse_args()
    size = SMOKE_SIZE if options.smoke else SIZE
    where = machine()
    print(describe(where), flush=True)
    figures: list[Figure] = []
    details = {}
    with tempfile.TemporaryDirectory() as name:
        total = write_checkpoints(Path(name), size)
        part = total / NUM_STAGES
        print(f"|W| = {total:,} bytes, {NUM_STAGES} stages, |W|/d = {part:,.0f}", flush=True)
        for way in WAYS:
            ranks = run_on_ranks(NUM_STAGES, measure, way, size, Path(name))
            for rank, found in enumerate(ranks):
                growth, seconds = found["growth"], found["seconds"]
                print(
                    f"  {way:12} rank {rank}: peak growth {growth:>13,} = "
                    f"{growth / total:.2f} |W|, {seconds:.1f} s, "
                    f"values {'equal' if found['equal'] else 'DIFFERENT'}",
                    flush=True,
                )
            worst = max(found["growth"] for found in ranks)
            bound = None if way == "whole" else MAX_GROWTH_OVER_PART
            measured = "worst rank: peak growth over |W|/d"
            figures.append(
                Figure(way, measured, [worst / part], at_most=bound, ideal=IDEAL_GROWTH_OVER_PART)
            )
            details[way] = ranks
    print()
    print_table(figures, judged=not options.smoke)
    equal = all(found["equal"] for ranks in details.values() for found in ranks)
    print(f"values: {'all equal' if equal else 'DIFFERENT, see above'}")
    write_json(options.json, where, figures, equal=equal, smoke=options.smoke, ranks=details)


if __name__ == "__main__":
    main()
