"""Every option trains processes with a device each to the bits of the same processes' CPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

import pipedream2bw as pd2
from pipedream2bw import _C
from pipedream2bw.optimizer.shares import is_divided
from pipedream2bw.ranks import channels
from tests.device import checked
from tests.device.checked import Asked, AskedKind
from tests.device.on_device import batch_on, on
from tests.device.test_host_optimizer import OPTIMIZERS, PRECISIONS
from tests.distributed.test_sharded_state import WIDTH, lopsided
from tests.exhaustive import exhaustive
from tests.references.oracle import Batch
from tests.runs.launch import run_ranks
from tests.runs.trajectory import Trajectory, assert_same, copy_of, make_pipeline
from tests.samples.models import Task
from tests.samples.tied_models import TIED
from tests.unit.training.test_precision import MLP, SKIPS, float_loss, float_token_loss

NUM_BATCHES = 8
ENDS = {
    "group": (_C.ProcessGroupSender, _C.ProcessGroupReceiver),
    "rings": (_C.DeviceRingSender, _C.DeviceRingReceiver),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    Attributes:
        m: microbatches of a replica; 0: one more than the stages.
        fewer: rows that batches have less, in turn: then microbatches are absent.
        opt_options: of PipelineOptimizer.
        on_device: options of PipelineModule that the CPU's does without.
        options: of PipelineModule.
        train_steps: of an optimizer's step.
        no_sync: all but the last of these are in ``no_sync()``.
        hook: averages replicas' gradients, with what makes its state.
        cuts: whether replicas have elements of one parameter each.
    """

    task: Task = SKIPS
    m: int = 0
    fewer: Sequence[int] = (0,)
    optimizer: str = "adam"
    opt_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_device: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_steps: int = 1
    no_sync: bool = False
    hook: tuple[Any, Any] | None = None
    cuts: bool = False

    def run(self, device: str, num_stages: int, width: int) -> Trajectory:
        """Trains there, in this process's part; the state is the host's."""
        is_on_device = device != "cpu"
        replica = dist.get_rank() // (dist.get_world_size() // width)
        m = self.m or num_stages + 1
        turns = itertools.cycle(self.fewer)
        rows = [2 * m - next(turns) for _ in range(NUM_BATCHES)]
        batches = self.task.batches(rows, seed=2 + replica)
        batches = [batch_on(batch, device) for batch in batches]
        options = {**self.options, **(self.on_device if is_on_device else {})}
        if width > 1:
            options |= {"width": width, "bucket_cap_mb": 1e-4}
        task = on(self.task, device) if is_on_device else self.task
        with make_pipeline(task, num_stages, m, batches[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(
                OPTIMIZERS[self.optimizer](pipe.parameters()), **self.opt_options
            )
            if self.hook is not None:
                pipe.register_comm_hook(*self.hook)
            weights = [stage.weights for stage in pipe.session.stages]
            cut = [is_divided(each, i) for each in weights for i in range(len(each.trainable))]
            assert any(cut) == self.cuts
            losses = []
            with checked.log() as asked:
                for number, batch in enumerate(batches, 1):
                    is_last = number % self.train_steps == 0
                    waits = self.no_sync and not is_last
                    with pipe.no_sync() if waits else contextlib.nullcontext():
                        losses.append(pipe.train_step(*batch.args, target=batch.target))
                    if is_last:
                        opt.step()
                    if number == NUM_BATCHES // 2:
                        pipe.flush()
                pipe.flush()
            check_transfers(asked, has_hook=self.hook is not None, sums=width > 1)
            state = copy_of(pipe.state_dict())
            if "loss_scale" in self.opt_options:
                first, last = self.opt_options["loss_scale"].init_scale, float(opt.loss_scale)
                assert last < first, "no step was left out"
            return Trajectory([float(loss) for loss in losses], state).on_host()


def check_transfers(asked: Sequence[Asked], *, has_hook: bool, sums: bool) -> None:
    """Only the stage's thread begins transfers, and of sums autograd's while that waits for it.

    Of two threads that do so at once one would be first on one rank and second on another. All
    messages are the stage's thread's, a frozen stage's gradients too. A hook of the user's is
    called in the update's, on ranks of one stage, which sends no messages.
    """
    threads = {each.thread for each in asked if each.kind == AskedKind.TRANSFER}
    of_sums = ("pd2 stage", "pt_autograd") if sums else ("pd2 stage",)
    allowed = ("pd2 update",) if has_hook else of_sums
    assert all(each.startswith(allowed) for each in threads), threads


CLIPS = {"max_grad_norm": 0.1}
OVERFLOWS = {"loss_scale": pd2.LossScale(2.0**24, growth_interval=3)}
ON_HOST = {"optimizer_device": "cpu", "bucket_cap_mb": 1e-4}
CHIMERA, EAGER = {"schedule": "chimera"}, {"schedule": "2bw_eager"}
PIPEDREAM = {"schedule": "pipedream"}
LANGUAGE_MODEL = Task(TIED["language model"].build, TIED["language model"].draw, float_token_loss)


def frozen_end() -> nn.Module:
    """Its last stage has nothing to train, and all others need gradients from it."""
    model = SKIPS.build()
    for layer in model.layers[3:]:
        layer.requires_grad_(False)
    return model


GRAPHS: dict[str, Any] = {"task": MLP, "optimizer": "sgd"}
DROPPING = Task(
    lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(4))),
    MLP.draw,
    float_loss,
)

