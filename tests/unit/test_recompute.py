"""Stages that recompute their activations give the same bits, and hold less."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipedream2bw as pd2
from pipedream2bw.capture import as_root
from pipedream2bw.recompute import Replayer
from tests.models import TASKS, WIDTH
from tests.oracle import Batch, run_oracle
from tests.trajectory import check_task

SCHEDULES = {"2bw": 1, "2bw_split": 1, "1f1b": 1, "zero_bubble": 1, "interleaved_2bw": 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", TASKS)
def test_recomputed_training_equals_the_definition(name: str, schedule: str) -> None:
    v = SCHEDULES[schedule]
    depths = [d for d in TASKS[name].depths if d % v == 0]
    for d in depths:
        options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v}
        check_task(TASKS[name], d, 2 * d, rows=[4 * d] * 4, recompute=True, **options)


@pytest.mark.parametrize("recompute", ["auto", [True, False, True]])
def test_stages_may_differ(recompute: Any) -> None:
    check_task(TASKS["skips"], 3, 4, rows=[9, 8, 11, 8], recompute=recompute)


def homogeneous(dropout: nn.Module) -> list[nn.Module]:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), dropout)

    return [stage(), stage(), stage()]


def total(output: torch.Tensor, target: None) -> torch.Tensor:
    return output.sum()


class Attention(nn.Module):
    """Random numbers drawn inside an operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.ones(1, 1, x.shape[0], 4, dtype=x.dtype)
        v = x.reshape(1, 1, *x.shape)
        return F.scaled_dot_product_attention(q, q, v, dropout_p=0.5).reshape(x.shape)


@pytest.mark.parametrize("make", [lambda: nn.Dropout(0.5), Attention])
@pytest.mark.parametrize("schedule", ["2bw", "zero_bubble", "gpipe"])
@pytest.mark.parametrize("recompute", [True, [True, False, False]])
def test_the_second_forward_draws_the_numbers_of_the_first(
    schedule: str, recompute: Any, make: Any
) -> None:
    # The output is linear in each weight, so the loss is <w, gradient>, if both saw one mask.
    torch.manual_seed(0)
    stages = [stage.double() for stage in homogeneous(make())]
    before = [stage[0].weight.detach().clone() for stage in stages]  # type: ignore
    x = torch.randn(12, WIDTH, dtype=torch.float64)
    with pd2.PipelineModule(
        stages,
        total,
        num_microbatches=4,
        schedule=schedule,
        example_args=(x,),
        recompute=recompute,
        loss_reduction="sum",
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=1.0))
        loss = pipe.train_step(x)
        while not loss.done():
            torch.rand(1)  # whoever draws beside the pipeline changes nothing
        optimizer.step()
        state = pipe.state_dict()
        assert abs(loss.item()) > 1e-3
        for old, new in zip(before, state.values(), strict=True):
            assert torch.sum(old * (old - new)).item() == pytest.approx(loss.item(), rel=1e-9)


def test_random_numbers_depend_on_the_seed_alone() -> None:
    def losses(seed: int, schedule: str) -> list[float]:
        torch.manual_seed(seed)
        x = torch.ones(8, WIDTH)
        with pd2.PipelineModule(
            homogeneous(nn.Dropout(0.5)),
            total,
            num_microbatches=4,
            schedule=schedule,
            example_args=(x,),
            recompute=True,
            timeout=60.0,
        ) as pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.0))
            found = []
            for _ in range(3):
                found.append(pipe.train_step(x))
                optimizer.step()
            return [loss.item() for loss in found]

    want = losses(1, "2bw")
    assert len(set(want)) == 3
    assert losses(1, "gpipe") == want
    assert losses(2, "2bw") != want


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.linear(x.clone()).tanh()


