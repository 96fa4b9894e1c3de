"""Between a Trainer's inputs and losses and the calls of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

import pipedream2bw as pd2

from .computed import ComputedModel
from .replicas import raise_together

NUMBER = "num_items_in_batch"
_STEPS = "gradient_accumulation_steps"


class Calls:
    """Makes microbatches of a Trainer's inputs, and losses of their outputs.

    Args:
        trainer: whose model, labels and loss these are.
        example: a batch, after which all calls are of one kind.
        number: of its items; None: they are not counted.
        shifts_labels: whether the loss is a causal language model's.

    Raises:
        ValueError: on every rank: the example's labels are of another length.
    """

    def __init__(
        self, trainer: Trainer, example: Mapping[str, Any], number: Any, *, shifts_labels: bool
    ) -> None:
        self._trainer = trainer
        self._shifts_labels = shifts_labels
        raise_together(lambda: list(self.checked([self.microbatch(example, number, 1)])))
        self.example = self.arguments(example, number)
        """The arguments of a call."""

    def arguments(self, inputs: Mapping[str, Any], number: Any) -> dict[str, Any]:
        """The model's arguments in a call with these inputs."""
        trainer, call = self._trainer, dict(inputs)
        if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
            call.pop("labels", None)  # as Trainer.compute_loss does
        elif trainer.model_accepts_loss_kwargs and number is not None:
            call[NUMBER] = number.long()  # no float, of which precision= would make 16 bits
        return call

    def microbatch(self, inputs: Mapping[str, Any], number: Any, steps: int) -> pd2.Microbatch:
        """One of a batch that has so many items, in so many steps of accumulation."""
        target = {**inputs, NUMBER: number, _STEPS: steps}
        return pd2.Microbatch(**self.arguments(inputs, number), target=target)

    def checked(self, microbatches: Sequence[pd2.Microbatch]) -> Iterator[pd2.Microbatch]:
        """Checks labels where ranks agree on a batch: a ValueError is raised on all of them."""
        for number, each in enumerate(microbatches):
            tokens, labels = (each.target.get(name) for name in ("input_ids", "labels"))
            is_pair = self._shifts_labels and tokens is not None and labels is not None
            if is_pair and tokens.shape != labels.shape:
                raise ValueError(
                    f"microbatch {number}: labels of shape {list(labels.shape)}, input_ids of "
                    f"shape {list(tokens.shape)}: a label for each token is needed"
                )
            yield each

    def loss(self, outputs: Any, target: Mapping[str, Any]) -> torch.Tensor:
        """A microbatch's summand of its batch's loss, scaled as in Trainer.training_step."""
        trainer, inputs = self._trainer, dict(target)
        number, steps = inputs.pop(NUMBER), inputs.pop(_STEPS)
        computed = ComputedModel(trainer.model, outputs)
        loss: torch.Tensor = trainer.compute_loss(computed, inputs, num_items_in_batch=number)
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and number is not None
            is_scaled = by_model or trainer.compute_loss_func is not None
        return loss if is_scaled else loss / steps

    def evaluate(
        self, pipe: pd2.PipelineModule, batches: Sequence[Mapping[str, Any]], numbers: Sequence[Any]
    ) -> list[tuple[ComputedModel | None, Any]]:
        """Computes the outputs of some batches, each a microbatch as a whole.

        Returns:
            For each the model with its outputs, None where the last stage is another rank's, and
            the number of its items.
        """
        if not batches:
            return []
        calls = [self._completed(*each) for each in zip(batches, numbers, strict=True)]
        with torch.no_grad():
            outputs = pipe(microbatches=[pd2.Microbatch(**call) for call in calls])
        if outputs is None:
            return [(None, number) for number in numbers]
        computed = []
        for inputs, values in zip(batches, outputs, strict=True):
            if any(name not in inputs for name in self._trainer.label_names):
                values = {name: values[name] for name in values if name != "loss"}
            computed.append(ComputedModel(self._trainer.model, values))
        return list(zip(computed, numbers, strict=True))

    def _completed(self, inputs: Mapping[str, Any], number: Any) -> dict[str, Any]:
        """The arguments, with zeros for labels that the example has and these data do not."""
        call = self.arguments(inputs, number)
        main = getattr(self._trainer.model, "main_input_name", "input_ids")
        for name in self.example.keys() - call.keys():
            like = self.example[name]
            if name == NUMBER:
                call[name] = torch.ones_like(like)
            elif name in self._trainer.label_names:
                config = getattr(self._trainer.model, "config", None)
                if getattr(config, "is_encoder_decoder", False):
                    raise ValueError(
                        f"{name}: missing, the model makes its decoder's input of them: give them, "
                        "or decoder_input_ids from the first call on"
                    )
                lengths = dict(zip(self.example[main].shape, inputs[main].shape, strict=True))
                shape = [lengths.get(size, size) for size in like.shape[1:]]
                call[name] = like.new_zeros((find_batch_size(inputs), *shape))
        return call


class LossesToCome:
    """Losses that have not been added to the sum that a Trainer logs."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, pd2.Loss]] = []

    def append(self, step: int, loss: pd2.Loss) -> None:
        self._losses.append((step, loss))

    def add_to(self, total: torch.Tensor, *, logged_last: int, filters: bool) -> None:
        """Waits for them and adds them, as the Trainer's loop adds each step's.

        Args:
            logged_last: the step at which the sum began.
            filters: whether the mean of the others takes the place of what is not finite.
        """
        for step, loss in self._losses:
            value = float(loss)
            if filters and not math.isfinite(value):
                total += total / (1 + step - logged_last)
            else:
                total += value
        self._losses = []
