"""Idle slots are those of the simulator; work in them is late or fails, and training goes on."""

from __future__ import annotations

import gc
import math
import os
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "2bw", "chimera"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_idle_slots_of_a_steady_batch_are_the_bubbles(
    name: str, stages: int, microbatches: int
) -> None:
    simulation = pd2.simulate(
        name,
        num_stages=stages,
        num_microbatches=microbatches,
        forward=[1.0 + 0.1 * i for i in range(stages)],
        backward=2.0,
        update=0.0,
        num_batches=6,
    )
    slots = pd2.idle_slots(simulation.events, batch=3)
    for rank, share in enumerate(simulation.bubbles):
        idle = sum(slot.end - slot.start for slot in slots if slot.rank == rank)
        assert idle == pytest.approx(share * simulation.period, abs=0.02 * simulation.period)
    if name == "1f1b":
        assert slots
    for slot in slots:
        assert slot.after.end == slot.start < slot.end
        for event in simulation.events:
            is_inside = event.end > slot.start and event.start < slot.end
            assert not (event.rank == slot.rank and is_inside and event.end > event.start)


def action(start: float, end: float, batch: int = 0, kind: str = "F") -> pd2.Event:
    return pd2.Event(0, 0, kind, batch, 0, 0, start, end)


def test_what_overlaps_leaves_no_slot_and_the_last_action_of_all_decides() -> None:
    update = action(1.0, 5.0, kind="U")
    events = [action(6.0, 7.0, 1), action(0.0, 2.0), update, action(3.0, 4.0), action(9.0, 9.5, 2)]
    slots = pd2.idle_slots(events, batch=0)
    assert [(slot.start, slot.end, slot.after) for slot in slots] == [(5.0, 6.0, update)]
    assert [slot[2:4] for slot in pd2.idle_slots(events, batch=1)] == [(7.0, 9.0)]
    with pytest.raises(ValueError, match=r"idle_slots: batch: 7, the events are of \[0, 1, 2\]"):
        pd2.idle_slots(events, batch=7)


def test_work_goes_to_the_first_slot_with_room_for_it_and_a_twentieth() -> None:
    chosen = random.Random(0)
    for _ in range(50):
        begin, slots = 0.0, []
        for _ in range(chosen.randint(0, 5)):
            length = chosen.choice([1.05, 2.0, 3.0])
            slots.append(pd2.IdleSlot(0, 0, begin, begin + length, action(0.0, begin)))
            begin += length + 1.0
        seconds = [chosen.choice([0.5, 1.0, 1.95]) for _ in range(chosen.randint(0, 8))]
        placed = pd2.place_work(slots, seconds)
        assert len(placed) == len(seconds)
        left = {slot: slot.end - slot.start for slot in slots}
        later = list(slots)
        for each, slot in zip(seconds, placed, strict=True):
            room = [other for other in later if left[other] >= 1.05 * each]
            assert slot == (room[0] if room else None)
            if slot is not None:
                left[slot] -= 1.05 * each
                later = later[later.index(slot) :]  # in the order of the pieces
        assert all(each >= 0 for each in left.values())
    with pytest.raises(ValueError, match="place_work: seconds: -1"):
        pd2.place_work([], [-1.0])
    with pytest.raises(ValueError, match="place_work: seconds: inf"):
        pd2.place_work([], [math.inf])
    with pytest.raises(TypeError, match=r"seconds: 1\.0 given, it must be a list of numbers"):
        pd2.place_work([], 1.0)  # type: ignore[arg-type]
    two = [pd2.IdleSlot(0, rank, 0.0, 1.0, action(0.0, 0.0)) for rank in (0, 1)]
    with pytest.raises(ValueError, match=r"slots: of \[\(0, 0\), \(0, 1\)\], they must be of one"):
        pd2.place_work(two, [0.5])


class Watched(torch.optim.SGD):
    """SGD whose step has work done, begun in the step before."""

    def __init__(self, params: Any, bubbles: pd2.InBubbles, call: Any) -> None:
        super().__init__(params, lr=0.1)
        self.bubbles, self.call, self.works = bubbles, call, []

    def step(self, closure: Any = None) -> None:
        if self.works:
            assert self.works.pop().end(former=-1.0) == -1.0
        self.works.append(self.bubbles.begin("the work", self.call))
        super().step(closure)


def pipeline() -> tuple[pd2.PipelineModule, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=4, schedule="1f1b", example_args=(x,)
    )
    return pipe, x


def test_of_work_that_fails_training_goes_on_and_the_error_is_told() -> None:
    def fail() -> float:
        raise ZeroDivisionError("no inverse")

    losses = []
    for watched in (False, True):
        pipe, x = pipeline()
        with pipe:
            sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
            if watched:
                sgd = Watched(pipe.parameters(), pd2.InBubbles(pipe), fail)
            opt = pd2.PipelineOptimizer(sgd)

            def train(pipe: Any = pipe, opt: Any = opt, x: torch.Tensor = x) -> list[float]:
                found = []
                for _ in range(4):
                    found.append(pipe.train_step(x, target=x))
                    opt.step()
                pipe.flush()
                return [float(loss) for loss in found]

            if watched:
                told = r"in bubbles: the work failed.*ZeroDivisionError: no inverse"
                with pytest.warns(UserWarning, match=told):
                    losses.append(train())
            else:
                losses.append(train())
    assert losses[0] == losses[1]


def test_work_makes_way_in_a_thread_of_its_own() -> None:
    pipe, _ = pipeline()
    with pipe:
        bubbles = pd2.InBubbles(pipe)
        began, may_end = threading.Event(), threading.Event()

        def first() -> tuple[int, int]:
            began.set()
            assert may_end.wait(30)
            return threading.get_native_id(), os.getpriority(
                os.PRIO_PROCESS, threading.get_native_id()
            )

        running, waiting = (
            bubbles.begin("first", first),
            bubbles.begin("second", threading.get_ident),
        )
        assert began.wait(30)
        # No bubble has had room for it: who needs it does it.
        assert waiting.end(former=0) == threading.get_ident()
        calls: list[int] = []
        counted = bubbles.begin("counted", lambda: calls.append(1) or len(calls))
        assert (counted.end(former=0), counted.end(former=0)) == (1, 1)
        may_end.set()
        thread, priority = running.end(former=(0, 0))
        assert thread != threading.get_native_id()
        assert priority == 19
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
        with pytest.raises(TypeError, match="in bubbles: a number: 1 given, it must be callable"):
            bubbles.begin("a number", 1)  # type: ignore[arg-type]


def test_bubbles_are_of_a_pipeline() -> None:
    with pytest.raises(TypeError, match="InBubbles: pipe: None given, it must be a PipelineModule"):
        pd2.InBubbles(None)  # type: ignore[arg-type]


def test_what_waits_when_the_pipeline_is_gone_is_not_begun() -> None:
    pipe, _ = pipeline()
    bubbles = pd2.InBubbles(pipe)
    began, may_end, done = threading.Event(), threading.Event(), []
    bubbles.begin("first", lambda: (began.set(), may_end.wait(30)))
    bubbles.begin("second", lambda: done.append(1))
    assert began.wait(30)
    pipe.close()
    del pipe
    gc.collect()
    may_end.set()
    with pytest.raises(RuntimeError, match="shutdown"):
        bubbles.begin("third", lambda: done.append(1))
    assert done == []
