"""What stages held for their backwards, compared with a simulation of the same run."""

from __future__ import annotations

import dataclasses

import pipedream2bw as pd2
from tests.runs.trajectory import make_pipeline, sgd
from tests.samples.models import TASKS
from tests.samples.schedule_sizes import Sizes


def assert_as_simulated(schedule: str, sizes: Sizes) -> None:
    """On every rank; each looks at its stages."""
    options = dataclasses.asdict(sizes)
    d, m = options.pop("num_stages"), options.pop("num_microbatches")
    made = pd2.make_schedule(schedule, d, m, sizes.stages_per_rank)
    num_batches = made.most_batches_behind + 2
    task = TASKS["skips" if d in TASKS["skips"].depths else "mlp"]
    batches = task.batches([2 * m] * num_batches)
    with make_pipeline(task, d, m, batches[0], schedule=schedule, **options) as pipe:
        opt = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        for batch in batches:
            pipe.train_step(*batch.args, target=batch.target)
            opt.step()
        pipe.flush()
        report = pipe.memory_report()
        per_microbatch = {}
        for stage in pipe.session.stages:
            (per_microbatch[stage.index],) = stage.runner.bytes_kept.values()  # of one layout
    assert any(kept > 0 for kept in per_microbatch.values())
    for stage, memory in report.items():
        # A rank's peak is that of its stages together, so one stage at a time.
        kept = [0.0] * d
        kept[stage % d] = per_microbatch[stage]
        simulation = pd2.simulate(made, activation_bytes=kept, num_batches=num_batches)
        held = (memory.most_in_flight, memory.activations)
        foretold = (simulation.most_in_flight[stage], simulation.peak_bytes[made.placement[stage]])
        assert held == foretold, f"{sizes}, stage {stage}: {held}, simulated: {foretold}"
