"""A DeviceMesh says which process is which replica, stage and shard of a tensor-parallel stage."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pipedream2bw as pd2
from pipedream2bw.model.local_shards import as_local, shard_dimensions
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt
from tests.runs.timed import at_most_three_times
from tests.runs.trajectory import assert_close, copy_of, make_pipeline, sgd
from tests.samples.models import TASKS, WIDTH, Task
from tests.samples.tensor_parallel import (
    DIMENSIONS,
    NAMES,
    SHARDS_OF_BLOCK,
    Block,
    Parallelized,
)

draw = TASKS["mlp"].draw
M = 4
BOUND = 0.5  # of a norm


def shard_of(whole: torch.Tensor, name: str, mesh: DeviceMesh) -> torch.Tensor:
    dimension = DIMENSIONS.get(name.rpartition(".")[2])
    if dimension is None:
        return whole
    return whole.chunk(mesh.size(), dimension)[mesh.get_local_rank()]


def clipped(optimizer: torch.optim.Optimizer, norms: list[float]) -> torch.optim.Optimizer:
    """Clips before each step, as the definition does, and keeps the norms."""

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, BOUND)))

    optimizer.register_step_pre_hook(clip)
    return optimizer


def check(
    mesh: DeviceMesh, schedule: str, block: Any = Block, *, clips: bool = False, **options: Any
) -> None:
    names = mesh.mesh_dim_names or ()
    size = {name: mesh.size(i) for i, name in enumerate(names)}
    at = {name: mesh.get_local_rank(name) for name in names}
    tp = mesh["tp"] if "tp" in names else None
    d, width = size["pp"], size.get("dp", 1)
    task = Task(lambda: nn.Sequential(*(Block(None) for _ in range(4))), draw)
    torch.manual_seed(1)
    shards = SHARDS_OF_BLOCK if block is Block and tp is not None else None
    model = pd2.use_local_shards(nn.Sequential(*(block(tp) for _ in range(4))), shards)
    by_replica = [task.batches([8] * 4, seed=seed) for seed in range(width)]
    whole = task.model()
    norms: list[float] = []
    stock = sgd(whole.parameters())
    if clips:
        stock = clipped(stock, norms)
    oracle = Oracle(whole, stock, M, task.loss_fn, delay=int("2bw" in schedule))
    replica = at.get("dp", 0)
    # Shards add up a product's terms in another order, which each processor rounds as it does.
    within = 1e-6 if tp is None else 5e-6
    same = assert_equal if tp is None else partial(assert_close, within=within)
    want = [oracle.train_replicas(each)[replica] for each in zip(*by_replica, strict=True)]
    pipe = make_pipeline(
        task, d, M, by_replica[0][0], model=model, mesh=mesh, schedule=schedule, **options
    )
    assert (pipe.width, pipe.replica, pipe.stages) == (width, replica, [at["pp"]])
    assert pipe.mesh is mesh
    with pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=BOUND if clips else None)
        losses, found = [], []
        for batch in by_replica[replica]:
            # Only who needs them.
            args = batch.args if pipe.is_first_stage else ()
            losses.append(
                pipe.train_step(*args, target=batch.target if pipe.is_last_stage else None)
            )
            opt.step()
            if clips:
                found.append(opt.grad_norm)
        state = copy_of(as_local(pipe.state_dict(), pipe.session.grid.mesh_of_shards))
        ours = [float(loss) for loss in losses]
        pipe.eval()
        example = by_replica[replica][0].args
        output = pipe(*example)
        assert (output is not None) == pipe.gives_output
        if output is not None:
            assert_close("output", output, whole(*example).detach(), within=within)
        if tp is not None:
            with pytest.raises(ValueError, match="give all first stages of a replica the same"):
                pipe(*(x[: len(x) - tp.get_local_rank()] for x in example))
    if tp is not None:
        assert_copies_equal(state, set(shard_dimensions(model) or ()), tp)
    same("losses", torch.tensor(ours), torch.tensor(want))
    same("norms", torch.tensor([float(norm) for norm in found]), torch.tensor(norms))
    assert not clips or max(norms) > BOUND
    assert state
    for local_name, tensor in state.items():
        layer, _, rest = local_name.partition(".")
        name = f"{layer}.{NAMES.get(rest, rest)}"
        theirs = whole.state_dict()[name]
        same(name, tensor, theirs if tp is None else shard_of(theirs, name, tp))


def assert_copies_equal(state: dict[str, torch.Tensor], cut: set[str], tp: DeviceMesh) -> None:
    """What is no shard has the same bits on all processes of a stage."""
    for name in sorted(state.keys() - cut):
        copies = [torch.empty_like(state[name]) for _ in range(tp.size())]
        dist.all_gather(copies, state[name].contiguous(), group=tp.get_group())
        assert all(torch.equal(copy, copies[0]) for copy in copies), name


def assert_equal(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours, theirs), name


def on(ranks: Any, *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names or None)


def meshes(rank: int, world: int) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    # Neither the ranks nor the dimensions are in the usual order. (In a mesh whose ranks do not
    # ascend torch's get_local_rank() is another place than the mesh says.)
    check(on([[0, 2], [1, 3]], "dp", "pp"), "2bw")
    tensor_parallel = on([[0, 1], [2, 3]], "tp", "pp")
    for schedule, options in (("2bw", {}), ("1f1b", {"recompute": True}), ("2bw_split", {})):
        check(tensor_parallel, schedule, **options)
    check(on([[[0], [2]], [[1], [3]]], "dp", "tp", "pp"), "gpipe")
    for schedule in ("2bw", "2bw_split"):
        check(tensor_parallel, schedule, Parallelized)
    check(tensor_parallel, "2bw", clips=True)
    check(tensor_parallel, "1f1b", Parallelized, clips=True)
    check(on([[[0], [2]], [[1], [3]]], "dp", "tp", "pp"), "2bw", clips=True)
    batch = draw(8)
    plain = Task(lambda: nn.Sequential(*(Block(None) for _ in range(4))), draw)

    def make(mesh: Any, d: int = 2, **options: Any) -> pd2.PipelineModule:
        return make_pipeline(plain, d, M, batch, mesh=mesh, **options)

    wrong: dict[str, Any] = {
        "none": "dp, pp",
        "unnamed": on([[0, 1], [2, 3]]),
        "unknown": on([[0, 1], [2, 3]], "cp", "pp"),
        "outside": on([[0, 1]], "dp", "pp"),
        "depth": on([[0, 1, 2, 3]], "dp", "pp"),
        "sizes": {"dp": 2, "pp": 3},
        "sizes of another name": {"cp": 2, "pp": 2},
        "no size": {"dp": 0, "pp": 2},
        "no whole size": {"dp": 2.0, "pp": 2},
        "no sizes": {},
        "sizes on one rank": {"dp": 2, "pp": 2} if rank else {"pp": 2, "dp": 2},
    }
    dtensors = nn.Sequential(Parallelized(tensor_parallel["tp"]), Block(None))
    outcomes = {"dtensor": attempt(lambda: make(tensor_parallel, model=dtensors))}
    outcomes |= {name: attempt(lambda: make(mesh)) for name, mesh in wrong.items()}  # noqa: B023
    usual = on([[0, 1], [2, 3]], "dp", "pp")
    outcomes["width"] = attempt(lambda: make(usual, width=4))
    other = on([[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]], "dp", "pp")
    outcomes["other"] = attempt(lambda: make(other))
    with make(tensor_parallel) as pipe:
        own = list(pipe.parameters())
        outcomes["norm"] = attempt(lambda: pd2.PipelineOptimizer(sgd(own), max_grad_norm=1.0))
        outcomes["unknown optimizer"] = attempt(
            lambda: pd2.PipelineOptimizer(torch.optim.Adafactor(own))
        )
        outcomes["whole"] = attempt(pipe.full_state_dict)
        optimizer = pd2.PipelineOptimizer(sgd(own))
        outcomes["checkpoint"] = attempt(lambda: dcp.save({"model": pipe}, checkpoint_id="none"))
        outcomes["optimizer's"] = attempt(
            lambda: dcp.save({"optim": optimizer}, checkpoint_id="none")
        )
        rows = 8 if rank != 2 else 6  # on rank 2 is another shard of stage 0
        outcomes["rows"] = attempt(
            lambda: pipe.train_step(*draw(rows).args, target=draw(rows).target)
        )
    unequal = nn.Sequential(*(Block(None) for _ in range(4)))
    if rank == 2:
        unequal[1].up = nn.Parameter(torch.randn(3, WIDTH))
    unequal = pd2.use_local_shards(unequal, SHARDS_OF_BLOCK)
    outcomes["parts"] = attempt(lambda: make(tensor_parallel, model=unequal))
    forgotten = {name: cut for name, cut in SHARDS_OF_BLOCK.items() if name != "*.up_bias"}
    torch.manual_seed(2)
    cut = nn.Sequential(*(Block(tensor_parallel["tp"]) for _ in range(4)))
    outcomes["forgotten"] = attempt(
        lambda: make(tensor_parallel, model=pd2.use_local_shards(cut, forgotten))
    )
    torch.manual_seed(2)
    cut = nn.Sequential(*(Block(tensor_parallel["tp"]) for _ in range(4)))
    with make(tensor_parallel, model=pd2.use_local_shards(cut, SHARDS_OF_BLOCK)) as pipe:
        named = dict(pipe.named_parameters())
        outcomes["of shards"] = attempt(
            lambda: pd2.PipelineOptimizer(torch.optim.Adafactor(named.values()))
        )
        norms = [p for name, p in named.items() if "norm" in name or name.endswith(".bias")]
        rest = [p for p in named.values() if not any(p is norm for norm in norms)]
        pd2.PipelineOptimizer(torch.optim.Adafactor(norms), sgd(rest))
    for sizes, ranks in (
        ({"dp": 2, "pp": 2}, [[0, 1], [2, 3]]),
        ({"pp": 2, "dp": 2}, [[0, 2], [1, 3]]),
        ({"pp": 2, "tp": 2}, [[[0, 1], [2, 3]]]),
    ):
        with make(sizes) as pipe:
            assert pipe.mesh.mesh.tolist() == ranks
            assert pipe.mesh.mesh_dim_names == ("dp", "pp", "tp")[: pipe.mesh.ndim]
            assert pipe.mesh.get_local_rank("pp") == pipe.stages[0]
    cut_in_two = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    cut_in_two = parallelize_module(cut_in_two, tensor_parallel["tp"], plan)
    cut_in_two.append(nn.Linear(WIDTH, WIDTH))
    cut_in_two = pd2.use_local_shards(cut_in_two)
    outcomes["cut at a DTensor"] = attempt(
        lambda: make(tensor_parallel, model=cut_in_two, split=["2"])
    )
    outcomes["cut at DTensors"] = attempt(
        lambda: make(on([[0, 1, 2, 3]], "tp", "pp"), 4, model=cut_in_two, split="auto")
    )
    with make(tensor_parallel, model=cut_in_two, split="auto") as pipe:
        assert pipe.session.modes.first.programs[1].parameters[0] == "3.weight"
    with make_pipeline(plain, 2, M, batch, width=2) as pipe:
        assert pipe.mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert pipe.mesh.mesh_dim_names == ("dp", "pp")
        assert pipe.mesh.get_local_rank("pp") == pipe.stages[0]
        with pipe.timeline() as events:
            pass
        assert events.gather() == []
    pipe = make(None, width=2)
    outcomes["one alone"] = attempt(lambda: pipe.mesh if rank == 0 else pipe.flush())
    outcomes["a rank hangs"] = attempt(lambda: make_a_mesh_while_one_hangs(rank))
    one_shard_fails(tensor_parallel, rank)
    return outcomes


class FailingShard(Block):
    """One shard of a stage fails, and the other waits for it, as it does in a collective."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.isnan().any()):
            if dist.get_rank() == 1:
                raise ArithmeticError("a bad row")
            time.sleep(6.0)
        return super().forward(x)


