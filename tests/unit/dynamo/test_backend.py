"""torch.compile(backend="pipedream2bw"): forwards over stages equal eager ones, or are refused."""

from __future__ import annotations

import collections
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from examples.gpt import GPT
from pipedream2bw.extras.dynamo.backend import pipedream2bw

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, *, dynamic: bool | None = None, **options: Any) -> Any:
    given = {"num_stages": 2, "num_microbatches": 4, **options}
    return torch.compile(model, backend=pipedream2bw, options=given, dynamic=dynamic)


class Rows(nn.Module):
    """Element by element: splitting rows changes no bit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.shift = nn.Parameter(torch.randn(5))
        self.register_buffer("offset", torch.randn(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        hidden = (x * self.scale).tanh() + self.offset
        hidden = (hidden * self.shift).sin()
        return hidden if y is None else {"sum": hidden + y, "given": (x, hidden * 2)}


@pytest.mark.parametrize("rows", [8, 6, 3])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_outputs_are_those_of_eager_bit_for_bit(rows: int, stages: int) -> None:
    torch.manual_seed(0)
    model, x = Rows(), torch.randn(rows, 5)
    run = compiled(model, num_stages=stages)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x), model(x))
            x = x + 1


def test_structures_go_in_and_out() -> None:
    model, x, y = Rows(), torch.randn(8, 5), torch.randn(8, 5)
    with torch.no_grad():
        found, expected = compiled(model)(x, y=y), model(x, y)
    assert found.keys() == expected.keys()
    assert torch.equal(found["sum"], expected["sum"])
    assert found["given"][0] is x
    assert torch.equal(found["given"][1], expected["given"][1])


def test_a_transformer_is_evaluated() -> None:
    torch.manual_seed(0)
    model = GPT(num_layers=2, width=32, num_heads=2, context=8).eval()
    tokens = torch.randint(0, 256, (8, 8))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(tokens), model(tokens))


def test_other_numbers_of_rows_need_no_new_stages_by_hand() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).eval()
    run = compiled(model)
    with torch.no_grad():
        for rows in (8, 6, 7, 1, 4, 9):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(run(x), model(x))


seen: list[str] = []


@torch.library.custom_op("pipedream2bw_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    seen.append(threading.current_thread().name)
    return x * 1


@noted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def stages_seen() -> collections.Counter[int]:
    """How many microbatches each stage's thread has computed."""
    return collections.Counter(int(name.rpartition("_")[0][-1]) for name in seen)


def test_each_stage_has_a_thread_of_its_own() -> None:
    class Noting(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return noted(super().forward(noted(x)))

    run, x = compiled(Noting()), torch.randn(8, 5)
    with torch.no_grad():
        run(x)
        seen.clear()
        run(x)
    assert stages_seen() == {0: 4, 1: 4}


@pytest.mark.parametrize("rows", [8, 9])
def test_rows_in_the_code_are_a_microbatchs_with_dynamic_shapes(rows: int) -> None:
    class Reshapes(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(noted(x)).reshape(x.shape[0], 5, 1).flatten(1)
            return noted(hidden * 2)

    model, x = Reshapes(), torch.randn(rows, 5)
    run = compiled(model, dynamic=True)
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
        seen.clear()
        run(x)
    assert stages_seen() == {0: 4, 1: 4}


def test_weights_are_the_models_of_the_moment() -> None:
    model, x = Rows(), torch.randn(8, 5)
    run = compiled(model)
    with torch.no_grad():
        run(x)
        model.scale.mul_(2)
        model.offset += 1
        assert torch.equal(run(x), model(x))
        model.load_state_dict({name: torch.randn(5) for name in model.state_dict()})
        assert torch.equal(run(x), model(x))
        model.shift = nn.Parameter(torch.randn(5))
        assert torch.equal(run(x), model(x))


def test_modes_of_the_caller_hold_in_the_threads() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).eval()
    x = torch.randn(8, 8)
    run = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, model(x))


