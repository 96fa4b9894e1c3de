"""Models that are constructed without memory for their parameters.

Each process of a pipeline then makes its own stages' parameters alone, with the values that they
would have had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .replacing import replace_tensors, return_freed_memory
from .tape import Geometry, Tape

_Model = TypeVar("_Model")


_RECIPE = "_pipedream2bw_recipe"


def deferred_init(build: Callable[..., _Model], *args: Any, **kwargs: Any) -> _Model:
    """Calls ``build(*args, **kwargs)`` without memory for the parameters of the model it gives.

    They are on ``torch.device("meta")``, with a record of how they are initialised. PipelineModule
    makes those of its own stages, with bitwise the values that the call alone would have given
    after the same ``torch.manual_seed``, whatever initialises them inside ``build`` (constructors,
    ``torch.nn.init``, ``module.apply``, copies). Every process calls it alike::

        torch.manual_seed(0)
        model = pd2.deferred_init(GPT, config)
        pipe = pd2.PipelineModule(model, loss_fn, ...)

    The default generators are afterwards where the call would have left them: random numbers are
    drawn, for one tensor at a time, so this takes the time of an initialisation but the memory of
    the largest parameter. Buffers and other tensors of the modules are made at once. A model that
    is to be loaded, without buffers that no checkpoint has, is made faster under
    ``with torch.device("meta")``, which draws nothing.

    The idea of recording an initialisation is that of torchdistX's ``deferred_init``.

    Args:
        build: gives a module or a list of modules, none of them lazy, whose tensors are made on
            the CPU.

    Raises:
        ValueError: a tensor is made on another device or has another layout than strided, a tensor
            from outside is written to, or a parameter has hooks.
        TypeError: ``build`` gives no module and no list of modules.
    """
    tape = Tape()
    with tape.fake, tape:
        model = build(*args, **kwargs)
    given: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    if not given or not all(isinstance(module, nn.Module) for module in given):
        raise TypeError(
            f"deferred_init: build gave {type(model).__name__}, it must give an nn.Module or a "
            "list of nn.Modules"
        )
    modules = dict.fromkeys(part for module in given for part in module.modules())
    found: dict[int, FakeTensor] = {}

    def find(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            found[id(tensor)] = tensor
        return tensor

    replace_tensors(modules, find)
    plain = [tensor for tensor in found.values() if not isinstance(tensor, nn.Parameter)]
    values = tape.make([tape.geometry(tensor) for tensor in plain])
    new: dict[int, torch.Tensor] = {
        id(tensor): value for tensor, value in zip(plain, values, strict=True)
    }
    for tensor in found.values():
        if id(tensor) not in new:
            new[id(tensor)] = _promise(tensor, tape)
    replace_tensors(modules, lambda tensor: new.get(id(tensor), tensor))
    return_freed_memory()  # in which random numbers were drawn
    return model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the parameter gets its values that was put on meta."""

    tape: Tape
    geometry: Geometry
    version: int  # of the tensor then

    @staticmethod
    def of(tensor: torch.Tensor) -> Recipe | None:
        """The recipe of a tensor, if it has one."""
        return getattr(tensor, _RECIPE, None)

    @staticmethod
    def forget(tensor: torch.Tensor) -> None:
        """Lets go of the recipe."""
        vars(tensor).pop(_RECIPE, None)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError if what was done to the tensor since is not in the record."""
        if tensor._version != self.version:
            raise ValueError(
                f"parameter {name}: {tensor._version - self.version} writes since deferred_init() "
                "returned, there must be none: they are lost on meta; write inside of build"
            )
        if tuple(tensor.shape) != self.geometry.size:
            raise ValueError(
                f"parameter {name}: shape {tuple(tensor.shape)}, {self.geometry.size} when "
                "deferred_init() returned: it must stay the same"
            )


def attributes_of(tensor: torch.Tensor) -> Mapping[str, Any]:
    """What users have set on a parameter, without its recipe."""
    return {name: value for name, value in vars(tensor).items() if name != _RECIPE}


def _promise(fake: FakeTensor, tape: Tape) -> nn.Parameter:
    """A parameter on meta that knows how to get its values."""
    if fake._backward_hooks or getattr(fake, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"deferred_init: a parameter of shape {tuple(fake.shape)} has hooks on its gradient, "
            "it must have none: use hooks of modules instead"
        )
    data = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
    parameter = nn.Parameter(data, fake.requires_grad)
    of_every_fake = vars(tape.fake.from_tensor(torch.empty(0))).keys() | {"_is_param"}
    vars(parameter).update(
        (name, value) for name, value in vars(fake).items() if name not in of_every_fake
    )
    setattr(parameter, _RECIPE, Recipe(tape, tape.geometry(fake), parameter._version))
    return parameter
