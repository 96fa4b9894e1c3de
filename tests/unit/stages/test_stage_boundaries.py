"""Where stages begin: balanced, by name, and the same for both modes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pipedream2bw.capture.capture import capture
from pipedream2bw.capture.captured import Captured
from pipedream2bw.model.precision import Precision
from pipedream2bw.options import Options
from pipedream2bw.stages.boundaries import choose_boundaries, crossing_values, place_like
from pipedream2bw.stages.cut import split_into_stages
from pipedream2bw.stages.modes import Mode, Modes
from tests.runs.staged_run import cut


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, depth: int = 4, width: int = 16, untraceable: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
        self.untraceable = untraceable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.untraceable and x.shape[-1] != 16:
            raise ValueError("width")
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = (torch.randn(64, 16),)


def captured(num_stages: int = 4, model: nn.Module | None = None, **options: Any) -> Captured:
    return capture(model or Net(), num_stages=num_stages, example_args=X, **options)


def names_at(program: Captured, boundaries: list[int]) -> list[str]:
    return [program.layers[layer].name for layer in boundaries]


def both_modes(
    model: nn.Module, num_stages: int, split: str | list[str] = "auto"
) -> tuple[Mode, Mode]:
    """The mode that the model is in, which is captured first, and the other one."""
    modes = Modes(
        model,
        (X, {}),
        num_stages=num_stages,
        split=split,
        replicated=(),
        recomputed_blocks=(),
        precision=Precision(model, Options(), "cpu"),
    )
    first = modes.capture()
    model.train(not model.training)
    return first, modes.capture()


def boundaries_of(mode: Mode) -> list[int]:
    return [program.layers.start for program in mode.programs]


@pytest.mark.parametrize("untraceable", [False, True])
def test_names_of_modules_cut_before_their_first_layer(untraceable: bool) -> None:
    program = captured(model=Net(untraceable=untraceable))
    assert program.how == ("export" if untraceable else "fx")
    boundaries = choose_boundaries(program, 4, ["blocks.1", "blocks.2.up", "head"])
    stages = split_into_stages(program, boundaries)
    assert stages[0].parameters[-1].startswith("blocks.0.down")
    assert stages[1].parameters[0].startswith("blocks.1.norm")
    assert stages[1].parameters[-1].startswith("blocks.2.norm")
    assert stages[2].parameters[0].startswith("blocks.2.up")
    assert stages[3].parameters == ("head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias")


def test_names_of_a_sequentials_children_and_of_modules_inside_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 16)), nn.ReLU())
    program = captured(2, model, split=["1"])
    assert program.how == "sequential"
    assert choose_boundaries(program, 2, ["1"]) == [0, 1]
    program = captured(2, model, split=["1.1"])
    assert program.how == "fx"
    assert program.notes == ("sequential: split names '1.1', which is not one of its children",)
    assert names_at(program, choose_boundaries(program, 2, ["1.1"])) == ["0", "1.1"]


def test_a_sequential_with_fewer_children_than_stages_is_traced() -> None:
    model = nn.Sequential(Block(16), Block(16))
    program = captured(3, model)
    assert program.how == "fx"
    assert program.notes == ("sequential: 2 children, num_stages: 3",)


def test_an_unknown_name_lists_close_matches() -> None:
    program = captured(2)
    with pytest.raises(
        ValueError, match=r"'blocks.1.upp' is no module.*close matches: 'blocks.1.up'"
    ):
        choose_boundaries(program, 2, ["blocks.1.upp"])
    with pytest.raises(ValueError, match=r"'zzz'.*first ones: 'blocks.0', "):
        choose_boundaries(program, 2, ["zzz"])


@pytest.mark.parametrize("untraceable", [False, True])
def test_an_unknown_name_is_told_whatever_the_way_of_capture(untraceable: bool) -> None:
    with pytest.raises(ValueError, match=r"'blocks.9' is no module.*close matches: 'blocks.\d'"):
        cut(Net(untraceable=untraceable), 2, X, split=["blocks.9"])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["blocks.1", "blocks.2"], r"2 names, num_stages: 2: give num_stages - 1 = 1 names"),
        ([], r"0 names, num_stages: 2"),
        ("balanced", r"'balanced' given; it must be \"auto\""),
        (["blocks.0"], r"'blocks.0' begins at layer 0, the stage before begins at layer 0"),
    ],
)
def test_splits_that_make_no_stages(split: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_boundaries(captured(2), 2, split)


def test_names_out_of_order() -> None:
    with pytest.raises(ValueError, match=r"'blocks.1' begins at layer 6, .* layer 12. .*order"):
        choose_boundaries(captured(3), 3, ["blocks.2", "blocks.1"])


def test_more_stages_than_layers_name_both() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    with pytest.raises(ValueError, match=r"num_stages: 3, layers of the captured model: 2"):
        choose_boundaries(captured(2, model), 3)
    with pytest.raises(ValueError, match=r"fx: 2 layers, num_stages: 3\n  export: .*num_stages: 3"):
        captured(3, model)


def test_the_balanced_split_has_the_fastest_slowest_stage_of_all_splits() -> None:
    program = captured(3, Net(2))
    costs = [layer.forward_cost + layer.backward_cost for layer in program.layers]
    values = crossing_values(program)

    def messages(first: int, end: int) -> float:
        """Of what enters the stage and what leaves it; what passes over it costs it nothing."""
        stage = range(first, end)
        return sum(
            value.seconds
            for value in values
            if (
                any(consumer not in stage for consumer in value.consumers)
                if value.producer in stage
                else any(consumer in stage for consumer in value.consumers)
            )
        )

    def slowest(boundaries: tuple[int, ...]) -> float:
        ends = (*boundaries[1:], len(costs))
        return max(sum(costs[a:b]) + messages(a, b) for a, b in zip(boundaries, ends, strict=True))

    best = min(slowest((0, *cuts)) for cuts in itertools.combinations(range(1, len(costs)), 2))
    assert slowest(tuple(choose_boundaries(program, 3))) == pytest.approx(best, rel=1e-12)


def test_equal_blocks_are_shared_out_equally() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(64) for _ in range(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    program = capture(Blocks(), num_stages=4, example_args=(torch.randn(32, 16, 64),))
    boundaries = choose_boundaries(program, 4)
    assert names_at(program, boundaries) == [f"blocks.{i}.norm" for i in (0, 2, 4, 6)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("untraceable", [False, True])
def test_the_other_mode_puts_every_parameter_and_buffer_on_the_same_stage(
    first: bool, untraceable: bool
) -> None:
    class Moded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("scale", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if untraceable and x.shape[-1] != 16:
                raise ValueError("width")
            x = self.a(x)
            if self.training:
                x = nn.functional.dropout(x + torch.randn_like(x) * 0.1, 0.3)
            else:
                x = x * self.scale
            return self.c(self.norm(self.b(x)).relu())

    model = Moded().train(first)
    one, programs = cut(model, 3, X)
    other = captured(3, model.train(not first))
    boundaries = place_like(other, programs)
    others = split_into_stages(other, boundaries)
    assert one.how == other.how
    for here, there in zip(programs, others, strict=True):
        assert set(here.parameters) == set(there.parameters)
    running = [p.index for p in programs if "norm.running_mean" in p.buffers]
    assert running == [p.index for p in others if "norm.running_mean" in p.buffers]


class Branches(nn.Module):
    """Traceable in one of its modes only."""

    def __init__(self, untraceable_in_training: bool) -> None:
        super().__init__()
        self.net = Net(2)
        self.untraceable_in_training = untraceable_in_training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.untraceable_in_training and x.shape[-1] != 16:
            raise ValueError("width")
        return self.net(x)


@pytest.mark.parametrize("untraceable_in_training", [True, False])
def test_the_other_mode_is_captured_the_same_way_where_possible(
    untraceable_in_training: bool,
) -> None:
    model = Branches(untraceable_in_training).train()
    first, other = both_modes(model, 3)
    assert (first.captured.how, other.captured.how) == (
        ("export", "export") if untraceable_in_training else ("fx", "export")
    )
    for here, there in zip(first.programs, other.programs, strict=True):
        assert set(here.parameters) == set(there.parameters)


def test_a_sequential_cut_inside_its_children_is_cut_so_in_the_other_mode() -> None:
    model = nn.Sequential(Block(16), Block(16)).train()
    first, other = both_modes(model, 3)
    assert other.captured.how == "fx"
    assert boundaries_of(other) == boundaries_of(first)


@pytest.mark.parametrize("first", [True, False])
def test_tied_layers_stay_where_their_neighbours_are_in_the_other_mode(first: bool) -> None:
    class Tied(nn.Module):
        """A block of its own after every use of the common one, and noise in training."""

        def __init__(self) -> None:
            super().__init__()
            self.common = nn.Linear(16, 16)
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
            self.head = nn.Linear(16, 16)
            self.head.weight = self.common.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = self.common(x)
                if self.training:
                    x = x + torch.randn_like(x)
                x = block(x)
            return self.head(x)

    model = Tied().train(first)
    _, programs = cut(model, 4, X, split=["common_1", "common_2", "head"])
    assert ["common.weight" in program.parameters for program in programs] == [True] * 4
    other = captured(4, model.train(not first))
    others = split_into_stages(other, place_like(other, programs))
    for here, there in zip(programs, others, strict=True):
        assert set(here.parameters) == set(there.parameters)


def test_a_mode_in_which_a_stage_has_nothing_to_do() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            if self.training:
                x = x * 2 * torch.rand_like(x)
            return self.b(x)

    model = Noise().train()
    first, other = both_modes(model, 3, ["mul", "b"])
    assert len(other.captured.layers) == 2
    assert boundaries_of(other) in ([0, 1, 1], [0, 0, 1])
    assert other.programs[2].receives.keys() <= {0, 1}
    values: dict[str, Any] = {"x": X[0]}
    for stage in other.programs:
        results = stage.bind(model)([values[name] for name in stage.inputs])
        values.update(zip(stage.outputs, results, strict=True))
    assert torch.equal(values["output"], model(*X))
    assert first.captured.how == "fx"


def test_without_a_common_name_the_other_mode_is_cut_where_least_crosses() -> None:
    class Narrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(16, 256), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.wide(x)
            if self.training:
                x = nn.functional.dropout(x, 0.5)
            return self.narrow(x.tanh().view(-1, 16, 16).sum(1))

    model = Narrows().train()
    _, other = both_modes(model, 2, ["dropout"])
    assert names_at(other.captured, boundaries_of(other)) == ["wide", "narrow"]


def test_a_mode_that_uses_the_parameters_in_another_order_is_refused() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if self.training else self.a(self.b(x))

    model = Turned().train()
    _, programs = cut(model, 2, X)
    with pytest.raises(ValueError, match=r"stage 1 cannot begin anywhere"):
        place_like(captured(2, model.eval()), programs)
    with pytest.raises(
        ValueError, match=r"(?s)in eval mode\).*fx: stage 1 cannot.*export: stage 1 cannot"
    ):
        both_modes(model.train(), 2)


def test_read_only_buffers_may_be_on_several_stages_and_written_ones_may_not() -> None:
    class Buffers(nn.Module):
        def __init__(self, write: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.register_buffer("scale", torch.ones(16))
            self.write = write

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x) * self.scale
            if self.write:
                self.scale.mul_(0.5)
            return self.b(y) * self.scale

    _, programs = cut(Buffers(False), 2, X, split=["b"])
    assert [program.buffers for program in programs] == [("scale",), ("scale",)]
    with pytest.raises(ValueError, match=r"buffer 'scale' is used in stages 0 and 1"):
        cut(Buffers(True), 2, X, split=["b"])


def test_a_buffer_given_to_modules_of_several_stages_does_not_tie_them() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(4)]
            )
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, src_mask=self.mask, is_causal=True)
            return x

    program, programs = cut(Attends(), 4, (torch.randn(2, 5, 16),))
    assert program.how == "fx"
    assert [program.buffers for program in programs] == [("mask",)] * 4


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("untraceable", [True, False])
def test_one_batch_norm_used_on_two_stages_is_refused_where_it_writes(
    training: bool, untraceable: bool
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.norm = nn.BatchNorm1d(16, affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if untraceable and x.shape[-1] != 16:
                raise ValueError("width")
            return self.norm(self.b(self.norm(self.a(x))))

    model = Twice().train(training)
    if training:
        with pytest.raises(ValueError, match=r"buffer 'norm.\w+' is used in stages 0 and 1"):
            cut(model, 2, X, split=["b"])
    else:
        _, programs = cut(model, 2, X, split=["b"])
        assert "norm.running_mean" in programs[0].buffers
        assert "norm.running_mean" in programs[1].buffers