def test_inference_tensors_are_written_to_in_the_threads() -> None:
    class Writes(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(noted(x.add_(0)))

    run = compiled(Writes())
    with torch.inference_mode():
        given = torch.randn(8, 5)
        assert run(given).is_inference()
        seen.clear()
        run(given)
    assert len(seen) == 4


def test_training_is_refused_in_a_sentence() -> None:
    model, x = Rows(), torch.randn(8, 5)
    run = compiled(model)
    with pytest.raises(RuntimeError, match=r"under torch.no_grad\(\), and train with pipedream2bw"):
        run(x)
    with torch.no_grad():
        run(x)
    with pytest.raises(RuntimeError, match="it computes forwards alone"):
        run(x)
    model.requires_grad_(False)
    assert torch.equal(run(x), model(x))


class Mixes(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class Sums(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixes(), "rows depend on each other, or random numbers are drawn"),
        (Sums(), r"output 0: shape \[\], it must have rows"),
        (nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), "the graph writes to .*buffers"),
        (nn.Sequential(Rows(), nn.Dropout(), Rows()), "random numbers are drawn"),
    ],
)
def test_what_microbatches_would_change_is_refused(model: nn.Module, reason: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), pytest.raises(ValueError, match=reason):
        compiled(model)(torch.randn(8, 5))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_call_with_equal_rows_says_nothing_of_how_rows_depend() -> None:
    run = compiled(Mixes())
    with torch.no_grad():
        assert run(torch.zeros(8, 5)).shape == (8, 5)
        with pytest.raises(ValueError, match="rows depend on each other"):
            run(torch.randn(8, 5))


class MixesWithInfinities(Mixes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(x > 1, -math.inf)


class MixesImaginaryParts(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(super().forward(x), x - x.mean(0, keepdim=True))


class TurnsToNan(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean().log() * 0


@pytest.mark.parametrize("kind", [MixesWithInfinities, MixesImaginaryParts, TurnsToNan])
def test_outputs_that_are_not_finite_or_complex_are_compared(kind: type[nn.Module]) -> None:
    x = torch.cat([torch.rand(2, 5) - 0.9, torch.rand(6, 5) + 0.5])
    with torch.no_grad(), pytest.raises(ValueError, match="rows depend on each other"):
        compiled(kind())(x)


def test_a_small_graph_runs_as_it_is_and_one_that_cannot_be_cut_says_why() -> None:
    x = torch.randn(8, 5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(compiled(nn.Tanh(), num_stages=4)(x), x.tanh())

    class Switches(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = F.linear(x, torch.ones(5, 5))
            return super().forward(x)

    model = Switches()
    with torch.no_grad(), pytest.warns(UserWarning, match="runs unsplit: .*switches a mode"):
        assert torch.equal(compiled(model)(x), model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2}, "options: 'stages', known: num_stages, num_microbatches, devices"),
        ({"num_stages": 0}, "num_stages: 0"),
        ({"num_microbatches": 1.5}, "num_microbatches: 1.5"),
        ({"devices": ["cpu"]}, "devices: 1, num_stages: 2"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(Exception, match=message):
        compiled(Rows(), **options)(torch.randn(8, 5))


BY_NAME = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()
run = torch.compile(
    model, backend="pipedream2bw", options={"num_stages": 2, "num_microbatches": 4}
)
x = torch.randn(8, 4)
with torch.no_grad():
    torch.testing.assert_close(run(x), model(x))
assert "pipedream2bw" in torch.compiler.list_backends()
print("by its name")
"""


def test_the_backend_is_found_by_its_name(tmp_path: Path) -> None:
    # As pip installs what pyproject.toml says.
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    group = "[project.entry-points.torch_dynamo_backends]\n"
    line = text.partition(group)[2].partition("\n")[0].replace('"', "")
    made = tmp_path / "pipedream2bw-0.0.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: pipedream2bw\nVersion: 0.0.0\n")
    (made / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line}\n")
    result = subprocess.run(
        [sys.executable, "-c", BY_NAME],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.stdout == "by its name\n", result.stderr
