"""What else of torch the package relies on although torch does not document it, and why.

Some uses alone need these names, so nobody looks for them at import; the tests look for all of
them, and for names that are used and not listed.
"""

from __future__ import annotations

LATER = {
    "torch._C._autograd._saved_tensors_hooks_enable": "transforms of functions that fail in a "
    "stage",
    "torch._C._autograd._saved_tensors_hooks_is_enabled": "transforms of functions that fail "
    "in a stage",
    "torch._C._autograd._top_saved_tensors_default_hooks": "captures and added losses: whether "
    "activations are saved by hooks",
    "torch._C._functorch.get_dynamic_layer_stack_depth": "transforms of functions that fail in "
    "a stage",
    "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth": "transforms of functions "
    "that fail in a stage",
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
    "torch.export._trace": "prints graphs of what it cannot export, which is silenced",
    "torch.nn.functional._canonical_mask": "captures by torch.fx: masks of a Transformer",
    "torch.nn.functional._none_or_dtype": "captures by torch.fx: masks of a Transformer",
    "torch.nn.modules.transformer._detect_is_causal_mask": "captures by torch.fx: masks of a "
    "Transformer",
    "torch.nn.modules.transformer._get_seq_len": "captures by torch.fx: masks of a Transformer",
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
    "has_hooks": (
        "torch/csrc/autograd",
        "the backward in halves: leaves checkpoints whole",
    ),
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
