"""What the pipeline's users call and read, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

import pipedream2bw as pd2
from pipedream2bw.units import format_bytes
from tests.references.oracle import Batch, run_oracle

X = torch.randn(7, 4)
Y = torch.randn(7, 4)


class Model(nn.Module):
    """Nested names, a buffer, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"first": nn.Linear(4, 5), "norm": nn.BatchNorm1d(5)})
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(5, 4))
        self.last[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.inside["norm"](self.inside["first"](x)))
        return result


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def stack(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(4, 4) for _ in range(count)]


def build(of: Any, **changes: Any) -> pd2.PipelineModule:
    settings: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "example_args": (X[:2],)}
    return pd2.PipelineModule(of, mse_loss, **settings | changes)


def sgd(pipe: pd2.PipelineModule, lr: float = 0.1) -> pd2.PipelineOptimizer:
    return pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=lr))


def train(pipe: pd2.PipelineModule, batches: int) -> list[pd2.Loss]:
    optimizer = sgd(pipe)
    losses = []
    for i in range(batches):
        losses.append(pipe.train_step(X + i, target=Y))
        optimizer.step()
    return losses


def expected_losses(batches: int) -> list[float]:
    reference = nn.Sequential(*stack())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    return run_oracle(
        reference, optimizer, [Batch((X + i,), Y) for i in range(batches)], 2, mse_loss, delay=1
    )


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 2, 0, 4, 1, 3, 0]])
def test_losses_are_read_in_any_order_and_again(order: list[int]) -> None:
    with build(stack()) as pipe:
        losses = train(pipe, 5)
        expected = expected_losses(5)
        for i in order:
            assert losses[i].item() == expected[i]


def test_losses_outlive_the_pipeline() -> None:
    pipe = build(stack())
    losses = train(pipe, 3)
    pipe.flush()
    pipe.close()
    del pipe
    assert [float(loss) for loss in losses] == expected_losses(3)


def test_a_loss_formats_as_a_number() -> None:
    with build(stack()) as pipe:
        (loss,) = train(pipe, 1)
        assert f"{loss:.3f}" == f"{loss.item():.3f}"
        assert loss.done()
        assert repr(loss) == f"Loss({loss.item()})"
        assert math.isfinite(loss)
        assert loss.train_step == 0


# ---------------------------------------------------------------- names and weights


def test_names_are_those_of_the_unsplit_model() -> None:
    reference = model()
    with build(model()) as pipe:
        state = pipe.state_dict()
        assert list(state) == list(reference.state_dict())
        assert list(pipe.full_state_dict()) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert torch.equal(state[name], value)
        for method in ("named_parameters", "named_buffers"):
            got = {name: value.shape for name, value in getattr(pipe, method)()}
            assert got == {n: value.shape for n, value in getattr(reference, method)()}
        assert len(list(pipe.parameters())) == len(list(reference.parameters()))


def test_a_checkpoint_of_the_unsplit_model_starts_the_training_anew() -> None:
    start = {name: value.clone() for name, value in model().state_dict().items()}
    with build(model()) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))

        def three_batches() -> list[float]:
            losses = []
            for _ in range(3):
                losses.append(pipe.train_step(X, target=Y))
                optimizer.step()
            return [float(loss) for loss in losses]

        first = three_batches()
        pipe.load_state_dict(start)
        # Batch 0 knows no delay, batch 3 would: with W(0) in every version it is the same.
        assert three_batches() == first


def test_unsplit_gives_back_the_very_model_with_the_newest_weights() -> None:
    own = model()
    pipe = build(own)
    train(pipe, 3)
    newest = {name: value.clone() for name, value in pipe.state_dict().items()}
    assert pipe.unsplit() is own
    assert all(torch.equal(value, newest[name]) for name, value in own.state_dict().items())
    own(X).sum().backward()  # parameters of its own, with gradients of their own
    assert own.inside["first"].weight.grad is not None


