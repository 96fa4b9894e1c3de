"""A record of the operators that made fake tensors, from which the real tensors are made.

The record knows storages, not tensors: an operator's arguments are kept as geometries over
storages, so that views, in-place writes and ``.data`` need no special care. To make a tensor, the
record is searched backwards for the operators that its storage depends on, and those are run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
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

from .sources import sources_kept
from .storages import storage_of

# Random operators whose numbers do not depend on what the tensor holds.
_OVERWRITING = {
    *("uniform_", "normal_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
    *("rand_like", "randn_like", "randint_like"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """A tensor as a view of a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor as a view of ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is computed on fake CPU tensors while it is entered.

    Random operators are executed once while they are recorded, on memory that is freed at once. So
    the generators advance as if the tensors were real. When a tensor is made, the numbers are drawn
    again, from the state that the generator had.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._steps: list[_Step] = []
        self._known: dict[int, torch.UntypedStorage] = {}

    def geometry(self, tensor: torch.Tensor) -> Geometry:
        """Describes a fake tensor, which must have been made while the tape was entered."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"deferred_init: a tensor of layout {tensor.layout} or a lazily conjugated one, it "
                "takes strided ones only: construct the model without it"
            )
        return Geometry(
            storage=storage_of(tensor),
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def make(self, wanted: Sequence[Geometry]) -> list[torch.Tensor]:
        """Makes the tensors with the values that they have at the end of the record.

        Intermediate results are freed after their last use.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        kept = {geometry.storage for geometry in wanted}
        steps = self._needed_for(kept)
        last_use = {
            storage: i for i, step in enumerate(steps) for storage in step.reads | step.made
        }
        with sources_kept(), torch.no_grad():
            for i, step in enumerate(steps):
                step.run(storages)
                for storage in step.reads | step.made:
                    if last_use[storage] == i and storage not in kept:
                        del storages[storage]
        return [geometry.of(storages[geometry.storage]) for geometry in wanted]

    def _needed_for(self, storages: Iterable[int]) -> list[_Step]:
        needed = set(storages)
        steps = []
        for step in reversed(self._steps):
            if not needed.isdisjoint(step.made | step.writes):
                steps.append(step)
                needed = (needed - step.made) | step.reads
        return steps[::-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat, spec = pytree.tree_flatten((args, kwargs))
        with _disable_current_modes():
            writes = frozenset(map(storage_of, _written(func, args, kwargs)))
            arguments = [self._kept(item) for item in flat]
            step = _Step(call=func, arguments=arguments, spec=spec, writes=writes)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._draw(step)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # Python asks for a value, or the shape depends on one.
            with _disable_current_modes():
                return self._computed(step)
        with _disable_current_modes():
            self._record(step, result)
        # The memo holds weak references to results; a module's to() cannot swap such parameters.
        self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return result

    def _kept(self, item: Any) -> Any:
        if isinstance(item, FakeTensor):
            return self.geometry(item)
        return item.clone() if isinstance(item, torch.Tensor) else item

    def _real(self, arguments: Sequence[Any], *, scratch: bool) -> list[Any]:
        """Makes the arguments; with ``scratch`` their values do not matter."""
        wanted = [item for item in arguments if isinstance(item, Geometry)]
        if scratch:
            made = [torch.empty_strided(g.size, g.stride, dtype=g.dtype) for g in wanted]
        else:
            made = self.make(wanted)
        remaining = iter(made)
        return [next(remaining) if isinstance(item, Geometry) else item for item in arguments]

    def _draw(self, step: _Step) -> None:
        """Executes a random operator, and keeps the state that its generator had before."""
        name = step.call._overloadpacket.__name__
        scratch = name in _OVERWRITING or str(step.call) == "aten.bernoulli_.float"
        arguments = self._real(step.arguments, scratch=scratch)
        given = (item for item in arguments if isinstance(item, torch.Generator))
        step.generator_state = next(given, torch.default_generator).get_state()
        with torch.no_grad():
            step.execute(arguments)

    def _computed(self, step: _Step) -> Any:
        """Executes an operator on real tensors; its results become constants of the record."""

        def constant(value: torch.Tensor) -> torch.Tensor:
            fake = self.fake.from_tensor(value)
            _, spec = pytree.tree_flatten(((value,), {}))
            step = _Step(call=torch.ops.aten.clone.default, arguments=[value], spec=spec)
            self._record(step, fake)
            return fake

        result = step.execute(self._real(step.arguments, scratch=False))
        return pytree.tree_map_only(torch.Tensor, constant, result)

    def _record(self, step: _Step, result: Any) -> None:
        for position, item in enumerate(pytree.tree_leaves(result)):
            if isinstance(item, FakeTensor) and storage_of(item) not in self._known:
                if item.device.type != "cpu":
                    raise ValueError(
                        f"deferred_init: a tensor is made on {item.device}, it must be on cpu: the "
                        "pipeline moves each stage to its device; set no default device meanwhile"
                    )
                step.makes[position] = self.geometry(item)
                self._known[storage_of(item)] = item.untyped_storage()
        if step.makes or step.writes:
            self._steps.append(step)


@dataclasses.dataclass(kw_only=True)
class _Step:
    """An operator that made a storage or wrote to one."""

    call: Any  # an operator of torch
    arguments: list[Any]  # flat; tensors are geometries, or constants from outside
    spec: pytree.TreeSpec
    writes: frozenset[int] = frozenset()  # storages
    makes: dict[int, Geometry] = dataclasses.field(default_factory=dict)  # by place in the results
    generator_state: torch.Tensor | None = None  # before a random operator

    @functools.cached_property
    def reads(self) -> set[int]:
        """The storages of all arguments, also of those that the operator writes to."""
        return {item.storage for item in self.arguments if isinstance(item, Geometry)}

    @functools.cached_property
    def made(self) -> set[int]:
        """The storages of new results."""
        return {geometry.storage for geometry in self.makes.values()}

    def execute(self, arguments: Sequence[Any]) -> Any:
        """Calls the operator with real tensors in the place of geometries."""
        args, kwargs = pytree.tree_unflatten(arguments, self.spec)
        return self.call(*args, **kwargs)

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Executes the operator again, on storages and with the random numbers that it had."""

        def real(item: Any) -> Any:
            if isinstance(item, Geometry):
                return item.of(storages[item.storage])
            if isinstance(item, torch.Tensor):
                return item.clone()  # the next run must find it as it is
            if isinstance(item, torch.Generator) and self.generator_state is not None:
                return torch.Generator().set_state(self.generator_state)
            return item

        arguments = [real(item) for item in self.arguments]
        if self.generator_state is not None:
            torch.set_rng_state(self.generator_state)
        results = pytree.tree_leaves(self.execute(arguments))
        for position, geometry in self.makes.items():
            result = results[position]
            if (result.stride(), result.storage_offset()) != (geometry.stride, geometry.offset):
                # Real results may have other strides than fake ones.
                like = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype)
                result = like.copy_(result)
            storages[geometry.storage] = result.untyped_storage()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the fake tensors that an operator writes to.

    Raises:
        ValueError: it writes to a tensor that is not fake.
    """
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
