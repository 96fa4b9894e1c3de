"""Functions that torch.fx cannot look into: a trace records their calls, as they are."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.utils import rnn

from ..model.surroundings import attribute_set

PACKING = (rnn.pack_padded_sequence, rnn.pad_packed_sequence)
"""The functions that scripts import by their names."""


@contextlib.contextmanager
def opaque_calls_recorded() -> Iterator[None]:
    """Makes nodes of the calls that are given a value of a trace."""
    function = torch.autograd.Function  # whose backward a trace of its forward would lose
    apply = function.__dict__["apply"]

    def recording_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return _recording(apply.__get__(None, cls))(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute_set(function, "apply", classmethod(recording_apply)))
        for owner, name, made in _OF_MODULES:
            stack.enter_context(attribute_set(owner, name, made(getattr(owner, name))))
        yield


def _recording(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", call, args, kwargs)
        return call(*args, **kwargs)

    return recorded


def _but_padding(call: Callable[..., Any]) -> Callable[..., Any]:
    """A mask of padding is looked into: an encoder without gradients leaves padding out."""

    def masked(mask: Any, mask_name: str, *args: Any, **kwargs: Any) -> Any:
        made = call if mask_name == "src_key_padding_mask" else _recording(call)
        return made(mask, mask_name, *args, **kwargs)

    return masked


def _by_values(call: Callable[..., Any]) -> Callable[..., Any]:
    """Whether a mask's values are causal: False where a dry run has no values."""

    @functools.wraps(call)
    def is_causal(*args: Any, **kwargs: Any) -> bool:
        try:
            return bool(call(*args, **kwargs))
        except DataDependentOutputException:
            return False

    return _recording(is_causal)


_OF_MODULES: tuple[tuple[Any, str, Any], ...] = (
    (builtins, "len", _recording),  # Python's own takes nothing but a number from an object
    *((rnn, function.__name__, _recording) for function in PACKING),
    # How a Transformer looks at its masks.
    (transformer, "_get_seq_len", _recording),
    (transformer, "_detect_is_causal_mask", _by_values),
    (functional, "_none_or_dtype", _recording),
    (functional, "_canonical_mask", _but_padding),
)
