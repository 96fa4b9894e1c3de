"""Random numbers of a microbatch: a function of a seed, the train_step and the microbatch.

The engine gives stages these numbers, whatever else draws. Here a thread that trains the unsplit
model gets the same ones. Code that saves and restores torch's random state works with either:
torch.utils.checkpoint does that around a forward that it runs again.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _C
from ..accelerator import module_of

# The state that stands for a place: a mark, whether the place is known, and the place.
_STATE = struct.Struct("=8s?4Q")
_MARK = b"pd2place"


@contextlib.contextmanager
def reference_random(*, seed: int, train_step: int, microbatch: int) -> Iterator[None]:
    """Inside, the calling thread draws the random numbers of one microbatch of a train_step.

    The unsplit model, called once inside, draws what a pipeline draws for that microbatch, at any
    depth and under any schedule.

    >>> with pd2.reference_random(seed=pipe.random_seed, train_step=0, microbatch=0):
    ...     loss = loss_fn(unsplit(x), y)
    ...     loss.backward()

    Every call of an operator that draws has a number, counted from the beginning. Seed, train_step,
    microbatch and this number give the generator of the call. Torch's default generators stay as
    they are. The backward belongs inside if the model has checkpoints (torch.utils.checkpoint).

    A pipeline counts the draws of each layer once, on fake tensors, when it captures the model. How
    often a layer draws may depend on data or on the number of rows. A layer that draws more than
    was counted draws other numbers than here from there on. So do the layers after it. Where fake
    tensors cannot run a layer, only the layers after it do. A pipeline's own are the same in every
    run still. Compiled stages draw other numbers, too.

    Args:
        seed: the pipeline's ``random_seed``.
        train_step: how many calls of ``train_step`` came before.
        microbatch: its number in the train_step; of replica r of a pipeline with m microbatches,
            r * m more.
    """
    follow_threads()
    key = _C.mix_seed(_C.mix_seed(seed, train_step), microbatch)
    with _C.KeyedRandom((key, 0, _C.ALL_DRAWS, 0)):
        yield


def follow_threads() -> None:
    """Makes get_rng_state and set_rng_state those of a thread that draws by key.

    They are torch's, and those of the accelerator in use, whose generator all stages share: while
    one stage sets it back, as a checkpoint does, another one may draw. What restores the state
    before it runs a forward again finds the same numbers. In all other threads the functions do
    what they did.
    """
    modules: list[Any] = [torch, torch.random]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        of_device = module_of(accelerator.type)
        modules += [each for each in (of_device, getattr(of_device, "random", None)) if each]
    for module in modules:
        if not getattr(module.get_rng_state, "follows_threads", False):
            module.get_rng_state = _following_get(module.get_rng_state)
            module.set_rng_state = _following_set(module.set_rng_state)


def _following_get(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(plain)
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not _C.is_keyed():
            return plain(*args, **kwargs)
        place = _C.random_place()
        known = place is not None
        packed = _STATE.pack(_MARK, known, *(place or (0, 0, 0, 0)))
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    get_rng_state.follows_threads = True  # type: ignore[attr-defined]
    return get_rng_state


def _following_set(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not _C.is_keyed():
            plain(new_state, *args, **kwargs)
            return
        packed = bytes(new_state.tolist())
        if len(packed) != _STATE.size or not packed.startswith(_MARK):
            raise ValueError(
                f"set_rng_state: a state of {len(packed)} bytes, inside a stage it must be one "
                "that get_rng_state gave there, as stages draw by key. Give random='torch' to make "
                "stages draw from torch's default generator"
            )
        _, known, *place = _STATE.unpack(packed)
        _C.set_random_place(tuple(place) if known else None)

    return set_rng_state
