"""Runs of random options that are saved, go on elsewhere, evaluate and discard batches meanwhile.

A case is a combination of options (:mod:`tests.runs.combinations`), widened here to all of them,
and phases: one pipeline for each, the next of which goes on with what the last one has saved, under
another layout. What comes out is compared with the definition on the unsplit model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pipedream2bw as pd2
from pipedream2bw import options, rules
from pipedream2bw.optimizer import options as optimizer_options
from pipedream2bw.optimizer.options import OptimizerOptions, Stepping
from pipedream2bw.optimizer.staleness import Remedies
from pipedream2bw.options import Options
from tests.references.oracle import Batch
from tests.runs.combinations import (
    HARMLESS,
    NUM_UPDATES,
    OTHER_OPTIMIZERS,
    PARTS,
    Choose,
    Combination,
    Outcome,
    Phase,
    assert_alike,
    batches_of,
    build,
    draw,
    foreign_optimizers,
    opened,
    optimizers_of,
    phases_by_definition,
    sizes_of,
)
from tests.samples.schedule_sizes import TWO_PIPELINES, Sizes

SURROUNDING = ("evaluate", "discard", "go back", "full_state_dict", "flush", "state_dict")
NOTHING = (None, False, (), "", frozenset(), -1)
SAVED_BY = ("save", "save", "checkpointer", "newest")
NAMES = {field.name for table in (Options, OptimizerOptions) for field in dataclasses.fields(table)}


@dataclasses.dataclass(frozen=True)
class Part:
    """How a phase runs, beside what it computes."""

    phase: Phase
    world: int  # processes; 0: threads
    shard_state: bool
    saved_by: str
    """How the next one gets what this one has."""
    has_mesh: bool
    form: str
    """Of the schedule: its name, the object or the object's text."""

    @property
    def num_ranks(self) -> int:
        """Of a replica."""
        return max(self.world, 1) // self.phase.width


@dataclasses.dataclass(frozen=True)
class Case:
    seed: str
    number: int
    parts: tuple[Part, ...]
    is_excluded: bool
    """Whether the tables exclude the first part's options."""

    @property
    def kind(self) -> str:
        if self.is_excluded:
            return "excluded"
        world = self.parts[0].world
        return f"in {world} processes" if world else "in threads"

    def described(self) -> str:
        """All that is not as it is by default."""
        shown = []
        for part in self.parts:
            of = dataclasses.asdict(part.phase.of)
            beside = dataclasses.asdict(part)
            beside.pop("phase")
            given = {n: v for n, v in {**of, **beside}.items() if v not in NOTHING}
            updates = part.phase.updates
            shown.append(
                f"updates {updates.start} to {updates.stop}, width {part.phase.width}: {given}"
            )
        return "\n".join(shown)

    @property
    def command(self) -> str:
        return f"python -m tests.pairs --seed {self.seed} --case {self.number}"


# ---------------------------------------------------------------- what is drawn


