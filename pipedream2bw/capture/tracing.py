"""Capturing by torch.fx symbolic tracing.

A module whose forward cannot be traced becomes one node that calls it as it is, and everything
around it is still traced. Tracing must not change what the program means: what fx would silently
drop or freeze (no_grad and autocast regions, custom autograd functions, random numbers drawn while
tracing) makes the module around it untraceable.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.proxy import ParameterProxy
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from ..accelerator import device_types
from ..model.hooks import has_hooks
from ..model.sources import Sources, sources_kept
from ..model.surroundings import attribute_set
from .arguments import CallSignature
from .traced import Traced, reason_of

# Modules of torch.nn that are only containers of layers.
_OPENED = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_PACKING = (rnn.pack_padded_sequence, rnn.pad_packed_sequence)
"""The functions that scripts import by their names."""


class UntraceableError(Exception):
    """Symbolic tracing would change the meaning of the code it reached."""


def trace(root: nn.Module, signature: CallSignature) -> Traced:
    """Traces ``root`` as the example call calls it.

    ``root`` must be a structural clone that nobody else uses: tracing may leave attributes on it.
    """
    with sources_kept(root) as sources, _opaque_calls_recorded():
        tracer = _Tracer(signature, sources)
        graph = tracer.trace(root)
    graph.lint()
    return Traced(graph=graph, module=root, leaves=tracer.leaves)


class _Tracer(fx.Tracer):
    def __init__(self, signature: CallSignature, sources: Sources) -> None:
        super().__init__(autowrap_functions=_PACKING)
        self._signature, self._sources = signature, sources
        self._modes = _ambient_modes()
        self._thread = threading.get_ident()
        self._tensor_names: dict[int, str] = {}
        self._out_spec: pytree.TreeSpec | None = None
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor | None]] = []
        self._hooked: set[int] = set()  # not by the forward, whose own hooks are a part of it
        self.leaves: dict[str, str] = {}

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        values = [
            self.create_proxy("placeholder", leaf.name, (), {}) for leaf in self._signature.tensors
        ]
        args, kwargs = self._signature.rebuild(values)
        root = self.root
        tensors = (*root.named_parameters(), *root.named_buffers())
        self._tensor_names = {id(tensor): name for name, tensor in tensors}
        self._buffers = [
            (module._buffers, leaf, buffer)
            for module in root.modules()
            for leaf, buffer in module._buffers.items()
        ]

        self._hooked = {id(module) for module in root.modules() if has_hooks(module)}

        def call_root() -> Any:
            before = self._sources.now()
            leaves, self._out_spec = pytree.tree_flatten(root.forward(*args, **kwargs))
            self._sources.refuse_taken(before)
            self._refuse_assigned_buffers(root)
            return tuple(leaves)

        return call_root, []

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        # Parameters and buffers are read when the stage runs. No proxy is cached: it could belong
        # to a node that was erased with a module that cannot be traced.
        name = self._tensor_names.get(id(attr_val))
        if name is None:
            return attr_val
        if isinstance(attr_val, nn.Parameter):
            # Such a proxy knows its shape: code that branches on it can be traced.
            return self.create_proxy(
                "get_attr",
                name,
                (),
                {},
                proxy_factory_fn=lambda node: ParameterProxy(self, node, name, attr_val),
            )
        return self.create_proxy("get_attr", name, (), {})

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind not in ("placeholder", "output", "get_attr"):
            self._refuse_other_modes()
        node = super().create_node(kind, *args, **kwargs)
        if kind == "output":
            node.meta["out_spec"] = self._out_spec
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self._hooked:  # traced, they would run on proxies only
            return True
        return not isinstance(m, _OPENED) and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)  # torch.fx replaces nn.Module's call for all threads
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        last = next(iter(reversed(self.graph.nodes)), None)
        scopes = self.module_stack.copy()
        calls = self.num_calls.copy()
        before = self._sources.now()
        try:
            result = super().call_module(m, forward, args, kwargs)
            self._sources.refuse_taken(before)
            self._refuse_assigned_buffers(m)
            return result
        except Exception as error:
            self._sources.restore(before)
            for holder, leaf, buffer in self._buffers:
                holder[leaf] = buffer
            self.module_stack.clear()
            self.module_stack.update(scopes)
            self.num_calls = calls
            self._erase_after(last)
            self.leaves[path] = reason_of(error)
            # In torch 2.9 the hooks of a checkpoint that was left by an exception stay until its
            # frame goes, and the next node would be refused for them.
            traceback.clear_frames(error.__traceback__)

            def called_whole(*args: Any, **kwargs: Any) -> Any:
                return self.create_proxy("call_module", path, args, kwargs)

            return super().call_module(m, called_whole, args, kwargs)

    def _refuse_assigned_buffers(self, m: nn.Module) -> None:
        """The graph would compute the new tensor, but no module would get it."""
        below = {id(module._buffers) for module in m.modules()}
        for holder, leaf, buffer in self._buffers:
            if id(holder) in below and holder.get(leaf) is not buffer:
                raise UntraceableError(f"the forward assigns another tensor to the buffer {leaf}")

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.graph.erase_node(node)

    def _refuse_other_modes(self) -> None:
        for name, now in _ambient_modes().items():
            if now != self._modes[name]:
                raise UntraceableError(f"{name} is changed inside the forward")


def _ambient_modes() -> dict[str, Any]:
    return {
        "gradient recording (no_grad, inference_mode)": torch.is_grad_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in device_types()
        ],
        "the saving of activations (checkpoint, saved_tensors_hooks)": (
            torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ),
    }


@contextlib.contextmanager
def _opaque_calls_recorded() -> Iterator[None]:
    """Makes nodes of calls that torch.fx cannot look into, where they get a value of a trace."""
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
    *((rnn, function.__name__, _recording) for function in _PACKING),
    # How a Transformer looks at its masks.
    (transformer, "_get_seq_len", _recording),
    (transformer, "_detect_is_causal_mask", _by_values),
    (functional, "_none_or_dtype", _recording),
    (functional, "_canonical_mask", _but_padding),
)