TRAININGS = {
    "sgd": Training(optimizer="sgd"),
    "clipping": Training(opt_options=CLIPS),
    "clipping, 1f1b": Training(opt_options=CLIPS, options={"schedule": "1f1b"}),
    "clipping, chimera": Training(opt_options=CLIPS, options=CHIMERA, m=4),
    "clipping by value": Training(opt_options={"clip_grad_value": 0.01}, optimizer="adamw"),
    "masters": Training(options=PRECISIONS["bf16"]),
    "split masters": Training(options=PRECISIONS["split"], opt_options=CLIPS),
    "narrow gradients": Training(options=PRECISIONS["narrow"], opt_options=CLIPS),
    "loss scale": Training(options=PRECISIONS["fp16"], opt_options=OVERFLOWS),
    "loss scale, eager": Training(options=PRECISIONS["fp16"] | EAGER, opt_options=OVERFLOWS, m=6),
    "clipping, pipedream": Training(options=PIPEDREAM, opt_options=CLIPS, m=1),
    "recomputation": Training(options={"recompute": True}),
    "host": Training(on_device=ON_HOST, opt_options=CLIPS),
    "host, split masters": Training(options=PRECISIONS["split"], on_device=ON_HOST),
    "host, loss scale": Training(
        options=PRECISIONS["fp16"], opt_options=OVERFLOWS, on_device=ON_HOST
    ),
    "graphs": Training(**GRAPHS, on_device={"graphs": True}, m=6),
    "graphs, dropout": Training(task=DROPPING, optimizer="sgd", on_device={"graphs": True}, m=6),
    "graphs or not": Training(on_device={"graphs": "auto"}, opt_options=CLIPS, m=6),
    "accumulation": Training(options={"accumulate": 2}, train_steps=2, opt_options=CLIPS),
    "no_sync": Training(train_steps=2, no_sync=True),
    "no_sync, 1f1b": Training(train_steps=2, no_sync=True, options={"schedule": "1f1b"}),
    "halves of backwards": Training(options={"schedule": "zero_bubble"}, opt_options=CLIPS),
    "error feedback": Training(opt_options={"staleness": pd2.ErrorFeedback(0.8)}),
    "Nesterov": Training(opt_options={"staleness": pd2.NesterovCorrection(0.7)}),
    "normalizer": Training(options={"loss_reduction": "sum", "normalizer": torch.numel}),
    "absent": Training(fewer=(0, 4, 1, 5), opt_options=CLIPS),
    "staleness": Training(opt_options={"staleness": pd2.LearningRateDiscount(3)}),
    "tied": Training(task=LANGUAGE_MODEL, options={"split": ["blocks.2"]}, opt_options=CLIPS, m=4),
    "tied, 1f1b": Training(
        task=LANGUAGE_MODEL, options={"split": ["blocks.2"], "schedule": "1f1b"}, m=4
    ),
    "frozen": Training(task=dataclasses.replace(SKIPS, build=frozen_end), opt_options=CLIPS),
    "loss scale, 1f1b": Training(
        options=PRECISIONS["fp16"] | {"schedule": "1f1b"}, opt_options=OVERFLOWS
    ),
}
OF_RINGS = ["clipping", "clipping, chimera", "split masters", "loss scale, eager", "host"]
OF_RINGS += ["graphs", "no_sync, 1f1b", "halves of backwards", "absent", "tied", "frozen"]
"""Whose messages differ: other options change none."""
OF_THREE = ["clipping", "loss scale", "host, split masters", "graphs", "no_sync"]
OF_THREE += ["frozen"]
OF_REPLICAS = ["sgd", "clipping", "masters", "loss scale", "host", "accumulation"]
OF_REPLICAS += ["no_sync", "graphs", "graphs, dropout", "tied", "recomputation", "frozen"]
OF_REPLICAS += ["narrow gradients"]
SHARED = {
    f"shares, {name}": dataclasses.replace(
        TRAININGS[name], opt_options=TRAININGS[name].opt_options | {"shard_state": True}
    )
    for name in ("sgd", "clipping", "masters", "split masters", "narrow gradients", "loss scale")
}
LOPSIDED = Task(
    lopsided, lambda rows: Batch((torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH)), float_loss
)
CUT = {
    f"cut, {name}": dataclasses.replace(SHARED[f"shares, {name}"], task=LOPSIDED, cuts=True)
    for name in ("clipping", "masters", "split masters", "narrow gradients")
}
"""Replicas have elements of one parameter each."""
HOOKED = {
    "Ok-Topk": Training(
        hook=(lambda group: pd2.OkTopkState(group, 0.3), pd2.ok_topk_hook), opt_options=CLIPS
    ),
    "hook": Training(hook=(None, allreduce_hook), opt_options=CLIPS),
    "hook, loss scale": dataclasses.replace(
        TRAININGS["loss scale"], hook=(None, fp16_compress_hook)
    ),
}


