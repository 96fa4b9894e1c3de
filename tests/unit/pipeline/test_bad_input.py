"""In one process: bad input is refused with the rule and both values, and does no harm."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import embedding, mse_loss

import pipedream2bw as pd2

torch.manual_seed(0)  # the tests are named by these
X = torch.randn(8, 4)
Y = torch.randn(8, 4)
LEARNT = torch.ones(8, 4, requires_grad=True)


def layers(count: int = 2) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def build(model: Any = None, loss_fn: Any = mse_loss, **changes: Any) -> pd2.PipelineModule:
    settings: dict[str, Any] = {"num_microbatches": 2, "example_args": (X[:1],)} | changes
    return pd2.PipelineModule(layers() if model is None else model, loss_fn, **settings)


def sgd(pipe: pd2.PipelineModule) -> pd2.PipelineOptimizer:
    return pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x)) * scale
        return result


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return embedding(index, self.table, sparse=True)


# ---------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"num_microbatches": 1}, ValueError, r"num_microbatches: 1, num_stages: 2"),
        ({"num_microbatches": 0}, ValueError, r"num_microbatches: 0, it must be at least 1"),
        ({"num_microbatches": 2.0}, TypeError, r"num_microbatches: 2.0 given, it must be an int"),
        ({"num_microbatches": True}, TypeError, r"num_microbatches: True given"),
        ({"num_stages": 0}, ValueError, r"num_stages: 0, it must be at least 1"),
        ({"num_stages": "2"}, TypeError, r"num_stages: '2' given, it must be an int"),
        ({"width": 0}, ValueError, r"width: 0, it must be at least 1"),
        ({"width": 2}, ValueError, r"width: 2, processes: 1"),
        ({"schedule": "3bw"}, ValueError, r"3bw.*2bw"),
        ({"schedule": 5}, TypeError, r"schedule: 5 given, it must be a name"),
        ({"loss_reduction": "max"}, ValueError, r"loss_reduction: 'max', known: 'mean', 'sum'"),
        ({"loss_fn": 3}, TypeError, r"loss_fn: 3 given, it must be callable"),
        (
            {"loss_fn": nn.MSELoss(reduction="sum")},
            ValueError,
            r"reduction of loss_fn: 'sum', loss_reduction: 'mean': .* Give loss_reduction='sum'",
        ),
        (
            {"loss_fn": nn.MSELoss(), "loss_reduction": "sum"},
            ValueError,
            r"reduction of loss_fn: 'mean', loss_reduction: 'sum'",
        ),
        ({"split": 2}, TypeError, r"split: 2 given, it must be 'auto' or a list of modules' names"),
        ({"timeout": 0}, ValueError, r"timeout: 0, it must be > 0 and finite"),
        ({"timeout": float("nan")}, ValueError, r"timeout: nan, it must be > 0"),
        ({"timeout": "1 h"}, TypeError, r"timeout: '1 h' given, it must be a number"),
        ({"replicated": "mask"}, TypeError, r"replicated: 'mask' given"),
        ({"devices": ["cpu"]}, ValueError, r"devices: 1 given, num_stages: 2"),
        ({"example_args": ()}, ValueError, r"example_args"),
        ({"example_args": (X[:, :3],)}, ValueError, r"refuses the example arguments"),
        ({"example_args": X}, TypeError, r"example_args: Tensor given.*\(x,\) for one"),
        ({"example_kwargs": X}, TypeError, r"example_kwargs: Tensor given, it must be a dict"),
        ({"example_kwargs": {"other": X}}, ValueError, r"example_args and example_kwargs"),
        ({"precision": "bf32"}, ValueError, r"precision: 'bf32', known: 'bf16', 'fp16', 'fp32'"),
        ({"precision": torch.int8}, TypeError, r"precision: torch.int8 given.*str"),
        ({"precision": "bf16", "split_master": 1}, TypeError, r"split_master: 1 given.*bool"),
        ({"split_master": True}, ValueError, r"split_master: True, precision: None: .*'bf16'"),
        ({"gradient_dtype": "int8"}, TypeError, r"gradient_dtype: 'int8' given.* torch.dtype or"),
        (
            {"precision": "bf16", "gradient_dtype": torch.float16},
            ValueError,
            r"gradient_dtype: torch.float16, known: torch.bfloat16, None",
        ),
        *(
            (
                {"precision": precision, "gradient_dtype": torch.bfloat16},
                ValueError,
                rf"gradient_dtype: torch.bfloat16, precision: {precision!r}: it must be 'bf16'",
            )
            for precision in (None, "fp16", "fp32")
        ),
        ({"autocast": torch.float32}, ValueError, r"autocast: torch.float32, known: .*bfloat16"),
        ({"autocast": True}, TypeError, r"autocast: True given, it must be a torch.dtype"),
        (
            {"precision": "bf16", "model": [nn.Linear(4, 4), nn.Linear(4, 4).double()]},
            ValueError,
            r"parameter 1.weight: torch.float64, precision: 'bf16': .*float32",
        ),
        ({"example_args": (X[:0],)}, ValueError, r"\(0, 4\): dimension 0 holds.*at least 1"),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items())[:40] if isinstance(value, dict) else ""
    ),
)
def test_a_wrong_setting_is_named_with_the_rule(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build(**changes)


def as_if_sharded(module: nn.Module) -> nn.Module:
    """What fully_shard() makes of a module's class."""
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    return module


