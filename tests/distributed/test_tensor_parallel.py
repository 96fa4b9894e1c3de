"""Meshes of replicas, stages and shards train as one process does, and go on in other shapes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.distributed.test_sharded_checkpoints import assert_same, contents
from tests.exhaustive import exhaustive
from tests.runs.crew import Crew
from tests.runs.launch import run_ranks
from tests.runs.tensor_parallel import (
    NUM_BLOCKS,
    Case,
    Leg,
    Shape,
    distances,
    find_random_numbers,
    go_on_until_killed,
    keep_random_numbers,
    load_and_train,
    load_by_torch,
    save_by_torch,
    train,
    train_and_save,
    train_until_refused,
)

pytestmark = pytest.mark.slow
ALL_THREE, SHARDS, TWO_AND_FOUR = Shape(2, 2, 2), Shape(1, 1, 4), Shape(1, 2, 4)
SCHEDULES = ("2bw", "2bw_fresh", "1f1b", "2bw_v", "v_half")
OFTEN = [
    Case(ALL_THREE, "2bw_v"),
    Case(ALL_THREE, "2bw_fresh", "adamw", feedback=True),
    Case(SHARDS, "1f1b", "adamw"),
    Case(ALL_THREE, optimizer="adamw", kind="torch", tied=True, count=8),
    Case(ALL_THREE, optimizer="adamw", precision="bf16", shard_state=True, feedback=True, count=8),
    Case(ALL_THREE, precision="fp16", scale=2.0**20, count=8),
]
SELDOM = [
    *(
        Case(*each)
        for each in itertools.product(
            (ALL_THREE, SHARDS, TWO_AND_FOUR), SCHEDULES, ("sgd", "adamw")
        )
        if Case(*each) not in OFTEN and not (each[0] == SHARDS and "v" in each[1].split("_"))
    ),
    Case(SHARDS, "2bw_v", "adamw"),
    Case(ALL_THREE, kind="torch"),
    Case(ALL_THREE, tied=True),
    Case(ALL_THREE, "1f1b", "adamw", tied=True, shard_state=True),
    Case(ALL_THREE, optimizer="adamw", shard_state=True),
    Case(ALL_THREE, feedback=True, optimizer="adamw", shard_state=True),
    Case(ALL_THREE, precision="bf16"),
    Case(ALL_THREE, optimizer="adamw", precision="bf16", clips=False, kind="torch"),
    Case(ALL_THREE, precision="fp16", scale=2.0**20, shard_state=True),
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(8)
    yield crew
    crew.close()


def check(*legs: Leg) -> None:
    # float64, so that nothing but the sums' order remains, and is far below what is asked for.
    within = 1e-12 if legs[0].case.precision is None else 1e-6
    found = distances(*legs)
    assert max(found.values()) <= within, found


@pytest.mark.parametrize("case", [*OFTEN, *exhaustive(*SELDOM)], ids=str)
def test_a_mesh_trains_as_one_process(case: Case, crew: Crew) -> None:
    results = crew.run(train, case.shape.world, case)
    check(Leg(case, results, 0, case.count))
    if case.scale is not None:
        assert float("inf") in results[0].norms


@pytest.mark.exhaustive
def test_copies_are_equal_after_many_batches(crew: Crew) -> None:
    """``whole_of`` compares their bits."""
    case = Case(ALL_THREE, optimizer="adamw", count=100)
    check(Leg(case, crew.run(train, 8, case), 0, case.count))


DRIFTING = [
    (Case(Shape(1, 1, 2), kind="forgetful"), 0),
    (Case(ALL_THREE, optimizer="adamw", kind="forgetful", shard_state=True), 0),
    (Case(Shape(2, 1, 4), "1f1b", "adamw", kind="forgetful", precision="bf16"), 0),
    (Case(TWO_AND_FOUR, "2bw_v", "adamw", clips=False, kind="forgetful", feedback=True), 3),
]


@pytest.mark.parametrize(("case", "idle"), [DRIFTING[0], *exhaustive(*DRIFTING[1:])], ids=str)
def test_gradients_that_a_module_does_not_add_up(case: Case, idle: int, crew: Crew) -> None:
    found = set(crew.run(train_until_refused, case.shape.world, case, idle))
    (told,) = found  # all ranks the same, after the same number of steps
    number, text = told
    assert number in (4, 6)
    assert re.match(r"shards: 0.(norm.weight|norm.bias|bias) after \d updates: the values", text), (
        text
    )


def test_a_run_that_goes_on_is_watched_from_there(crew: Crew, tmp_path: Path) -> None:
    case = Case(Shape(1, 1, 2), kind="forgetful")
    ((number, text),) = set(crew.run(train_until_refused, 2, case, 0, str(tmp_path)))
    assert number == 4
    assert "after 5 updates" in text  # the second one of this run


def check_resumed(saving: Case, going_on: Case, crew: Crew, folder: Path, end: int = 3) -> None:
    """Saved in one shape, loaded in another: the same bits, and then the same training."""
    saved, again = str(folder / "saved"), str(folder / "again")
    before = crew.run(train_and_save, saving.shape.world, saving, end, saved)
    after = crew.run(load_and_train, going_on.shape.world, going_on, end, saved, again)
    assert_same(contents(again), contents(saved))
    check(Leg(saving, before, 0, end), Leg(going_on, after, end, going_on.count))


PAIRS = [
    (ALL_THREE, SHARDS),
    (ALL_THREE, Shape(1, 4, 1)),
    (Shape(1, 2, 2), Shape(2, 1, 4)),
    (Shape(1, 1, 4), Shape(4, 1, 2)),
    (Shape(1, 1, 1), Shape(1, 2, 4)),
    (Shape(2, 1, 2), Shape(1, 1, 1)),
]


@pytest.mark.parametrize(("saved", "resumed"), [PAIRS[0], *exhaustive(*PAIRS[1:])], ids=str)
def test_a_run_goes_on_in_another_shape(
    saved: Shape, resumed: Shape, crew: Crew, tmp_path: Path
) -> None:
    options = {"optimizer": "adamw", "tied": True, "shard_state": True, "feedback": True}
    cases = [Case(shape, count=6, **options) for shape in (saved, resumed)]
    check_resumed(*cases, crew, tmp_path)


@pytest.mark.parametrize("seed", exhaustive(0, 1))
def test_a_run_that_is_killed_goes_on_in_other_shapes(seed: int, tmp_path: Path) -> None:
    chance, folder = random.Random(seed), str(tmp_path)
    shapes = [Shape(1, 2, 2), Shape(1, 1, 4), Shape(2, 1, 2), Shape(1, 4, 1), Shape(2, 2, 2)]
    for _ in range(4):
        case = Case(chance.choice(shapes), optimizer="adamw", tied=True, feedback=True, count=40)
        victim, seconds = chance.randrange(case.shape.world), chance.uniform(0.05, 1.5)
        given = (case, folder, victim, seconds)
        results = run_ranks(
            go_on_until_killed, case.shape.world, args=given, timeout=60, expect_failure=True
        )
        assert results[victim].exit_code == -signal.SIGKILL
    case = dataclasses.replace(case, shape=chance.choice(shapes))
    given = (case, folder, None, 0.0)
    results = run_ranks(go_on_until_killed, case.shape.world, args=given, timeout=60)
    begun = {result.value[0] for result in results}
    assert len(begun) == 1
    (first,) = begun
    assert first > 0
    trained = [result.value[1] for result in results]
    check(Leg(case, [], 0, first), Leg(case, trained, first, case.count))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (Shape(1, 2, 4), "by hand"),
        *exhaustive((Shape(1, 4, 1), "by hand"), (Shape(4, 1, 2), "torch"), (ALL_THREE, "torch")),
    ],
    ids=str,
)
def test_torchs_checkpoints_have_shards(
    shape: Shape, kind: str, crew: Crew, tmp_path: Path
) -> None:
    options = {"optimizer": "adamw", "kind": kind, "tied": True, "shard_state": True, "count": 2}
    folder = str(tmp_path)
    saved = crew.run(save_by_torch, 8, Case(ALL_THREE, **options), folder)[0]
    loaded = crew.run(load_by_torch, shape.world, Case(shape, **options), folder)[0]
    for state in loaded:
        assert_same(state, saved)
    for each in ("objects", "states"):
        assert_same(contents(f"{folder}/{each}-{shape}"), contents(f"{folder}/ours"))


@pytest.mark.parametrize(
    ("shape", "origins"),
    [
        (Shape(2, 1, 4), [0, 1, 2, 3, 4, 5, 6, 7]),
        *exhaustive(
            (ALL_THREE, [0, 1, 2, 3, 4, 5, 6, 7]),
            (Shape(4, 1, 2), [0, 1, 4, 5, 0, 0, 0, 0]),
            (SHARDS, [0, 1, 0, 0]),
        ),
    ],
    ids=str,
)
def test_random_numbers_and_extras_of_each_rank(
    shape: Shape, origins: list[int], crew: Crew, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    kept = crew.run(keep_random_numbers, ALL_THREE.world, Case(ALL_THREE), folder)
    found = crew.run(find_random_numbers, shape.world, Case(shape), folder)
    for rank, (untouched, drawn, extra, place) in enumerate(found):
        assert drawn == (kept[rank] if shape == ALL_THREE else untouched), place
        assert extra == origins[rank], place


SHAPES = [
    Shape(dp, pp, tp)
    for dp, pp, tp in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4, 8))
    if dp * pp * tp <= 8
]


@st.composite
def resumed_cases(draw: st.DrawFn) -> tuple[Case, Case]:
    schedule = draw(st.sampled_from([*SCHEDULES, "2bw_split", "gpipe", "interleaved_2bw"]))
    bools = st.booleans()
    options = {
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
        "clips": draw(bools),
        "kind": draw(st.sampled_from(["by hand", "torch"])),
        "tied": draw(bools),
        "shard_state": draw(bools),
        "feedback": "2bw" in schedule and draw(bools),
        "count": draw(st.integers(4, 7)),
    }
    case = Case(draw(st.sampled_from(SHAPES)), schedule, **options)
    case = dataclasses.replace(case, shape=draw(st.sampled_from(shapes_for(case))))
    other = draw(st.sampled_from(shapes_for(case, like=case.shape)))
    return case, dataclasses.replace(case, shape=other)


def shapes_for(case: Case, like: Shape | None = None) -> list[Shape]:
    """On which the schedule runs, and, under fresh forwards, with as many of them."""
    most = NUM_BLOCKS // case.stages_per_rank
    return [
        shape
        for shape in SHAPES
        if shape.pp <= most
        and (like is None or "fresh" not in case.schedule or shape.pp == like.pp)
    ]


@settings(
    max_examples=int(os.environ.get("PIPEDREAM2BW_EXAMPLES", "2")),
    deadline=None,
    derandomize="PIPEDREAM2BW_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller case takes as long
)
@given(cases=resumed_cases(), end=st.integers(1, 3))
def test_any_run_goes_on_in_any_shape(
    cases: tuple[Case, Case], end: int, crew: Crew, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_resumed(*cases, crew, tmp_path_factory.mktemp("run"), end)
