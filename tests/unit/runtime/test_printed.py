"""What ``print()`` shows of a pipeline's reports fits the width of a terminal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipedream2bw as pd2

X = torch.randn(16, 64)


def profiled() -> pd2.Profile:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    return pd2.profile(model, nn.functional.mse_loss, example_args=(X,), target=X)


def lines(shown: object, first: str) -> list[str]:
    found = str(shown).splitlines()
    assert first in found[0]
    assert max(map(len, found)) <= 100
    assert "\n" not in repr(shown)
    assert len(repr(shown)) <= 150
    return found


def test_profiles_and_plans_say_first_what_decides() -> None:
    profile = profiled()
    assert lines(profile, "4 layers, 8 parameters")[3].split()[:2] == ["rows", "forward"]
    plan = pd2.plan(profile, devices=2, memory="16GiB", batch=16)
    _, sizes, reason = lines(plan, " a batch")[:3]
    assert sizes.startswith(f"{plan.schedule}: ")
    assert reason.startswith("bound by: ")


def test_a_simulation_says_how_long_a_batch_takes() -> None:
    found = pd2.simulate("1f1b", num_stages=2, num_microbatches=2, weight_bytes=2.0**20)
    shown = lines(found, f"{found.period:.4g} s a batch")
    assert f"{100 * found.bubbles[1]:.1f} %" in shown[4]
    assert "MiB" in shown[4]


def test_a_memory_report_has_a_line_for_each_stage() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    loss = nn.functional.mse_loss
    with pd2.PipelineModule(
        model, loss, num_stages=2, num_microbatches=2, example_args=(X,)
    ) as pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pipe.timeline() as timeline:
            pipe.train_step(X, target=X)
            opt.step()
        report = pipe.memory_report()
        shown = str(report).splitlines()
        assert max(map(len, [*shown, *str(pipe).splitlines()])) <= 110
    assert "stage 1 has the most" in shown[0]
    kinds = shown[3].split()
    weights = float(shown[4].split()[kinds.index("weights")])
    assert weights == pytest.approx(report[0].weights / 2**10, abs=0.01)
    assert repr(timeline).startswith(f"Timeline({len(timeline.rows)} actions of stages [0, 1]")
