"""What a user's module must not have to be trained by a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from .hooks import has_hooks
from .local_shards import is_dtensor
from .replacing import replace_tensors


def check_aliases(root: nn.Module) -> None:
    """Refuses two Parameters over the same memory, which the stages' copies would take apart.

    Raises:
        ValueError: names both and tells which is frozen.
    """
    placed = sorted(
        (parameter.data_ptr(), number, name, parameter)
        for number, (name, parameter) in enumerate(root.named_parameters())
        if _is_dense(parameter.data) and parameter.data_ptr()
    )
    for (begin, _, one, first), (other_begin, _, other, second) in itertools.pairwise(placed):
        if other_begin < begin + first.nbytes:
            raise ValueError(
                f"parameters {one} and {other} are two Parameters over the same memory, with "
                f"requires_grad {first.requires_grad} and {second.requires_grad}: a tied weight "
                "must be one Parameter, trained or frozen wherever it is used: assign the "
                "Parameter itself (head.weight = embedding.weight)"
            )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory, in whatever order, is its elements and no others."""
    if type(tensor) is not torch.Tensor or not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def check_views(root: nn.Module) -> None:
    """Refuses tensors over a parameter's memory: they would keep what the parameter was at first.

    Looks at buffers and at the modules' plain attributes, also in lists, tuples and dictionaries.

    Raises:
        ValueError: names the tensor and the parameter.
    """
    parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}  # by storage
    for name, parameter in root.named_parameters():
        if _has_storage(parameter.data):
            parameters.setdefault(_storage(parameter), []).append((name, parameter))
    for where, tensor in _other_tensors(root):
        for name, parameter in parameters.get(_storage(tensor), ()):
            first, second = _extent(tensor), _extent(parameter)
            if first[0] < second[1] and second[0] < first[1]:
                raise ValueError(
                    f"{where} is a view of the memory of parameter {name}: it must be made in the "
                    "forward, from the parameter: the pipeline has several versions of its "
                    "weights, none of them there"
                )


def _other_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for owner, module in root.named_modules():
        prefix = f"{owner}." if owner else ""
        for name, buffer in module._buffers.items():
            if _has_storage(buffer):
                yield f"buffer {prefix}{name}", buffer
        # The old spectral_norm keeps the weight there until its hook has made another one.
        made_anew = {
            hook.name for hook in module._forward_pre_hooks.values() if type(hook) is SpectralNorm
        }
        for name, value in vars(module).items():
            if name not in _OF_MODULES and name not in made_anew:
                for tensor in _tensors_in(value, depth=2):
                    yield f"attribute {prefix}{name}", tensor


# What nn.Module itself keeps: parameters, buffers, modules and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        if _has_storage(value):
            yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)


def _has_storage(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of the storage that is the tensor's, and the one after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def check_example(args: object, kwargs: object) -> None:
    """Raises TypeError unless these are a tuple of arguments and a mapping."""
    if not isinstance(args, (tuple, list)):  # a tensor would be taken apart into its rows
        raise TypeError(
            f"example_args: {type(args).__name__} given, it must be a tuple of the positional "
            "arguments: (x,) for one"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"example_kwargs: {type(kwargs).__name__} given, it must be a dict")


def check_parameters(root: nn.Module, loss_fn: object) -> None:
    """Raises ValueError if a parameter has what its copies in the stages would not have."""
    check_aliases(root)
    check_views(root)
    for name, module in root.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            raise ValueError(
                f"module {name or 'itself'}: {type(module).__name__}, it must not be sharded by "
                "FSDP: that frees and gathers the parameters, of which each weight version has its "
                "own memory; shard a stage by tensor parallelism (mesh=) or use more stages"
            )
    for name, parameter in root.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter {name}: a DTensor, it must be a plain tensor: give the model to "
                "pipedream2bw.use_local_shards() first"
            )
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise ValueError(
                f"parameter {name}: {len(hooks)} hooks on its gradient, they must be none: the "
                "pipeline takes gradients as soon as they exist; use hooks of modules instead"
            )
    if isinstance(loss_fn, nn.Module):
        trainable = [name for name, p in loss_fn.named_parameters() if p.requires_grad]
        if trainable:
            raise ValueError(
                f"loss_fn: {type(loss_fn).__name__} has {len(trainable)} trainable parameters "
                f"({', '.join(trainable[:5])}), it must have none: make them a part of the model"
            )


