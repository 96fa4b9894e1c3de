"""An update takes its time beside the next microbatches; nobody reads a half-made version."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import pipedream2bw as pd2
from tests.runs.trajectory import assert_same_state, by_oracle, copy_of, make_pipeline, sgd
from tests.samples.models import TASKS

NUM_BATCHES = 6


class SlowSGD(torch.optim.SGD):
    """Shows a half-made version for a while to whoever looks too early."""

    seconds = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.mul_(2)
        time.sleep(self.seconds)
        for parameter in parameters:
            parameter.div_(2)
        super().step()


def train_slowly(
    schedule: str, num_stages: int, m: int
) -> tuple[dict[str, torch.Tensor], list[pd2.Event]]:
    task = TASKS["skips"]
    batches = task.batches([2 * m] * NUM_BATCHES)
    with make_pipeline(task, num_stages, m, batches[0], schedule=schedule) as pipe:
        opt = pd2.PipelineOptimizer(SlowSGD(pipe.parameters(), lr=0.3))
        with pipe.timeline() as timeline:
            for batch in batches:
                pipe.train_step(*batch.args, target=batch.target)
                opt.step()
        return copy_of(pipe.state_dict()), timeline.rows


@pytest.mark.parametrize(("num_stages", "m"), [(1, 2), (2, 3), (3, 4)])
def test_updates_are_beside_other_actions_of_their_stage(num_stages: int, m: int) -> None:
    task = TASKS["skips"]
    batches = task.batches([2 * m] * NUM_BATCHES)
    state, events = train_slowly("2bw", num_stages, m)
    assert_same_state(state, by_oracle(task, batches, m).state)
    for stage in range(num_stages):
        mine = [event for event in events if event.stage == stage]
        updates = [event for event in mine if event.kind == "U"]
        assert len(updates) == NUM_BATCHES
        # What the schedule has after the update of batch t: a forward of the next batch.
        ends = {(e.kind, e.batch, e.microbatch): e.end for e in mine}
        after = [ends["F", t + 1, num_stages - 1 - stage] for t in range(NUM_BATCHES - 1)]
        assert any(end < update.end for end, update in zip(after, updates, strict=False))
        for update in updates:
            readers = [e for e in mine if e.kind == "F" and e.version == update.version]
            assert all(reader.start >= update.end for reader in readers)


def test_with_one_version_the_next_forward_waits() -> None:
    state, events = train_slowly("1f1b", 2, 3)
    task = TASKS["skips"]
    batches = task.batches([6] * NUM_BATCHES)
    assert_same_state(state, by_oracle(task, batches, 3, schedule="1f1b").state)
    for update in (event for event in events if event.kind == "U"):
        for other in events:
            if other.stage == update.stage and other.kind != "U":
                assert other.end <= update.start or other.start >= update.end


def test_what_is_read_after_a_flush_is_complete() -> None:
    task = TASKS["skips"]
    batches = task.batches([4] * 3)
    with make_pipeline(task, 2, 2, batches[0]) as pipe:
        opt = pd2.PipelineOptimizer(SlowSGD(pipe.parameters(), lr=0.3))
        for t, batch in enumerate(batches):
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
            pipe.flush()
            shown = {name: p.detach().clone() for name, p in pipe.named_parameters()}
            expected = by_oracle(task, batches[: t + 1], 2).state
            assert_same_state(shown, {name: expected[name] for name in shown})


def test_a_failing_update_ends_the_pipeline_with_its_cause() -> None:
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("no step today")

    task = TASKS["skips"]
    batch = task.batches([4])[0]
    cause = r"(?s)stage \d, batch 0, .*update: .*no step today"
    with pytest.raises(RuntimeError, match=cause), make_pipeline(task, 2, 2, batch) as pipe:
        opt = pd2.PipelineOptimizer(Failing(pipe.parameters(), lr=0.3))
        for _ in range(5):
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()


def test_an_optimizer_may_be_made_after_its_first_batch() -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([4])
    with make_pipeline(task, 2, 2, batch) as pipe:
        loss = pipe.train_step(*batch.args, target=batch.target)
        assert loss.item() > 0
        before = [parameter.clone() for parameter in pipe.parameters()]
        pd2.PipelineOptimizer(sgd(pipe.parameters())).step()
        pipe.flush()
        assert not any(map(torch.equal, before, pipe.parameters()))
