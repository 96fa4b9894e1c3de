"""With graphs training gives the bits that it gives without, whatever cannot be recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import pipedream2bw as pd2
from pipedream2bw.runtime.graphs import StageGraphs
from tests.runs.trajectory import Trajectory, copy_of

from .device import Device
from .section import Pace, Rows
from .training import distance, repeatable, sgd, sgd_of

WIDTH, M, NUM_BATCHES = 64, 3, 16
ROWS, FEW_ROWS = 2048, 2
"""Of a microbatch. Messages of so many that are never freed add up to 3 MiB in a batch."""
ALL_RECORDED = 8
"""By this batch every kind of microbatch has been recorded, or its recording has failed."""
MOST_GROWN = 8 << 20
"""Bytes: streams that are late for once need memory beside."""

Act = Callable[[torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Two layers, and between them what may not be recordable."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.first, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.behind(self.act(self.first(x)))
        return y


def in_backward(do: Act) -> Act:
    def act(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(do)
        return x * 1

    return act


def read(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.sum().item() > 0 else 1.0)


def draw(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.25)


def draw_more(x: torch.Tensor) -> torch.Tensor:
    """Draws of every kind of operator: fused dropout, and those that take a generator."""
    order = torch.randperm(x.shape[0], device=x.device)
    some = torch.bernoulli(torch.full_like(x, 0.75))
    return F.dropout(x[order], 0.25) * some + 0.1 * torch.rand_like(x)


def attend(kind: str) -> Act:
    """Attention that drops, as torch's kernel of that kind computes it."""

    def act(x: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if kind == "EFFICIENT_ATTENTION" else torch.bfloat16
        heads = x.to(dtype).view(1, -1, 1, WIDTH).transpose(1, 2)
        with sdpa_kernel(getattr(SDPBackend, kind)):
            mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.25)
        return mixed.transpose(1, 2).reshape(x.shape).to(x.dtype)

    return act


def draw_in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(draw, x, use_reentrant=False)
    return result


def draw_by_own(x: torch.Tensor) -> torch.Tensor:
    """By a generator that is new in every call: it draws the same numbers each time."""
    own = torch.Generator(x.device).manual_seed(7)
    return x + torch.rand(x.shape, generator=own, device=x.device)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a pipeline of two stages is trained, of which the last one acts."""

    act: Act = torch.relu
    is_recorded: bool = True
    """Whether all of the last stage's forwards and backwards can be."""
    on_host: bool = False
    looks: bool = False
    """A timeline is made and a checkpoint saved while graphs are recorded."""
    empties: bool = False
    """The caller gives the allocator's cache back again and again."""
    caller_draws: bool = True
    """Beside stages that draw by operators without a generator it would shift their numbers."""


TRAININGS = {
    "all is recorded": Training(),
    "the host reads numbers in a forward": Training(read, is_recorded=False),
    "the host reads numbers in a backward": Training(in_backward(read), is_recorded=False),
    "a forward draws": Training(draw, caller_draws=False),
    "a forward draws in many ways": Training(draw_more, caller_draws=False),
    "a forward draws, the optimizer on the host": Training(draw, on_host=True, caller_draws=False),
    "a forward draws in a checkpoint": Training(
        draw_in_checkpoint, is_recorded=False, caller_draws=False
    ),
    "a forward draws by its own generator": Training(draw_by_own, is_recorded=False),
    "a backward draws": Training(in_backward(draw), is_recorded=False, caller_draws=False),
    "the optimizer is on the host": Training(on_host=True),
    "a timeline, and a checkpoint in every batch": Training(looks=True),
    "empty_cache() all along": Training(empties=True),
}
OF_A_GPU = {
    "flash attention drops": Training(attend("FLASH_ATTENTION"), caller_draws=False),
    "cuDNN's attention drops": Training(attend("CUDNN_ATTENTION"), caller_draws=False),
    "memory-efficient attention drops": Training(
        attend("EFFICIENT_ATTENTION"), is_recorded=False, caller_draws=False
    ),
}
ALIKE = 1e-3
"""Relative distance, where torch's own operators do not give the same bits again."""
EMPTIED = 20
"""How often in a batch: a recording takes milliseconds."""


