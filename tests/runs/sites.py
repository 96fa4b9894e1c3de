"""Pipelines on several sites, which share a store and no process group."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD

import pipedream2bw as pd2
from benchmarks.measuring.delays import delayed_messages, delays_everywhere
from tests.device.on_device import batch_on, on
from tests.references.mixed_oracle import MixedOracle, lowered
from tests.references.oracle import Oracle
from tests.references.seldom_oracle import SeldomOracle
from tests.runs.trajectory import copy_of, drawing, make_pipeline
from tests.samples.models import TASKS, Task, whole
from tests.samples.tied_models import TIED, summing, untied

OUTER = {"lr": 0.7, "momentum": 0.9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How sites train.

    Attributes:
        in_processes: whether each stage of a site is a process; else it is a thread.
        width: replicas of each site.
        hook: whether a gradient hook averages over these.
        device: where the stages are; None: the CPU.
        late: whether messages within a site take their time, differently each.
        averages: whether the sites' outer optimizer is the default; else it is DiLoCo's.
    """

    num_sites: int = 2
    num_stages: int = 2
    in_processes: bool = False
    width: int = 1
    hook: bool = False
    device: str | None = None
    task: str = "skips"
    schedule: str = "2bw"
    every: int = 4
    staggered: bool = True
    num_microbatches: int | None = None  # None: twice the stages
    precision: str | None = None
    momentum: float = 0.5
    batches: int = 10
    late: bool = False
    averages: bool = False

    @property
    def ranks(self) -> int:
        """Processes of a site."""
        return self.width * (self.num_stages if self.in_processes else 1)

    @property
    def microbatches(self) -> int:
        return self.num_microbatches or 2 * self.num_stages

    def make_task(self) -> Task:
        task = TASKS.get(self.task) or TIED[self.task]
        if self.precision is not None:
            task = dataclasses.replace(task, loss_fn=float_loss)
        return task if self.device is None else on(task, self.device)

    def data(self) -> list[list[list[Any]]]:
        """Batches by site, replica and number."""
        rows = [2 * self.microbatches] * self.batches
        task = self.make_task()

        def of_replica(number: int) -> list[Any]:
            batches = task.batches(rows, seed=10 + number)
            return batches if self.device is None else [batch_on(b, self.device) for b in batches]

        first = range(0, self.num_sites * self.width, self.width)
        return [[of_replica(site + i) for i in range(self.width)] for site in first]

    def sgd(self, parameters: Any) -> torch.optim.Optimizer:
        return SGD(parameters, lr=0.05, momentum=self.momentum)


def float_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


def join_site(folder: str, name: str, rank: int, ranks: int) -> tuple[int, dist.Store]:
    """This process's site, and its client of the store; makes the site's process group.

    Args:
        name: of these sites; others have another one.
        ranks: processes of a site.
    """
    torch.set_num_threads(1)
    site = rank // ranks
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{name}{site}", rank=rank % ranks, world_size=ranks
        )
    return site, dist.PrefixStore(name, dist.FileStore(f"{folder}/store", -1))


def sync_of(setting: Setting, store: dist.Store, site: int, **options: Any) -> pd2.ReplicaSync:
    given: dict[str, Any] = {
        "every": setting.every,
        "store": store,
        "site": site,
        "num_sites": setting.num_sites,
        "staggered": setting.staggered,
    }
    if not setting.averages:
        given["outer"] = functools.partial(SGD, nesterov=True, **OUTER)
    return pd2.ReplicaSync(**{**given, **options})


def pipe_of(setting: Setting, site: int, **options: Any) -> pd2.PipelineModule:
    """Of other weights on each site."""
    task = setting.make_task()
    given: dict[str, Any] = {"schedule": setting.schedule, "precision": setting.precision}
    return make_pipeline(
        task,
        setting.num_stages,
        setting.microbatches,
        setting.data()[0][0][0],
        model=task.model(seed=1 + site),
        width=setting.width,
        **{**given, **options},
    )


def stages_of(pipe: pd2.PipelineModule) -> dict[str, int]:
    """The first stage that holds each parameter."""
    programs = pipe.session.modes.first.programs
    found: dict[str, int] = {}
    for program in programs:
        for name in program.parameters:
            found.setdefault(name, program.index)
    return found


