"""The backend of ``torch.compile`` that computes forwards over stages, in threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...checks import check_whole_number
from . import CALLED
from .inputs import Inputs
from .outputs import check_same, devices_of, joined
from .stages import NotSplitError, Stages

_OPTIONS = ("num_stages", "num_microbatches", "devices")


def pipedream2bw(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one graph of ``torch.compile`` to stages that compute microbatches at once.

    For inference and evaluation, called under ``torch.no_grad()``: ``torch.compile(model.eval(),
    backend="pipedream2bw", options={"num_stages": 2, "num_microbatches": 4})``.

    It can compute one call: weights and steps are the caller's, so there are no versions and no
    training; for that there is :class:`PipelineModule`. Stages are threads of this process. A call
    returns when all its microbatches are done.

    Tensors with as many rows in dimension 0 as the first argument are split there; others, and
    weights, are given whole to every microbatch. The first call with arguments of some shapes,
    whose rows are not all equal, computes the whole, too, on copies of the buffers, and compares: a
    graph whose rows depend on each other, or that writes to its buffers, is refused. A graph of
    fewer layers than stages runs as it is, and one that cannot be cut, with a warning that says
    why.

    A graph for one number of rows may have that number in its code: ``torch.compile(dynamic=True)``
    leaves it open.

    Args:
        graph_module, example_inputs: from torch.
        options: num_stages (2), num_microbatches (num_stages), devices: of the stages, whose
            weights are copied there when they have changed; all on the caller's if not given.
            Outputs are where they are without stages.

    Raises:
        ValueError, TypeError: an option is unknown or wrong, named; from ``torch.compile`` as its
            ``BackendCompilerFailed``, with these words.
    """
    given = dict(options or {})
    for name in given:
        if name not in _OPTIONS:
            raise ValueError(f"options: {name!r}, known: {', '.join(_OPTIONS)}")
    num_stages = given.get("num_stages", 2)
    num_microbatches = given.get("num_microbatches", num_stages)
    check_whole_number("num_stages", num_stages)
    check_whole_number("num_microbatches", num_microbatches)
    devices = given.get("devices")
    if devices is not None and len(devices) != num_stages:
        raise ValueError(
            f"devices: {len(devices)}, num_stages: {num_stages}: there must be one for each stage"
        )
    places = [None] * num_stages if devices is None else [torch.device(each) for each in devices]
    return _Compiled(graph_module, Inputs(graph_module), places, num_microbatches)


class _Compiled:
    """What ``torch.compile`` calls in place of a graph."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Inputs,
        devices: Sequence[torch.device | None],
        num_microbatches: int,
    ) -> None:
        self._graph_module = graph_module
        self._inputs = inputs
        self._devices = devices
        self._num_microbatches = num_microbatches
        self._stages: Stages | None = None
        self._runs_as_is = len(devices) == 1
        self._compared: set[Any] = set()  # forms of calls
        self._output_devices: list[torch.device | None] = []  # without stages

    def __call__(self, *args: Any) -> Any:
        _refuse_training(args)
        parts = self._inputs.microbatches(args, self._num_microbatches)
        if self._runs_as_is or len(parts) == 1:
            return self._graph_module(*args)
        if self._stages is None:
            try:
                self._stages = Stages(self._graph_module, self._inputs, self._devices, args)
            except NotSplitError as error:
                self._runs_as_is = True
                if error.is_unexpected:
                    warnings.warn(
                        f"{CALLED}: runs unsplit: {error}",
                        stacklevel=2,
                    )
                return self._graph_module(*args)
        form = self._inputs.form(args)
        if form in self._compared:
            return joined(self._stages.run(parts), self._output_devices)
        found = self._compared_outputs(self._stages, args, len(parts))
        if self._inputs.have_unlike_rows(args):  # else it says nothing of how rows depend
            self._compared.add(form)
        return found

    def _compared_outputs(
        self, stages: Stages, args: Sequence[Any], num_parts: int
    ) -> tuple[Any, ...]:
        """What the stages give, if that is what the whole gives."""
        copies = self._inputs.copied(args)
        whole = self._graph_module(*copies)
        self._inputs.refuse_written(args, copies)
        copies = self._inputs.copied(args)
        outputs = stages.run(self._inputs.microbatches(copies, self._num_microbatches))
        self._output_devices = devices_of(whole)
        found = joined(outputs, self._output_devices)
        check_same(whole, found, num_parts)
        return found


def _refuse_training(args: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(item, torch.Tensor) and item.requires_grad for item in args
    ):
        raise RuntimeError(
            f"{CALLED}: gradients are enabled and an argument or a "
            "parameter requires them: it computes forwards alone; call it under torch.no_grad(), "
            "and train with pipedream2bw.PipelineModule"
        )
