"""A record of the operators that made tensors on fake memory, by which they are made for real.

The record knows storages, not tensors: an operator's arguments are kept as geometries over
storages, so that views, in-place writes and ``.data`` need no care of their own. To make a tensor,
the record is walked back for the operators that its storage depends on, and those are run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .surroundings import random_state_kept

# Random operators that draw as many numbers, and the same ones, whatever the tensor holds.
_OVERWRITING = {
    *("uniform_", "normal_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
    *("rand_like", "randn_like", "randint_like"),
}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A tensor as a view of a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor over memory of its own."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclasses.dataclass
class _Step:
    """One operator that made a storage or wrote to one."""

    call: Callable[..., Any]
    arguments: list[Any]  # flat; tensors are geometries, or constants from outside
    spec: pytree.TreeSpec
    reads: frozenset[int]  # storages, also of what it writes to
    writes: frozenset[int]
    makes: dict[int, Geometry]  # by position among its flat results
    generator_state: torch.Tensor | None  # before a random operator

    def touches(self) -> set[int]:
        """The storages that must be there or are there afterwards."""
        return {*self.reads, *(geometry.storage for geometry in self.makes.values())}

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(item: Any) -> Any:
            if isinstance(item, Geometry):
                return item.of(storages[item.storage])
            if isinstance(item, torch.Tensor):
                return item.clone()  # the next run must find it as it is
            if isinstance(item, torch.Generator) and self.generator_state is not None:
                return torch.Generator().set_state(self.generator_state)
            return item

        args, kwargs = pytree.tree_unflatten([real(item) for item in self.arguments], self.spec)
        if self.generator_state is not None:
            torch.set_rng_state(self.generator_state)
        results = pytree.tree_leaves(self.call(*args, **kwargs))
        for position, geometry in self.makes.items():
            result = results[position]
            if (result.stride(), result.storage_offset()) != (geometry.stride, geometry.offset):
                # An operator may give other strides for real than it said on fake tensors.
                like = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype)
                result = like.copy_(result)
            storages[geometry.storage] = result.untyped_storage()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is computed on fake CPU tensors while it is entered.

    Random operators are executed once while they are recorded, on memory that is freed at once, so
    that the generators go on as if the tensors were real; what they drew is drawn again, from the
    state that the generator had, when a tensor is made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._steps: list[_Step] = []
        self._known: dict[int, torch.UntypedStorage] = {}

    def geometry(self, tensor: torch.Tensor) -> Geometry:
        """Where a fake tensor is. It must have been made while the tape was entered."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"deferred_init: a tensor of layout {tensor.layout} or a lazily conjugated one, it "
                "takes strided ones only: construct the model without it"
            )
        return Geometry(
            _storage(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def make(self, wanted: Sequence[Geometry]) -> list[torch.Tensor]:
        """The tensors with the values that they have by now.

        Beside them there is never more memory than what the operators that make one of them need.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        kept = {geometry.storage for geometry in wanted}
        steps = self._needed_for(kept)
        last_use = {storage: i for i, step in enumerate(steps) for storage in step.touches()}
        with random_state_kept(), torch.no_grad():
            for i, step in enumerate(steps):
                step.run(storages)
                for storage in step.touches():
                    if last_use[storage] == i and storage not in kept:
                        del storages[storage]
        return [geometry.of(storages[geometry.storage]) for geometry in wanted]

    def _needed_for(self, storages: Iterable[int]) -> list[_Step]:
        needed = set(storages)
        steps = []
        for step in reversed(self._steps):
            made = {geometry.storage for geometry in step.makes.values()}
            if not needed.isdisjoint(made | step.writes):
                steps.append(step)
                needed = (needed - made) | step.reads
        return steps[::-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, spec = pytree.tree_flatten((args, kwargs))
        with _disable_current_modes():
            arguments = [self._kept(item) for item in flat]
            writes = frozenset(map(_storage, _written(func, args, kwargs)))
            state = None
            if torch.Tag.nondeterministic_seeded in func.tags:
                state = self._draw(func, arguments, spec)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # Python asks for a value, or the shape depends on one.
            with _disable_current_modes():
                return self._computed(func, arguments, spec)
        with _disable_current_modes():
            self._record(func, arguments, spec, writes, result, state)
        # Of weak references to results, with which a module's to() could not swap parameters.
        self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return result

    def _kept(self, item: Any) -> Any:
        if isinstance(item, FakeTensor):
            return self.geometry(item)
        return item.clone() if isinstance(item, torch.Tensor) else item

    def _real(self, arguments: Sequence[Any], *, scratch: bool) -> list[Any]:
        """The arguments for real; with ``scratch`` their values do not matter."""
        wanted = [item for item in arguments if isinstance(item, Geometry)]
        if scratch:
            made = [torch.empty_strided(g.size, g.stride, dtype=g.dtype) for g in wanted]
        else:
            made = self.make(wanted)
        remaining = iter(made)
        return [next(remaining) if isinstance(item, Geometry) else item for item in arguments]

    def _draw(self, func: Any, arguments: Sequence[Any], spec: pytree.TreeSpec) -> torch.Tensor:
        """Executes a random operator; returns the state that its generator had before."""
        name = func._overloadpacket.__name__
        scratch = name in _OVERWRITING or str(func) == "aten.bernoulli_.float"
        args, kwargs = pytree.tree_unflatten(self._real(arguments, scratch=scratch), spec)
        given = (item for item in arguments if isinstance(item, torch.Generator))
        generator = next(given, torch.default_generator)
        state: torch.Tensor = generator.get_state()
        with torch.no_grad():
            func(*args, **kwargs)
        return state

    def _computed(self, func: Any, arguments: Sequence[Any], spec: pytree.TreeSpec) -> Any:
        """What the operator gives for real; its tensors are constants of the record."""
        args, kwargs = pytree.tree_unflatten(self._real(arguments, scratch=False), spec)
        result = func(*args, **kwargs)

        def constant(value: torch.Tensor) -> torch.Tensor:
            fake = self.fake.from_tensor(value)
            self._record(torch.ops.aten.clone.default, [value], _ONE, frozenset(), fake, None)
            return fake

        return pytree.tree_map_only(torch.Tensor, constant, result)

    def _record(
        self,
        func: Any,
        arguments: list[Any],
        spec: pytree.TreeSpec,
        writes: frozenset[int],
        result: Any,
        state: torch.Tensor | None,
    ) -> None:
        makes: dict[int, Geometry] = {}
        for position, item in enumerate(pytree.tree_leaves(result)):
            if isinstance(item, FakeTensor) and _storage(item) not in self._known:
                if item.device.type != "cpu":
                    raise ValueError(
                        f"deferred_init: a tensor is made on {item.device}, it must be on cpu: the "
                        "pipeline moves each stage to its device; set no default device meanwhile"
                    )
                makes[position] = self.geometry(item)
                self._known[_storage(item)] = item.untyped_storage()
        if makes or writes:
            reads = frozenset(item.storage for item in arguments if isinstance(item, Geometry))
            self._steps.append(_Step(func, arguments, spec, reads, writes, makes, state))


_ONE = pytree.tree_flatten(((0,), {}))[1]
"""The arguments of an operator that takes one."""


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in pytree.tree_leaves(value):
            if isinstance(item, FakeTensor):
                yield item
            elif isinstance(item, torch.Tensor):
                raise ValueError(
                    f"deferred_init: {func} writes to a tensor of shape {tuple(item.shape)} that "
                    "was made before, it may only write to what is made within"
                )
