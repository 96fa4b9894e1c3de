"""The stages of a model, run one after another, compute bitwise what the model computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.runs.staged_run import check_split_equals_whole, cut


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = (torch.randn(5, 8),)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_mlp_in_a_sequential(num_stages: int) -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), nn.Sigmoid()
    )
    check_split_equals_whole(model, num_stages, X, how="sequential")


def test_a_list_of_modules_is_its_own_split() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, Any]:
            return self.linear(x) * scale, {"x": x, "n": 3, "none": None}

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, y: torch.Tensor, extra: dict[str, Any]) -> list[torch.Tensor]:
            assert extra["none"] is None
            return [self.linear(y) + extra["x"] * extra["n"], y]

    class Last(nn.Module):
        def forward(self, values: list[torch.Tensor]) -> torch.Tensor:
            return values[0] * values[1]

    _, programs = check_split_equals_whole(
        [Two(), Join(), Last()], 3, X, {"scale": 0.5}, how="list"
    )
    assert [program.layers for program in programs] == [range(0, 1), range(1, 2), range(2, 3)]
    assert programs[1].parameters == ("1.linear.weight", "1.linear.bias")


def test_nested_modules_are_cut_inside() -> None:
    _, programs = check_split_equals_whole(Stack(), 5, X, how="fx")
    assert all(program.parameters for program in programs)


def test_skip_connections_over_several_stages() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            second = self.layers[1](first)
            third = self.layers[2](second)
            fourth = self.layers[3](third)
            fifth = self.layers[4](fourth + second)
            return self.layers[5](fifth + first)

    _, programs = check_split_equals_whole(
        Skips(), 6, X, how="fx", split=[f"layers.{i}" for i in range(1, 6)]
    )
    assert sorted(programs[0].sends) == [1, 4]  # the sums come before the layers they feed
    assert sorted(programs[1].sends) == [2, 3]


def test_a_value_with_several_consumer_stages() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.rest = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shared = self.first(x).tanh()
            total = self.rest[0](shared)
            for layer in self.rest[1:]:
                total = layer(total) * shared
            return total

    _, programs = check_split_equals_whole(
        Fan(), 4, X, split=["rest.0", "rest.1", "rest.2"], exact=False
    )
    names = [set(programs[0].sends[consumer]) for consumer in (1, 2, 3)]
    assert names[0] & names[1] & names[2]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_tuples_dicts_none_and_numbers_between_stages() -> None:
    class Front(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            if x.sum() > 1e9:  # untraceable: the module is called as a whole
                raise AssertionError
            y = self.linear(x)
            return {"pair": (y, None), "n": 3, "named": [y.tanh(), 0.5]}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = Front()
            self.middle = nn.Linear(8, 8)
            self.back = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            bundle = self.front(x)
            y = self.middle(bundle["pair"][0])
            z = self.back(y + bundle["named"][0] * bundle["named"][1]) * bundle["n"]
            return {"z": z, "list": [y, None, 7], "pair": Pair(y, z), "flag": True}

    captured, _ = check_split_equals_whole(Model(), 3, X, how="fx", split=["middle", "back"])
    assert any(note.startswith("front is kept whole") for note in captured.notes)


def test_model_inputs_used_by_later_stages_reach_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.positions = nn.Embedding(7, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(
            self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, where: torch.Tensor
        ) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x).relu()
            if mask is not None:
                x = x.masked_fill(mask.unsqueeze(-1), 0.0)
            return x + self.positions(where)

    tokens = torch.randint(11, (5, 4))
    where = torch.randint(7, (5, 4))
    mask = torch.rand(5, 4) > 0.5
    _, programs = check_split_equals_whole(
        Masked(), 4, (tokens,), {"mask": mask, "where": where}, how="fx"
    )
    assert programs[0].inputs == ("tokens", "mask", "where")
    assert {"mask", "where"} <= {name for names in programs[0].sends.values() for name in names}
    _, programs = check_split_equals_whole(Masked(), 4, (tokens,), {"where": where}, how="fx")
    assert programs[0].inputs == ("tokens", "where")


def test_the_capture_follows_the_branch_of_the_given_arguments() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mode: str = "a", scale: float = 1.0) -> torch.Tensor:
            return (self.a(x) if mode == "a" else self.b(x)) * scale

    model = Branch()
    _, programs = check_split_equals_whole(model, 2, X, {"mode": "b", "scale": 2.0})
    used = [name for program in programs for name in program.parameters]
    unused = [name for program in programs for name in program.unused_parameters]
    assert used == ["b.weight", "b.bias"]
    assert unused == ["a.weight", "a.bias"]


def test_containers_of_tensors_as_arguments() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, batch: dict[str, Any], *more: torch.Tensor, **named: Any) -> torch.Tensor:
            total = self.a(batch["x"])
            for value in batch["list"]:
                total = total + value
            for value in more:
                total = self.b(total * value)
            return total * named["scale"] + named["shift"]

    batch = {"x": torch.randn(5, 8), "list": [torch.randn(5, 8), 2.0]}
    check_split_equals_whole(
        Packed(),
        3,
        (batch, torch.randn(5, 8), torch.randn(5, 8)),
        {"scale": 3, "shift": torch.randn(5, 8)},
        how="fx",
    )


class Picky(nn.Module):
    """A forward that symbolic tracing cannot follow, but export can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 8:
            raise ValueError("width")
        return self.linear(x).relu()