def draw_case(seed: str, number: int) -> Case:
    numbers = random.Random(f"{seed} {number}")
    choose = numbers.choice
    while True:
        world = choose([0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 4])
        width = choose([w for w in (1, 2, 4) if world % w == 0]) if world else 1
        of = draw(choose, world // width if world else None)
        of = widen(choose, of)
        begins = sorted({0, *numbers.sample(range(1, NUM_UPDATES), choose([0, 0, 1, 1, 2]))})
        parts = []
        for i, (begin, end) in enumerate(itertools.pairwise([*begins, NUM_UPDATES])):
            if i:
                width = choose([w for w in (1, 2, 4) if world % w == 0]) if world else 1
                found = moved(choose, of, world // width if world else None)
                if found is None:
                    break
                of = found
            phase = Phase(of, range(begin, end), width)
            parts.append(
                Part(
                    phase,
                    world,
                    shard_state=choose([False, False, True]),
                    saved_by=choose(SAVED_BY),
                    has_mesh=world > 0 and choose([False, True]),
                    form=choose(["name", "name", "object", "text"]),
                )
            )
        if parts[-1].phase.updates.stop < NUM_UPDATES:
            continue
        parts = [_linked(part, before) for part, before in zip(parts, [None, *parts], strict=False)]
        is_saved = len(parts) > 1 or parts[0].saved_by == "checkpointer"
        if not all(can_be_compared(part.phase.of, is_saved=is_saved) for part in parts):
            continue
        excluded = [is_excluded(part) for part in parts]
        if not any(excluded):
            return Case(seed, number, tuple(parts), is_excluded=False)
        if excluded[0] and choose(range(20)) == 0:
            return Case(seed, number, tuple(parts[:1]), is_excluded=True)


def _linked(part: Part, before: Part | None) -> Part:
    is_new = before is not None and before.saved_by == "newest"
    return dataclasses.replace(part, phase=dataclasses.replace(part.phase, is_new=is_new))


def widen(choose: Choose[Any], of: Combination) -> Combination:
    """What :func:`draw` does not draw, and what is done between batches."""
    optimizer = of.optimizer
    if of.norm != "batch":
        optimizer = choose([optimizer, *OTHER_OPTIMIZERS, *foreign_optimizers()])
    reduction = of.reduction
    between = [
        choose([each, each, *SURROUNDING]) if k == 0 else each
        for length, start in zip(of.lengths, itertools.accumulate((0, *of.lengths)), strict=False)
        for k, each in enumerate(of.between[start : start + length])
    ]
    return dataclasses.replace(
        of,
        optimizer=optimizer,
        split_master=of.split_master and optimizer in ("sgd", "adamw", "adam", "heavy"),
        between=tuple(between),
        dropout=choose([0.0, 0.0, 0.1]),
        shifts=choose([False, False, True]),
        normalizer=choose(["", "number", "function"]) if reduction == "sum" else "",
        measures=choose([False, True]),
        half=choose([False, False, True]),
        further=further(choose),
    )


def further(choose: Choose[Any]) -> tuple[tuple[str, Any], ...]:
    """Options that change no number."""
    drawn = {
        "bucket_cap_mb": choose([None, None, 1e-6, 1.0]),
        "optimizer_device": choose([None, None, None, "cpu"]),
        "random": choose([None] * 5 + ["torch"]),
        "graphs": choose([None, None, "auto", *[True] * (choose(range(9)) == 0)]),
        "dynamic_shapes": choose([None, None, None, True]),
        "compile": {"backend": "aot_eager"} if choose(range(40)) == 0 else None,
    }
    return tuple((name, value) for name, value in drawn.items() if value is not None)


def moved(choose: Choose[Any], of: Combination, num_ranks: int | None) -> Combination | None:
    """Another layout that goes on with what this one has saved; None: there is none."""
    drawn = {n: v for n, v in further(choose) if n != "random"}
    kept = {n: v for n, v in of.further if n == "random"}  # as it was saved
    of = dataclasses.replace(of, further=tuple({**drawn, **kept}.items()))
    stays = of.is_fresh or of.schedule == "pipedream"
    found: dict[str, list[Sizes]] = {}
    for schedule in [of.schedule] if stays else pd2.schedule_names():
        is_other = schedule in ("pipedream", "2bw_fresh") and not stays
        is_other |= of.norm == "batch" and schedule in TWO_PIPELINES
        if is_other or (of.staleness and "2bw" not in schedule):
            continue
        depths = [1, 2, 3, 4] if num_ranks is None else [num_ranks, 2 * num_ranks]
        sizes_there = [
            each
            for depth in ([of.sizes.num_stages] if stays else depths)
            for each in sizes_of(schedule, depth)
            if num_ranks in (None, depth // each.stages_per_rank)
            and (not stays or each == of.sizes)
            and (not of.tied or (depth > 1) == bool(of.cuts))
        ]
        if sizes_there:
            found[schedule] = sizes_there
    if not found:
        return None
    schedule = choose(list(found))
    sizes = choose(found[schedule])
    cuts = list(PARTS[1:])
    while len(cuts) >= sizes.num_stages:
        cuts.remove(choose(cuts))
    few = sizes.num_microbatches * (4 if of.norm == "batch" else 2)
    return dataclasses.replace(
        of,
        schedule=schedule,
        sizes=sizes,
        cuts=of.cuts if stays else tuple(cuts),
        rows=tuple(choose([few, few, few + 1]) for _ in of.rows),
        recompute=of.recompute if stays else choose([False, True, "auto", ["blocks.2"]]),
    )


# ---------------------------------------------------------------- what the tables say


def is_excluded(part: Part) -> bool:
    """Whether the tables exclude its options."""
    of = part.phase.of
    try:
        rules.refuse(options.EXCLUSIONS, facts_of(part))
        for optimizer in optimizers_of(of.optimizer, build(of).named_parameters()):
            facts = facts_of(part) | {"optimizer": Stepping(optimizer, [torch.float32])}
            rules.refuse(optimizer_options.EXCLUSIONS, facts)
    except ValueError:
        return True
    return False


def can_be_compared(of: Combination, *, is_saved: bool) -> bool:
    """Whether the unsplit model does the same, as the documents say."""
    if of.normalizer == "function" and max(of.lengths) > 1:
        return False
    if of.is_fresh and max(of.late) > of.sizes.num_microbatches:
        return False
    # "auto" may recompute nothing.
    by_name = dict(of.further)
    if of.recompute == "auto" and not {"compile", "random", "graphs"}.isdisjoint(by_name):
        return False
    # Else other numbers are drawn: after a layer that no fake tensors can run, too.
    if of.dropout and (of.gated or "compile" in by_name or by_name.get("random") == "torch"):
        return False
    # The state of an optimizer inside another one is in no state_dict.
    loads = is_saved or {"go back", HARMLESS[-1]} & {*of.between}
    return of.optimizer != "lookahead" or not loads


def facts_of(part: Part) -> dict[str, Any]:
    """As the tables of exclusions know them."""
    of = part.phase.of
    defaults = {
        field.name: field.default
        for table in (Options, OptimizerOptions)
        for field in dataclasses.fields(table)
    }
    given = {**of.pipeline_options(), **of.optimizer_options(), "shard_state": part.shard_state}
    cpu = torch.device("cpu")
    return {
        **defaults,
        **given,
        "staleness": Remedies(given["staleness"]),
        "num_stages": of.sizes.num_stages,
        "schedule": pd2.make_schedule(of.schedule, *dataclasses.astuple(of.sizes)),
        "width": part.phase.width,
        "processes": max(part.world, 1),
        "device": cpu,
        "devices of the stages": [cpu] * of.sizes.num_stages,
        "'tp' of the mesh": 1,
        "shards": None,
        "tied parameters": ["last.weight"] if of.is_tied_across else [],
        "register_comm_hook": None,
        "fresh forwards": of.is_fresh,
        "late forwards of one's own": False,
    }


# ---------------------------------------------------------------- what runs


def batches_of_part(part: Part, number: int) -> list[list[Batch]]:
    """Of each replica."""
    of = part.phase.of
    return [batches_of(of, 100 * number + 10 + r, r) for r in range(part.phase.width)]


@contextlib.contextmanager
def pipeline_of(part: Part, batches: Sequence[Batch]) -> Iterator[Any]:
    of = part.phase.of
    given: dict[str, Any] = {}
    if part.form != "name" and not of.is_fresh:
        made = pd2.make_schedule(of.schedule, *dataclasses.astuple(of.sizes))
        given["schedule"] = made if part.form == "object" else str(made)
        given["stages_per_rank"] = None
    if part.has_mesh:
        shape = (part.phase.width, part.num_ranks)
        given["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    elif part.world:
        given["width"] = part.phase.width
    elif part.form == "object":
        given["devices"] = ["cpu"] * of.sizes.num_stages
    with opened(of, batches, shard_state=part.shard_state, **given) as run:
        yield run


def run_part(part: Part, batches: Sequence[Batch], before: Part | None, folder: Path) -> Outcome:
    """Trains a part; this replica's batches, for all train_steps."""
    updates = part.phase.updates
    with pipeline_of(part, batches) as run, contextlib.ExitStack() as stack:
        pipe, opt = run.pipe, run.opt
        after_update: Any = lambda: None  # noqa: E731
        save: Any = lambda: None  # noqa: E731
        if before is not None and before.saved_by == "checkpointer":
            with pd2.Checkpointer(folder / str(updates.start), pipe, opt, every=1) as last:
                assert last.resume() == updates.start
        elif before is not None:
            found = pd2.load(folder / str(updates.start), pipe, opt)
            assert found == {"updates": updates.start}
        path = folder / str(updates.stop)
        if part.saved_by == "checkpointer":
            ckpt = stack.enter_context(pd2.Checkpointer(path, pipe, opt, every=1))
            after_update = ckpt.step
        elif updates.stop < NUM_UPDATES:
            versions = "newest" if part.saved_by == "newest" else "all"

            def save() -> None:
                extra = {"updates": updates.stop}
                pd2.save(path, pipe, opt, extra=extra, versions=versions).wait()

        return run.train(updates, save, after_update)


def run_case(case: Case, rank: int, folder: Path) -> None:
    """All parts, here and now.

    Raises:
        AssertionError: something else came out than by the definition, or than the tables say.
    """
    by_part = [batches_of_part(part, i) for i, part in enumerate(case.parts)]
    got: list[Outcome] = []
    before = None
    for part, by_replica in zip(case.parts, by_part, strict=True):
        own = rank // part.num_ranks
        try:
            got.append(run_part(part, by_replica[own], before, folder))
        except (ValueError, TypeError) as error:
            names = [name for name in NAMES if name in str(error)]
            if case.is_excluded and names:
                return
            raise
        assert not case.is_excluded, "the tables exclude it, and it was taken"
        before = part
    want = phases_by_definition([part.phase for part in case.parts], by_part)
    for i, (part, mine, theirs) in enumerate(zip(case.parts, got, want, strict=True)):
        reference = theirs[rank // part.num_ranks]
        updates, of = part.phase.updates, part.phase.of
        norms = [*reference.norms[updates.start :]]
        scales = [*reference.scales[updates.start : updates.stop]]
        try:
            assert_alike(of, mine, dataclasses.replace(reference, norms=norms, scales=scales))
        except AssertionError as error:
            raise AssertionError(f"part {i}: {error}") from error


def outcomes(rank: int, world: int, seed: str, numbers: Sequence[int], folder: str) -> None:
    """Runs cases, one after the other; leaves a file ``ended-NUMBER`` of each that is right."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for number in numbers:
        run_case(draw_case(seed, number), rank, Path(folder) / str(number))
        if world > 1:
            dist.barrier()
        (Path(folder) / f"ended-{number}").touch()
