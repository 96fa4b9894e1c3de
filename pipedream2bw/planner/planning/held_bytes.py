"""What a stage holds, and steps, for each byte of its trained weights."""

from __future__ import annotations

from typing import NamedTuple


class PerTrainedByte(NamedTuple):
    """Bytes of one copy of a stage, for each byte of one version of what it trains.

    Attributes:
        gradient: of gradients.
        state: of optimizer state and masters, of all replicas together where they share it out.
        stepped: of float32 that the optimizer steps.
    """

    gradient: float
    state: float
    stepped: float


def per_trained_byte(
    optimizer: object, precision: object, split_master: object, gradient_dtype: object
) -> PerTrainedByte:
    """Returns the bytes for arguments of :func:`plan`, of which all but the first are checked.

    Raises:
        TypeError, ValueError: naming the argument and the rule.
    """
    states = {"sgd": 0.0, "momentum": 1.0, "adamw": 2.0}
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer: {optimizer!r} given, it must be a name")
    if optimizer not in states:
        raise ValueError(f"optimizer: {optimizer!r}, known: {', '.join(states)}")
    if precision in (None, "fp32"):
        return PerTrainedByte(gradient=1.0, state=states[optimizer], stepped=1.0)
    # Float32 beside weights of 16 bits: twice the bytes; a split master has the other 16 bits.
    return PerTrainedByte(
        gradient=2.0 if gradient_dtype is None else 1.0,
        state=2 * states[optimizer] + (1 if split_master else 2),
        stepped=2.0,
    )
