"""The gradients of the model's own Parameters, which have none: the engine owns all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_aten = torch.ops.aten


_ADDING = (_aten.add_.Tensor, _aten.add.Tensor)


class ArrivalGuard:
    """Raises when a gradient reaches a model's own Parameter, which no stage computes with."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"parameter {self._name}: a gradient reached the model's own Parameter, not the "
            "pipeline's copy, and would be lost. Call train_step() to train, not the model. "
            "loss_fn must not use the model's parameters. No closure, object or nested container "
            "may hold a Parameter: make each Parameter an attribute of its module"
        )


class EngineGradient(torch.Tensor):
    """Takes the place of such a Parameter's ``.grad``; whoever computes with it gets an error.

    Without it, functions that take ``None`` for "no gradient" would silently do nothing. It has the
    parameter's shape, dtype and device, and no memory.
    """

    parameter_name: str

    @staticmethod
    def __new__(cls, name: str, parameter: torch.Tensor) -> EngineGradient:
        made: EngineGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.parameter_name = name
        return made

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.zero_.default:  # zero_grad(set_to_none=False)
            return args[0]
        if func is _aten._foreach_zero_.default:
            return None
        if func in _ADDING and torch._C._current_graph_task_id() != -1:
            return args[0]  # a gradient arrives, see ArrivalGuard
        leaves = pytree.tree_leaves((args, kwargs))
        name = next(leaf.parameter_name for leaf in leaves if isinstance(leaf, EngineGradient))
        raise RuntimeError(
            f"parameter {name}: its .grad has no value: the pipeline's engine owns the gradients. "
            "Call step() of the PipelineOptimizer, not of the torch optimizer. To clip gradients "
            "or to see their norm give it max_grad_norm= (inf only measures) or clip_grad_value=. "
            "Move or convert a model before the pipeline is made"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EngineGradient({self.parameter_name})"
