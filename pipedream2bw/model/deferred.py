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

from .replacing import replace_tensors, tensors_in
from .storages import return_freed_memory
from .tape import Geometry, Tape

_Model = TypeVar("_Model")

_RECIPE = "_pipedream2bw_recipe"


def deferred_init(build: Callable[..., _Model], *args: Any, **kwargs: Any) -> _Model:
    """Calls ``build(*args, **kwargs)`` without memory for the parameters of the model it gives.

    The parameters are on ``torch.device("meta")``, with a record of how they are initialised.
    PipelineModule makes those of its own stages, bitwise with the values that the plain call would
    have given after the same ``torch.manual_seed``. Constructors, ``torch.nn.init``,
    ``module.apply`` or copies may initialise them inside ``build``. Every process makes the same
    call.

    >>> generator = torch.manual_seed(0)
    >>> model = pd2.deferred_init(GPT, config)
    >>> pipe = pd2.PipelineModule(
    ...     model, loss_fn, num_stages=2, num_microbatches=4, example_args=(tokens,)
    ... )

    The default generators end in the state in which the plain call would have left them: random
    numbers are drawn, for one tensor at a time, so this takes the time of an initialisation but the
    memory of the largest parameter. Buffers and other tensors of the modules are made at once. A
    model that is to be loaded, without buffers that no checkpoint has, is made faster under
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
    fakes = dict.fromkeys(
        tensor
        for module in modules
        for _, tensor in tensors_in(module)
        if isinstance(tensor, FakeTensor)
    )
    plain = [tensor for tensor in fakes if not isinstance(tensor, nn.Parameter)]
    values = tape.make([tape.geometry(tensor) for tensor in plain])
    new: dict[torch.Tensor, torch.Tensor] = dict(zip(plain, values, strict=True))
    new.update((tensor, _promise(tensor, tape)) for tensor in fakes if tensor not in new)
    replace_tensors(modules, lambda tensor: new.get(tensor, tensor))
    return_freed_memory()  # random numbers were drawn in it
    return model


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a parameter on meta gets its values."""

    tape: Tape
    geometry: Geometry
    version: int  # of the parameter when deferred_init() returned

    @staticmethod
    def of(tensor: torch.Tensor) -> Recipe | None:
        """Returns the recipe of a tensor, if it has one."""
        return getattr(tensor, _RECIPE, None)

    @staticmethod
    def forget(tensor: torch.Tensor) -> None:
        """Drops the recipe of a tensor."""
        vars(tensor).pop(_RECIPE, None)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError if the tensor was changed since: the record does not have that."""
        if tensor._version != self.version:
            raise ValueError(
                f"parameter {name}: {tensor._version - self.version} writes since deferred_init() "
                "returned, there must be none: they are lost on meta; write inside build"
            )
        if tuple(tensor.shape) != self.geometry.size:
            raise ValueError(
                f"parameter {name}: shape {tuple(tensor.shape)}, {self.geometry.size} when "
                "deferred_init() returned: it must stay the same"
            )


def attributes_of(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Returns the attributes that users have set on a parameter, without its recipe."""
    return {name: value for name, value in vars(tensor).items() if name != _RECIPE}


def _promise(fake: FakeTensor, tape: Tape) -> nn.Parameter:
    """Makes a parameter on meta that has a recipe for its values."""
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
