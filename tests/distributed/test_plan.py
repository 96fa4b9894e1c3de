"""Ranks that read one plan train as the oracle says, each where the plan has its device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipedream2bw as pd2
from pipedream2bw.planner.profiling.profile import ProfiledLinks
from pipedream2bw.ranks import boards
from pipedream2bw.ranks.deadline import Deadline
from tests.references.oracle import Oracle
from tests.runs.launch import run_ranks
from tests.runs.trajectory import sgd
from tests.samples.models import TASKS
from tests.samples.plans import plan_for

TASK = TASKS["mlp"]
M = 4
UNEQUAL = (5, 2)


def attempt(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def model() -> nn.Module:
    made = TASK.model()
    assert isinstance(made, nn.Module)
    return made


def planned(devices: list[list[int]], **changes: Any) -> pd2.Plan:
    cut = list(dict(model().named_children()))[2]
    return plan_for(
        model(),
        [cut] * (len(devices) - 1),
        TASK.batches([8])[0].args,
        width=len(devices[0]),
        devices=devices,
        **{"num_microbatches": M, **changes},
    )


def build(**options: Any) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        options.pop("model", None) or model(),
        TASK.loss_fn,
        example_args=TASK.batches([8])[0].args,
        timeout=60.0,
        **options,
    )


def trains_as_the_oracle(folder: str, name: str) -> None:
    """Four processes; stage 0's replicas are devices 3 and 0, stage 1's 1 and 2."""
    plan = pd2.Plan.load(Path(folder, name))
    by_replica = [TASK.batches([8] * 4, seed=seed) for seed in range(2)]
    whole = model()
    oracle = Oracle(whole, sgd(whole.parameters()), plan.num_microbatches, TASK.loss_fn, delay=1)
    losses = [oracle.train_replicas(each) for each in zip(*by_replica, strict=True)]
    with build(plan=plan) as pipe:
        assert pipe.mesh.mesh.tolist() == [[3, 1], [0, 2]]
        assert pipe.microbatches_per_replica == (UNEQUAL if name == "unequal.json" else (M, M))
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        ours = []
        for batch in by_replica[pipe.replica]:
            args = batch.args if pipe.is_first_stage else ()
            ours.append(pipe.train_step(*args, target=batch.target if pipe.is_last_stage else None))
            opt.step()
        state = pipe.state_dict()
        mine = [float(loss) for loss in ours]
    assert mine == [each[pipe.replica] for each in losses]
    assert state
    for name, tensor in state.items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def refusals(rank: int, folder: str) -> dict[str, tuple[str, str]]:
    here = Path(folder)
    replicas = here / "replicas.json"
    other = nn.Sequential(*model(), nn.Tanh())
    return {
        "world": attempt(lambda: build(plan=here / "two.json")),
        "model": attempt(lambda: build(plan=replicas, model=other if rank == 1 else None)),
        "contradiction": attempt(
            lambda: build(plan=replicas, **({"num_microbatches": 2} if rank == 2 else {}))
        ),
        "other numbers": attempt(
            lambda: build(plan=here / "unequal.json", num_microbatches=[5, 3] if rank else [5, 2])
        ),
        "auto": attempt(lambda: build(num_stages="auto" if rank == 0 else 2, num_microbatches=M)),
        "no target": attempt(
            lambda: build(
                num_stages="auto",
                num_microbatches=M,
                example_target=None if rank == 1 else torch.zeros(8),
            )
        ),
        "missing": attempt(lambda: build(plan=here / "no.json" if rank == 3 else replicas)),
        "other": attempt(lambda: build(plan=here / "usual.json" if rank == 0 else replicas)),
    }


def finds_one_plan(folder: str) -> None:
    """All four ranks are used, in whatever replicas are fastest, or in those asked for."""
    made: list[int] = []
    make_boards = boards.make_boards

    def counted(group: Any, machines: Any, row_sizes: list[int], deadline: Deadline) -> Any:
        made.extend(row_sizes)
        return make_boards(group, machines, row_sizes, deadline)

    boards.make_boards = counted
    batch = TASK.batches([8])[0]
    options = {"num_stages": "auto", "example_target": batch.target}
    options["profile"] = Path(folder, "profile.json")
    for given, depth in (({"width": 2}, 2), ({"width": 1}, 4), ({}, None)):
        with build(**options, **given, num_microbatches=M) as pipe:
            assert pipe.width * pipe.num_stages == 4
            assert pipe.num_stages == depth or depth is None
            opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
            loss = pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            assert float(loss) > 0
    assert len(made) == 2 * 3  # planning and training agree over one, and updates over one
    links = pd2.Profile.load(Path(folder, "profile.json")).links
    assert links is not None  # which the dry profile has not
    assert len(links.latency) == 4
    with build(**{**options, "profile": Path(folder, "even.json")}, num_microbatches=M) as pipe:
        assert (pipe.width, pipe.num_stages, pipe.schedule) == (4, 1, "1f1b")


def plans(rank: int, world: int, folder: str) -> dict[str, tuple[str, str]]:
    torch.set_num_threads(1)
    trains_as_the_oracle(folder, "replicas.json")
    trains_as_the_oracle(folder, "unequal.json")
    finds_one_plan(folder)
    return refusals(rank, folder)


OUTCOMES = {
    "world": ("ValueError", ["world size: 4", "1 * 2 = 2"]),
    "model": ("ValueError", ["plan of another model", "layers"]),
    "contradiction": ("ValueError", ["num_microbatches: 2, of the plan: 4"]),
    "other numbers": ("ValueError", ["num_microbatches: (5, 3), of the plan: (5, 2)"]),
    "auto": ("ValueError", ["num_stages must be the same on every rank", "0: auto", "1: 2"]),
    "no target": ("ValueError", ["example_target"]),
    "other": ("ValueError", ["order of the plan's devices must be the same", "[[3, 1], [0, 2]]"]),
}


def even(profile: pd2.Profile) -> pd2.Profile:
    """All widths are equally fast: links are free, and four stages can take as long."""
    cuts = [i for i, layer in enumerate(profile.layers) if layer.can_cut_after][:3]
    times = tuple(
        1e-3 * (i in cuts or i + 1 == len(profile.layers)) for i in range(len(profile.layers))
    )
    return dataclasses.replace(
        profile,
        microbatches=tuple(
            dataclasses.replace(each, forward=times, input_grad=times, weight_grad=times)
            for each in profile.microbatches
        ),
        seconds_per_update_byte={},
        links=ProfiledLinks(
            latency=((0.0,) * 4,) * 4,
            bandwidth=tuple(
                tuple(math.inf if i == j else 1e30 for j in range(4)) for i in range(4)
            ),
        ),
    )


@pytest.mark.slow
def test_ranks_train_where_the_plan_has_them_and_refuse_what_does_not_fit(tmp_path: Path) -> None:
    planned([[3, 0], [1, 2]]).save(tmp_path / "replicas.json")
    planned([[3, 0], [1, 2]], num_microbatches=UNEQUAL).save(tmp_path / "unequal.json")
    planned([[0, 2], [1, 3]]).save(tmp_path / "usual.json")
    planned([[0], [1]]).save(tmp_path / "two.json")
    batch = TASK.batches([8])[0]
    profile = pd2.profile(
        model(),
        TASK.loss_fn,
        example_args=batch.args,
        target=batch.target,
        microbatch_rows=(2,),
        dry=pd2.KNOWN_DEVICES["v100"],
    )
    profile.save(tmp_path / "profile.json")
    even(profile).save(tmp_path / "even.json")
    for result in run_ranks(plans, 4, args=[str(tmp_path)], timeout=150):
        for name, (kind, texts) in OUTCOMES.items():
            raised, said = result.value[name]
            assert raised == kind, (name, result.rank, raised, said)
            assert all(text in said for text in texts), (name, result.rank, said)
        raised, said = result.value["missing"]
        assert raised == ("FileNotFoundError" if result.rank == 3 else "OSError")
        assert "no.json" in said