def one_shard_fails(mesh: DeviceMesh, rank: int) -> None:
    """The rank that fails names the cause; the others do, or say that they waited."""
    torch.manual_seed(1)
    layers = [Block(mesh["tp"]), FailingShard(mesh["tp"])]
    pipe = pd2.PipelineModule(
        layers, F.mse_loss, num_microbatches=M, mesh=mesh, example_args=draw(8).args, timeout=4.0
    )
    pd2.PipelineOptimizer(sgd(pipe.parameters()))
    bad = draw(8).args[0] * float("nan")
    start = time.monotonic()
    with pytest.raises(pd2.errors.StageError) as caught:
        pipe.train_step(bad, target=bad)
        pipe.flush()
    assert time.monotonic() - start < 12.0
    assert rank != 1 or "ArithmeticError: a bad row" in str(caught.value)


def make_a_mesh_while_one_hangs(rank: int) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = pd2.PipelineModule(
        layers,
        F.mse_loss,
        num_microbatches=2,
        width=2,
        example_args=(torch.zeros(1, 4),),
        timeout=2.0,
    )
    start = time.monotonic()
    hang = mock.patch(
        "pipedream2bw.ranks.mesh.DeviceMesh", side_effect=lambda *a, **k: time.sleep(60)
    )
    try:
        with hang if rank == 1 else contextlib.nullcontext():
            assert pipe.mesh
    finally:
        assert time.monotonic() - start < 5.0