@dataclasses.dataclass
class SiteResult:
    """What a process of a site has at the end."""

    site: int
    replica: int
    losses: list[float]
    state: dict[str, torch.Tensor]
    anchors: dict[str, torch.Tensor]
    stages: dict[str, int]


def result_of(
    site: int, pipe: pd2.PipelineModule, losses: Sequence[Any], sync: pd2.ReplicaSync
) -> SiteResult:
    """Drains."""
    state = {name: value.cpu() for name, value in copy_of(pipe.state_dict()).items()}
    found = [float(loss) for loss in losses]
    return SiteResult(site, pipe.replica, found, state, sync.anchors(), stages_of(pipe))


def delays_of(setting: Setting, site: int) -> contextlib.AbstractContextManager[None]:
    if not setting.late:
        return contextlib.nullcontext()
    if not setting.in_processes:
        return delayed_messages(0.0, 0.01, site)
    return delays_everywhere(0.01, site)


def train_site(rank: int, world: int, folder: str, settings: list[Setting]) -> list[SiteResult]:
    """Trains as each setting says; all have as many processes for a site."""
    results = []
    for number, setting in enumerate(settings):
        site, store = join_site(folder, f"setting{number}", rank, setting.ranks)
        with delays_of(setting, site), pipe_of(setting, site) as pipe:
            if setting.hook:
                pipe.register_comm_hook(None, allreduce_hook)
            sync = sync_of(setting, store, site)
            opt = pd2.PipelineOptimizer(setting.sgd(pipe.parameters()), replica_sync=sync)
            losses = []
            for batch in setting.data()[site][pipe.replica]:
                losses.append(pipe.train_step(*batch.args, target=batch.target))
                opt.step()
            results.append(result_of(site, pipe, losses, sync))
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


class _Replicas:
    """An oracle of several replicas as one of a site."""

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle
        self.model = oracle.model

    @property
    def versions(self) -> Any:
        return self.oracle.versions

    def train_step(self, batches: Any) -> Any:
        return self.oracle.train_replicas(batches)


def expected(
    setting: Setting,
    stages: dict[str, int],
    before: Mapping[int, Callable[[SeldomOracle], None]] = {},
) -> tuple[list[list[list[float]]], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Losses by batch, site and replica, each site's weights, and the anchors.

    Args:
        before: by batch: what happens before it.
    """
    setting = dataclasses.replace(setting, device=None)
    task = setting.make_task()
    delay = int("2bw" in setting.schedule)
    sites: list[_Replicas] = []
    for _ in range(setting.num_sites):
        model = whole(untied(task.model()) if setting.task in TIED else task.model())
        make = (
            summing(SGD, lr=0.05, momentum=setting.momentum)
            if setting.task in TIED
            else setting.sgd
        )
        optimizer = make(model.parameters())
        m = setting.microbatches
        oracle: Any
        if setting.precision is None:
            oracle = Oracle(model, optimizer, m, task.loss_fn, delay, drawing=drawing)
        else:
            dtype = torch.bfloat16
            low = lowered(model, dtype)
            oracle = MixedOracle(model, low, optimizer, m, task.loss_fn, delay, dtype=dtype)
        sites.append(_Replicas(oracle))
    first = dict(sites[0].model.named_parameters())
    names = {id(parameter): name for name, parameter in first.items()}
    offsets = [
        stages[names[id(getattr(p, "first_use", p))]] * setting.every // setting.num_stages
        if setting.staggered
        else 0
        for p in first.values()
    ]
    outer = {"lr": 1.0, "momentum": 0.0} if setting.averages else OUTER
    oracle = SeldomOracle(sites, setting.every, offsets, **outer)
    data = setting.data()
    losses = []
    for t in range(setting.batches):
        before.get(t, lambda _: None)(oracle)
        losses.append(oracle.train_step([[each[t] for each in of_site] for of_site in data]))
    anchors = dict(zip(first, oracle.anchors, strict=True))
    return losses, [copy_of(site.model.state_dict()) for site in sites], anchors


def assert_expected(setting: Setting, result: SiteResult, want: Any) -> None:
    """To the bit."""
    losses, states, anchors = want
    assert result.losses == [batch[result.site][result.replica] for batch in losses], setting
    for name, tensor in result.state.items():
        assert torch.equal(tensor, states[result.site][name]), (setting, name)
    for name, tensor in result.anchors.items():
        assert torch.equal(tensor, anchors[name]), (setting, name)
