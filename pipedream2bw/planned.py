"""A plan, and whether it was made for the model that is to be trained by it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .materialize import Example
from .plans import Plan
from .precision import Precision
from .profile import describe_parameters, fingerprint_of


def check_model(
    plan: Plan,
    root: nn.Module,
    example: Example,
    replicated: Sequence[str],
    precision: Precision,
) -> None:
    """Raises ValueError if the plan was made for another model; says what differs.

    It may be the model as it is, in the dtype of the precision, or as its stages will have it.
    """
    from .profiler import layer_names  # which measures pipelines

    args, kwargs = example
    names = layer_names(root, example_args=args, example_kwargs=kwargs, replicated=replicated)
    planned = plan.stages[-1].layers[1]
    if len(names) != planned:
        raise ValueError(
            f"plan of another model: it has {planned} layers, {type(root).__name__} has "
            f"{len(names)}"
        )
    for index, stage in enumerate(plan.stages):
        if index > 0 and names[stage.layers[0]] != stage.begins_at:
            raise ValueError(
                f"plan of another model: stage {index} begins at layer {stage.layers[0]}, which is "
                f"{stage.begins_at!r} in the plan and {names[stage.layers[0]]!r} in "
                f"{type(root).__name__}"
            )
    found = fingerprint_of(describe_parameters(root), names)
    others = [
        fingerprint_of(describe_parameters(root, dtype_of), names)
        for dtype_of in (precision.of_parameter, precision.of_converted)
    ]
    if plan.profile_fingerprint not in (found, *others):
        raise ValueError(
            f"plan of another model: the names, shapes or dtypes of its parameters or layers "
            f"differ from those of {type(root).__name__}: fingerprint "
            f"{plan.profile_fingerprint[:12]}, the model's: {found[:12]}"
        )