@pytest.mark.parametrize(
    ("model", "changes", "kind", "message"),
    [
        (lambda: nn.Linear(4, 4), {}, ValueError, r"num_stages is missing"),
        (lambda: layers(2), {"num_stages": 3, "num_microbatches": 3}, ValueError, r"2.*3|3.*2"),
        (
            lambda: nn.Sequential(*layers(2)),
            {"num_stages": 3, "num_microbatches": 3},
            ValueError,
            r"3 stages|num_stages: 3",
        ),
        (
            lambda: nn.Sequential(*layers(2)),
            {"num_stages": 2, "split": ["nowhere"]},
            ValueError,
            r"nowhere",
        ),
        (
            lambda: nn.Sequential(*layers(2)),
            {"num_stages": 2, "split": [1]},
            ValueError,
            r"split: 1 is no module .* close matches: '1'",
        ),
        (
            lambda: nn.Sequential(*layers(3)),
            {"num_stages": 2, "split": ["1", "2"]},
            ValueError,
            r"split.*2.*num_stages",
        ),
        (lambda: "a model", {"num_stages": 2}, TypeError, r"must be an nn.Module"),
        (lambda: [nn.Linear(4, 4), 3], {}, TypeError, r"must be an nn.Module"),
        (
            lambda: [nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64)],
            {},
            ValueError,
            r"'1.weight' has dtype torch.complex64",
        ),
        (
            lambda: [nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)],
            {"example_args": (torch.zeros(1, dtype=torch.long),)},
            ValueError,
            r"sparse=True: a pipeline takes dense gradients only",
        ),
        (
            lambda: [nn.Linear(4, 4), as_if_sharded(nn.Linear(4, 4))],
            {},
            ValueError,
            r"module 1: FSDPLinear, it must not be sharded by FSDP.*shard_state=True: .*8 \+ 12/w",
        ),
    ],
)
def test_a_model_that_cannot_be_a_pipeline_is_refused(
    model: Any, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build(model(), **changes)


def test_other_schedules_take_fewer_microbatches_than_stages() -> None:
    for schedule in ("1f1b", "gpipe"):
        with build(layers(3), schedule=schedule, num_microbatches=1) as pipe:
            assert pipe.num_microbatches == 1


# ---------------------------------------------------------------- optimizers


def test_an_optimizer_of_foreign_parameters_is_refused() -> None:
    with build() as pipe:
        foreign = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"belong to 0 open pipelines"):
            pd2.PipelineOptimizer(torch.optim.SGD(foreign.parameters(), lr=0.1))
        both = [*pipe.parameters(), *foreign.parameters()]
        with pytest.raises(ValueError, match=r"parameters of the optimizer: 6.*not the pip.*: 2 "):
            pd2.PipelineOptimizer(torch.optim.SGD(both, lr=0.1))


def test_an_optimizer_that_misses_trainable_parameters_is_refused() -> None:
    with build() as pipe:
        some = list(pipe.parameters())[:3]
        with pytest.raises(ValueError, match=r"trainable.*: 4, missing.*: 1 \(1.bias\)"):
            pd2.PipelineOptimizer(torch.optim.SGD(some, lr=0.1))


def test_an_optimizer_over_two_pipelines_is_refused() -> None:
    with build() as one, build() as other:
        both = [*one.parameters(), *other.parameters()]
        with pytest.raises(ValueError, match=r"belong to 2 open pipelines"):
            pd2.PipelineOptimizer(torch.optim.SGD(both, lr=0.1))


def test_an_optimizer_of_a_closed_pipeline_is_refused() -> None:
    pipe = build()
    pipe.close()
    with pytest.raises(ValueError, match=r"to 0 open pipelines.* before the pipeline is closed"):
        sgd(pipe)


