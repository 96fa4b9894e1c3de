"""One evaluation: the first pipeline's forwards, without gradients."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _C
from ..model.trees import opened
from ..ranks.operations import Operation
from .local_stages import interrupts_later, replicas_of_loss
from .microbatch import has_entries, is_array
from .session import Session
from .stage_values import newest_masters
from .stage_weights import StageWeights
from .step_data import Microbatches, StepArguments


def evaluate(session: Session, arguments: StepArguments) -> Any:
    """Gives the output, of ready-made microbatches a list, where the last stage is. Drains.

    Every rank calls it.
    """
    outputs, microbatches = _run(session, arguments, Operation.evaluation)
    if not session.gives_output:
        return None
    return outputs if arguments.is_list else join_outputs(outputs, microbatches.sizes)


def evaluate_loss(session: Session, arguments: StepArguments) -> list[float]:
    """Gives the loss and the metrics as a ``train_step`` defines them, on every rank. Drains.

    Every rank calls it.
    """
    outputs, microbatches = _run(session, arguments, Operation.evaluation_of_loss)
    grid, weights = session.grid, microbatches.loss_weights
    mine: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    if session.gives_output:
        losses, metrics = zip(*outputs, strict=True)
        # As the engine weighs the losses of a train_step.
        weighted = [loss / weights.divisor for loss in losses]
        if weights.factors:
            weighted = [loss * share for loss, share in zip(losses, weights.factors, strict=True)]
        mine = list(torch.stack(weighted).cpu()), [_sum(metrics).cpu()]
    with session.ending.failing_closes():
        told = session.control.told_by_all(mine, "evaluating")
    replicas = replicas_of_loss(grid, session.stages.options)
    last_stages = [told[grid.process_of(grid.depth - 1, replica)] for replica in replicas]
    # One after the other, as the engine adds them.
    loss = _sum([each for losses, _ in last_stages for each in losses])
    return [loss.item(), *_sum([each for _, metrics in last_stages for each in metrics]).tolist()]


def _sum(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(operator.add, numbers)


def _run(
    session: Session, arguments: StepArguments, operation: Operation
) -> tuple[list[Any], Microbatches]:
    """Runs the microbatches; gives what the last stage, if it is here, has of each."""
    session.ending.check_open()
    with session.ending.failing_closes():
        given, microbatches = session.agree_on_call(
            arguments, lambda: None, operation, session.num_evaluations
        )
    for extension in session.extensions:
        extension.before_evaluation()
    with session.ending.failing_closes():
        mode = session.mode_in_use()
        session.drain()
        run = ~session.num_evaluations  # never a train_step's number
        session.num_evaluations += 1
        stages = session.stages.of_first_pipeline()
        # If it fails it is discarded alone: as a batch after all that have begun.
        batch = session.accumulation.num_updates + 1
        submitted = _C.Run(id=run, wiring=mode.wiring, layouts=microbatches.layouts, batch=batch)
        with _by_masters([stage.weights for stage in session.stages]):
            with session.interruptible_later():
                for stage in stages:
                    inputs = session.intake.inputs(given, stage, mode, microbatches)
                    stage.runner.begin(run, inputs)
                for executor in session.stages.executors:
                    executor.submit_evaluation(submitted)
            session.drain()
        outputs = [stage.runner.outputs_of(run) for stage in stages]
    return outputs[-1], microbatches


@contextlib.contextmanager
def _by_masters(stages: Iterable[StageWeights]) -> Iterator[None]:
    """Meanwhile stages compute with their masters' roundings, where weights are ahead of these.

    All replicas call it, drained. It takes as many bytes as these weights have, and while it begins
    those of the masters where replicas share them out.
    """
    ahead: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for weights in stages:
            engine, numbers = weights.engine, list(weights.ahead)
            # All before the first one is written: a mirror in the host's memory would take it over.
            whole = bool(numbers) and engine.is_shared
            masters = newest_masters(weights, numbers, whole=whole)
            for i, master in zip(numbers, masters, strict=True):
                weight = engine.weight(engine.newest_slot, i)
                ahead.append((weight, weight.clone()))
                weight.copy_(master)
        yield
    finally:
        with interrupts_later():
            for weight, value in ahead:
                weight.copy_(value)


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of the microbatches joined along dimension 0.

    A floating-point tensor without dimensions is a mean over its microbatch's rows, as a loss is:
    the result is the mean over all rows.

    Raises:
        ValueError: there are several microbatches, and another tensor among the outputs has not as
            many rows as its microbatch. Or another value differs between them.
    """
    if len(outputs) == 1:
        return outputs[0]
    split = [pytree.tree_flatten(opened(output), is_leaf=has_entries) for output in outputs]
    if len({len(leaves) for leaves, _ in split}) > 1:
        raise ValueError(f"the model's output has another structure in each microbatch. {_INSTEAD}")
    columns = zip(*(leaves for leaves, _ in split), strict=True)
    return pytree.tree_unflatten([_joined(column, sizes) for column in columns], split[0][1])


_INSTEAD = "Give evaluations of microbatches of your own, pipe(microbatches=[...]), or eval_step()"


def _joined(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor) and first.dim() == 0 and first.is_floating_point():
        shares = [size / sum(sizes) for size in sizes]
        return sum(leaf * share for leaf, share in zip(leaves, shares, strict=True))
    if isinstance(first, torch.Tensor) or is_array(first):
        for leaf, size in zip(leaves, sizes, strict=True):
            shape = list(leaf.shape)
            if not shape or shape[0] != size:
                raise ValueError(
                    f"the model's output has shape {shape} for a microbatch of {size} "
                    "rows: outputs of microbatches are joined along dimension 0. Return a tensor "
                    "of the microbatch's rows, or one floating-point number, the mean over the rows"
                )
        if is_array(first):
            return sys.modules["numpy"].concatenate(leaves)
        return torch.cat(list(leaves))
    if has_entries(first) and [len(leaf) for leaf in leaves] == list(sizes):
        return type(first)(itertools.chain(*leaves))
    are_rows = type(first) is int and list(leaves) == list(sizes)
    if are_rows or any(leaf is not first and leaf != first for leaf in leaves):
        raise ValueError(
            f"the model's output has {type(first).__name__}s for microbatches of {list(sizes)} "
            f"rows, {list(leaves)[:4]}, which cannot be joined. Return a tensor. {_INSTEAD}"
        )
    return first