def test_an_untraceable_module_in_a_traceable_root_becomes_a_leaf() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()
            self.picky = Picky()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.picky(self.a(x)) + x)

    captured, _ = check_split_equals_whole(Model(), 3, X, how="fx")
    assert "picky" in [layer.name for layer in captured.layers]
    why = "picky is kept whole, as torch.fx cannot look inside: TraceError"
    assert any(why in note for note in captured.notes)


def test_only_the_innermost_untraceable_module_becomes_a_leaf() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(8, 8)
            self.picky = Picky()
            self.after = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.picky(self.before(x)))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Outer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(x) + self.outer.before(x)

    captured, _ = cut(Root(), 1, X)
    names = [layer.name for layer in captured.layers]
    assert names == ["outer.before", "outer.picky", "outer.after", "outer.before", "add"]


class Untraceable(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> dict[str, Any]:
        batch, width = x.shape
        if width != 8 or batch < 1:
            raise ValueError("width")
        for block in self.blocks:
            x = self.dropout(block(x).relu()).reshape(batch, width)
        if mask is not None:
            x = x * mask[:, :1]
        with torch.no_grad():
            weight = torch.softmax(x, -1)
        return {"y": self.norm(x) * self.scale, "weighted": (x * weight, None, batch)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_an_untraceable_root_is_exported(training: bool, num_stages: int) -> None:
    model = Untraceable(dropout=0.3).train(training)
    x, mask = torch.randn(5, 8), torch.rand(5, 3)
    captured, programs = check_split_equals_whole(
        model, num_stages, (x,), {"mask": mask}, how="export"
    )
    assert any(note.startswith("fx: TraceError") for note in captured.notes)
    assert [name for program in programs for name in program.parameters]


@pytest.mark.parametrize("example_rows", [1, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_an_exported_model_takes_any_number_of_rows(example_rows: int, rows: int) -> None:
    from tests.runs.staged_run import assert_same, run_staged, run_whole, sum_of_squares

    model = Untraceable().eval()
    captured, programs = cut(model, 3, (torch.randn(example_rows, 8),))
    assert captured.how == "export"
    args = (torch.randn(rows, 8),)
    got = run_staged(model, captured, programs, args, loss=sum_of_squares)
    assert_same(got, run_whole(model, args, loss=sum_of_squares))


def test_checks_of_the_example_are_no_layers_of_an_exported_model() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 8:
                raise ValueError("width")
            unused = torch.zeros(x.shape[0])
            assert unused.shape[0] > 0
            return self.b(self.a(x).to(torch.float64).to(torch.float32))

    captured, _ = check_split_equals_whole(Casts(), 2, X, how="export")
    assert [layer.name for layer in captured.layers] == ["linear", "to", "to_1", "linear_1"]


def test_replicated_arguments_keep_their_size_in_an_export() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            if table.shape[0] != 3 or x.shape[1] != 8:
                raise ValueError("table")
            return self.b(self.a(x) + table.sum(0))

    args = (torch.randn(5, 8), torch.randn(3, 8))
    check_split_equals_whole(Tabled(), 2, args, how="export", replicated=("table",))
    with pytest.raises(ValueError, match=r"rows.*5.*3.*replicated|3.*5.*replicated"):
        cut(Tabled(), 2, args)