@pytest.mark.parametrize("optimizer", [3, None, "sgd"])
def test_no_optimizer_at_all_is_a_type_error(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer"):
        pd2.PipelineOptimizer(optimizer)


def test_optimizers_that_need_a_closure_are_refused() -> None:
    with build() as pipe, pytest.raises(TypeError, match=r"LBFGS"):
        pd2.PipelineOptimizer(torch.optim.LBFGS(pipe.parameters()))


def test_frozen_parameters_may_be_left_out() -> None:
    model = layers()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    with build(model) as pipe:
        trainable = [p for p in pipe.parameters() if p.requires_grad]
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(trainable, lr=0.1))
        before = [p.clone() for p in model[0].parameters()]
        for _ in range(3):
            pipe.train_step(X, target=Y)
            optimizer.step()
        pipe.flush()
        assert all(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))


# ---------------------------------------------------------------- batches


def trained(mistakes: bool) -> list[torch.Tensor]:
    """Final parameters of a run of four batches, with or without refused calls in between."""
    torch.manual_seed(3)
    pipe = build(TwoInputs(), num_stages=2, example_args=(X[:1], torch.ones(1, 1)))
    optimizer = sgd(pipe)
    scale = torch.ones(8, 1)
    with pipe:
        for _ in range(4):
            if mistakes:
                for args, kwargs, kind, message in WRONG_BATCHES:
                    with pytest.raises(kind, match=message):
                        pipe.train_step(*args, **kwargs)
            pipe.train_step(X, scale, target=Y)
            if mistakes:
                with pytest.raises(ValueError, match=r"opt.step\(\): \d calls for \d train_steps"):
                    pipe.train_step(X, scale, target=Y)
            optimizer.step()
            if mistakes:
                with pytest.raises(ValueError, match=r"opt.step\(\): \d calls for \d train_steps"):
                    optimizer.step()
        return [value.clone() for value in pipe.state_dict().values()]


WRONG_BATCHES: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((X[:0], torch.ones(0, 1)), {"target": Y[:0]}, ValueError, r"rows of the batch: 0, at least 1"),
    ((X, torch.ones(7, 1)), {"target": Y}, ValueError, r"scale: 7 rows.*x: 8.*replicated"),
    ((X, torch.ones(8, 1)), {"target": Y[:7]}, ValueError, r"rows.*: 8, .*target: 7"),
    ((X, torch.ones(8, 1)), {"target": {"a": Y, "b": Y[:2]}}, ValueError, r"\['b'\]: 2 rows"),
    ((X, torch.tensor(1.0)), {"target": Y}, ValueError, r"scale: shape \[\].*replicated"),
    ((X,), {"target": Y}, ValueError, r"arguments do not fit|arguments given"),
    ((X, torch.ones(8, 1), X), {"target": Y}, ValueError, r"arguments do not fit"),
    ((X, torch.ones(8, 1)), {"target": Y, "other": 3}, ValueError, r"arguments do not fit"),
    ((X, 2.0), {"target": Y}, TypeError, r"argument scale: float given, a tensor"),
    (([X], torch.ones(8, 1)), {"target": Y}, TypeError, r"argument x: list given, a tensor"),
    ((LEARNT, torch.ones(8, 1)), {"target": Y}, ValueError, r"argument x: requires_grad is True"),
    ((X, LEARNT[:, :1]), {"target": Y}, ValueError, r"scale: requires_grad is True.* detach\(\)"),
    ((X, torch.ones(8, 1)), {"target": LEARNT * 2}, ValueError, r"target: requires_grad is True"),
]


def test_refused_batches_and_steps_leave_no_trace() -> None:
    for got, expected in zip(trained(mistakes=True), trained(mistakes=False), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused_and_does_no_harm(without: Any) -> None:
    with build() as pipe:
        optimizer = sgd(pipe)
        with (
            without(),
            pytest.raises(ValueError, match=r"turned off: call .* outside no_grad"),
        ):
            pipe.train_step(X, target=Y)
        pipe.train_step(X, target=Y)
        with without():
            optimizer.step()
            assert pipe(LEARNT).shape == (8, 4)


def test_a_step_before_any_batch_is_refused() -> None:
    with build() as pipe:
        optimizer = sgd(pipe)
        with pytest.raises(ValueError, match=r"opt.step\(\): 1 calls for 0 train_steps"):
            optimizer.step()


def test_training_mode_call_with_gradients_is_refused() -> None:
    with build() as pipe:
        with pytest.raises(RuntimeError, match=r"use train_step\(\) to train"):
            pipe(X)
        assert pipe.eval()(X).shape == (8, 4)


def test_evaluation_of_another_form_is_refused_and_does_no_harm() -> None:
    with build() as pipe:
        pipe.eval()
        with pytest.raises(ValueError, match=r"arguments do not fit"):
            pipe(X, X)
        with pytest.raises(TypeError, match=r"list given, a tensor in the example"):
            pipe([X])
        assert pipe(X[:1]).shape == (1, 4)


def test_a_state_dict_that_does_not_fit_is_refused_and_does_no_harm() -> None:
    with build() as pipe:
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"missing keys: \['1.bias'\]"):
            pipe.load_state_dict({k: v for k, v in state.items() if k != "1.bias"})
        with pytest.raises(RuntimeError, match=r"unexpected keys: \['2.bias'\]"):
            pipe.load_state_dict(state | {"2.bias": torch.zeros(4)})
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
            pipe.load_state_dict(state | {"0.weight": torch.zeros(4, 5)})
        with pytest.raises(ValueError, match=r"assign: True, only False"):
            pipe.load_state_dict(state, assign=True)
        result = pipe.load_state_dict({"0.bias": state["0.bias"], "x": X}, strict=False)
        assert result.missing_keys == ["0.weight", "1.bias", "1.weight"]
        assert result.unexpected_keys == ["x"]
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, state[name])


