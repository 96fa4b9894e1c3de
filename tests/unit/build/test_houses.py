"""The core is one house; planner, extras and pictures are loaded when a script asks for them."""

from __future__ import annotations

import typing

import pytest

import pipedream2bw as pd2
from pipedream2bw import extras, pictures, planner
from tests.runs.launch import run_ranks

PROGRAM = """
import sys, torch, pipedream2bw as pd2

def main(*_):
    houses = ("pipedream2bw.planner", "pipedream2bw.extras", "pipedream2bw.pictures")
    exec({code!r}, globals())
    return sorted(name for name in sys.modules if name.startswith(houses))
"""


def loaded_after(code: str) -> list[str]:
    """In a process that has imported the package alone."""
    (result,) = run_ranks(PROGRAM.format(code=code), 1, rendezvous="none")
    modules: list[str] = result.value
    return modules


def test_none_is_loaded_by_the_core_and_a_training() -> None:
    training = """
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
x = torch.ones(4, 2)
pipe = pd2.PipelineModule(
    model, torch.nn.functional.mse_loss, num_stages=2, num_microbatches=2, example_args=(x,)
)
opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
pipe.train_step(x, target=x)
opt.step()
pipe.close()
"""
    assert loaded_after(training) == []


def test_a_name_loads_its_house() -> None:
    assert "pipedream2bw.planner.planning.planner" in loaded_after("pd2.plan")
    assert "pipedream2bw.extras.traffic" in loaded_after("pd2.TrafficReport")
    assert "pipedream2bw.pictures.timeline" in loaded_after("pd2.draw_timeline")


def test_lazy_names_are_listed_and_stand_for_types() -> None:
    assert set(pd2.__all__) <= set(dir(pd2))
    assert "plan" in typing.get_type_hints(pd2.PipelineModule.__init__)


def test_every_name_of_a_house_is_public() -> None:
    for house in (planner, extras, pictures):
        assert set(house.__all__) < set(pd2.__all__)
        for name in house.__all__:
            assert getattr(pd2, name) is getattr(house, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pd2.nothing  # noqa: B018
