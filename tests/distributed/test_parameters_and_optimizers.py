"""Under processes: parameters of every kind, any optimizers, and ranks that have none of some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler

import pipedream2bw as pd2
from benchmarks.measuring.delays import delays_everywhere
from tests.exhaustive import exhaustive
from tests.references.oracle import Oracle
from tests.runs.launch import in_turn, run_ranks
from tests.runs.outcomes import Expected, Outcome, assert_raised, attempt
from tests.runs.trajectory import assert_close, copy_of, make_pipeline
from tests.samples.models import TASKS, WIDTH, Task, whole
from tests.samples.odd_optimizers import CountsInGroup, Together
from tests.samples.parameter_kinds import KINDS, draw, freeze, stack

Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Named], list[torch.optim.Optimizer]]


def plain_sgd(named: Named) -> list[torch.optim.Optimizer]:
    return [SGD([p for _, p in named if p.requires_grad], lr=0.1)]


def check(
    task: Task, width: int, make: Make = plain_sgd, *, exact: bool = True, **options: Any
) -> pd2.PipelineModule:
    """On every rank; each compares what it holds. ``exact``: where width is 1."""
    world = torch.distributed.get_world_size()
    d = world // width
    m = d + 1
    own = torch.distributed.get_rank() // d
    by_replica = [task.batches([3 * m] * 4, seed=10 + r) for r in range(width)]
    model = whole(task.model())
    stock = make(list(model.named_parameters()))
    oracle = Oracle(model, Together(*stock), m, task.loss_fn, 1)
    rates = [lr_scheduler.ExponentialLR(each, 0.8) for each in stock]
    want = []
    for batches in zip(*by_replica, strict=True):
        want.append(oracle.train_replicas(batches)[own])
        for scheduler in rates:
            scheduler.step()
    with make_pipeline(task, d, m, by_replica[0][0], width=width, **options) as pipe:
        opt = pd2.PipelineOptimizer(*make(list(pipe.named_parameters())))
        rate = lr_scheduler.ExponentialLR(opt, 0.8)
        losses = []
        for batch in by_replica[own]:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            opt.step()
            rate.step()
        state = copy_of(pipe.state_dict())
        ours = torch.tensor([float(loss) for loss in losses])
        reloaded = opt.state_dict()
        opt.load_state_dict(reloaded)
    assert_close("losses", ours, torch.tensor(want))
    for name, tensor in state.items():
        if exact or not tensor.is_floating_point():
            assert torch.equal(tensor, model.state_dict()[name]), name
        else:
            assert_close(name, tensor, model.state_dict()[name])
    return pipe


def every_kind(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    names = ["low rank", "quantised", "orthogonal", "weight norm", "weight norm, old", "a user's"]
    if width == 1:  # their vectors are each replica's own
        names += ["spectral norm", "spectral norm, old", "was lazy"]
    for name in names:
        check(KINDS[name], width)
    d = world // width
    if d == 4:
        for name in ("shared within", "some microbatches"):
            check(KINDS[name], width)
    if d == 1:
        # Each replica goes its own way: a gradient on one of them only counts as zero elsewhere.
        one = Task(lambda: [whole(TASKS["branch"].model())], TASKS["branch"].draw)
        check(one, width, lambda named: [RMSprop([p for _, p in named], lr=0.01)], exact=False)


def frozen(rank: int, world: int) -> None:
    """Ranks that train nothing, before and between those that do."""
    torch.set_num_threads(1)
    for trained in ([3], [1, 3], [0], [2]):
        frozen_names = [
            f"{2 * i}.{kind}" for i in range(4) if i not in trained for kind in ("weight", "bias")
        ]
        task = Task(lambda: freeze(stack(lambda m: m), frozen_names), draw, cuts=tuple("0246"))  # noqa: B023
        split: Any = [str(8 // world * i) for i in range(1, world)]
        for recompute in (False, True):
            for make in (plain_sgd, by_groups):
                pipe = check(task, 1, make, split=split, recompute=recompute)
                (memory,) = pipe.memory_report().values()
                mine = [i for i in range(4) if i * world // 4 == rank]
                each = 4 * (WIDTH * WIDTH + WIDTH)
                count = sum(i in trained for i in mine)
                assert memory.weights == 2 * each * count
                assert memory.frozen_weights == each * (len(mine) - count)
                if max(mine) < min(trained):
                    assert (memory.most_in_flight, memory.activations) == (0, 0)


def sorted_out(named: Named) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, biases and scales to train; a rank may have none of them."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    vectors = [(name, p) for name, p in trained if p.ndim != 2]
    return (
        [p for _, p in trained if p.ndim == 2],
        [p for name, p in vectors if "bias" in name],
        [p for name, p in vectors if "bias" not in name],
    )


def by_groups(named: Named) -> list[torch.optim.Optimizer]:
    """The usual groups."""
    matrices, biases, scales = sorted_out(named)
    groups = [{"params": matrices}, {"params": biases + scales, "weight_decay": 0.0}]
    return [SGD(groups, lr=0.1, weight_decay=0.1)]


def several(named: Named) -> list[torch.optim.Optimizer]:
    matrices, biases, scales = sorted_out(named)
    return [
        RMSprop([{"params": matrices}], lr=0.01),
        SGD([{"params": biases}], lr=0.1, momentum=0.9),
        CountsInGroup([{"params": scales}]),
    ]


def adams(named: Named) -> list[torch.optim.Optimizer]:
    matrices, biases, scales = sorted_out(named)
    return [
        AdamW([{"params": matrices}], lr=0.01, weight_decay=0.1),
        AdamW([{"params": biases + scales}], lr=0.02, weight_decay=0.0),
    ]


def muon_and_adamw(named: Named) -> list[torch.optim.Optimizer]:
    matrices, biases, scales = sorted_out(named)
    rest = {"params": biases + scales}
    return [torch.optim.Muon([{"params": matrices}], lr=0.02), AdamW([rest], lr=0.01)]


class Unequal(nn.Module):
    """Its stages have matrices only, vectors only, or nothing to train."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.part: nn.Module = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.LayerNorm(WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
        )[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.part(x)
        return result


def any_optimizers(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    d = world // width
    unequal = Task(lambda: nn.Sequential(*map(Unequal, range(4))), draw)
    split = [str(4 // d * i) for i in range(1, d)]
    ways: list[tuple[Make, bool]] = [(by_groups, True), (several, True), (adams, False)]
    ways += [(muon_and_adamw, False)] if hasattr(torch.optim, "Muon") else []
    for make, exact in ways:
        check(unequal, width, make, exact=exact, split=split)
        check(TASKS["mlp"], width, make, exact=exact)


def late_messages(rank: int, world: int, width: int) -> None:
    torch.set_num_threads(1)
    with delays_everywhere(0.02):
        for name in ("low rank", "weight norm", "some microbatches"):
            if world // width in KINDS[name].depths:
                check(KINDS[name], width)
        check(TASKS["mlp"], width, several)
        check(TASKS["mlp"], width, adams, exact=False)


def mistakes(rank: int, world: int) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    outcomes = {
        "lazy": attempt(
            lambda: make_pipeline(
                Task(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)), draw),
                world,
                world,
                draw(world),
            )
        )
    }
    model = stack(lambda layer: layer)
    task = Task(lambda: None, draw)
    with make_pipeline(task, world, world, draw(world), model=model) as pipe:
        own = [p for _, p in pipe.named_parameters()]
        everything = list(model.parameters())
        wrong: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
            "another stage's": lambda: [SGD(everything if rank == 1 else own, lr=0.1)],
            "of all ranks": lambda: [SGD(everything, lr=0.1)],
            "in two": lambda: [SGD(own, lr=0.1), RMSprop(own[: rank + 1] if rank else [own[0]])],
            "in none": lambda: [SGD(own[1:] if rank == 1 else own, lr=0.1)],
            "closure": lambda: [torch.optim.LBFGS(own)],
            "closure on one": lambda: [torch.optim.LBFGS(own) if rank else SGD(own, lr=0.1)],
        }
        for name, make in wrong.items():
            outcomes[name] = attempt(lambda: pd2.PipelineOptimizer(*make()))  # noqa: B023
        opt = pd2.PipelineOptimizer(SGD(own, lr=0.1))
        state = opt.state_dict()
        outcomes["state"] = attempt(lambda: opt.load_state_dict({} if rank else state))
        batch = draw(2 * world)
        pipe.train_step(*batch.args, target=batch.target)
        opt.step()
    return outcomes


MISTAKES: Expected = {
    "lazy": ("ValueError", ["parameter '1.weight' is lazy"]),
    "another stage's": ("ValueError", ["0.weight of a stage that another rank runs"]),
    "of all ranks": ("ValueError", ["of a stage that another rank runs"]),
    "in two": ("ValueError", ["is in optimizer 0 (SGD) and in optimizer 1 (RMSprop)"]),
    "in none": ("ValueError", ["missing in the optimizer: 1 ("]),
    "closure": ("TypeError", ["LBFGS evaluates the loss several times"]),
    "closure on one": ("TypeError", ["LBFGS evaluates the loss several times"]),
    "state": ("ValueError|RuntimeError", ["state_dict without param_groups and state"]),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "num_stages"), [(2, 2), *exhaustive((1, 2), (1, 4), (2, 1))])
def test_parameters_of_every_kind_and_any_optimizers(width: int, num_stages: int) -> None:
    """Also where ranks have no parameter of a group, or train nothing, and after mistakes."""
    each_width = (every_kind, any_optimizers, late_messages)
    checks: list[Any] = [partial(each, width=width) for each in each_width]
    checks += [frozen] if width == 1 else []
    checks += [mistakes] if (width, num_stages) == (1, 2) else []
    results = run_ranks(in_turn, width * num_stages, args=checks, timeout=280)
    if mistakes in checks:
        assert_raised((result.value[-1] for result in results), MISTAKES)