class Counts(nn.Module):
    """A buffer that every forward reads and changes."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.linear(x) / self.count


def test_inputs_that_are_written_and_buffers_that_change_are_kept() -> None:
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(WritesInput(), Counts()), nn.Sequential(Counts(), nn.Tanh())]

    batches = [Batch((torch.randn(8, WIDTH),), torch.randn(8, WIDTH)) for _ in range(4)]
    whole = nn.Sequential(*make())
    want = run_oracle(
        whole,
        torch.optim.SGD(whole.parameters(), lr=0.1),
        [Batch((batch.args[0].clone(),), batch.target) for batch in batches],
        4,
        F.mse_loss,
        delay=1,
    )
    with pd2.PipelineModule(
        make(),
        F.mse_loss,
        num_microbatches=4,
        example_args=(torch.randn(2, WIDTH),),
        recompute=True,
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
        assert [loss.item() for loss in losses] == want
        for ours, theirs in zip(
            pipe.state_dict().values(), whole.state_dict().values(), strict=True
        ):
            assert torch.equal(ours, theirs)


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.linear(x)


def test_a_stage_recomputes_while_the_gradient_is_under_way() -> None:
    x = torch.randn(4, 4)
    with pd2.PipelineModule(
        [Sleeps(), Sleeps()],
        F.mse_loss,
        num_microbatches=2,
        schedule="gpipe",
        example_args=(x,),
        recompute=True,
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pipe.timeline() as timeline:
            pipe.train_step(x, target=x)
            optimizer.step()
    at = {(e.stage, e.kind, e.microbatch): e for e in timeline.rows}
    # Stage 0 has forwarded long before stage 1 can send it a gradient.
    assert at[0, "R", 0].start < at[1, "B", 0].start
    assert at[0, "R", 0].end <= at[0, "B", 0].start
    assert at[0, "R", 0].end - at[0, "R", 0].start >= 0.02


def test_what_is_held_is_what_was_received_and_one_microbatchs_activations() -> None:
    d, m, rows, width = 3, 6, 8, 32

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    reports = {}
    for recompute in (False, True):
        with pd2.PipelineModule(
            [make() for _ in range(d)],
            F.mse_loss,
            num_microbatches=m,
            example_args=(torch.randn(2, width),),
            recompute=recompute,
            timeout=60.0,
        ) as pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
            for _ in range(3):
                pipe.train_step(torch.randn(m * rows, width), target=torch.randn(m * rows, width))
                optimizer.step()
            pipe.flush()
            reports[recompute] = pipe.memory_report()
    received = rows * width * 4
    kept, held = ([reports[r][i].activations for i in range(d)] for r in (False, True))
    for stage in range(d):
        in_flight = d - stage
        # The input of stage 0 is the user's; of the others it is received, not computed.
        one = kept[stage] // in_flight - (received if stage else 0)
        assert held[stage] == one + (in_flight * received if stage else 0)
        assert reports[True][stage].most_in_flight == in_flight
    assert held[0] * 3 == kept[0]


def test_a_checkpoint_that_would_draw_other_numbers_is_an_error() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(
                lambda z: F.dropout(self.linear(z), 0.5), x, use_reentrant=False
            )
            return y

    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        [Inner(), nn.Linear(4, 4)],
        F.mse_loss,
        num_microbatches=2,
        schedule="1f1b",
        example_args=(x,),
        recompute=True,
        timeout=60.0,
    )
    with pytest.raises(RuntimeError, match=r"random numbers are drawn in the backward, by aten::"):
        for _ in range(2):
            pipe.train_step(x, target=x)
            pipe.flush()
    pipe.close()


def test_nothing_is_kept_for_a_forward_that_draws_and_changes_nothing() -> None:
    buffers = {"a": torch.zeros(3), "b": torch.zeros(3)}
    replayer = Replayer(torch.device("cpu"), lambda: [(buffers, name) for name in buffers])
    x = torch.randn(3)
    for _ in range(2):
        with replayer.first([x], keep_inputs=True) as replay:
            x * 2 + buffers["a"]
        assert replay.nbytes() == 0
        assert replay.inputs[0] is x


class Sometimes(nn.Module):
    """Writes to its buffer where the input is large."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 10:
            self.scale.mul_(1.1)
        return x * self.scale


