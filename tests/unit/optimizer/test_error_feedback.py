"""Error feedback of masters, and under a loss scale, against the definition."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop

import pipedream2bw as pd2
from pipedream2bw.optimizer.step_remedies import StepCorrection, StepRemedies
from tests.references.mixed_oracle import MixedOracle, half_away, lowered, masters_of
from tests.references.oracle import Batch
from tests.references.remedies import Corrected
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_pipeline,
    copy_of,
    go_on,
    make_pipeline,
)
from tests.samples.models import TASKS
from tests.samples.tied_models import TIED
from tests.unit.optimizer.test_loss_scale import SCALE, with_outliers
from tests.unit.training.test_precision import SKIPS

M, NUM_BATCHES, COEFFICIENT = 3, 8, 0.8
BFLOAT16 = torch.bfloat16
MAKE: dict[str, Any] = {
    "SGD": lambda ps: SGD(ps, lr=0.2, momentum=0.5, weight_decay=0.01),
    "AdamW": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "own step": lambda ps: RMSprop(ps, lr=0.01, momentum=0.5, foreach=False),
}


FEEDBACK = pd2.ErrorFeedback(COEFFICIENT)


def by_definition(
    batches: list[Batch],
    make: Any,
    *,
    dtype: torch.dtype = BFLOAT16,
    split: bool = False,
    scaled: bool = False,
) -> tuple[Trajectory, MixedOracle]:
    model = SKIPS.model()
    low, optimizer = (
        lowered(model, dtype),
        Corrected(make(list(model.parameters())), "error feedback", COEFFICIENT, 0),
    )
    if not split:
        optimizer.masters = masters_of(model, low)
    oracle = MixedOracle(
        model,
        low,
        optimizer,
        M,
        SKIPS.loss_fn,
        1,
        dtype=dtype,
        round_to=half_away if split else lambda weight: weight,
        scale=SCALE.init_scale if scaled else None,
        growth_interval=SCALE.growth_interval,
        left_out=optimizer.skip,
    )
    losses = [oracle.train_step(batch) for batch in batches]
    return Trajectory(losses, copy_of(model.state_dict())), oracle


MASTERS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"precision": "fp16"},
]
# Where an own step is refused.
OF_FUSED: list[dict[str, Any]] = [
    {"precision": "bf16", "split_master": True},
    {"precision": "bf16", "optimizer_device": "cpu"},
]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (name, options)
        for name in MAKE
        for options in MASTERS + (OF_FUSED if name != "own step" else [])
    ],
)
def test_the_steps_of_masters_are_fed_back_as_defined(
    optimizer: str, options: dict[str, Any]
) -> None:
    make = MAKE[optimizer]
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)
    dtype = {"bf16": BFLOAT16, "fp16": torch.float16}[options["precision"]]
    want, _ = by_definition(batches, make, dtype=dtype, split="split_master" in options)
    for num_stages in (1, 3):
        with make_pipeline(SKIPS, num_stages, M, batches[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=FEEDBACK)
            got = go_on(pipe, opt, batches, flush_after=(2, 5))
        assert_same(got, want, exact=optimizer == "SGD")
    plain = by_pipeline(SKIPS, batches, 1, M, make, **options)
    assert got.losses != plain.losses


@pytest.mark.parametrize("optimizer", MAKE)
def test_a_step_that_overflow_leaves_out_keeps_the_one_before(optimizer: str) -> None:
    batches = with_outliers([0, 5])  # also the first
    want, oracle = by_definition(batches, MAKE[optimizer], dtype=torch.float16, scaled=True)
    assert oracle.num_overflows >= 2
    with make_pipeline(SKIPS, 2, M, batches[0], precision="fp16") as pipe:
        opt = pd2.PipelineOptimizer(
            MAKE[optimizer](pipe.parameters()), loss_scale=SCALE, staleness=FEEDBACK
        )
        got = go_on(pipe, opt, batches)
    assert str(got.losses[0]) == str(want.losses[0])
    got.losses[:], want.losses[:] = (
        [loss for loss in each.losses if loss == loss] for each in (got, want)
    )
    assert_same(got, want, exact=optimizer == "SGD")


class OwnSGD(SGD):
    """The same, without a fused pass."""


FUSED_OPTIONS = StepRemedies.fused_options


def without_feedback(self: StepRemedies, *given: Any) -> Any:
    return [group.with_feedback(0.0) for group in FUSED_OPTIONS(self, *given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_pass_has_the_bits_of_the_definition_tensor_by_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference: the fused passes without feedback, corrected in Python."""
    task = TASKS["skips"]
    batches = [
        batch._replace(args=tuple(x.to(dtype) for x in batch.args), target=batch.target.to(dtype))
        for batch in task.batches([4] * NUM_BATCHES)
    ]

    def train(make: Any) -> Trajectory:
        model = copy.deepcopy(task.model()).to(dtype)
        with make_pipeline(task, 2, 2, batches[0], model=model) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=FEEDBACK)
            return go_on(pipe, opt, batches)

    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "foreach": False}
    for kind in (SGD, Adam, AdamW):
        got = train(functools.partial(kind, **options))
        with monkeypatch.context() as patched:
            patched.setattr(StepCorrection, "_is_fused", lambda self, parameter: False)
            patched.setattr(StepRemedies, "fused_options", without_feedback)
            want = train(functools.partial(kind, **options))
        assert_same(got, want)


