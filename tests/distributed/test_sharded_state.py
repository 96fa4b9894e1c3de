"""Optimizer state on one replica of several: the same bits, in less memory."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from pipedream2bw.checkpoint import snapshot
from tests.references.oracle import Batch, Oracle
from tests.runs.launch import in_turn, run_ranks
from tests.samples.odd_optimizers import CountsInGroup

ROWS, WIDTH, NUM_BATCHES, M = 4, 16, 5, 4


class Block(nn.Module):
    """Parameters of very different sizes, one of them unused at times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def tied_model() -> nn.Sequential:
    made = model()
    made[3].outer.weight = made[0].outer.weight
    return made


def one_matrix() -> nn.Sequential:
    """Of four replicas three have nothing to step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))


def matrices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


class Reached(nn.Module):
    """Uses a part of a large parameter, transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, 500).t().contiguous().t() / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.table) @ self.table.t()


def lopsided() -> nn.Sequential:
    """Most of it is one parameter, as large embeddings are."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Reached(), nn.Linear(WIDTH, WIDTH, bias=False))


class Empty(nn.Module):
    """Its parameters have no elements, and are the only ones of their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum().to(x.dtype)


def with_empty() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Empty(), nn.Linear(WIDTH, WIDTH))


def batches_of(replica: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1 + replica)
    rows = (torch.randn(2, M * ROWS, WIDTH, generator=generator) for _ in range(NUM_BATCHES))
    return [Batch((x,), target) for x, target in rows]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.01)


def made(
    width: int,
    make_model: Callable[[], nn.Module] = model,
    schedule: str = "2bw",
    **options: Any,
) -> pd2.PipelineModule:
    world = torch.distributed.get_world_size()
    return pd2.PipelineModule(
        make_model(),
        mse_loss,
        num_stages=world // width,
        width=width,
        schedule=schedule,
        num_microbatches=M,
        example_args=batches_of(0)[0].args,
        timeout=60.0,
        **options,
    )