class Checked(channels.Channels):
    """All of whose ends between processes are of one kind."""

    kind_of_ends: tuple[type, ...] = ()

    def make(self, edges: Any) -> None:
        super().make(edges)
        ends = [*self.senders.values(), *self.receivers.values()]
        on_hosts = all(device.type == "cpu" for device in self._devices)
        between = [end for end in ends if not isinstance(end, _C.LocalChannel)]
        assert on_hosts or between or not edges
        assert on_hosts or all(isinstance(end, self.kind_of_ends) for end in between), between


def train(
    rank: int,
    world: int,
    names: Sequence[str],
    kind: str,
    width: int,
    probability: float = 0.05,
) -> None:
    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,checked:checked")
    checked.set_timeout(20.0)

    class Ends(Checked):
        kind_of_ends = ENDS[kind]

    with contextlib.ExitStack() as patches:
        if kind == "group":
            patches.enter_context(
                mock.patch.object(channels, "make_device_ring", return_value=None)
            )
        patches.enter_context(mock.patch("pipedream2bw.runtime.local_stages.Channels", Ends))
        for name in names:
            training = (TRAININGS | SHARED | CUT | HOOKED)[name]
            want = training.run("cpu", world // width, width)
            # Whatever waits for a device on a real one does so here at random.
            checked.set_drains(at_first_use=True, probability=probability, seed=rank)
            try:
                with checked.expect_no_errors():
                    got = training.run(f"checked:{rank}", world // width, width)
                assert_same(got, want)
            except BaseException as error:
                raise AssertionError(name) from error


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("group", list(TRAININGS)),
        ("rings", OF_RINGS),
        *exhaustive(("rings", [name for name in TRAININGS if name not in OF_RINGS])),
    ],
    ids=["group", "rings", "rings, others"],
)
def test_two_processes(kind: str, names: list[str]) -> None:
    run_ranks(train, 2, args=[names, kind, 1], rendezvous="environment", timeout=150)


def test_three_processes() -> None:
    run_ranks(train, 3, args=[OF_THREE, "group", 1], rendezvous="environment", timeout=90)


def test_replicas() -> None:
    run_ranks(train, 4, args=[OF_REPLICAS, "group", 2], rendezvous="environment", timeout=90)


def test_replicas_that_share_out_state() -> None:
    """Which exchange what they have stepped in the order in which they give backwards to devices.

    In a thread beside, one in some trainings waited for ever for a device that waited for it.
    """
    names = [*SHARED, *["shares, clipping", "shares, sgd"] * 3]
    run_ranks(train, 4, args=[names, "group", 2, 0.3], rendezvous="environment", timeout=90)


def test_replicas_that_share_out_one_parameter() -> None:
    run_ranks(train, 2, args=[list(CUT), "group", 2], rendezvous="environment", timeout=90)


def test_hooks() -> None:
    """Of one stage: others wait for messages, which hooks may have to wait for."""
    run_ranks(train, 2, args=[list(HOOKED), "group", 2], rendezvous="environment", timeout=90)


def hooked(rank: int, world: int) -> None:
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,checked:checked")
    training = dataclasses.replace(TRAININGS["sgd"], hook=(None, allreduce_hook))
    with pytest.raises(
        ValueError, match=r"devices of the stages: .*checked.*, num_stages: 2: a hook that"
    ):
        training.run(f"checked:{rank}", 2, 2)


def test_a_hook_of_several_stages_on_devices_is_refused() -> None:
    run_ranks(hooked, 4, rendezvous="environment", timeout=60)


def waits_for_three(rank: int, world: int) -> None:
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,checked:checked")
    rule = "an update of all its stages.*waiting for the device could last for ever"
    with pytest.raises(ValueError, match=rule):
        TRAININGS["clipping, pipedream"].run(f"checked:{rank}", world, 1)


def test_pipedream_of_three_devices_whose_updates_wait_is_refused() -> None:
    run_ranks(waits_for_three, 3, rendezvous="environment", timeout=60)
