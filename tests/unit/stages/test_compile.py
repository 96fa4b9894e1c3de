"""``compile=True``: the same training to rounding, one compilation for all weight versions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.utils import counters

import pipedream2bw as pd2
from pipedream2bw.options import EXCLUSIONS
from pipedream2bw.rules import among, refuse
from pipedream2bw.stages.compile import compile_options
from tests.exhaustive import exhaustive
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    by_pipeline,
    make_pipeline,
    sgd,
)
from tests.samples.flow_models import adding, raising, random_batch
from tests.samples.models import TASKS, WIDTH, Task


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()
    counters.clear()


def assert_near(got: Trajectory, want: Trajectory, *, losses: bool = True) -> None:
    if losses:
        torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses))
    assert got.state.keys() == want.state.keys()
    for name, theirs in want.state.items():
        torch.testing.assert_close(got.state[name], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "num_stages", "schedule"),
    [
        *exhaustive(("mlp", 1, "2bw"), ("mlp", 2, "2bw")),
        ("skips", 2, "2bw_split"),
        ("skips", 2, "1f1b"),
        ("gpt", 2, "2bw"),
    ],
)
def test_compiled_stages_train_as_the_definition(name: str, num_stages: int, schedule: str) -> None:
    m = num_stages + 1
    batches = TASKS[name].batches([2 * m] * 5)
    want = by_oracle(TASKS[name], batches, m, schedule=schedule)
    got = by_pipeline(TASKS[name], batches, num_stages, m, schedule=schedule, compile=True)
    assert_near(got, want)
    # One for each stage, although each has two weight slots under 2bw.
    assert counters["stats"]["unique_graphs"] == num_stages


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_compiled_stages_update_statistics(schedule: str) -> None:
    """Their code writes to running means, which is no change by the script."""
    task = TASKS["batch norm"]
    batches = task.batches([8] * 4)
    want = by_oracle(task, batches, 2, schedule=schedule)
    got = by_pipeline(task, batches, 2, 2, schedule=schedule, compile={"backend": "aot_eager"})
    assert_near(got, want)


def test_a_compiled_module_adds_its_loss() -> None:
    batches = raising().batches([6, 7, 6])
    want = by_oracle(adding(), batches, 3)
    got = by_pipeline(raising(), batches, 2, 3, compile={"backend": "aot_eager"})
    assert_near(got, want, losses=False)


def test_options_go_to_torch_compile_and_rows_may_change() -> None:
    task = dataclasses.replace(TASKS["mlp"], depths=())
    batches = task.batches([6, 9, 13, 6, 8])
    want = by_oracle(task, batches, 3)
    got = by_pipeline(task, batches, 2, 3, compile={"backend": "aot_eager", "dynamic": True})
    assert_near(got, want)
    assert counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize("backend", ["aot_eager", *exhaustive("inductor")])
def test_compiled_stages_draw_the_same_numbers_in_every_run(backend: str) -> None:
    task = dataclasses.replace(TASKS["dropout in eval"], training=True)
    batches = task.batches([8] * 4)
    runs = [
        by_pipeline(task, batches, 2, 4, schedule=schedule, compile={"backend": backend})
        for schedule in ("2bw", "2bw", "2bw_eager")
    ]
    for again in runs[1:]:
        assert_same(again, runs[0])


class Breaking(nn.Module):
    """Breaks the graph, so that the stage's backward is of parts, some of which can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.layer(x))
        torch._dynamo.graph_break()
        return torch.tanh(y) * 2


@pytest.mark.parametrize("schedule", ["2bw_split", "zero_bubble"])
@pytest.mark.parametrize("layer", [nn.GELU, *exhaustive(Breaking)])
def test_compiled_stages_of_split_backwards(schedule: str, layer: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.GELU()) for _ in range(4))
        )

    task = Task(model, random_batch)
    batches = task.batches([8] * 4)
    want = by_oracle(task, batches, 4, schedule=schedule)
    options = {"schedule": schedule, "compile": {"backend": "aot_eager"}}
    assert_near(by_pipeline(task, batches, 2, 4, **options), want)


def test_evaluation_and_late_hooks_of_compiled_stages() -> None:
    task: Task = TASKS["mlp"]
    batches = task.batches([6])
    with make_pipeline(task, 2, 3, batches[0], compile={"backend": "eager"}) as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        with torch.no_grad():
            torch.testing.assert_close(pipe(*batches[0].args), task.model()(*batches[0].args))
        calls: list[int] = []
        pipe.session.root[0].register_forward_hook(lambda *_: calls.append(1))
        pipe.train_step(*batches[0].args, target=batches[0].target)
        optimizer.step()
        pipe.flush()
        assert len(calls) == 4  # one of a trial


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"compile": "yes"}, TypeError, r"compile: 'yes' given, it must be a bool or a dict"),
        ({"compile": True, "recompute": True}, ValueError, r"compile: True, recompute"),
        ({"compile": True, "recompute": ["2"]}, ValueError, r"compile: True, recompute"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    (batch,) = TASKS["mlp"].batches([4])
    with pytest.raises(kind, match=message):
        make_pipeline(TASKS["mlp"], 2, 2, batch, **options)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    monkeypatch.setattr(config.cpp, "cxx", ("/no/such/compiler",))
    (batch,) = TASKS["mlp"].batches([4])
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler"):
        make_pipeline(TASKS["mlp"], 2, 2, batch, compile=True)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
    ],
)
def test_torchs_own_graphs_are_refused_on_a_device(options: dict[str, Any]) -> None:
    facts = {"compile": options, "device": torch.device("cuda")}
    with pytest.raises(
        ValueError, match=r"compile: .* makes torch's CUDA graphs, .*: give graphs="
    ):
        refuse(among(EXCLUSIONS, facts), facts)
    other = {"mode": "max-autotune-no-cudagraphs"}
    refuse(among(EXCLUSIONS, facts), {**facts, "compile": other})
    assert compile_options(other, torch.device("cuda")) == {
        "backend": "inductor",
        **other,
    }
