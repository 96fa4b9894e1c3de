"""The best of all plans, by trying every set of cuts of every candidate."""

from __future__ import annotations

import itertools
import math

from tests.references.plan_oracle import (
    ROUNDING,
    Candidate,
    Grid,
    Problem,
    all_cuts,
    busiest,
    candidates,
    fits,
    grids,
    rows,
    seconds,
    stages,
)


class Search:
    """Every set of cuts of every candidate, by rising work of the slowest rank."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.candidates = list(candidates(problem))
        self.least_slowness = min(1 / each.throughput for each in problem.cluster.types)
        self.by_work: dict[tuple[object, ...], list[tuple[float, tuple[int, ...]]]] = {}

    def cuts(self, candidate: Candidate) -> list[tuple[float, tuple[int, ...]]]:
        """With the seconds of a microbatch that the slowest rank computes, at least."""
        c = candidate
        is_chimera = c.schedule == "chimera"
        placed = tuple(tuple(c.stages_on(rank)) for rank in range(c.ranks))
        key = (c.size, c.recompute, placed)
        if key not in self.by_work:
            item = self.problem.profile.microbatches[c.size]
            times = [
                sum(each)
                for each in zip(item.forward, item.input_grad, item.weight_grad, strict=True)
            ]
            if c.recompute == "stages":
                times = [a + b for a, b in zip(times, item.forward, strict=True)]
            before = [0.0, *itertools.accumulate(times)]
            share = self.least_slowness * (0.5 if is_chimera else 1.0)
            found = []
            for firsts in all_cuts(self.problem, c.num_stages):
                ends = [*firsts[1:], self.problem.num_layers]
                each = [before[b] - before[a] for a, b in zip(firsts, ends, strict=True)]
                on = [sum(each[k] for k in c.stages_on(rank)) for rank in range(c.ranks)]
                found.append((share * max(on), firsts))
            self.by_work[key] = sorted(found)
        return self.by_work[key]

    def fastest(self, worth: float = math.inf) -> float:
        """Seconds of a row, of all that fit; ``worth`` if none takes less."""
        order = [
            (self.cuts(c)[0][0] * c.num_microbatches / rows(self.problem, c), index)
            for index, c in enumerate(self.candidates)
        ]
        best = worth
        for _, index in sorted(order):
            best = min(best, self.fastest_of(self.candidates[index], best))
        return best

    def fastest_of(self, candidate: Candidate, worth: float = math.inf) -> float:
        c, batch, best = candidate, rows(self.problem, candidate), worth
        for least, firsts in self.cuts(c):
            if least * c.num_microbatches / batch >= best:
                break
            for grid in grids(self.problem, c):
                made = stages(self.problem, c, firsts, grid)
                if busiest(c, made) / batch >= best or not fits(self.problem, c, made, grid):
                    continue
                best = min(best, seconds(self.problem, c, firsts, made, grid) / batch)
        return best

    def fits_somewhere(self) -> bool:
        return any(
            fits(self.problem, c, stages(self.problem, c, firsts, grid), grid)
            for c in self.candidates
            for _, firsts in self.cuts(c)
            for grid in grids(self.problem, c)
        )

    def by_slowest_stage(self) -> float:
        """Seconds of a row, of splits whose slowest stage takes the least time."""
        return min(self.of_slowest_stage(c) for c in self.candidates)

    def of_slowest_stage(self, candidate: Candidate) -> float:
        """Of the best layout; of splits that tie, the slowest one.

        If it needs more than the memory, it is one of those that fit, each of a rank's several
        stages into an equal share.
        """
        c = candidate
        sharing = max(len(c.stages_on(rank)) for rank in range(c.ranks))
        best = math.inf
        for grid in grids(self.problem, c):
            all_firsts = [firsts for _, firsts in self.cuts(c)]
            made = {firsts: stages(self.problem, c, firsts, grid) for firsts in all_firsts}
            slowest = {firsts: max(self.stage_seconds(c, firsts, grid)) for firsts in all_firsts}
            chosen = least_of(slowest)
            fitting = [x for x in chosen if fits(self.problem, c, made[x], grid)]
            if len(fitting) < len(chosen):
                limits = [
                    min(self.problem.memory_of(each) for r in c.ranks_of(k) for each in grid[r])
                    for k in range(c.num_stages)
                ]
                shared = {
                    firsts: taken
                    for firsts, taken in slowest.items()
                    if all(
                        stage["peak_bytes"] <= limit / sharing
                        for stage, limit in zip(made[firsts], limits, strict=True)
                    )
                }
                fitting += least_of(shared)
            if fitting:
                taken = max(seconds(self.problem, c, x, made[x], grid) for x in fitting)
                best = min(best, taken / rows(self.problem, c))
        return best

    def stage_seconds(
        self, candidate: Candidate, firsts: tuple[int, ...], grid: Grid
    ) -> list[float]:
        """Of a chain's stages: F and B of a microbatch, and messages there and back."""
        c, n = candidate, self.problem.num_layers
        item = self.problem.profile.microbatches[c.size]
        latency, per_byte = self.mean_link(c)
        crossing = {b: 2 * (size * per_byte + latency) for _, b, size in item.edges}
        taken = []
        for k, (first, end) in enumerate(itertools.pairwise([*firsts, n])):
            work = sum(
                item.forward[i] * (2 if c.recompute == "stages" else 1)
                + item.input_grad[i]
                + item.weight_grad[i]
                for i in range(first, end)
            )
            devices = [device for rank in c.ranks_of(k) for device in grid[rank]]
            messages = sum(crossing[cut] for cut in (first, end) if 0 < cut < n)
            taken.append(self.problem.slowness(devices) * work + messages)
        return taken

    def mean_link(self, candidate: Candidate) -> tuple[float, float]:
        """Latency and seconds per byte, between neighbouring ranks in all layouts."""
        found = [
            self.problem.link(a, b)
            for grid in grids(self.problem, candidate)
            for before, after in itertools.pairwise(grid)
            for a, b in zip(before, after, strict=True)
        ]
        count = max(len(found), 1)
        return sum(a for a, _ in found) / count, sum(1 / b for _, b in found) / count


def least_of(seconds_by_cuts: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """All that tie for the least."""
    least = min(seconds_by_cuts.values(), default=0.0)
    return [cuts for cuts, taken in seconds_by_cuts.items() if taken <= least * ROUNDING]