def own_batches(width: int) -> list[Batch]:
    ranks = torch.distributed.get_world_size() // width
    return batches_of(torch.distributed.get_rank() // ranks)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(itertools.starmap(same, zip(one, other, strict=True)))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def trained(
    width: int,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    shard_state: bool,
    make_model: Callable[[], nn.Module] = model,
    clip: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    with made(width, make_model, **options) as pipe:
        opt = pd2.PipelineOptimizer(
            make_optimizer(pipe.parameters()), shard_state=shard_state, **(clip or {})
        )
        losses = []
        for batch in own_batches(width):
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        output = pipe.eval()(*own_batches(width)[0].args)
        staleness = opt.state_dict().get("staleness", {"kept": {}})
        return {
            "output": output,
            "kept": {name: tensor.clone() for name, tensor in staleness["kept"].items()},
            "norm": opt.grad_norm.item() if clip and "max_grad_norm" in clip else 0.0,
            "weights": {n: t.clone() for n, t in pipe.state_dict().items()},
            "state": {n: {k: torch.as_tensor(v).clone() for k, v in s.items()} for n, s in
                      opt.state_dict()["state"].items()},
            "losses": [loss.item() for loss in losses],
        }  # fmt: skip


def equal_with_and_without(**options: Any) -> None:
    whole, shared = (trained(shard_state=each, **options) for each in (False, True))
    assert whole["state"]
    for key, value in whole.items():
        assert same(shared[key], value), (key, options)


NARROW = {"precision": "bf16", "gradient_dtype": torch.bfloat16}
CLIP = {"max_grad_norm": 0.1}
SMALL = 4 / 1024
"""MiB: many buckets, of one or two parameters."""

LOPSIDED: list[tuple[Any, dict[str, Any]]] = [
    (sgd, {"clip": CLIP}),
    (adamw, {"precision": "bf16", "bucket_cap_mb": SMALL, "clip": CLIP}),
    (adamw, {**NARROW, "split_master": True, "clip": {"clip_grad_value": 0.01}}),
]
FED: dict[str, Any] = {"staleness": pd2.ErrorFeedback(0.8)}

CASES: list[tuple[Any, dict[str, Any]]] = [
    (sgd, {"bucket_cap_mb": SMALL, "clip": CLIP}),
    (sgd, {"schedule": "1f1b", "clip": {"clip_grad_value": 0.01}}),
    (adamw, {"precision": "bf16", "split_master": True, "clip": CLIP}),
    (adamw, {"make_model": tied_model, "precision": "bf16", "clip": CLIP}),
    (rmsprop, {**NARROW, "make_model": tied_model, "schedule": "1f1b"}),
    (adamw, {"replica_sums": "all_reduce"}),
    *((make, {"width": 4, "make_model": lopsided, **of}) for make, of in LOPSIDED),
    (adamw, {"clip": FED, "make_model": lopsided}),
    (sgd, {"precision": "bf16", "split_master": True, "clip": FED}),
    (muon, {"width": 4, "make_model": matrices, "precision": "bf16"}),
    (adamw, {"width": 4, "make_model": one_matrix, "precision": "bf16", "bucket_cap_mb": SMALL}),
    (adamw, {"width": 4, "make_model": with_empty, "clip": CLIP}),
]
OTHERS: list[tuple[Any, dict[str, Any]]] = [
    (adamw, {"precision": "bf16", "bucket_cap_mb": SMALL}),
    (sgd, {"make_model": tied_model, "bucket_cap_mb": SMALL}),
    (rmsprop, {"precision": "bf16", "clip": CLIP}),
    (adamw, {**NARROW, "bucket_cap_mb": SMALL, "clip": CLIP}),
    *((make, {"make_model": lopsided, **of}) for make, of in LOPSIDED),
    (adamw, {"clip": FED, "bucket_cap_mb": SMALL}),
    (rmsprop, {"precision": "bf16", "make_model": tied_model, "clip": FED}),
    (sgd, {"width": 4, "make_model": one_matrix, "clip": CLIP}),
]


def every_case(rank: int, world: int) -> None:
    for make_optimizer, options in CASES:
        equal_with_and_without(**{"width": 2, "make_optimizer": make_optimizer, **options})
    with delays_everywhere(0.01):
        equal_with_and_without(width=2, make_optimizer=sgd, bucket_cap_mb=SMALL, clip=CLIP)
        equal_with_and_without(width=4, make_optimizer=adamw, bucket_cap_mb=SMALL, **NARROW)


def every_other_case(rank: int, world: int) -> None:
    for make_optimizer, options in OTHERS:
        equal_with_and_without(**{"width": 2, "make_optimizer": make_optimizer, **options})


def test_bits_are_those_of_whole_states() -> None:
    run_ranks(in_turn, 4, args=(every_case, like_the_oracle), timeout=150)


@pytest.mark.exhaustive
def test_bits_are_those_of_whole_states_under_other_options() -> None:
    run_ranks(every_other_case, 4, timeout=150)


def of_three(rank: int, world: int) -> None:
    for make, options in LOPSIDED:
        equal_with_and_without(width=3, make_optimizer=make, make_model=lopsided, **options)
    with made(world, lopsided, precision="bf16") as pipe:
        opt = pd2.PipelineOptimizer(adamw(pipe.parameters()), shard_state=True)
        (stage,) = pipe.session.stages
        engine, shares = stage.weights.engine, [0] * world
        owners = {name: engine.owners(i) for i, name in enumerate(stage.weights.trainable)}
        for of_one in owners.values():
            for owner, _, count in of_one:
                shares[owner] += count
        assert len(owners["1.table"]) > 1
        numel = sum(p.numel() for p in lopsided().parameters())
        assert sum(shares) == numel
        assert max(shares) < 1.1 * numel / world
        x = own_batches(world)[0].args[0]
        pipe.train_step(x, target=x)
        opt.step()
        pipe.flush()
        (report,) = pipe.memory_report().values()
        assert report.masters == 4 * shares[rank]
        assert report.optimizer_state == 8 * shares[rank]


def test_a_parameter_larger_than_a_share_is_several_replicas() -> None:
    run_ranks(of_three, 3, timeout=100)


def loses_one(rank: int, world: int, folder: str) -> None:
    """The last replica ends where a checkpoint is put together; nobody waits for it."""
    batch = own_batches(world)[0]
    with made(world, lopsided, precision="bf16") as pipe:
        opt = pd2.PipelineOptimizer(adamw(pipe.parameters()), shard_state=True)
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
        pipe.flush()
        leaves = (lambda *_: os._exit(9)) if rank == world - 1 else snapshot.of_all_replicas
        with mock.patch.object(snapshot, "of_all_replicas", leaves):
            start = time.monotonic()
            with pytest.raises(pd2.errors.PeerLost):
                pd2.save(folder, pipe, opt).wait()
        print("told after", time.monotonic() - start, flush=True)
    os._exit(0)


def test_a_replica_that_is_lost_while_others_save_is_told(tmp_path: Path) -> None:
    run = functools.partial(run_ranks, loses_one, 2, args=(str(tmp_path),), timeout=60)
    first, _ = run(expect_failure=True)
    assert float(first.stdout.split()[-1]) < 10, first


def like_the_oracle(rank: int, world: int) -> None:
    """Replicas without stages: each has the whole model."""
    whole = model()
    oracle = Oracle(whole, sgd(whole.parameters()), M, mse_loss, delay=1)
    for batches in zip(*(batches_of(replica) for replica in range(world)), strict=True):
        oracle.train_replicas(list(batches))
    for bucket in (SMALL, 25.0):
        shared = trained(world, sgd, True, bucket_cap_mb=bucket)
        assert same(shared["weights"], dict(whole.state_dict()))


def output_of(pipe: pd2.PipelineModule) -> torch.Tensor:
    with torch.no_grad():
        output = pipe(own_batches(1)[0].args[0])
    return torch.empty(0) if output is None else output


def goes_on(rank: int, world: int, folder: str) -> None:
    """From a checkpoint of shares with whole states, and the other way round."""
    batches, remedy = own_batches(world), {"staleness": pd2.ErrorFeedback()}
    for number, (first, then) in enumerate(((True, False), (False, True), (True, True))):
        path, build = f"{folder}/{first}-{then}", (lopsided, model, lopsided)[number]
        low: dict[str, Any] = {"precision": "bf16"} if number else {}
        want = trained(world, adamw, False, build, clip=remedy, **low)
        assert bool(want["kept"]) != bool(low)
        with made(world, build, **low) as pipe:
            opt = pd2.PipelineOptimizer(adamw(pipe.parameters()), shard_state=first, **remedy)
            for batch in batches[:3]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            pd2.save(path, pipe, opt).wait()
            evaluated = output_of(pipe)
        with made(world, build, **low) as pipe:
            opt = pd2.PipelineOptimizer(adamw(pipe.parameters()), shard_state=then, **remedy)
            pd2.load(path, pipe, opt)
            # By the masters' roundings, which one of the two puts together from shares.
            assert torch.equal(output_of(pipe), evaluated)
            for batch in batches[3:]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            assert same(dict(pipe.state_dict()), want["weights"])
            assert same(opt.state_dict()["state"], want["state"])
            assert same(opt.state_dict()["staleness"]["kept"], want["kept"])


def kinds_of(state: dict[str, Any]) -> dict[str, Any]:
    """Of every parameter, what its tensors are like."""
    return {
        name: {key: (value.shape, value.dtype) for key, value in of_one.items()}
        for name, of_one in state.items()
    }


def takes_over(rank: int, world: int) -> None:
    """Loading, and another optimizer over the same pipeline, keep and give whole masters."""
    want = trained(world, adamw, False, precision="bf16")
    with made(world, precision="bf16") as pipe:
        batches = own_batches(world)
        opt = pd2.PipelineOptimizer(adamw(pipe.parameters()), shard_state=True)
        opt.init_state()
        room = opt.state_dict()["state"]
        assert kinds_of(room) == kinds_of(want["state"])
        for number, batch in enumerate(batches):
            if number == 2:
                state, kept = opt.state_dict(), pipe.state_dict()
                kept = {name: tensor.clone() for name, tensor in kept.items()}
                opt = pd2.PipelineOptimizer(adamw(pipe.parameters()))  # whole again
                assert same(dict(pipe.state_dict()), kept)
                stock = adamw(pipe.parameters())
                opt = pd2.PipelineOptimizer(stock, shard_state=True)
                opt.load_state_dict(state)
                assert same(opt.state_dict()["state"], state["state"])
                assert 0 < sum(map(bool, stock.state.values())) < len(state["state"])
                assert same(dict(pipe.state_dict()), kept)
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        ended = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        assert same(ended, want["weights"])
        assert same(opt.state_dict()["state"], want["state"])
        pipe.load_state_dict(model().state_dict())
        assert same(dict(pipe.state_dict()), dict(model().state_dict()))
        with pytest.raises(RuntimeError, match="missing keys"):
            pipe.load_state_dict({"0.norm.bias": torch.ones(WIDTH)})
        assert same(dict(pipe.state_dict()), dict(model().state_dict()))
        given = {name: torch.full_like(value, 0.5) for name, value in kept.items()}
        mine = given if rank == 0 else {}  # what the first has loaded all have then
        with pytest.raises(RuntimeError, match="missing keys"):
            pipe.load_state_dict(mine)
        assert same(dict(pipe.state_dict()), given)


def changes_hands(rank: int, world: int) -> None:
    """Gradients wait for a step while the optimizer becomes one with shares, or without."""
    stateless = functools.partial(torch.optim.SGD, lr=0.1)
    want: dict[str, torch.Tensor] = {}
    for flips in (False, True):
        with made(world, precision="bf16", bucket_cap_mb=SMALL) as pipe:
            opt = pd2.PipelineOptimizer(stateless(pipe.parameters()), shard_state=flips)
            for number, batch in enumerate(own_batches(world)):
                pipe.train_step(*batch.args, target=batch.target)
                if number % 2 or not flips:
                    pipe.flush()
                if number % 2 and flips:
                    opt = pd2.PipelineOptimizer(
                        stateless(pipe.parameters()), shard_state=number % 4 == 3
                    )
                opt.step()
            ended = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
            assert not flips or same(ended, want)
            want = ended


def test_states_of_shares_are_whole_wherever_they_are_seen(tmp_path: Path) -> None:
    goes = functools.partial(goes_on, folder=str(tmp_path))
    run_ranks(in_turn, 2, args=(like_the_oracle, takes_over, changes_hands, goes), timeout=150)


def refused(rank: int, world: int) -> None:
    def refuses(error: type[Exception], text: str, *, kind: Any = sgd, **options: Any) -> None:
        given = {"shard_state": True, **options}
        with made(world, **given.pop("pipeline", {})) as pipe:
            optimizer = kind(pipe.parameters())
            with pytest.raises(error, match=text):
                pd2.PipelineOptimizer(optimizer, **given)

    refuses(TypeError, "shard_state: 1 given, it must be a bool", shard_state=1)
    refuses(
        ValueError,
        "shard_state: True, optimizer: CountsInGroup of torch.float32: nothing tells",
        kind=CountsInGroup,
    )
    refuses(ValueError, "shard_state must be the same on every rank", shard_state=bool(rank))
    refuses(
        ValueError,
        "shard_state: True, optimizer_device: 'cpu'",
        pipeline={"optimizer_device": "cpu"},
    )
    refuses(
        ValueError,
        "shard_state: True, staleness: NesterovCorrection",
        staleness=pd2.NesterovCorrection(),
    )


def test_every_rank_refuses_what_cannot_be_shared_out() -> None:
    run_ranks(refused, 2, timeout=60)


def test_one_replica_has_all_of_it() -> None:
    x = torch.randn(M, WIDTH)
    states = []
    for shard_state in (False, True):
        with pd2.PipelineModule(
            model(), mse_loss, num_stages=2, num_microbatches=M, example_args=(x,)
        ) as pipe:
            opt = pd2.PipelineOptimizer(adamw(pipe.parameters()), shard_state=shard_state)
            pipe.train_step(x, target=x)
            opt.step()
            states.append([{n: t.clone() for n, t in pipe.state_dict().items()}, opt.state_dict()])
    assert same(*states)