def run(device: Device, rows: Rows) -> None:
    if not device.has_kernels:
        rows.absent("graphs", "the package is built without")
        return
    pace = Pace(rows)
    with repeatable():
        for name, training in TRAININGS.items():
            if pace.has_time(name):
                with rows.guarded(name):
                    judge(device, rows, name, training)
        for name, training in (OF_A_GPU if device.is_gpu else {}).items():
            if pace.has_time(name):
                with rows.guarded(name):
                    judge_attention(device, rows, name, training)


def judge(device: Device, rows: Rows, name: str, training: Training) -> None:
    want, _, _ = train(device, training, graphs=False)
    judge_graphs(device, rows, name, training, want, within=0.0)


def judge_attention(device: Device, rows: Rows, name: str, training: Training) -> None:
    """Torch's kernel may refuse what it is given, or give other bits when it is called again."""
    try:
        want, again = (train(device, training, graphs=False)[0] for _ in range(2))
        device.synchronize()
    except Exception as error:
        traceback.print_exc()
        rows.absent(name, f"also without graphs {type(error).__name__}: {error}")
        return
    differs = distance(again, want)
    if differs:
        rows.note(f"{name}: two trainings without graphs", f"their bits differ, by {differs:.1e}")
    judge_graphs(device, rows, name, training, want, within=ALIKE if differs else 0.0)


def judge_graphs(
    device: Device, rows: Rows, name: str, training: Training, want: Trajectory, *, within: float
) -> None:
    got, reports, grown = train(device, training, graphs="auto")
    device.synchronize()
    apart = distance(got, want)
    what = f"within {within:g} of" if within else "the bits of"
    rows.check(f"{name}: {what} a training without graphs", apart <= within, f"{apart:.1e}")
    first, last = reports[0], reports[1]
    is_right = all(of.forwards > 0 and of.backwards > 0 for of in (first, last))
    if not training.is_recorded:
        is_right = first.forwards > 0 and len(last.others) > 1
    rows.check(f"{name}: graphs are used where they can be", is_right, f"{last}")
    is_right = grown <= MOST_GROWN
    rows.check(f"{name}: later batches take no more memory", is_right, f"{grown:,} bytes")


def train(
    device: Device, training: Training, *, graphs: bool | str
) -> tuple[Trajectory, dict[int, StageGraphs], int]:
    """Losses and weights; what graphs did; and the bytes by which the last batches' memory grew."""
    torch.manual_seed(1)
    stages = [Layers(torch.relu), Layers(training.act)]
    num_rows = M * (ROWS if device.is_gpu else FEW_ROWS)
    options: dict[str, Any] = {}
    if training.on_host:
        options = {"optimizer_device": "cpu", "bucket_cap_mb": 1e-4}
    with pd2.PipelineModule(
        [stage.to(device.torch) for stage in stages],
        F.mse_loss,
        num_stages=2,
        num_microbatches=M,
        example_args=(torch.zeros(M, WIDTH, device=device.torch),),
        graphs=graphs,
        timeout=60.0,
        **options,
    ) as pipe:
        parameters = pipe.parameters()
        opt = pd2.PipelineOptimizer(
            sgd(parameters) if training.on_host else sgd_of(device, parameters)
        )
        with looking(pipe, opt) if training.looks else contextlib.nullcontext(lambda: None) as look:
            losses, before = [], 0
            for number in range(NUM_BATCHES):
                own = torch.Generator().manual_seed(number)
                x, target = torch.randn(2, num_rows, WIDTH, generator=own).to(device.torch)
                losses.append(pipe.train_step(x, target=target))
                opt.step()
                if training.caller_draws:
                    torch.rand(1, device=device.torch)  # also while a stage records
                look()
                for _ in range(EMPTIED if training.empties else 0):
                    with contextlib.suppress(RuntimeError):  # torch's, while a stage records
                        device.module.empty_cache()
                    time.sleep(1e-3)
                if number == ALL_RECORDED:
                    pipe.flush()
                    before = torch.accelerator.memory_reserved()
            pipe.flush()
            grown = torch.accelerator.memory_reserved() - before
        state = copy_of(pipe.state_dict())
        return Trajectory([loss.item() for loss in losses], state), pipe.graph_report(), grown


@contextlib.contextmanager
def looking(pipe: Any, opt: Any) -> Iterator[Callable[[], object]]:
    """Inside what is done is on a timeline; gives what saves a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        savings = []
        with pipe.timeline():
            yield lambda: savings.append(pd2.save(folder, pipe, opt))
        for saving in savings:
            saving.wait()