def test_writing_to_what_the_first_microbatch_did_not_write_to_is_an_error() -> None:
    module = Sometimes()
    replayer = Replayer(torch.device("cpu"), lambda: [(module._buffers, "scale")])
    with replayer.first([torch.zeros(3)], keep_inputs=True):
        module(torch.zeros(3))
    with (
        pytest.raises(RuntimeError, match=r"wrote to inputs \[\] and buffers \['scale'\]"),
        replayer.first([torch.zeros(3)], keep_inputs=True),
    ):
        module(torch.full((3,), 20.0))


def test_a_buffer_that_comes_to_be_is_taken_away_again() -> None:
    module = nn.Module()
    module.register_buffer("before", None)
    module.register_buffer("count", None)
    places = [(module._buffers, leaf) for leaf in module._buffers]
    replayer = Replayer(torch.device("cpu"), lambda: places)

    def forward() -> None:
        module.count = torch.ones(()) if module.count is None else module.count + 1

    for microbatch in (1, 2, 3):
        with replayer.first([], keep_inputs=True) as replay:
            forward()
        assert module.count == microbatch
        with replay.again():
            forward()
        assert module.count == microbatch


def test_an_input_that_was_written_to_since_is_an_error() -> None:
    x = torch.zeros(3)
    replayer = Replayer(torch.device("cpu"), list)
    with replayer.first([x], keep_inputs=True) as replay:
        pass
    x.add_(1)
    with pytest.raises(RuntimeError, match="an input was written to"), replay.again():
        pass


class FakeGenerator:
    """A device's generator, on which others draw."""

    def __init__(self) -> None:
        self.draws = 0

    def state(self) -> torch.Tensor:
        return torch.tensor(self.draws)

    def set(self, state: torch.Tensor) -> None:
        self.draws = int(state)


@pytest.mark.parametrize("others_draw", [False, True])
def test_a_devices_generator_is_set_back_and_what_others_draw_is_seen(others_draw: bool) -> None:
    replayer = Replayer(torch.device("cpu"), list)
    generator = FakeGenerator()
    replayer._generator = generator  # type: ignore[assignment]
    with replayer.first([], keep_inputs=True) as replay:
        generator.draws += 2 + others_draw
    generator.draws += 5
    after = generator.draws
    seen = (
        pytest.raises(RuntimeError, match="another thread drew")
        if others_draw
        else contextlib.nullcontext()
    )
    with seen, replay.again():
        assert generator.draws == 0
        generator.draws += 2
    assert generator.draws == after


def test_buffers_of_a_module_that_changed_one_are_kept_though_they_are_equal_yet() -> None:
    norm = nn.BatchNorm1d(3)
    places = [(norm._buffers, name) for name in norm._buffers]
    replayer = Replayer(torch.device("cpu"), lambda: places)
    for x in (torch.zeros(4, 3), torch.randn(4, 3)):  # the mean stays 0 at first
        with replayer.first([x], keep_inputs=True) as replay:
            norm(x)
        after = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        with replay.again():
            norm(x)
        for name, buffer in norm.named_buffers():
            assert torch.equal(buffer, after[name]), name


