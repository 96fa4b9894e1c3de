"""Error feedback of masters, under a loss scale and rounded, against the definition."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, RMSprop

import pipedream2bw as pd2
from pipedream2bw.optimizer.step_correction import StepCorrection
from pipedream2bw.optimizer.step_remedies import StepRemedies
from tests.references.mixed_oracle import MixedOracle, half_away, lowered
from tests.references.oracle import Batch
from tests.references.remedies import Corrected
from tests.runs.trajectory import (
    Trajectory,
    assert_same,
    by_oracle,
    by_pipeline,
    copy_of,
    go_on,
    make_pipeline,
)
from tests.samples.models import TASKS
from tests.unit.optimizer.test_loss_scale import SCALE, with_outliers
from tests.unit.training.test_precision import SKIPS

M, NUM_BATCHES, COEFFICIENT = 3, 8, 0.8
BFLOAT16 = torch.bfloat16
MAKE: dict[str, Any] = {
    "SGD": lambda ps: SGD(ps, lr=0.2, momentum=0.5, weight_decay=0.01),
    "AdamW": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "own step": lambda ps: RMSprop(ps, lr=0.01, momentum=0.5, foreach=False),
}


def feedback(dtype: torch.dtype | None = None) -> pd2.ErrorFeedback:
    return pd2.ErrorFeedback(COEFFICIENT, dtype=dtype)


def corrected(make: Any, dtype: torch.dtype | None = None) -> Any:
    return lambda ps: Corrected(make(ps), "error feedback", COEFFICIENT, 0, dtype)


def by_definition(
    batches: list[Batch],
    make: Any,
    kept: torch.dtype | None,
    *,
    dtype: torch.dtype = BFLOAT16,
    split: bool = False,
    scaled: bool = False,
) -> tuple[Trajectory, MixedOracle]:
    model = SKIPS.model()
    optimizer = corrected(make, kept)(list(model.parameters()))
    oracle = MixedOracle(
        model,
        lowered(model, dtype),
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


@pytest.mark.parametrize("kept", [None, BFLOAT16])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (name, options)
        for name in MAKE
        for options in MASTERS + (OF_FUSED if name != "own step" else [])
    ],
)
def test_the_steps_of_masters_are_fed_back_as_defined(
    optimizer: str, options: dict[str, Any], kept: torch.dtype | None
) -> None:
    make = MAKE[optimizer]
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)
    dtype = {"bf16": BFLOAT16, "fp16": torch.float16}[options["precision"]]
    want, _ = by_definition(batches, make, kept, dtype=dtype, split="split_master" in options)
    for num_stages in (1, 3):
        with make_pipeline(SKIPS, num_stages, M, batches[0], **options) as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=feedback(kept))
            got = go_on(pipe, opt, batches, flush_after=(2, 5))
        assert_same(got, want, exact=optimizer == "SGD")
    plain = by_pipeline(SKIPS, batches, 1, M, make, **options)
    assert got.losses != plain.losses


@pytest.mark.parametrize("kept", [None, BFLOAT16])
@pytest.mark.parametrize("optimizer", MAKE)
def test_a_step_that_overflow_leaves_out_keeps_the_one_before(
    optimizer: str, kept: torch.dtype | None
) -> None:
    batches = with_outliers([0, 5])  # also the first
    want, oracle = by_definition(batches, MAKE[optimizer], kept, dtype=torch.float16, scaled=True)
    assert oracle.num_overflows >= 2
    with make_pipeline(SKIPS, 2, M, batches[0], precision="fp16") as pipe:
        opt = pd2.PipelineOptimizer(
            MAKE[optimizer](pipe.parameters()), loss_scale=SCALE, staleness=feedback(kept)
        )
        got = go_on(pipe, opt, batches)
    assert str(got.losses[0]) == str(want.losses[0])
    got.losses[:], want.losses[:] = (
        [loss for loss in each.losses if loss == loss] for each in (got, want)
    )
    assert_same(got, want, exact=optimizer == "SGD")


@pytest.mark.parametrize("optimizer", MAKE)
def test_what_is_kept_may_be_rounded_in_float32_too(optimizer: str) -> None:
    task = TASKS["skips"]
    batches = task.batches([4] * NUM_BATCHES)
    make = MAKE[optimizer]
    want = by_oracle(task, batches, 4, corrected(make, BFLOAT16))
    for options in ({}, {"optimizer_device": "cpu"}):
        if optimizer == "own step" and options:
            continue
        got = by_pipeline(task, batches, 2, 4, make, staleness=feedback(BFLOAT16), **options)
        assert_same(got, want, exact=optimizer == "SGD")
    whole = by_pipeline(task, batches, 2, 4, make, staleness=feedback())
    assert got.losses != whole.losses
    assert got.losses == pytest.approx(whole.losses, rel=1e-2)


class OwnSGD(SGD):
    """The same, without a fused pass."""


FUSED_OPTIONS = StepRemedies.fused_options


def without_feedback(self: StepRemedies, *given: Any) -> Any:
    return [group.with_feedback(0.0) for group in FUSED_OPTIONS(self, *given)]


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float32, None), (torch.float32, BFLOAT16), (torch.float64, None)]
)
def test_the_fused_pass_has_the_bits_of_the_definition_tensor_by_tensor(
    dtype: torch.dtype, kept: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
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
            opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=feedback(kept))
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

    want, _ = by_definition(batches, Both, None)
    with make_pipeline(SKIPS, 2, M, batches[0], precision="bf16") as pipe:
        opt = pd2.PipelineOptimizer(*parts(pipe.parameters()), staleness=feedback())
        got = go_on(pipe, opt, batches)
        saved = opt.state_dict()["staleness"]["kept"]
        assert saved.keys() == dict(pipe.named_parameters()).keys()
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert_same(got, want, exact=False)


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "bf16", "split_master": True}], ids=str
)
@pytest.mark.parametrize("kept", [None, BFLOAT16])
def test_saved_state_goes_on_to_the_bit(
    options: dict[str, Any], kept: torch.dtype | None, tmp_path: Any
) -> None:
    batches = SKIPS.batches([2 * M] * NUM_BATCHES)

    def make(d: int) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
        pipe = make_pipeline(SKIPS, d, M, batches[0], **options)
        return pipe, pd2.PipelineOptimizer(
            MAKE["AdamW"](pipe.parameters()), staleness=feedback(kept)
        )

    pipe, opt = make(2)
    with pipe:
        go_on(pipe, opt, batches[:4])
        saving = pd2.save(tmp_path / "checkpoint", pipe, opt)
        want = go_on(pipe, opt, batches[4:])
        saving.wait()
    pipe, opt = make(3)
    with pipe:
        pd2.load(tmp_path / "checkpoint", pipe, opt)
        assert {t.dtype for t in opt.state_dict()["staleness"]["kept"].values()} == {
            kept or torch.float32
        }
        got = go_on(pipe, opt, batches[4:])
    assert_same(got, want)


@pytest.mark.parametrize(("kept", "size"), [(None, 4), (BFLOAT16, 2)])
def test_what_is_kept_has_the_reported_bytes(kept: torch.dtype | None, size: int) -> None:
    batches = SKIPS.batches([2 * M] * 3)
    for make in (MAKE["SGD"], lambda ps: OwnSGD(ps, lr=0.1, momentum=0.5)):
        with make_pipeline(SKIPS, 2, M, batches[0], precision="bf16") as pipe:
            opt = pd2.PipelineOptimizer(make(pipe.parameters()), staleness=feedback(kept))
            go_on(pipe, opt, batches)
            for stage, report in pipe.memory_report().items():
                numel = sum(p.numel() for p in pipe.session.stages[stage].weights.handles)
                in_engine = 4 * numel if make is MAKE["SGD"] else 0  # momentum
                assert report.optimizer_state == in_engine + size * numel


def test_dtypes_that_cannot_be_kept_are_named() -> None:
    task = TASKS["mlp"]
    (batch,) = task.batches([4])
    wide = batch._replace(args=tuple(x.double() for x in batch.args), target=batch.target.double())
    model: nn.Module = task.model().double()
    with (
        make_pipeline(task, 2, 2, wide, model=model) as pipe,
        pytest.raises(ValueError, match=r"dtype=torch.bfloat16\), optimizer: SGD of torch.float64"),
    ):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=feedback(BFLOAT16))
    with make_pipeline(task, 2, 2, batch) as pipe:
        for dtype, kind, message in (
            (torch.float16, ValueError, "dtype: torch.float16, it must be None or torch.bfloat16"),
            ("int8", TypeError, "dtype: 'int8' given, it must be None or torch.bfloat16"),
        ):
            remedy = pd2.ErrorFeedback(dtype=dtype)  # type: ignore[arg-type]
            with pytest.raises(kind, match=message):
                pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=remedy)
    with (
        make_pipeline(SKIPS, 2, M, SKIPS.batches([M])[0], precision="bf16") as pipe,
        pytest.raises(ValueError, match=r"NesterovCorrection.*precision: 'bf16': it does"),
    ):
        pd2.PipelineOptimizer(SGD(pipe.parameters(), lr=0.1), staleness=pd2.NesterovCorrection())
