"""Models of the transformers library, exported, train under 2BW as the definition says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.exhaustive import exhaustive
from tests.references.oracle import Batch
from tests.runs.trajectory import assert_same, by_oracle, by_pipeline, make_pipeline
from tests.samples.models import Task

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip(
        "transformers", reason="the transformers library is not installed (pip install -e .[test])"
    )

from tests.unit.capture import test_capture_transformers as zoo


def logits_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def task_of(
    build: Callable[[], nn.Module], inputs: Callable[[int], dict[str, torch.Tensor]], training: bool
) -> Task:
    def draw(rows: int) -> Batch:
        kwargs = inputs(rows)
        name = "decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"
        # Classifiers have a label for each row, language models one for each token.
        if build in (zoo.bert, zoo.vit):
            target = torch.randint(2, (rows,))
        else:
            target = torch.randint(zoo.VOCABULARY, kwargs[name].shape)
        return Batch((), target, kwargs)

    return Task(build, draw, logits_loss, training=training)


TASKS = {
    "gpt2": task_of(zoo.gpt2, zoo.masked, training=True),
    "gpt2, tied": task_of(zoo.tied_gpt2, zoo.masked, training=True),
    "bert": task_of(zoo.bert, zoo.masked, training=True),
    "llama": task_of(zoo.llama, zoo.text, training=True),
    "mixtral": task_of(zoo.mixtral, zoo.text, training=True),
    "t5": task_of(zoo.t5, zoo.translation, training=True),
    "vit": task_of(zoo.vit, zoo.image, training=True),
}
# A value with three or more consumers (a mask or the encoder's output): another order of addition.
EXACT = {"gpt2", "bert", "llama", "vit"}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Its layers are Mixtral's but for the experts.
    "name",
    [*(name for name in TASKS if name != "llama"), *exhaustive("llama")],
)
def test_trained_for_some_batches_and_equal_to_the_oracle(name: str) -> None:
    task = TASKS[name]
    batches = task.batches([6, 6, 7, 6])
    want = by_oracle(task, batches, 3, sgd)
    got = by_pipeline(task, batches, 3, 3, sgd)
    assert_same(got, want, exact=name in EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_draws_the_dropout_of_the_first_forward(reentrant: bool) -> None:
    def build() -> nn.Module:
        model: Any = zoo.gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return nn.Sequential(Hidden(model.transformer), model.lm_head)

    task = Task(build, text_batch, token_loss)
    batches = task.batches([6, 6, 7, 6])
    want = by_oracle(task, batches, 3, sgd)
    assert_same(by_pipeline(task, batches, 2, 3, sgd), want)


class Hidden(nn.Module):
    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.transformer(input_ids=tokens).last_hidden_state
        return hidden


def text_batch(rows: int) -> Batch:
    tokens, target = (torch.randint(zoo.VOCABULARY, (rows, 5)) for _ in range(2))
    return Batch((tokens,), target)


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


@pytest.mark.slow
def test_gpt2_drops_in_training_mode_only() -> None:
    task = TASKS["gpt2"]
    (batch,) = task.batches([6])
    model = task.model().train()
    with make_pipeline(task, 2, 2, batch, model=model) as pipe, torch.no_grad():
        assert "captured by export" in repr(pipe)
        assert not torch.equal(pipe(**batch.kwargs).logits, pipe(**batch.kwargs).logits)
        pipe.eval()
        assert torch.equal(pipe(**batch.kwargs).logits, pipe(**batch.kwargs).logits)
