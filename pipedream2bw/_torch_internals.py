"""What of torch this package relies on although torch does not document it, and why.

torch may change these names in any release. What is used in every run is looked for when the
package is imported, in a few microseconds; what is missing is then named at once, not in the middle
of a training. The tests look for all of them, and for names that are used and not listed here.
"""

from __future__ import annotations

import importlib

import torch

from ._build_check import TESTED_TORCH

AT_IMPORT = {
    "torch.Tensor._make_wrapper_subclass": "gradient guards stand for gradients of the engine's",
    "torch.Tensor._version": "finds writes in place: recomputation, captures, guards",
    "torch.UntypedStorage._cdata": "tells storages apart, also those of fake tensors",
    "torch._C.Future": "what gradient hooks may give",
    "torch._C._autograd": "where torch keeps what follows",
    "torch._C._current_graph_task_id": "whether a backward runs in this thread",
    "torch._C._disabled_torch_function_impl": "gradient guards",
    "torch._C._distributed_c10d.GradBucket": "what gradient hooks get, as those of DDP do",
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
    "torch.utils._python_dispatch.TorchDispatchMode": "counts what operators do",
    "torch.utils._python_dispatch._disable_current_modes": "deferred initialisation",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "memory of DTensors",
    "torch.utils._pytree.TreeSpec": "arguments and outputs of any structure",
    "torch.utils._pytree.keystr": "names in arguments of any structure",
    "torch.utils._pytree.tree_flatten": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_flatten_with_path": "names in arguments of any structure",
    "torch.utils._pytree.tree_leaves": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_map": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_map_only": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_structure": "arguments and outputs of any structure",
    "torch.utils._pytree.tree_unflatten": "arguments and outputs of any structure",
    "torch.utils.flop_counter.flop_registry": "operations of products, convolutions, attention",
    "torch.utils.flop_counter.sdpa_backward_flop_count": "operations of attention on the CPU",
    "torch.utils.flop_counter.sdpa_flop_count": "operations of attention on the CPU",
}
"""Names that are there as soon as torch and this package's own imports are."""

LATER = {
    "torch._C._autograd._top_saved_tensors_default_hooks": "captures and added losses: whether "
    "activations are saved by hooks",
    "torch._dynamo.config": "any number of captures of one model",
    "torch._dynamo.config.accumulated_recompile_limit": "any number of captures of one model",
    "torch._dynamo.config.patch": "any number of captures of one model",
    "torch._dynamo.config.recompile_limit": "any number of captures of one model",
    "torch._dynamo.mark_dynamic": "captures by Dynamo: numbers of rows",
    "torch._dynamo.mark_static": "captures by Dynamo: other sizes",
    "torch._dynamo.maybe_mark_dynamic": "captures by Dynamo: dynamic_shapes=True",
    "torch._dynamo.source.UnspecializedParamBufferSource": "the torch.compile backend: which "
    "arguments of a graph are weights",
    "torch._inductor.cpp_builder.get_cpp_compiler": "compile=: whether there is a compiler",
    "torch._inductor.exc.InvalidCxxCompiler": "compile=: whether there is a compiler",
    "torch._subclasses.fake_impls.conv": "captures by Dynamo: numbers of rows of convolutions",
    "torch.ops.higher_order.autograd_function_apply": "captures by Dynamo: custom backwards",
}
"""Names in modules that take seconds to import, or that few use; where they are missing, that use
fails."""

OF_OBJECTS = {
    "guard.sloc.framework_loc": "captures by Dynamo: numbers of rows of convolutions",
    "module._backward_hooks": "hooks of modules: which are there, and shared by clones",
    "module._backward_pre_hooks": "hooks of modules",
    "module._buffers": "buffers, which modules may replace",
    "module._forward_hooks": "hooks of modules",
    "module._forward_pre_hooks": "hooks of modules",
    "module._is_full_backward_hook": "hooks of modules",
    "module._modules": "clones for each weight version",
    "module._parameters": "clones for each weight version",
    "operator._overloadpacket": "counts of operations",
    "operator._schema": "what an operator writes",
    "optimizer._opt_called": "schedulers ask whether the optimizer has stepped",
    "function._torchdynamo_disable": "add_loss() in compiled stages",
    "world.default_pg": "groups made by their members",
    "world.group_count": "names of groups",
    "world.pg_map": "groups made by their members",
}
"""Attributes that only objects have."""

IN_HEADERS = {
    "TESTING_ONLY_GenericMode": (
        "c10/core",
        "random numbers by key: the dispatch key for which torch itself registers nothing",
    ),
    "IncludeDispatchKeyGuard": ("c10/core/impl", "random numbers by key: in this thread alone"),
    "tls_is_dispatch_key_included": ("c10/core/impl", "random numbers by key"),
    "hasKernelForDispatchKey": ("ATen/core/dispatch", "random numbers by key: which operators"),
    "registerFallback": ("ATen/core/dispatch", "random numbers by key"),
    "registerImpl": ("ATen/core/dispatch", "random numbers by key"),
    "ThreadLocalDebugInfo": ("c10/util", "random numbers by key: in autograd's threads"),
    "graphsafe_set_state": ("c10/core", "random numbers in graphs"),
    "CUDAGeneratorState": ("ATen/cuda", "random numbers in graphs: seeds in the device's memory"),
    "VirtualGuardImpl": ("c10/core/impl", "streams of any device"),
    "PostAccumulateGradHook": ("torch/csrc/autograd", "gradients leave autograd as they arise"),
    "set_post_acc_grad_hooks": ("torch/csrc/autograd", "gradients leave autograd as they arise"),
    "tensor_post_acc_grad_hooks": ("torch/csrc/autograd", "which nodes give weights' gradients"),
    "FunctionPreHook": ("torch/csrc/autograd", "the backward in halves: keeps gradients"),
    "next_edges": ("torch/csrc/autograd", "the backward in halves: cuts the graph"),
    "pre_hooks": ("torch/csrc/autograd", "the backward in halves"),
    "release_variables": ("torch/csrc/autograd", "the backward in halves: frees activations"),
    "add_input_metadata": ("torch/csrc/autograd", "gradients of received values"),
    "undefined_input": ("torch/csrc/autograd", "gradients of received values"),
    "create_gradient_edge": ("torch/csrc/autograd", "gradients of received values"),
    "gradient_edge": ("torch/csrc/autograd", "where a backward begins"),
    "queue_callback": ("torch/csrc/autograd", "adds small gradients at a backward's end"),
    "resolve_process_group": ("torch/csrc/distributed/c10d", "groups of Python in the engine"),
}
"""Names of libtorch that the engine is compiled with: the folder of their header, and why. A torch
without one cannot build the package; one of another minor version does not load it."""


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
