"""Tied weights under processes: each that runs one of their stages has a copy, all equal."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import copy_of, make_pipeline
from tests.samples.models import whole
from tests.samples.tied_models import TIED, late_by_layer, summing, untied
from tests.unit.training.test_tied import SGD, ByWhole, sgd

NUM_BATCHES = 6


def assert_copies_equal(pipe: pd2.PipelineModule) -> None:
    """Of all stages of all replicas, in whichever process."""
    pipe.flush()
    mine = [
        (name, stage.weights.shown(name).numpy().tobytes())
        for stage in pipe.session.stages
        for name in stage.weights.trainable
    ]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    copies: dict[str, list[bytes]] = {}
    for name, bits in (pair for part in everyone for pair in part):
        copies.setdefault(name, []).append(bits)
    pipelines = pipe.session.schedule.num_pipelines
    assert max(map(len, copies.values())) >= 2 * pipelines * pipe.width
    for name, (first, *others) in copies.items():
        assert all(other == first for other in others), name


def check(
    name: str, schedule: str, m: int, *, width: int, v: int = 1, bound: float | None = None
) -> None:
    """On every rank; each compares what it holds. Ranks begin with weights of their own."""
    task = TIED[name]
    rank, p = torch.distributed.get_rank(), torch.distributed.get_world_size() // width
    d, own = p * v, rank // p
    by_replica = [task.batches([2 * m] * NUM_BATCHES, seed=10 + r) for r in range(width)]
    model = whole(untied(task.model()))
    stock = summing(torch.optim.SGD, bound=bound or math.inf, **SGD)(model.parameters())
    delay: int | list[int] = int("2bw" in schedule)
    if schedule == "pipedream":
        delay = list(late_by_layer(model).values())
    pipelines = 2 if "chimera" in schedule else 1
    oracle = Oracle(model, stock, m, task.loss_fn, delay, num_pipelines=pipelines)
    want = [oracle.train_replicas(batches)[own] for batches in zip(*by_replica, strict=True)]
    first = task.model(seed=2 + rank % p)  # tied weights of a replica's ranks differ
    example = by_replica[0][0]
    options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v, "width": width}
    with make_pipeline(task, d, m, example, model=first, **options) as pipe:
        pipe.load_state_dict(whole(task.model()).state_dict())
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()), max_grad_norm=bound)
        losses = []
        for batch in by_replica[own]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
        assert_copies_equal(pipe)
        state = copy_of(pipe.state_dict())
        got = [float(loss) for loss in losses]
    assert got == want
    for key, tensor in state.items():
        assert torch.equal(tensor, model.state_dict()[key]), key


def train(rank: int, world: int, width: int, longest_delay: float) -> None:
    torch.set_num_threads(1)
    late = delays_everywhere(longest_delay) if longest_delay else contextlib.nullcontext()
    p = world // width
    with late:
        for name in ("language model", "layers") if p == 4 else ("language model",):
            check(name, "2bw", p, width=width)
            check(name, "2bw", p, width=width, bound=0.3)
        if longest_delay:
            return
        check("language model", "1f1b", 3, width=width)
        check("language model", "zero_bubble", 2 * p, width=width)
        check("language model", "chimera", p, width=width)
        if p == 2:
            check("layers", "interleaved_2bw", 4, width=width, v=2, bound=0.3)
            check("layers", "interleaved", 4, width=width, v=2)
        if p == 4 and width == 1:
            check("layers", "chimera", p, width=width, bound=0.3)
            check("layers", "pipedream", 1, width=width)
        own_names_and_states(width)


def own_names_and_states(width: int) -> None:
    """What each rank holds of a tied parameter, and that what is loaded reaches all copies."""
    task = TIED["language model"]
    p = torch.distributed.get_world_size() // width
    m = p
    batches = task.batches([2 * m] * 6)
    rank = torch.distributed.get_rank()
    ends = rank % p in (0, p - 1)
    for make in (ByWhole, lambda ps: torch.optim.AdamW(ps, lr=0.01)):
        model = task.model(seed=1 + rank % p)
        names_of_model = model.state_dict().keys()
        with make_pipeline(task, p, m, batches[0], width=width, model=model) as pipe:
            assert_copies_equal(pipe)
            names = [name for name, _ in pipe.named_parameters()]
            assert ("embedding.weight" in names) == ends
            assert "head.weight" not in names
            assert ("head.weight" in pipe.state_dict()) == ends
            opt = pd2.PipelineOptimizer(make(pipe.parameters()))
            for batch in batches[:3]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            moments = copy.deepcopy(opt.state_dict())
            box = [pipe.full_state_dict()]
            torch.distributed.broadcast_object_list(box)
            assert box[0].keys() == names_of_model
            pipe.load_state_dict(box[0])
            for batch in batches[3:]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            assert_copies_equal(pipe)
            want = copy_of(pipe.state_dict())
        model = task.model(seed=20 + rank % p)
        with make_pipeline(task, p, m, batches[0], width=width, model=model) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()))
            pipe.load_state_dict(box[0])
            opt.load_state_dict(moments)
            for batch in batches[3:]:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
            assert_copies_equal(pipe)
            for name, value in pipe.state_dict().items():
                assert torch.equal(value, want[name]), name


@pytest.mark.parametrize(
    ("world", "width", "longest_delay"),
    [(4, 2, 0.02), *exhaustive((2, 1, 0.0), (4, 1, 0.0), (4, 1, 0.02), (4, 2, 0.0))],
)
def test_tied_weights_train_as_one(world: int, width: int, longest_delay: float) -> None:
    run_ranks(train, world, args=(width, longest_delay), timeout=180)
