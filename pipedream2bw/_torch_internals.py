"""What of torch this package needs in every run although torch does not document it, and why.

torch may change these names in any release. They are looked for when the package is imported, in a
few microseconds; what is missing is then named at once, not in the middle of a training.
"""

from __future__ import annotations

import importlib

import torch

from ._build_check import TESTED_TORCH

AT_IMPORT = {
    "torch.Tensor._make_wrapper_subclass": "gradient guards stand for gradients of the engine's",
    "torch.Tensor._version": "finds writes in place: recomputation, captures, guards",
    "torch.UntypedStorage._cdata": "tells storages apart, also those of fake tensors",
    "torch._C.DisableTorchFunctionSubclass": "parameters of stages that another process runs",
    "torch._C.Future": "what gradient hooks may give",
    "torch._C._autograd": "where torch keeps what follows",
    "torch._C._current_graph_task_id": "whether a backward runs in this thread",
    "torch._C._disabled_torch_function_impl": "gradient guards",
    "torch._C._distributed_c10d.GradBucket": "what gradient hooks get, as those of DDP do",
    "torch._C._functorch.peek_interpreter_stack": "whether a call is transformed by torch.func",
    "torch._functorch.config.donated_buffer": "compiled stages of split backwards",
    "torch._ops.OpOverload": "operators of exported graphs: what they write and draw",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "models run without values",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "models run without values",
    "torch._subclasses.fake_tensor.FakeTensor": "models run without values",
    "torch._subclasses.fake_tensor.FakeTensorMode": "models run without values",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException": "models run without values",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": "models run without values",
    "torch.distributed.distributed_c10d._get_default_store": "how ranks find each other",
    "torch.distributed.distributed_c10d._new_process_group_helper": "groups made by their members",
    "torch.distributed.distributed_c10d._world": "groups: their number, the default group",
    "torch.nn.modules.batchnorm._NormBase": "norms: statistics, and parameters kept in float32",
    "torch.overrides._get_current_function_mode_stack": "contexts around a call",
    "torch.utils._device.DeviceContext": "contexts around a call: the default device",
    "torch.utils._python_dispatch.TorchDispatchMode": "counts what operators do",
    "torch.utils._python_dispatch._disable_current_modes": "deferred initialisation",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "contexts around a call",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "tensors without memory",
    "torch.utils._pytree.GetAttrKey": "names in arguments of any structure",
    "torch.utils._pytree.TreeSpec": "arguments and outputs of any structure",
    "torch.utils._pytree.keystr": "names in arguments of any structure",
    "torch.utils._pytree.register_pytree_node": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_flatten": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_flatten_with_path": "names in arguments of any structure",
    "torch.utils._pytree.tree_leaves": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_map": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_map_only": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_map_with_path": "names in state of any structure",
    "torch.utils._pytree.tree_structure": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_unflatten": "arguments and outputs of any structure",
    "torch.utils.flop_counter.flop_registry": "operations of products, convolutions, attention",
    "torch.utils.flop_counter.sdpa_backward_flop_count": "operations of attention on the CPU",
    "torch.utils.flop_counter.sdpa_flop_count": "operations of attention on the CPU",
}
"""Names that are there as soon as torch and this package's own imports are."""


def check_torch_internals() -> None:
    """Looks for the names of :data:`AT_IMPORT`, in modules that the package imports anyway.

    Raises:
        ImportError: one is missing: names it, why it is needed, and torch's version.
    """
    for name, why in AT_IMPORT.items():
        found: object = torch
        parts = name.split(".")
        for number, part in enumerate(parts[1:], 2):
            try:
                found = getattr(found, part)
            except AttributeError:
                try:
                    found = importlib.import_module(".".join(parts[:number]))
                except ImportError:
                    raise ImportError(
                        f"torch {torch.__version__} has no {name}, which pipedream2bw relies on "
                        f"({why}): install a torch that it is tested with, {TESTED_TORCH}"
                    ) from None