def test_parameters_show_the_newest_weights_after_a_drain() -> None:
    with build(stack()) as pipe:
        handles = list(pipe.parameters())
        train(pipe, 2)
        pipe.flush()
        state = list(pipe.state_dict().values())
        assert all(a is b for a, b in zip(handles, pipe.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(handles, state, strict=True))


# ---------------------------------------------------------------- evaluation


def test_evaluation_is_the_unsplit_models_output_on_the_newest_weights() -> None:
    with build(model()) as pipe:
        train(pipe, 2)
        reference = model()
        reference.load_state_dict(pipe.state_dict())
        for rows in (1, 2, 7):
            with torch.no_grad():
                parts = X[:rows].tensor_split(min(rows, 2))  # BLAS rounds by the number of rows
                expected = torch.cat([reference.eval()(part) for part in parts])
                assert torch.equal(pipe.eval()(X[:rows]), expected)
        assert not pipe.eval()(X).requires_grad
        assert pipe.train().training
        assert not pipe.eval().training


def test_evaluation_in_between_changes_no_number() -> None:
    with build(stack()) as plain, build(stack()) as checked:
        expected = [float(loss) for loss in train(plain, 4)]
        optimizer = sgd(checked)
        got = []
        for i in range(4):
            got.append(checked.train_step(X + i, target=Y))
            with torch.no_grad():
                checked(X[:3])
            optimizer.step()
            checked.eval()(X)
            checked.train()
        assert [float(loss) for loss in got] == expected


# ---------------------------------------------------------------- reports


def test_the_report_names_stages_sizes_and_versions() -> None:
    with build(stack()) as pipe:
        shown = str(pipe)
        train(pipe, 2)
        pipe.flush()
        for word in ("schedule='2bw'", "num_stages=2", "num_microbatches=2", "stage 0", "stage 1"):
            assert word in shown
        assert shown.count("20 parameters on cpu, 2 weight versions (newest W(0))") == 2
        assert str(pipe).count("newest W(2)") == 2
        for index, memory in pipe.memory_report().items():
            assert f"stage {index}" in str(pipe)
            assert format_bytes(memory.total) in str(pipe)


@pytest.mark.parametrize(("schedule", "versions"), [("2bw", 2), ("1f1b", 1), ("gpipe", 1)])
@pytest.mark.parametrize(("kind", "states"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_memory_follows_the_formulas(
    schedule: str, versions: int, kind: Callable[..., torch.optim.Optimizer], states: int
) -> None:
    with build([nn.Linear(16, 16), nn.Linear(16, 16)], schedule=schedule,
               example_args=(torch.randn(1, 16),)) as pipe:  # fmt: skip
        optimizer = pd2.PipelineOptimizer(kind(pipe.parameters(), lr=0.1))
        for _ in range(3):
            pipe.train_step(torch.randn(4, 16), target=torch.randn(4, 16))
            optimizer.step()
        pipe.flush()
        weights = (16 * 16 + 16) * 4
        for memory in pipe.memory_report().values():
            assert memory.weights == versions * weights
            assert memory.gradients == weights
            assert memory.optimizer_state == states * weights
            assert memory.most_live_versions <= versions


def test_the_properties_say_what_runs_here() -> None:
    with build(stack(3), num_stages=3, num_microbatches=4, schedule="1f1b") as pipe:
        assert (pipe.rank, pipe.replica, pipe.width) == (0, 0, 1)
        assert (pipe.num_stages, pipe.num_microbatches, pipe.schedule) == (3, 4, "1f1b")
        assert pipe.stages == [0, 1, 2]
        assert pipe.is_first_stage
        assert pipe.is_last_stage


def test_a_timeline_has_each_action_once_and_only_of_its_block() -> None:
    with build(stack()) as pipe:
        optimizer = sgd(pipe)
        for batch in range(4):
            if batch == 1:
                pipe.flush()
                recording = pipe.timeline()
                events = recording.__enter__()
            pipe.train_step(X, target=Y)
            optimizer.step()
            if batch == 2:
                recording.__exit__(None, None, None)
        pipe.flush()
        actions = {(e.stage, e.kind, e.batch, e.microbatch) for e in events.rows}
        expected = {
            (stage, kind, batch, microbatch)
            for stage in (0, 1)
            for batch in (1, 2)
            for kind, microbatch in [("F", 0), ("F", 1), ("B", 0), ("B", 1), ("U", 1)]
        }
        assert actions == expected
        assert len(events.rows) == len(expected)
        assert all(event.start <= event.end for event in events.rows)
        assert events.gather() == sorted(events.rows)


def test_a_recorded_action_has_the_rank_that_executed_it() -> None:
    four = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with build(four, num_stages=4, schedule="interleaved", stages_per_rank=2) as pipe:
        optimizer = sgd(pipe)
        with pipe.timeline() as events:
            pipe.train_step(X, target=Y)
            optimizer.step()
    assert {(event.stage, event.rank) for event in events.gather()} == {
        (0, 0),
        (1, 1),
        (2, 0),
        (3, 1),
    }


def test_a_timeline_ends_with_an_exception_too() -> None:
    with build(stack()) as pipe:
        optimizer = sgd(pipe)
        with pytest.raises(KeyError), pipe.timeline() as events:
            pipe.train_step(X, target=Y)
            optimizer.step()
            pipe.flush()
            raise KeyError
        assert len(events.rows) == 2 * (2 + 2 + 1)
        with pipe.timeline() as later:
            pass
        pipe.train_step(X, target=Y)
        pipe.flush()
        assert not later.rows


# ---------------------------------------------------------------- optimizers and schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)],
        milestones=[2],
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_the_rate_of_each_update(name: str) -> None:
    """As the oracle's definition with the same scheduler: update t has the rate at its step()."""
    reference = nn.Sequential(*stack())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with build(stack()) as pipe:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9))
        scheduler, expected = SCHEDULERS[name](optimizer), SCHEDULERS[name](plain)
        rates = []
        for _ in range(6):
            pipe.train_step(X, target=Y)
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
            optimizer.zero_grad()
            expected_rate = plain.param_groups[0]["lr"]
            plain.step()
            expected.step()
            assert rates[-1] == expected_rate
        assert len(set(rates)) > 1
        pipe.flush()


def test_the_rate_at_step_holds_where_the_update_happens_later() -> None:
    with build(stack()) as pipe, build(stack()) as other:
        early, late = sgd(pipe), sgd(other)
        for rate in (0.1, 0.0, 0.3):
            for module, optimizer, flushes in ((pipe, early, False), (other, late, True)):
                module.train_step(X, target=Y)
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                if flushes:
                    module.flush()
                optimizer.param_groups[0]["lr"] = 1e6  # after step(): no longer counts
        for a, b in zip(pipe.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()


def test_an_edit_of_the_wrapped_optimizers_groups_is_seen() -> None:
    with build(stack()) as pipe:
        wrapped = torch.optim.SGD(pipe.parameters(), lr=0.1)
        optimizer = pd2.PipelineOptimizer(wrapped)
        assert optimizer.param_groups is wrapped.param_groups
        before = [value.clone() for value in pipe.state_dict().values()]
        wrapped.param_groups[0]["lr"] = 0.0
        pipe.train_step(X, target=Y)
        optimizer.step()
        after = pipe.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.RMSprop], ids=["fused", "own step"]
)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(kind: Any) -> None:
    """Bitwise, for a schedule without delay; 2bw's delay starts anew."""

    def start() -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        pipe = build(stack(), schedule="1f1b")
        return pipe, pd2.PipelineOptimizer(kind(pipe.parameters(), lr=0.01))

    def run(pipe: pd2.PipelineModule, optimizer: pd2.PipelineOptimizer, batches: int) -> None:
        for _ in range(batches):
            pipe.train_step(X, target=Y)
            optimizer.step()

    whole, whole_optimizer = start()
    run(whole, whole_optimizer, 6)
    first, first_optimizer = start()
    run(first, first_optimizer, 3)
    checkpoint = {name: value.clone() for name, value in first.state_dict().items()}
    moments = first_optimizer.state_dict()
    second, second_optimizer = start()
    second.load_state_dict(checkpoint)
    second_optimizer.load_state_dict(moments)
    first.close()
    run(second, second_optimizer, 3)
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    whole.close()
    second.close()
