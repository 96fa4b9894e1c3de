"""The model as captured in train mode, in eval mode and with other attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..capture.capture import capture, capture_finely
from ..capture.captured import Captured, constants_of, refuse_parameters
from ..model.fingerprint import describe_parameters
from ..model.materialize import Example, brought_together, for_capture
from ..model.precision import Precision
from .blocks import blocks_of_layers, written_as_blocks
from .boundaries import choose_boundaries, place_like
from .cut import split_into_stages
from .program import StageProgram


@dataclasses.dataclass
class Mode:
    """The model captured in one mode and cut into stages."""

    wiring: int  # the number by which executors know it
    captured: Captured
    programs: list[StageProgram]
    whole: list[bool]  # by model input: passed whole to every microbatch

    def edges(self) -> list[tuple[int, int]]:
        """Lists (producer stage, consumer stage) of every message."""
        return [
            (program.index, consumer) for program in self.programs for consumer in program.sends
        ]

    def check_shapes(self, values: Sequence[Any], sizes: Iterable[int], place: str) -> None:
        """Raises ValueError unless microbatches of these sizes have shapes that were captured.

        Args:
            values: of the batch's model inputs.
            place: what an error's text about them begins with.
        """
        captured, rule = self.captured, self.captured.shape_rule
        if rule is None:
            return
        for size in sizes:
            shapes = {
                position: (
                    captured.signature.tensors[position].path,
                    value.shape if whole else (size, *value.shape[1:]),
                )
                for position, value, whole in zip(
                    captured.input_positions, values, self.whole, strict=True
                )
            }
            if (reason := rule.why_not(shapes)) is not None:
                raise ValueError(
                    f"{place}{reason}: torch.export has captured the model for these shapes; "
                    "dynamic_shapes=True captures it for all that it leaves open"
                )


@dataclasses.dataclass
class Modes:
    """Captures the model in its modes, over the same parameters and cut at the same places.

    Attributes:
        recomputed_blocks: names of the modules whose forward is run again in the backward.
        dynamic_shapes: whether all sizes of arguments are left open that the model leaves open.
        numbers_draws: whether the stages number the random draws of their layers.
        check_layers: the layers are those of a plan: the model is captured as finely as for a
            profile, and this raises ValueError if it is another model.
    """

    root: nn.Module
    example: Example
    _: dataclasses.KW_ONLY
    num_stages: int
    split: str | Sequence[str]
    replicated: Sequence[str]
    recomputed_blocks: Sequence[str]
    dynamic_shapes: bool = False
    numbers_draws: bool = False
    precision: Precision
    check_layers: Callable[[Captured], None] | None = None

    def __post_init__(self) -> None:
        self.example = self.precision.cast(self.example)
        self._first: Mode | None = None
        self._num_captures = 0

    @property
    def first(self) -> Mode:
        """The mode that was captured first; others have its parameters on the same stages."""
        assert self._first is not None
        return self._first

    def capture(self) -> Mode:
        """Captures the model as its modules behave now."""
        with (
            self.precision.as_in_stages() as addresses,
            for_capture(self.root, self.example) as (root, (args, kwargs)),
        ):
            options: dict[str, Any] = {
                "example_args": args,
                "example_kwargs": kwargs,
                "replicated": self.replicated,
                "dynamic_shapes": self.dynamic_shapes,
            }
            if self._first is not None:
                with brought_together(root, (args, kwargs)) as root_here:
                    captured = self._capture_like_first(root_here, options)
                boundaries = place_like(captured, self.first.programs)
            else:
                captured = self._capture_first(root, options)
                boundaries = choose_boundaries(captured, self.num_stages, self.split)
            refuse_parameters(constants_of(captured), addresses)
        leaves = [captured.signature.tensors[position] for position in captured.input_positions]
        whole = [not leaf.carries_batch(self.replicated) for leaf in leaves]
        write = None
        if self.recomputed_blocks:
            names = self.recomputed_blocks
            write = written_as_blocks(
                blocks_of_layers(captured, self.root, names, training=self.root.training)
            )
        programs = split_into_stages(
            captured, boundaries, numbers_draws=self.numbers_draws, write=write
        )
        mode = Mode(self._num_captures, captured, programs, whole)
        self._num_captures += 1
        self._first = self._first or mode
        return mode

    def _capture_first(self, root: nn.Module, options: Mapping[str, Any]) -> Captured:
        if self.check_layers is None:
            return capture(
                root, num_stages=self.num_stages, split=self.split, balances=True, **options
            )
        example = options["example_args"], options["example_kwargs"]
        captured = capture_finely(
            root, example, self.replicated, dynamic_shapes=self.dynamic_shapes
        )
        self.check_layers(captured)
        return captured

    def _capture_like_first(self, root: nn.Module, options: Mapping[str, Any]) -> Captured:
        """Captures the model in a way that can be cut like the first mode."""

        def why_not(captured: Captured) -> str | None:
            try:
                place_like(captured, self.first.programs)
            except ValueError as error:
                return str(error)
            return None

        # One stage is enough, since some may have nothing to do in this mode.
        prefer = self.first.captured.how
        return capture(root, num_stages=1, prefer=prefer, why_not=why_not, **options)

    def names_in(self, stages: Iterable[int]) -> list[str]:
        """Lists the parameters and buffers that the given stages of the model hold."""
        programs = [self.first.programs[stage] for stage in stages]
        return [
            name
            for program in programs
            for name in (*program.parameters, *program.unused_parameters, *program.buffers)
        ]

    def settings(self) -> dict[str, Any]:
        """Returns what the first capture found that must be the same on all ranks."""
        if self._first is None:
            return {}
        captured, programs = self.first.captured, self.first.programs
        return {
            "mode of the model": "train" if self.root.training else "eval",
            "parameters": list(describe_parameters(self.root)),
            "example arguments": [str(item) for item in captured.model_inputs],
            "capture": captured.how,
            "layers of the model": len(captured.layers),
            "first layer of each stage": [program.first_layer_name for program in programs],
        }
