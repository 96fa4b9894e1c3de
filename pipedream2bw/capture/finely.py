"""The capture of which profiles and plans name the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .capture import capture
from .captured import Captured

_MANY_STAGES = 8
"""A model that torch.fx cannot trace as a whole is exported unless it can form so many."""


def capture_finely(
    root: nn.Module,
    example: tuple[Sequence[Any], Mapping[str, Any]],
    replicated: Sequence[str],
    *,
    dynamic_shapes: bool = False,
) -> Captured:
    """Captures a model in as many layers as possible: ``split=`` may name any of them.

    Profiles and plans count these layers, so they do not depend on a number of stages.
    """
    args, kwargs = example
    options: dict[str, Any] = {
        "example_args": args,
        "example_kwargs": kwargs,
        "replicated": replicated,
        "dynamic_shapes": dynamic_shapes,
        "prefer": "fx",
    }
    try:
        return capture(root, num_stages=_MANY_STAGES, **options)
    except ValueError:
        return capture(root, num_stages=1, **options)