OUTCOMES: Expected = {
    "dtensor": ("ValueError", ["0.first.weight: a DTensor", "use_local_shards"]),
    "none": ("TypeError", ["mesh: 'dp, pp' given, it must be a DeviceMesh"]),
    "unnamed": ("ValueError", ["its dimensions are without names", "'pp'"]),
    "unknown": ("ValueError", ["('cp', 'pp')", "'pp'"]),
    "outside": ("ValueError", ["ranks [0, 1], world size: 4"]),
    "depth": ("ValueError", ["'pp' of the mesh: 4, ranks of the schedule: 2"]),
    "sizes": ("ValueError", ["{'dp': 2, 'pp': 3}, world size: 4", "must multiply to the world's"]),
    "sizes of another name": ("ValueError", ["('cp', 'pp')", "'pp'"]),
    "no size": ("ValueError", ["mesh['dp']: 0, it must be at least 1"]),
    "no whole size": ("TypeError", ["mesh['dp']: 2.0 given, it must be an int"]),
    "no sizes": ("ValueError", ["its dimensions are without names"]),
    "sizes on one rank": ("ValueError", ["mesh must be the same on every rank"]),
    "cut at a DTensor": (
        "ValueError",
        ["a DTensor (use_local_output=True makes it a plain tensor), is used in stages 0 and 1"],
    ),
    "cut at DTensors": ("ValueError", ["can be cut in only 1 places: value", "a DTensor"]),
    "width": ("ValueError", ["width: 4, 'dp' of the mesh: 2"]),
    "other": ("ValueError", ["mesh must be the same on every rank"]),
    "norm": ("ValueError", ["max_grad_norm: 1.0, 'tp' of the mesh: 2, shards: None"]),
    "unknown optimizer": ("ValueError", ["Adafactor of torch.float32, 'tp' of the mesh: 2"]),
    "of shards": ("ValueError", ["'tp' of the mesh: 2: it may look at a parameter as a whole, of"]),
    "whole": ("ValueError", ["full_state_dict()", "'tp' of the mesh: 2"]),
    "checkpoint": ("ValueError", ["state_dict(), 'tp' of the mesh: 2, shards: None"]),
    "optimizer's": ("ValueError", ["state_dict(), 'tp' of the mesh: 2, shards: None"]),
    "forgotten": ("ValueError", ["up_bias and", "what is no shard must be equal on all"]),
    "parts": ("ValueError", ["shards, and their shapes must be the same on every rank"]),
    "rows": ("ValueError", ["rows of the arguments"]),
    "one alone": ("StageError", ["rank 0: new_mesh 0, rank 1: flush 0"]),
    "a rank hangs": ("PeerTimeout", ["a rank was lost while making the mesh: no answer for 2.0 s"]),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@at_most_three_times
def test_a_mesh_of_replicas_stages_and_shards() -> None:
    assert_raised((result.value for result in run_ranks(meshes, 4, timeout=280)), OUTCOMES)
