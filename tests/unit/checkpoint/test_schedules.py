"""A run that changes among schedules of one delay has the bits of one that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pipedream2bw as pd2
from tests.samples.schedule_sizes import TWO_PIPELINES
from tests.unit.checkpoint.trained_run import BATCHES, Trained, make_model

MICROBATCHES = 4


def ways(delay: int) -> dict[str, dict[str, int]]:
    """The stages with which each schedule runs whose stages all have the delay."""
    found = {}
    for name in pd2.schedule_names():
        if name in TWO_PIPELINES:  # which add gradients up in another order
            continue
        for num_stages, stages_per_rank in ((4, 2), (2, 1)):
            try:
                schedule = pd2.make_schedule(name, num_stages, MICROBATCHES, stages_per_rank)
            except ValueError:
                continue
            if set(schedule.delay) == {delay} and not schedule.has_fresh_forwards:
                found[name] = {"num_stages": num_stages, "stages_per_rank": stages_per_rank}
                break
    return found


@pytest.mark.parametrize("delay", [0, 1])
def test_one_run_goes_on_under_every_schedule_of_a_delay(
    delay: int, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    options = {"num_microbatches": MICROBATCHES}
    found = ways(delay)
    names = list(found)
    batches = [*BATCHES, *BATCHES][: len(names)]
    stays = start_trained(schedule=names[0], **options, **found[names[0]])
    want = []
    for x, y in batches:
        want.append(stays.pipe.train_step(x, target=y))
        stays.opt.step()
    stays.pipe.flush()
    for number, (name, (x, y)) in enumerate(zip(names, batches, strict=True)):
        run = start_trained(schedule=name, seed=number + 1, **options, **found[name])
        if number > 0:
            pd2.load(tmp_path, run.pipe, run.opt)
        loss = run.pipe.train_step(x, target=y)
        run.opt.step()
        saving = pd2.save(tmp_path, run.pipe, run.opt)
        saving.wait()
        assert float(loss) == float(want[number]), (name, names[number - 1])
        if number < len(names) - 1:
            run.pipe.close()
    for name, value in run.pipe.state_dict().items():
        assert torch.equal(value, stays.pipe.state_dict()[name]), name


@pytest.mark.parametrize("schedules", [("chimera", "1f1b"), ("1f1b", "chimera")])
def test_one_run_goes_on_with_another_number_of_pipelines(
    schedules: tuple[str, str], start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    options = {"num_microbatches": MICROBATCHES, "num_stages": 2}
    stays = start_trained(schedule=schedules[0], **options)
    stays.train(0, 3)
    pd2.save(tmp_path, stays.pipe, stays.opt).wait()
    goes_on = start_trained(schedule=schedules[1], seed=5, **options)
    pd2.load(tmp_path, goes_on.pipe, goes_on.opt)
    for run in (stays, goes_on):
        run.train(3, 6)
        run.pipe.flush()
    trained = {name for name, _ in stays.pipe.named_parameters()}
    for name, value in goes_on.pipe.state_dict().items():
        if name in trained:
            torch.testing.assert_close(value, stays.pipe.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_a_stage_that_trains_nothing_loads_no_versions_before_the_first(
    batches: int, start_trained: Callable[..., Trained], tmp_path: Path
) -> None:
    model = make_model()
    for number in (3, 4):  # the second stage
        model.get_submodule(str(number)).requires_grad_(False)
    run = start_trained(
        model=model, num_stages=4, num_microbatches=1, schedule="pipedream", split=["3", "6", "9"]
    )
    run.train(0, batches)
    pd2.save(tmp_path, run.pipe, run.opt).wait()
    run.train(batches, batches + 1)
    want = float(run.losses[-1])
    pd2.load(tmp_path, run.pipe, run.opt)
    run.train(batches, batches + 1)
    assert float(run.losses[-1]) == want