@pytest.mark.parametrize(
    ("recompute", "error", "message"),
    [
        (
            "always",
            ValueError,
            r"recompute: 'always', known: True, False, 'auto'",
        ),
        ([True], ValueError, r"recompute: 1 given, num_stages: 2: one for each stage"),
        ([1, 0], TypeError, r"recompute: \[1, 0\] given, it must be a bool"),
        (3, TypeError, r"recompute: 3 given"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(recompute: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        pd2.PipelineModule(
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            F.mse_loss,
            num_microbatches=2,
            example_args=(torch.randn(2, 2),),
            recompute=recompute,
        )


def blocks_of(name: str) -> list[str]:
    """The modules right below the root or below a list of modules."""
    return [
        path
        for path, module in as_root(TASKS[name].model()).named_modules()
        if path.rpartition(".")[0] in ("", "layers", "blocks", "rest")
        and not isinstance(module, nn.ModuleList)
        and path
        and not path.endswith("never")
    ]


@pytest.mark.parametrize("schedule", ["2bw", "zero_bubble"])
@pytest.mark.parametrize("name", TASKS)
def test_recomputed_blocks_equal_the_definition(name: str, schedule: str) -> None:
    for d in TASKS[name].depths[-2:]:
        blocks = blocks_of(name)
        check_task(
            TASKS[name], d, 2 * d, rows=[4 * d] * 4, schedule=schedule, recompute=blocks[::2]
        )


def test_a_recomputed_block_draws_the_same_numbers_and_keeps_its_inputs_only() -> None:
    torch.manual_seed(0)
    rows, width = 8, 32
    kept = {}
    for recompute in (False, ["0"]):
        block = nn.Sequential(nn.Linear(width, width, bias=False), nn.Dropout(0.5), Attention())
        block.double()
        before = block[0].weight.detach().clone()
        x = torch.randn(4 * rows, width, dtype=torch.float64)
        with pd2.PipelineModule(
            [block, nn.Identity()],
            total,
            num_microbatches=4,
            example_args=(x,),
            recompute=recompute,
            loss_reduction="sum",
            timeout=60.0,
        ) as pipe:
            optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=1.0))
            loss = pipe.train_step(x)
            optimizer.step()
            after = next(iter(pipe.state_dict().values()))
            assert torch.sum(before * (before - after)).item() == pytest.approx(loss.item())
            kept[not recompute] = pipe.memory_report()[0].activations
    assert kept[True] > 0
    assert kept[False] == 0  # the block's input is the user's


class InnerBackward(torch.autograd.Function):
    """x * w, whose backward runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            y: torch.Tensor = module(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = InnerBackward.apply(x, self.linear)  # type: ignore[no-untyped-call]
        return y


class OneAfterTheOther(nn.Module):
    """As nn.Sequential, but traced into its parts."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


class StatefulParts(nn.Module):
    """A block whose layers are used with others between them, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Counts(), Counts()]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[1](self.parts[0](x) * 2)
        y: torch.Tensor = self.parts[3](self.parts[2](x + 1))
        return y


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "2bw_split"])
@pytest.mark.parametrize("recompute", [True, ["1"], ["1.parts"]])
@pytest.mark.parametrize("make", [Nested, StatefulParts])
def test_backwards_inside_backwards_and_blocks_with_state(
    make: Any, recompute: Any, schedule: str
) -> None:
    if make is Nested and recompute == ["1.parts"]:
        recompute = ["1", "2"]
    model = [nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)]
    if recompute == ["1.parts"]:
        root: Any = OneAfterTheOther(model)
        options: dict[str, Any] = {"split": ["1", "2"], "num_stages": 3}
    else:
        root, options = model, {}
    whole = copy.deepcopy(nn.Sequential(*model))
    batches = [Batch((torch.randn(12, WIDTH),), torch.randn(12, WIDTH)) for _ in range(4)]
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
    want = run_oracle(whole, sgd, batches, 4, F.mse_loss, delay=int("2bw" in schedule))
    with pd2.PipelineModule(
        root,
        F.mse_loss,
        num_microbatches=4,
        schedule=schedule,
        example_args=(torch.randn(2, WIDTH),),
        recompute=recompute,
        timeout=60.0,
        **options,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        losses = []
        for batch in batches:
            losses.append(pipe.train_step(*batch.args, target=batch.target))
            optimizer.step()
        assert [loss.item() for loss in losses] == want
        for name, theirs in whole.state_dict().items():
            assert torch.equal(pipe.state_dict()[name], theirs), name


def test_a_blocks_random_numbers_leave_the_users_alone() -> None:
    def drawn(recompute: Any) -> list[float]:
        torch.manual_seed(0)
        x = torch.randn(4, WIDTH)
        seen = []
        with pd2.PipelineModule(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), nn.Linear(WIDTH, WIDTH)],
            F.mse_loss,
            num_microbatches=2,
            schedule="1f1b",
            example_args=(x,),
            recompute=recompute,
            timeout=60.0,
        ) as pipe:
            torch.manual_seed(1)
            pipe.train_step(x, target=x)
            pipe.flush()
            seen.append(torch.rand(()).item())
        return seen

    found = drawn(["0"])
    torch.manual_seed(1)
    assert found == [torch.rand(()).item()]


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", ["0"]), ("zero_bubble", True)])
def test_a_checkpoint_around_a_weight_or_in_a_block_that_draws_is_an_error(
    schedule: str, recompute: Any
) -> None:
    class DropConnect(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = checkpoint(lambda w: F.dropout(w, 0.5), self.w, use_reentrant=False)
            return F.linear(x, w)

    x = torch.randn(4, 4)
    pipe = pd2.PipelineModule(
        [DropConnect(), nn.Linear(4, 4)],
        F.mse_loss,
        num_microbatches=2,
        schedule=schedule,
        example_args=(x,),
        recompute=recompute,
        timeout=60.0,
    )
    with pytest.raises(RuntimeError, match=r"random numbers are drawn in the backward, by aten::"):
        pipe.train_step(x, target=x)
        pipe.flush()


def test_a_block_may_have_no_layers_in_the_other_mode() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.aux = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.main(x)
            if self.training:
                y = y + self.aux(y)
            z: torch.Tensor = y.tanh()
            return z

    x = torch.randn(4, 4)
    with pd2.PipelineModule(
        OneAfterTheOther([Auxiliary(), nn.Linear(4, 4)]),
        F.mse_loss,
        num_stages=2,
        split=["1"],
        num_microbatches=2,
        example_args=(x,),
        recompute=["0.aux"],
        timeout=60.0,
    ) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.train_step(x, target=x)
        optimizer.step()
        pipe.eval()
        assert pipe(x).shape == (4, 4)


def test_a_blocks_input_counts_as_held() -> None:
    x = torch.randn(4, WIDTH)
    with pd2.PipelineModule(
        [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Sigmoid())],
        total,
        num_microbatches=2,
        example_args=(x,),
        recompute=["1"],
        loss_reduction="sum",
        timeout=60.0,
    ) as pipe:
        pipe.train_step(x)
        pipe.flush()
        assert pipe.memory_report()[1].activations == 2 * WIDTH * 4


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("2.none", r"recompute: '2.none' is no module of the model"),
        ("1.0", r"recompute: no layer of the captured model is in '1.0': it computes nothing"),
    ],
)
def test_a_block_that_is_not_there_is_refused(block: str, message: str) -> None:
    class Refers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(2, 2))
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return y

    with pytest.raises(ValueError, match=message):
        pd2.PipelineModule(
            [nn.Linear(2, 2), Refers()],
            F.mse_loss,
            num_microbatches=2,
            example_args=(torch.randn(2, 2),),
            recompute=[block],
        )


def test_a_block_that_writes_to_its_input_is_refused() -> None:
    x = torch.randn(4, WIDTH)
    pipe = pd2.PipelineModule(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesInput(), nn.Linear(WIDTH, WIDTH)),
        F.mse_loss,
        num_stages=2,
        split=["2"],
        num_microbatches=2,
        example_args=(x,),
        recompute=["1"],
        timeout=60.0,
    )
    with pytest.raises(RuntimeError, match=r"block 1 writes to its inputs in place"):
        pipe.train_step(x, target=x)
        pipe.flush()
