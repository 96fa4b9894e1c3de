"""The signature of a call of the model: which tensors are in it, and where.

The example call fixes the structure: which parameters of ``forward`` are given, how containers
nest, and every leaf that is no tensor (numbers, strings, None, flags). These leaves are part of the
captured program, so a later call must repeat them; the tensors are the model's inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .templates import collect, leaves_of, listing


class CallSignature:
    """The structure of the example call, by which other calls are taken apart and rebuilt.

    Attributes:
        args, kwargs: the example call.
        tensors: its tensors, in the order in which they stand in it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        example_args: Sequence[Any],
        example_kwargs: Mapping[str, Any],
    ) -> None:
        """Reads the structure of ``forward(*example_args, **example_kwargs)``.

        Raises:
            ValueError: the signature of ``forward`` does not take these arguments.
        """
        self._forward = _signature_of(forward)
        try:
            bound = self._forward.bind(*example_args, **example_kwargs)
        except TypeError as error:
            raise ValueError(
                f"example_args and example_kwargs do not fit the model's "
                f"forward{self._forward}: {error}. Give the arguments of one call"
            ) from None
        # In containers of their own: the caller may go on changing those that were given.
        own = pytree.tree_map(lambda leaf: leaf, (bound.args, bound.kwargs))
        self.args, self.kwargs = own
        self._values = [*self.args, *self.kwargs.values()]
        self._names = self._names_of(len(self.args), tuple(self.kwargs))
        self.tensors = [
            leaf
            for name, value in zip(self._names, self._values, strict=True)
            for leaf in leaves_of(value, name, (name,))
        ]
        self._all_tensors = all(isinstance(value, torch.Tensor) for value in self._values)
        # A call may pass by keyword what the example passed by position, and vice versa: where each
        # argument is found depends on the number of positional arguments and the names of others.
        self._sources: dict[tuple[int, tuple[str, ...]], list[int | str]] = {}

    def tensors_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors of a call, in the order of :attr:`tensors`.

        Raises:
            ValueError: other arguments are given than in the example call, a container has
                another structure, or a value that is no tensor differs; states both.
            TypeError: something else than a tensor is given where the example had one.
        """
        form = (len(args), tuple(kwargs))
        sources = self._sources.get(form)
        if sources is None:
            sources = self._sources[form] = self._find_sources(*form)
        given = [args[key] if type(key) is int else kwargs[key] for key in sources]  # type: ignore[index]
        if self._all_tensors and all(isinstance(value, torch.Tensor) for value in given):
            return given
        values: list[torch.Tensor] = []
        for name, example, value in zip(self._names, self._values, given, strict=True):
            collect(example, value, name, values)
        return values

    def rebuild(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the example call's args and kwargs with ``values`` in place of its tensors."""
        remaining = iter(values)
        built = pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), self._values)
        return tuple(built[: len(self.args)]), dict(
            zip(self.kwargs, built[len(self.args) :], strict=True)
        )

    def _find_sources(self, num_args: int, kwarg_names: tuple[str, ...]) -> list[int | str]:
        try:
            bound = self._forward.bind(*range(num_args), **{name: name for name in kwarg_names})
        except TypeError as error:
            raise ValueError(
                f"the arguments do not fit the model's forward{self._forward}: {error}. Give "
                "the model's arguments; train_step() takes the target as target="
            ) from None
        sources = dict(
            zip(
                self._names_of(len(bound.args), tuple(bound.kwargs)),
                [*bound.args, *bound.kwargs.values()],
                strict=True,
            )
        )
        if sources.keys() != set(self._names):
            raise ValueError(
                f"arguments given: {listing(sources)}, in the example call: "
                f"{listing(self._names)}: the model was captured for the arguments of example_args "
                "and example_kwargs. Give exactly these"
            )
        return [sources[name] for name in self._names]

    def _names_of(self, num_args: int, kwarg_names: tuple[str, ...]) -> tuple[str, ...]:
        names: list[str] = []
        for parameter in self._forward.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind == parameter.VAR_POSITIONAL:
                names.extend(f"{parameter.name}[{i}]" for i in range(num_args - len(names)))
        return (*names[:num_args], *kwarg_names)


def _signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # implemented in C: any arguments may be right
        kinds = inspect.Parameter
        return inspect.Signature(
            [kinds("args", kinds.VAR_POSITIONAL), kinds("kwargs", kinds.VAR_KEYWORD)]
        )
    # Annotations make error messages unreadable.
    return signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