def test_muon_and_adamw_of_one_model_are_both_corrected() -> None:
    """One by the fused pass, the other after its own step."""
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)

    def parts(parameters: Any) -> list[torch.optim.Optimizer]:
        given = list(parameters)
        return [
            Muon([p for p in given if p.dim() == 2], lr=0.02),
            AdamW([p for p in given if p.dim() != 2], lr=0.01, foreach=False),
        ]

    class Both(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.parts = parts(parameters)
            super().__init__([p for each in self.parts for p in each.param_groups[0]["params"]], {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for part in self.parts:
                part.step()

    want, _ = by_definition(batches, Both)
    with make_pipeline(SKIPS, 2, M, batches[0], precision="bf16") as pipe:
        opt = pd2.PipelineOptimizer(*parts(pipe.parameters()), staleness=FEEDBACK)
        got = go_on(pipe, opt, batches)
        assert not opt.state_dict()["staleness"]["kept"]
    assert_same(got, want, exact=False)


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "bf16", "split_master": True}], ids=str
)
@pytest.mark.parametrize("optimizer", ["AdamW", "own step"])
def test_saved_state_goes_on_to_the_bit(
    options: dict[str, Any], optimizer: str, tmp_path: Any
) -> None:
    if optimizer == "own step" and "split_master" in options:
        return
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)

    def make(d: int) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        pipe = make_pipeline(SKIPS, d, M, batches[0], **options)
        return pipe, pd2.PipelineOptimizer(MAKE[optimizer](pipe.parameters()), staleness=FEEDBACK)

    pipe, opt = make(2)
    with pipe:
        go_on(pipe, opt, batches[:4])
        saving = pd2.save(tmp_path / "checkpoint", pipe, opt)
        want = go_on(pipe, opt, batches[4:])
        saving.wait()
    pipe, opt = make(3)
    with pipe:
        pd2.load(tmp_path / "checkpoint", pipe, opt)
        keeps = options.get("precision") is None or "split_master" in options
        assert bool(opt.state_dict()["staleness"]["kept"]) == keeps
        got = go_on(pipe, opt, batches[4:])
    assert_same(got, want)


