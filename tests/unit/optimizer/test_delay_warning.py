"""One line warns of optimizers that a delay costs much."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Muon, NAdam

import pipedream2bw as pd2
from tests.runs.launch import run_ranks
from tests.runs.trajectory import make_pipeline
from tests.samples.models import TASKS

TEXT = r'{} with beta1 {}, schedule: "{}": .*ErrorFeedback\(\)\).*pipeline_optimizer='


def warnings_of(make: Any, schedule: str = "2bw", m: int = 2, **options: Any) -> list[str]:
    """What is said of two pipelines, one after the other, from one line of code."""
    task = TASKS["mlp"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_pipeline(task, 2, m, task.batches([m])[0], schedule=schedule) as pipe:
            made = make(list(pipe.parameters()))
            pd2.PipelineOptimizer(*(made if isinstance(made, list) else [made]), **options)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(("schedule", "m"), [("2bw", 2), ("pipedream", 1)])
def test_adam_with_a_short_average_is_warned_of(kind: Any, schedule: str, m: int) -> None:
    (text,) = warnings_of(lambda ps: kind(ps, lr=0.1), schedule, m)
    assert "\n" not in text
    with pytest.warns(match=TEXT.format(kind.__name__, "0.9", schedule)):
        warnings.warn(text, stacklevel=1)
    groups = [{"betas": (0.95, 0.999)}, {"betas": (torch.tensor(0.8), torch.tensor(0.999))}]
    (text,) = warnings_of(
        lambda ps: kind([{**groups[0], "params": ps[:1]}, {**groups[1], "params": ps[1:]}], lr=0.1),
        schedule,
        m,
    )
    assert f"{kind.__name__} with beta1 0.8, schedule" in text


def test_muon_is_warned_of() -> None:
    (text,) = warnings_of(muon_and_adamw)
    assert text.startswith('Muon, schedule: "2bw": its gradients are late')
    assert 'schedule="2bw_fresh" and 2 microbatches or more for each stage for nearly all' in text
    assert warnings_of(muon_and_adamw, "2bw_fresh", 4) == []
    assert warnings_of(muon_and_adamw, staleness=pd2.ErrorFeedback()) == []


def test_of_many_late_forwards_among_fresh_ones_it_is_told() -> None:
    for m, clip in ((2, {}), (4, {"max_grad_norm": 1.0})):
        (text,) = warnings_of(muon_and_adamw, "2bw_fresh", m, **clip)
        assert "more, with more microbatches for nearly all" in text
    assert warnings_of(muon_and_adamw, "2bw_fresh", 6, max_grad_norm=1.0) == []


def test_no_remedy_is_named_that_the_schedule_refuses() -> None:
    (text,) = warnings_of(muon_and_adamw, "pipedream", 1)
    assert 'schedule="2bw_fresh" and PipelineOptimizer(' in text


def muon_and_adamw(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters if p.dim() == 2]
    return [Muon(matrices, lr=0.1), AdamW([p for p in parameters if p.dim() != 2], lr=0.1)]


def test_no_one_else_is() -> None:
    def adamw(parameters: Any) -> AdamW:
        return AdamW(parameters, lr=0.1)

    assert warnings_of(adamw, "1f1b") == warnings_of(adamw, "gpipe") == []
    assert warnings_of(adamw, staleness=pd2.ErrorFeedback()) == []
    assert warnings_of(adamw, staleness=pd2.LearningRateDiscount(5)) == []
    for make in (
        lambda ps: AdamW(ps, lr=0.1, betas=(0.98, 0.999)),
        lambda ps: NAdam(ps, lr=0.1),
        lambda ps: SGD(ps, lr=0.1),
        lambda ps: [SGD(ps[:1], lr=0.1), AdamW(ps[1:], lr=0.1)],
    ):
        assert warnings_of(make) == []


def warned(rank: int, world: int) -> None:
    said = warnings_of(lambda ps: AdamW(ps, lr=0.1))
    assert len(said) == (rank == 0), said


def test_of_several_processes_the_first_one_warns() -> None:
    run_ranks(warned, 2, timeout=60)
