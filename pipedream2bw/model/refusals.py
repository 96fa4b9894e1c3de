"""What a model must not have if a pipeline is to train it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .hooks import has_hooks
from .local_shards import is_dtensor
from .reads import Reads
from .replacing import OF_EVERY_MODULE, tensors_in
from .storages import ParameterElsewhere, bytes_of_storage, storage_of


def refuse_untrainable(root: nn.Module, loss_fn: object = None) -> None:
    """Refuses a model that a pipeline cannot train.

    Looks at its modules, at its parameters and buffers one by one, at the memory that they share,
    and at ``loss_fn``, in this order. No value is read: tensors may be on meta.

    Raises:
        ValueError: a module, parameter, buffer or ``loss_fn`` breaks a rule; the message names it.
        TypeError: a module cannot be cloned.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("inference_mode() is on, it must be off: make the pipeline outside it")
    for name, module in root.named_modules():
        refuse_uncloneable(name, module)
        _refuse_module(name, module)
    if has_hooks(root):
        raise ValueError(
            f"model: {type(root).__name__} itself has hooks, it must have none: the stages call "
            "parts of it; register them on modules inside it"
        )
    for name, parameter in root.named_parameters():
        _refuse_tensor("parameter", name, parameter)
        _refuse_parameter(name, parameter)
    for name, buffer in root.named_buffers():
        _refuse_tensor("buffer", name, buffer)
    _refuse_several_devices(root)
    _refuse_aliases(root)
    _refuse_views(root)
    if loss_fn is not None:
        _refuse_loss(root, loss_fn)


def _refuse_loss(root: nn.Module, loss_fn: object) -> None:
    """Refuses a loss that trains weights of its own, or reads what stages keep in their copies."""
    mine = {id(module): name for name, module in root.named_modules()}
    reads = Reads.of([("loss_fn", loss_fn)], root.modules())

    for where, item in reads.items():
        if isinstance(item, nn.Module) and id(item) in mine:
            for name, module in item.named_modules(prefix=mine[id(item)]):
                if read := reads.names & Reads.of_class(type(module)).assigned:
                    raise ValueError(
                        f"loss_fn: it reads the attribute {min(read)} of module {name!r}, which "
                        "the module's forward assigns: stages call copies of the module. Return "
                        "the value with the model's output, or add a loss by pipedream2bw.add_loss"
                    )
        elif isinstance(item, nn.Module):
            trained = [name for name, p in item.named_parameters() if p.requires_grad]
            if trained:
                kind = type(item).__name__
                told = kind if where == "loss_fn" else f"{where} ({kind})"
                raise ValueError(
                    f"loss_fn: {told} has {len(trained)} trainable "
                    f"parameters ({', '.join(trained[:5])}), it must have none: make them a part "
                    "of the model"
                )
        elif isinstance(item, nn.Parameter) and item.requires_grad:
            raise ValueError(
                f"loss_fn: {where} is trainable parameters of shape {list(item.shape)}, it must "
                "have none: make them a part of the model"
            )


def refuse_uncloneable(name: str, module: nn.Module) -> None:
    """Raises TypeError if a clone of the module would not compute what the module computes."""
    where = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{where} is TorchScript: its parameters cannot be replaced; "
            "pass the module it was scripted from"
        )
    parallel = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    if parallel or "dynamo_ctx" in module.__dict__:
        raise TypeError(
            f"{where} is a wrapper: stages run parts of the module inside. Pass that module, and "
            f"give {'width= for replicas' if parallel else 'compile= in place of torch.compile()'}"
        )


def refuse_synchronized(root: nn.Module) -> None:
    """Raises ValueError if a module would wait for processes that run other stages."""
    for name, module in root.named_modules():
        all_processes = (None, dist.group.WORLD)
        if isinstance(module, nn.SyncBatchNorm) and module.process_group in all_processes:
            raise ValueError(
                f"module {name!r}: SyncBatchNorm over all processes, some of which run other "
                "stages and would never come. Leave it a BatchNorm"
            )


def refuse_valueless(root: nn.Module) -> None:
    """Raises ValueError if a tensor has no values here, and no checkpoint can have them."""
    for name, parameter in root.named_parameters():
        if isinstance(parameter, ParameterElsewhere):
            raise ValueError(
                f"parameter {name}: a pipeline had it in another process, and its values are not "
                "here. To make a pipeline again, make the model anew and load what "
                "full_state_dict() gave"
            )
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    in_checkpoints = {id(tensor) for tensor in root.state_dict(keep_vars=True).values()}
    how = "make the model by pipedream2bw.deferred_init(), which knows how tensors are initialised"
    for name, buffer in root.named_buffers():
        if buffer.is_meta and id(buffer) not in in_checkpoints:
            raise ValueError(
                f"buffer {name}: on meta and not persistent, it must not be both, since no "
                f"checkpoint has its values: {how}"
            )
    for name, module in root.named_modules():
        for _, tensor in tensors_in(module):
            if tensor.is_meta and id(tensor) not in registered:
                raise ValueError(
                    f"module {name!r}: a tensor of shape {tuple(tensor.shape)} on meta is neither "
                    f"parameter nor buffer, so no checkpoint has its values: {how}"
                )