@pytest.mark.parametrize("before", ["nothing", "a discarded batch", "another optimizer"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_tied_masters_go_on_to_the_bit(before: str, num_stages: int, tmp_path: Any) -> None:
    """Whatever was done before the checkpoint, it has the weights that the next batch reads."""
    task = TIED["language model"]
    batches = task.batches([2 * M] * NUM_BATCHES)

    def make() -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        pipe = make_pipeline(task, num_stages, M, batches[0], precision="bf16")
        return pipe, pd2.PipelineOptimizer(MAKE["SGD"](pipe.parameters()), staleness=FEEDBACK)

    pipe, opt = make()
    with pipe:
        go_on(pipe, opt, batches[:4])
        if before == "a discarded batch":
            pipe.train_step(*batches[0].args, target=batches[0].target)
            pipe.discard_batch()
        elif before == "another optimizer":
            opt = pd2.PipelineOptimizer(MAKE["SGD"](pipe.parameters()), staleness=FEEDBACK)
        saving = pd2.save(tmp_path / "checkpoint", pipe, opt)
        want = go_on(pipe, opt, batches[4:])
        saving.wait()
    pipe, opt = make()
    with pipe:
        pd2.load(tmp_path / "checkpoint", pipe, opt)
        got = go_on(pipe, opt, batches[4:])
    assert_same(got, want)


@pytest.mark.parametrize(("options", "in_pass"), [({}, 4), ({"precision": "bf16"}, 0)])
def test_what_is_kept_has_the_reported_bytes(options: dict[str, Any], in_pass: int) -> None:
    """An own step's correction of masters keeps them, as they were, while they are stepped."""
    batches = SKIPS.batches([2 * M] * 3)
    for make in (MAKE["SGD"], lambda ps: OwnSGD(ps, lr=0.1, momentum=0.5)):
        size = in_pass if make is MAKE["SGD"] else 4
        with make_pipeline(SKIPS, 2, M, batches[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=FEEDBACK)
            go_on(pipe, opt, batches)
            for stage, report in pipe.memory_report().items():
                numel = sum(p.numel() for p in pipe.session.stages[stage].weights.handles)
                in_engine = 4 * numel if make is MAKE["SGD"] else 0  # momentum
                assert report.optimizer_state == in_engine + size * numel


def test_evaluation_computes_with_what_is_given() -> None:
    """The masters make plain steps; the next batch reads what is a step ahead of them."""
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)
    _, oracle = by_definition(batches, MAKE["SGD"])
    with make_pipeline(SKIPS, 2, M, batches[0], precision="bf16") as pipe:
        opt = pd2.PipelineOptimizer(MAKE["SGD"](pipe.parameters()), staleness=FEEDBACK)
        go_on(pipe, opt, batches)
        (x,) = batches[0].args
        with torch.no_grad():
            got = pipe(x)
            for low, master in zip(oracle.low.parameters(), oracle.model.parameters(), strict=True):
                low.copy_(master)
            want = oracle.low.eval()(x.to(BFLOAT16))
        given = pipe.state_dict()
    assert torch.equal(got, want)
    for name, master in oracle.model.named_parameters():
        assert torch.equal(given[name], master)
    assert any(
        not torch.equal(master, weight)
        for master, weight in zip(oracle.model.parameters(), oracle.versions[-1], strict=True)
    )


def trained_with(
    between: Callable[[pd2.PipelineModule, Batch], None], **options: Any
) -> Trajectory:
    """What comes after four batches, and after what is done between these and the others."""
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)
    with make_pipeline(SKIPS, 2, M, batches[0], **options) as pipe:
        opt = pd2.PipelineOptimizer(MAKE["AdamW"](pipe.parameters()), staleness=FEEDBACK)
        go_on(pipe, opt, batches[:4])
        with torch.no_grad():
            between(pipe, batches[0])
        return go_on(pipe, opt, batches[4:])


@pytest.mark.parametrize("options", [*MASTERS, *OF_FUSED], ids=str)
def test_after_an_evaluation_training_goes_on_ahead(options: dict[str, Any]) -> None:
    dtype = {"bf16": BFLOAT16, "fp16": torch.float16}[options["precision"]]

    def evaluate(pipe: pd2.PipelineModule, batch: Batch) -> None:
        (x,) = batch.args
        low = SKIPS.model()
        low.load_state_dict(pipe.state_dict())
        assert torch.equal(pipe(x), low.to(dtype).eval()(x.to(dtype)))

    evaluated = trained_with(evaluate, **options)
    assert_same(evaluated, trained_with(lambda pipe, batch: None, **options))


def test_an_evaluation_that_fails_leaves_the_weights_ahead() -> None:
    def fail(pipe: pd2.PipelineModule, batch: Batch) -> None:
        with pytest.raises(pd2.errors.StageError):
            pipe.eval_step(*batch.args, target="of another kind")

    failed = trained_with(fail, precision="bf16")
    assert_same(failed, trained_with(lambda pipe, batch: None, precision="bf16"))


def test_weights_that_are_loaded_are_ahead_of_no_master() -> None:
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)
    losses = []
    for reload in (False, True):
        with make_pipeline(SKIPS, 2, M, batches[0], precision="bf16") as pipe:
            opt = pd2.PipelineOptimizer(MAKE["SGD"](pipe.parameters()), staleness=FEEDBACK)
            go_on(pipe, opt, batches[:3])
            weights, state = copy.deepcopy((dict(pipe.state_dict()), opt.state_dict()))
            if reload:
                pipe.load_state_dict(weights)
                opt.load_state_dict(state)
            losses.append(go_on(pipe, opt, batches[3:]).losses)
    model = SKIPS.model()
    with make_pipeline(SKIPS, 2, M, batches[0], precision="bf16", model=model) as pipe:
        opt = pd2.PipelineOptimizer(MAKE["SGD"](pipe.parameters()), staleness=FEEDBACK)
        opt.load_state_dict(state)
        pipe.load_state_dict(weights)
        losses.append(go_on(pipe, opt, batches[3:]).losses)
    plain, reloaded, of_another = losses
    assert reloaded == of_another != plain


def test_a_look_ahead_of_masters_is_refused() -> None:
    with (
        make_pipeline(SKIPS, 2, M, SKIPS.batches([M])[0], precision="bf16") as pipe,
        pytest.raises(ValueError, match=r"NesterovCorrection.*precision: 'bf16': it does"),
    ):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=pd2.NesterovCorrection())