def test_unsplit_works_once() -> None:
    pipe = build()
    pipe.unsplit()
    with pytest.raises(RuntimeError, match=r"the pipeline is closed: unsplit\(\) was called"):
        pipe.unsplit()


def test_a_call_of_a_closed_pipeline_says_that_it_is_closed() -> None:
    pipe = build()
    pipe.close()
    with pytest.raises(RuntimeError, match=r"the pipeline is closed: close\(\) was called"):
        pipe(X)


@pytest.mark.parametrize(
    ("mistake", "what_to_do"),
    [
        (
            lambda pipe, opt: pipe.train_step(X, Y),
            r"Give .*; train_step\(\) takes the target as target=",
        ),
        (lambda pipe, opt: pipe.train_step(X.numpy(), target=Y), r"example call\. Give a tensor"),
        (lambda pipe, opt: pd2.PipelineOptimizer(pipe), r"Give one over pipe.parameters\(\), or"),
        (
            lambda pipe, opt: pd2.PipelineOptimizer(torch.optim.LBFGS(pipe.parameters())),
            r"Give another one",
        ),
        (lambda pipe, opt: build(example_args=()), r"Give the arguments of one call"),
        (lambda pipe, opt: pipe.half(), r"weights\. Give precision='bf16' or 'fp16'"),
        (
            lambda pipe, opt: pipe.session.root(X).sum().backward(),
            r"would be lost\. Call train_step\(\) to train, not the model\.",
        ),
    ],
)
def test_the_last_sentence_says_what_to_do(mistake: Any, what_to_do: str) -> None:
    with build() as pipe:
        optimizer = sgd(pipe)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=what_to_do):
            mistake(pipe, optimizer)
        pipe.train_step(X, target=Y)
        optimizer.step()


# ---------------------------------------------------------------- what only a run shows


def test_a_failures_text_ends_in_one_full_stop() -> None:
    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("Nothing is there.")

    with build(loss_fn=failing) as pipe:
        sgd(pipe)
        with pytest.raises(pd2.errors.StageError, match=r"is there\. train_step 0 was discarded"):
            float(pipe.train_step(X, target=Y))


def test_a_loss_function_that_fails_without_a_target_says_so() -> None:
    with build() as pipe:
        sgd(pipe)
        text = r"loss_fn with target None: .*'size'. Call train_step\(target=\)"
        with pytest.raises(pd2.errors.StageError, match=text):
            float(pipe.train_step(X))


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"schedule": "1f1b"}])
def test_a_loss_without_its_history_is_refused(
    options: dict[str, Any], needs_gradient: bool
) -> None:
    def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target).detach().requires_grad_(needs_gradient)

    with build(loss_fn=detached, **options) as pipe:
        sgd(pipe)
        with pytest.raises(pd2.errors.StageError, match=r"would train nothing\. .* detach\(\)"):
            float(pipe.train_step(X, target=Y))


@pytest.mark.parametrize("write", ["x", "y"])
def test_a_batch_that_is_written_to_before_it_is_read_is_refused(write: str) -> None:
    batch = {"x": X.clone(), "y": Y.clone()}
    may_go_on = threading.Event()

    def waiting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        may_go_on.wait(10)
        return mse_loss(output, target)

    # No autograd keeps what a ReLU is given.
    model = [nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4)]
    with build(model, waiting, schedule="1f1b", num_microbatches=4) as pipe:
        opt = sgd(pipe)
        pipe.train_step(X, target=Y)  # whose loss waits: nobody has read the next batch
        opt.step()
        loss = pipe.train_step(batch["x"], target=batch["y"])
        opt.step()
        batch[write].zero_()
        may_go_on.set()
        text = r"a tensor of the batch, of shape \[8, 4\]: 1 writes since train_step\(\)"
        with pytest.raises(pd2.errors.StageError, match=text):
            float(loss)
        loss = pipe.train_step(X, target=Y)
        opt.step()
        pipe.flush()
        assert float(loss) > 0