def _refuse_module(name: str, module: nn.Module) -> None:
    kinds = {kind.__name__ for kind in type(module).__mro__}  # without loading FSDP
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise ValueError(
            f"module {name or 'itself'}: {type(module).__name__}, it must not be sharded by FSDP, "
            "which frees parameters: each weight version has memory of its own. Leave out "
            "fully_shard(), and give PipelineOptimizer shard_state=True: with precision='bf16' and "
            "Adam 8 + 12/w bytes per parameter are left of 20 on each of w replicas. Tensor "
            "parallelism (mesh=) and more stages cut the rest"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        raise ValueError(
            f"module {name!r} has sparse=True: a pipeline takes dense gradients only; set "
            "sparse=False"
        )


def _refuse_tensor(kind: str, name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{kind} {name!r} is lazy and has no shape yet: run one forward of the model on real "
            "input before building the pipeline"
        )
    if tensor.is_inference():  # autograd keeps none
        raise ValueError(
            f"{name}: made in inference_mode(), a model to be trained must not be: make the model "
            "outside it"
        )
    if kind == "parameter" and is_dtensor(tensor):
        raise ValueError(
            f"parameter {name}: a DTensor, it must be a plain tensor: give the model to "
            "pipedream2bw.use_local_shards() first"
        )
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    if is_wrapper:
        raise ValueError(
            f"{kind} {name}: a {type(tensor).__name__}, which has no memory of its own, it must be "
            "a plain tensor: keep what it wraps as parameters or buffers, and make it of them in "
            "forward()"
        )


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name!r} has dtype {parameter.dtype}: a pipeline takes real floating-point "
            "parameters only"
        )
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks:
        raise ValueError(
            f"parameter {name}: {len(hooks)} hooks on its gradient, there must be none. If an open "
            "pipeline has the parameter, call close() of that pipeline first. In place of hooks of "
            "your own use hooks of modules, as the pipeline takes gradients as soon as they exist"
        )


def _refuse_several_devices(root: nn.Module) -> None:
    places = [(name, p.device) for name, p in root.named_parameters() if not p.is_meta]
    for name, device in places[1:]:
        if device != places[0][1]:
            raise ValueError(
                f"parameter {name!r} is on {device}, {places[0][0]!r} is on {places[0][1]}: build "
                "the model on one device; the pipeline moves each stage to its own (devices=)"
            )


def _refuse_aliases(root: nn.Module) -> None:
    """Refuses two Parameters over the same memory, which the stages' copies would take apart."""
    placed = sorted(
        (parameter.data_ptr(), number, name, parameter)
        for number, (name, parameter) in enumerate(root.named_parameters())
        if _is_dense(parameter.data) and parameter.data_ptr()
    )
    for (begin, _, one, first), (other_begin, _, other, second) in itertools.pairwise(placed):
        if other_begin < begin + first.nbytes:
            raise ValueError(
                f"parameters {one} and {other} are two Parameters over the same memory, with "
                f"requires_grad {first.requires_grad} and {second.requires_grad}. A tied weight "
                "must be one Parameter, trained or frozen wherever it is used. Assign the "
                "Parameter itself (head.weight = embedding.weight)"
            )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor's elements fill its memory, in whatever order."""
    if not _has_extent(tensor):
        return False
    first, end = bytes_of_storage(tensor)
    return end - first == tensor.nbytes


def _refuse_views(root: nn.Module) -> None:
    """Refuses tensors over a parameter's memory: they would keep the parameter's first values.

    Looks at buffers and at the modules' plain attributes, also in lists, tuples and dictionaries.
    """
    parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}  # by storage
    for name, parameter in root.named_parameters():
        if _has_extent(parameter.data):
            parameters.setdefault(storage_of(parameter), []).append((name, parameter))
    for where, tensor in _other_tensors(root):
        for name, parameter in parameters.get(storage_of(tensor), ()):
            first, second = bytes_of_storage(tensor), bytes_of_storage(parameter)
            if first[0] < second[1] and second[0] < first[1]:
                raise ValueError(
                    f"{where} is a view of the memory of parameter {name}: it must be made in the "
                    "forward, from the parameter. The pipeline has versions of the weights, which "
                    "lie elsewhere"
                )


def _other_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that modules hold, without Parameters, each after its name in messages."""
    for owner, module in root.named_modules():
        prefix = f"{owner}." if owner else ""
        # The old spectral_norm keeps the weight there until its hook has made another one.
        made_again = {
            hook.name for hook in module._forward_pre_hooks.values() if type(hook) is SpectralNorm
        }
        for name, buffer in module.named_buffers(recurse=False):
            if _has_extent(buffer):
                yield f"buffer {prefix}{name}", buffer
        for name, tensor in tensors_in(module):
            if name not in OF_EVERY_MODULE and name not in made_again and _has_extent(tensor):
                yield f"attribute {prefix}{name}", tensor


def _has_extent(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
