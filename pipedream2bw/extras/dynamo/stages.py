"""A graph of ``torch.compile`` cut into stages, each run by a thread of its own."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...accelerator import device_types
from ...capture.bytecode import changes_modes
from ...capture.capture import capture
from ...model.clone import structural_clone
from ...stages.boundaries import choose_boundaries
from ...stages.codegen import StageFunction
from ...stages.cut import split_into_stages
from ...stages.program import StageProgram
from .inputs import Inputs


class NotSplitError(Exception):
    """Why a graph runs as it is; ``is_unexpected`` if the caller should know."""

    def __init__(self, reason: str, *, is_unexpected: bool) -> None:
        super().__init__(reason)
        self.is_unexpected = is_unexpected


class Stages:
    """The threads of the stages, and a cut of the graph for each form of a microbatch.

    Args:
        devices: of each stage; None: where the arguments are.
        args: of a first call.

    Raises:
        NotSplitError: the graph is too small, or cannot be cut.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Inputs,
        devices: Sequence[torch.device | None],
        args: Sequence[Any],
    ) -> None:
        layers = [node for node in graph_module.graph.nodes if node.op.startswith("call_")]
        if len(layers) < len(devices):
            raise NotSplitError(
                f"{len(layers)} layers, num_stages: {len(devices)}", is_unexpected=False
            )
        switches = [node.name for node in layers if changes_modes(node)]
        if switches:
            raise NotSplitError(
                f"{switches[0]} switches a mode of torch inside of the graph", is_unexpected=True
            )
        self._inputs = inputs
        self._devices = devices
        self._names = {i: f"state_{i}" for i in sorted(inputs.state)}
        self._graph_module = graph_module
        self._state = {i: args[i] for i in self._names}
        self._cuts: dict[Any, _Cut] = {}
        self._cut_for(inputs.microbatches(args, 2)[0])
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"pipedream2bw stage {i}")
            for i in range(len(devices))
        ]

    def run(self, parts: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """The outputs of each microbatch."""
        cuts = [self._cut_for(part) for part in parts]
        state = [parts[0][i] for i in self._names]
        for cut in dict.fromkeys(cuts):
            cut.bind(state)
        modes, num_stages = _Modes(), len(self._devices)
        values = [cut.given(self._tensors(part)) for cut, part in zip(cuts, parts, strict=True)]
        outputs: list[Future[None]] = []
        for number, cut in enumerate(cuts):
            before: list[Future[None]] = []
            for stage in range(num_stages):
                done = self._threads[stage].submit(
                    cut.compute, stage, values[number], before, modes
                )
                before = [done]
            outputs += before
        for future in outputs:
            future.result()
        return [cut.output(value) for cut, value in zip(cuts, values, strict=True)]

    def _tensors(self, part: Sequence[Any]) -> list[torch.Tensor]:
        return [
            item
            for i, item in enumerate(part)
            if i not in self._names and isinstance(item, torch.Tensor)
        ]

    def _cut_for(self, part: Sequence[Any]) -> _Cut:
        form = self._inputs.form(part)
        if form not in self._cuts:
            example = [self._state.get(i, item) for i, item in enumerate(part)]
            module = _with_state(self._graph_module, self._names, example)
            self._cuts[form] = _Cut(
                module, list(self._names.values()), self._tensors(part), self._devices
            )
        return self._cuts[form]


class _Cut:
    """The stages' programs for microbatches of one form."""

    def __init__(
        self,
        module: fx.GraphModule,
        names: Sequence[str],
        example: Sequence[torch.Tensor],
        devices: Sequence[torch.device | None],
    ) -> None:
        self._module = module
        self._devices = devices
        try:
            with torch.inference_mode(False):
                example = [
                    item.clone() if isinstance(item, torch.Tensor) and item.is_inference() else item
                    for item in example
                ]
                captured = capture(module, num_stages=len(devices), example_args=example)
                boundaries = choose_boundaries(captured, len(devices), "auto")
                self._programs = split_into_stages(captured, boundaries)
        except ValueError as error:
            raise NotSplitError(str(error), is_unexpected=True) from error
        self._inputs = list(
            zip(captured.model_inputs, captured.input_positions, strict=True)
        )  # names, and positions among the tensors
        self._names = names
        self._bound: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._functions: list[StageFunction] = []

    def bind(self, state: Sequence[torch.Tensor]) -> None:
        """Makes the stages read these weights and buffers."""
        versions = [0 if item.is_inference() else item._version for item in state]
        is_same = len(self._bound) == len(state) and all(
            one is other for one, other in zip(self._bound, state, strict=True)
        )
        has_copies = any(device is not None for device in self._devices)
        if self._functions and is_same and (versions == self._versions or not has_copies):
            return  # without copies the stages read the very tensors
        self._bound, self._versions = list(state), versions
        self._functions = [
            program.bind(self._root(program, state, device), device)
            for program, device in zip(self._programs, self._devices, strict=True)
        ]

    def _root(
        self, program: StageProgram, state: Sequence[torch.Tensor], device: torch.device | None
    ) -> nn.Module:
        used = {*program.parameters, *program.buffers}
        parameters: dict[nn.Parameter, nn.Parameter] = {}
        buffers: dict[torch.Tensor, torch.Tensor] = {}
        for name, new in zip(self._names, state, strict=True):
            moved = new if device is None or name not in used else new.to(device)
            old = getattr(self._module, name)
            if isinstance(old, nn.Parameter):
                parameters[old] = (
                    moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved, False)
                )
            else:
                buffers[old] = moved
        return structural_clone(self._module, parameters, buffers)

    def given(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The values that a microbatch's first stage takes, by name."""
        return {name: tensors[position] for name, position in self._inputs}

    def compute(
        self, stage: int, values: dict[str, Any], before: Sequence[Future[None]], modes: _Modes
    ) -> None:
        """Adds a stage's values to those of its microbatch, once the stage before has."""
        for future in before:
            future.result()
        program, device = self._programs[stage], self._devices[stage]
        with modes.here():
            inputs = [_on(device, values[name]) for name in program.inputs]
            values.update(zip(program.outputs, self._functions[stage](inputs), strict=True))

    def output(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """What the graph returns."""
        found: tuple[Any, ...] = values[self._programs[-1].outputs[0]]
        return found


class _Modes:
    """The caller's modes, which threads have of their own."""

    def __init__(self) -> None:
        self._is_inference = torch.is_inference_mode_enabled()
        self._has_gradients = torch.is_grad_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in device_types()
        }

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Sets them in this thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            for kind, (enabled, dtype) in self._autocast.items():
                if enabled:
                    # Without the cache, which all threads share and any of them empties.
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield


def _with_state(
    graph_module: fx.GraphModule, names: Mapping[int, str], args: Sequence[Any]
) -> fx.GraphModule:
    """The graph with the state, and this microbatch's numbers, in place of arguments."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    owned: dict[str, Any] = {}
    given = iter(enumerate(args))
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            position, value = next(given)
            if position in names:
                owned[names[position]] = value
                copies[node] = graph.get_attr(names[position])
                continue
            if not isinstance(value, torch.Tensor):
                copies[node] = value
                continue
        if node.op in ("call_module", "get_attr"):
            owned[node.target] = operator.attrgetter(node.target)(graph_module)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(owned, graph)


def _on(device: torch.device | None, value: Any) -> Any:
    if device is None:
        return value
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
