"""Runs a captured model stage after stage in one thread, as the engine would, and the model whole.

Between stages values travel detached, and gradients come back per value, added from the last
consumer stage to the first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipedream2bw.capture.capture import capture, split_model_args
from pipedream2bw.capture.captured import Captured
from pipedream2bw.capture.chain import as_root
from pipedream2bw.model.clone import structural_clone
from pipedream2bw.stages.boundaries import choose_boundaries
from pipedream2bw.stages.cut import split_into_stages
from pipedream2bw.stages.program import StageProgram

Loss = Callable[[Any], torch.Tensor]


@dataclasses.dataclass
class Outcome:
    output: Any
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def cut(
    model: nn.Module | list[nn.Module],
    num_stages: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    split: Any = "auto",
    **options: Any,
) -> tuple[Captured, list[StageProgram]]:
    captured = capture(
        model,
        num_stages=num_stages,
        example_args=args,
        example_kwargs=kwargs,
        split=split,
        **options,
    )
    boundaries = choose_boundaries(captured, num_stages, split)
    return captured, split_into_stages(captured, boundaries)


def run_staged(
    model: nn.Module | list[nn.Module],
    captured: Captured,
    programs: list[StageProgram],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
) -> Outcome:
    """Forward and backward of one microbatch through the stages, on a clone with other weights."""
    root = copy.deepcopy(as_root(model))
    weights = {
        old: nn.Parameter(old.detach().clone(), old.requires_grad) for old in root.parameters()
    }
    clone = structural_clone(root, weights)
    for old in root.parameters():
        old.detach().fill_(float("nan"))  # whoever still reads the original shows
    functions = [program.bind(clone) for program in programs]
    values: dict[tuple[int, str], Any] = {}  # as stage i produced them
    received: list[list[Any]] = []
    outputs: list[list[Any]] = []
    for program, function in zip(programs, functions, strict=True):
        if program.index == 0:
            inputs: list[Any] = list(split_model_args(captured, args, kwargs or {}))
        else:
            inputs = [
                pytree.tree_map(_as_leaf, values[producer, name])
                for producer, names in program.receives.items()
                for name in names
            ]
        assert len(inputs) == len(program.inputs)
        results = function(list(inputs))
        assert len(results) == len(program.outputs)
        values.update(
            {(program.index, n): v for n, v in zip(program.outputs, results, strict=True)}
        )
        received.append(inputs)
        outputs.append(results)
    if loss is not None:
        _backward(programs, received, outputs, loss(outputs[-1][0]))
    gradients = {name: weights[old].grad for name, old in root.named_parameters()}
    return Outcome(outputs[-1][0], gradients, dict(clone.named_buffers()))


def run_whole(
    model: nn.Module | list[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
) -> Outcome:
    root = copy.deepcopy(as_root(model))
    output = root(*args, **(kwargs or {}))
    if loss is not None:
        loss(output).backward()
    gradients = {name: parameter.grad for name, parameter in root.named_parameters()}
    return Outcome(output, gradients, dict(root.named_buffers()))


def assert_same(got: Outcome, want: Outcome, *, exact: bool = True) -> None:
    got_leaves, got_spec = pytree.tree_flatten(got.output)
    want_leaves, want_spec = pytree.tree_flatten(want.output)
    assert type(got.output) is type(want.output)
    assert got_spec == want_spec
    for ours, theirs in zip(got_leaves, want_leaves, strict=True):
        if isinstance(theirs, torch.Tensor):
            _assert_tensor("output", ours, theirs, exact)
        else:
            assert ours == theirs
    assert got.gradients.keys() == want.gradients.keys()
    for name, theirs in want.gradients.items():
        ours = got.gradients[name]
        assert (ours is None) == (theirs is None), f"gradient of {name}: {ours}, {theirs}"
        if ours is not None and theirs is not None:
            _assert_tensor(f"gradient of {name}", ours, theirs, exact)
    assert got.buffers.keys() == want.buffers.keys()
    for name, theirs in want.buffers.items():
        _assert_tensor(f"buffer {name}", got.buffers[name], theirs, True)


def check_split_equals_whole(
    model: nn.Module | list[nn.Module],
    num_stages: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    split: Any = "auto",
    loss: Loss | None = None,
    exact: bool = True,
    how: str | None = None,
    **options: Any,
) -> tuple[Captured, list[StageProgram]]:
    """Captures, cuts, runs both and compares outputs, gradients and buffers."""
    loss = loss or sum_of_squares
    state = torch.get_rng_state()
    captured, programs = cut(model, num_stages, args, kwargs, split, **options)
    assert torch.equal(torch.get_rng_state(), state), "capturing drew random numbers"
    assert how in (None, captured.how), captured.notes
    assert len(programs) == num_stages
    check_wiring(captured, programs)
    torch.manual_seed(1)
    want = run_whole(model, args, kwargs, loss)
    torch.manual_seed(1)
    got = run_staged(model, captured, programs, args, kwargs, loss)
    assert_same(got, want, exact=exact)
    return captured, programs


def check_wiring(captured: Captured, programs: list[StageProgram]) -> None:
    """What one stage sends is what the other receives; every parameter has a place."""
    for program in programs:
        for producer, names in program.receives.items():
            assert producer < program.index
            assert programs[producer].sends[program.index] == names
        for consumer, names in program.sends.items():
            assert programs[consumer].receives[program.index] == names
            assert set(names) <= set(program.outputs)
        taken = tuple(name for names in program.receives.values() for name in names)
        assert program.inputs == (captured.model_inputs if program.index == 0 else taken)
    for program in programs:
        used = {name for layer in program.layers for name in captured.layer_parameters[layer]}
        assert sorted(program.parameters) == sorted(used)
    unused = [name for program in programs for name in program.unused_parameters]
    used = {name for program in programs for name in program.parameters}
    assert sorted([*used, *unused]) == sorted(captured.parameter_names)
    assert {name for p in programs for name in p.buffers} == set(captured.buffer_names)


def sum_of_squares(output: Any) -> torch.Tensor:
    leaves = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _backward(
    programs: list[StageProgram],
    received: list[list[Any]],
    outputs: list[list[Any]],
    loss: torch.Tensor,
) -> None:
    pending: dict[tuple[int, str, int], torch.Tensor] = {}  # producer, value, leaf -> gradient
    for program, inputs, results in reversed(list(zip(programs, received, outputs, strict=True))):
        if program.index == len(programs) - 1:
            loss.backward()
        else:
            roots, gradients = [], []
            for name, value in zip(program.outputs, results, strict=True):
                for position, leaf in enumerate(pytree.tree_leaves(value)):
                    gradient = pending.pop((program.index, name, position), None)
                    if gradient is not None:
                        roots.append(leaf)
                        gradients.append(gradient)
            if roots:
                torch.autograd.backward(roots, gradients)
        if program.index == 0:
            continue
        sources = [(p, name) for p, names in program.receives.items() for name in names]
        for (producer, name), value in zip(sources, inputs, strict=True):
            for position, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
                    key = (producer, name, position)
                    pending[key] = pending[key] + leaf.grad if key in pending else leaf.grad
    assert not pending


def _assert_tensor(what: str, ours: torch.Tensor, theirs: torch.Tensor, exact: bool) -> None:
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    assert ours.requires_grad == theirs.requires_grad, what
    if exact:
        assert torch.equal(ours, theirs), f"{what} differs by {(ours - theirs).abs().max()}"
    else:
        distance = (ours - theirs).norm() / (theirs.norm() + 1e-12)
        assert distance < 1e-6, f"{what} differs by {distance} of its norm"