class Clamps(nn.Module):
    """Writes to what it is given; no fake tensor can tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(-1, 1) * (2.0 if x.sum().item() > 0 else 1.0)


def test_what_a_script_may_write_is_not_refused() -> None:
    """A target by loss_fn or by a metric, an input by the model."""
    targets = torch.rand(8, 4)

    def clamped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target.clamp_(0.2, 0.8))

    def cloned(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target.clone())  # what autograd keeps nobody may write to

    def measured(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (target.clamp_(0.3, 0.7) == output).float().mean()

    first = nn.Sequential(Clamps(), nn.Linear(4, 4))
    for model, loss_fn, metrics in (
        ([nn.Linear(4, 4), nn.Linear(4, 4)], clamped, None),
        ([nn.Linear(4, 4), nn.Linear(4, 4)], cloned, {"same": measured}),
        ([first, nn.Linear(4, 4)], mse_loss, None),
    ):
        with build(model, loss_fn, num_microbatches=4, metrics=metrics) as pipe:
            opt = sgd(pipe)
            for _ in range(12):
                pipe.train_step(X.clone(), target=targets)
                opt.step()
            pipe.flush()


def test_an_error_for_one_row_says_how_many_the_batch_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with build(model, num_stages=2, example_args=(X,)) as pipe:
        sgd(pipe)
        text = (
            r"size\(\[1, 4\]\)\. This microbatch has 1 of the batch's 3 rows\. .* or fewer microb"
        )
        with pytest.raises(pd2.errors.StageError, match=text.replace("size", "Size")):
            float(pipe.train_step(X[:3], target=Y[:3]))


def test_a_call_during_another_threads_call_is_refused_and_does_no_harm() -> None:
    with build() as pipe, ThreadPoolExecutor(1) as other:
        optimizer = sgd(pipe)

        def train() -> None:
            pipe.train_step(X, target=Y)
            optimizer.step()

        with (
            pipe.session.ending.failing_closes(),  # which surrounds every call
            pytest.raises(RuntimeError, match=r"in another thread's call: use one thread at a"),
        ):
            other.submit(train).result()
        train()
        other.submit(train).result()
        train()


def test_two_threads_that_train_at_once_end_without_breaking_the_pipeline() -> None:
    with build() as pipe, ThreadPoolExecutor(2) as both:
        optimizer = sgd(pipe)

        def train() -> None:
            with contextlib.suppress(ValueError, RuntimeError):
                for _ in range(50):
                    pipe.train_step(X, target=Y)
                    optimizer.step()

        for ended in [both.submit(train), both.submit(train)]:
            ended.result(timeout=60)
        pipe.discard_batch()
        assert pipe.eval()(X).shape == (8, 4)


def test_a_sparse_gradient_ends_the_pipeline_with_the_parameters_name() -> None:
    pipe = build(
        [SparseEmbedding(), nn.Linear(4, 4)], example_args=(torch.zeros(1, dtype=torch.long),)
    )
    optimizer = sgd(pipe)
    message = r"stage 0, batch 0, microbatch 0, backward: .*0.table.*dense, got a sparse"
    with pytest.raises(RuntimeError, match=message):
        pipe.train_step(torch.zeros(8, dtype=torch.long), target=Y)
        optimizer.step()
        pipe.flush()


@pytest.mark.parametrize(
    ("loss_fn", "kind", "message"),
    [
        (lambda output, target: 3.0, TypeError, "loss_fn returned float, it must return a tensor"),
        (
            lambda output, target: (output - target).square(),
            ValueError,
            "loss_fn returned shape [4, 4]",
        ),
        (lambda output, target: output.sum().long(), ValueError, "dtype torch.int64"),
    ],
)
def test_a_loss_function_that_gives_no_loss_is_named(
    loss_fn: Any, kind: type[Exception], message: str
) -> None:
    pipe = build(loss_fn=loss_fn)
    with pytest.raises(RuntimeError) as raised:
        float(pipe.train_step(X, target=Y))
    assert "stage 1, batch 0, microbatch 0, forward" in str(raised.value)
    assert message in str(raised.value)
    assert isinstance(raised.value.__cause__, kind)