def check_capturable(root: nn.Module) -> None:
    """Refuses models whose parameters a pipeline cannot hold.

    Raises:
        ValueError: hooks of the model itself, lazy parameters or buffers without a shape, complex
            parameters, sparse gradients, or parameters on several devices.
        TypeError: a module that cannot be cloned.
    """
    refuse_uncloneable(root)
    refuse_hooks_of_root(root)
    first: tuple[str, torch.device] | None = None
    for name, parameter in root.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is lazy and has no shape yet: run one forward of the model on "
                "real input before building the pipeline"
            )
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} has dtype {parameter.dtype}: a pipeline takes real "
                "floating-point parameters only"
            )
        if first is None:
            first = (name, parameter.device)
        elif parameter.device != first[1]:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, {first[0]!r} is on {first[1]}: "
                "build the model on one device; the pipeline moves each stage to its own (devices=)"
            )
    for name, buffer in root.named_buffers():
        if nn.parameter.is_lazy(buffer):
            raise ValueError(
                f"buffer {name!r} is lazy and has no shape yet: run one forward of the model on "
                "real input before building the pipeline"
            )
    for name, module in root.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(
            module, (nn.Embedding, nn.EmbeddingBag)
        ):
            raise ValueError(
                f"module {name!r} has sparse=True: a pipeline takes dense gradients only; "
                "set sparse=False"
            )


def refuse_uncloneable(root: nn.Module) -> None:
    """Raises TypeError if :func:`structural_clone` cannot clone a module of ``root``."""
    for name, module in root.named_modules():
        refuse_uncloneable_module(name, module)


def refuse_uncloneable_module(name: str, module: nn.Module) -> None:
    """Raises TypeError if a copy of the module would not compute what the module computes."""
    where = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{where} is TorchScript: its parameters cannot be replaced; "
            "pass the module it was scripted from"
        )
    if "dynamo_ctx" in module.__dict__:
        raise TypeError(
            f"{where} is wrapped by torch.compile: the wrapper keeps running the original "
            "parameters; pass the module itself"
        )


def refuse_hooks_of_root(root: nn.Module) -> None:
    """Raises ValueError if the model itself has hooks: no stage calls it as a whole."""
    if has_hooks(root):
        raise ValueError(
            f"model: {type(root).__name__} itself has hooks, it must have none: the stages call "
            "parts of it; register them on modules inside it"
        )


def check_loadable(root: nn.Module) -> None:
    """Raises ValueError if a tensor is on meta whose values no checkpoint can have."""
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    in_checkpoints = {id(tensor) for tensor in root.state_dict(keep_vars=True).values()}
    how = "make the model by pipedream2bw.deferred_init(), which knows how tensors are initialised"
    for name, buffer in root.named_buffers():
        if buffer.is_meta and id(buffer) not in in_checkpoints:
            raise ValueError(
                f"buffer {name}: on meta and not persistent, it must be one of the two at most, "
                f"since no checkpoint has its values: {how}"
            )

    for name, module in root.named_modules():

        def refuse(tensor: torch.Tensor, name: str = name) -> torch.Tensor:
            if tensor.is_meta and id(tensor) not in registered:
                raise ValueError(
                    f"module {name!r}: a tensor of shape {tuple(tensor.shape)} on meta is neither "
                    f"parameter nor buffer, so no checkpoint has its values: {how}"
                )
            return tensor

        replace_tensors([module], refuse)
