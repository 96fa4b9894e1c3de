"""What TrainingArguments say, as options of PipelineModule and PipelineOptimizer, or refused."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments

import pipedream2bw as pd2

_STEPS_OF_THEIR_OWN = (
    "the pipeline steps each stage's parameters apart, when their gradients are there"
)
_REFUSED: dict[str, str] = {
    "fsdp": "the stages hold the parameters",
    "deepspeed": "the stages hold the parameters",
    "parallelism_config": "the pipeline arranges the processes",
    "auto_find_batch_size": "choose a size that fits",
    "neftune_noise_alpha": "each train() registers its hook, the stages are captured once",
    "use_cache": "microbatches are whole, no cache is kept",
    "use_liger_kernel": "its kernels cannot be captured",
    "debug": "the stages call no hooks of their modules",
    "fp16_full_eval": "the stages evaluate in the precision that they train in",
    "bf16_full_eval": "the stages evaluate in the precision that they train in",
    "torch_empty_cache_steps": "the stages run ahead of the loop",
    "push_to_hub": "call trainer.model.push_to_hub() after the training",
    "enable_jit_checkpoint": "one rank alone would save; use save_steps",
    "save_on_each_node": "rank 0 writes the model; give an output_dir that all nodes reach",
    "eval_use_gather_object": "results of replicas are tensors",
}
"""Arguments that are false unless they are set, and why a pipeline cannot obey them."""

_OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lion_32bit"),
    *("ademamix", "grokadamw", "stable_adamw", "adamw_anyprecision"),
    *("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
)
_OURS = {
    "num_microbatches": "gradient_accumulation_steps is their number",
    "example_args": "they are the first batch of the data",
    "example_kwargs": "they are the first batch of the data",
    "example_target": "it is the first batch of the data",
    "loss_reduction": "the Trainer's loss decides it",
    "normalizer": "the Trainer counts the items of a batch",
    "accumulate": "gradient_accumulation_steps is the number of microbatches",
    "plan": "give its num_stages, schedule and split",
    "profile": "give num_stages, schedule and split",
    "mesh": "processes are arranged by num_stages and width",
}
_KNOWN = frozenset(inspect.signature(pd2.PipelineModule).parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How many processes a replica has, and how many replicas there are."""

    ranks_per_replica: int
    width: int


def obeyed(
    args: TrainingArguments,
    pipeline: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    *,
    recomputes: bool,
) -> tuple[Arrangement, dict[str, Any], dict[str, Any]]:
    """What the arguments and the caller's options say.

    Returns:
        How processes are arranged; the options of PipelineModule; those of PipelineOptimizer.

    Raises:
        TypeError, ValueError: what a pipeline cannot obey, or options that do not go together.
    """
    for name, given in (("pipeline", pipeline), ("pipeline_optimizer", optimizer)):
        if not isinstance(given, Mapping):
            raise TypeError(f"{name}: {given!r} given, it must be a dict of options")
    _check_arguments(args, recomputes=recomputes)
    arrangement = _arrangement_of(args, pipeline)
    options = _pipeline_options(args, pipeline, arrangement, recomputes=recomputes)
    return arrangement, options, _optimizer_options(args, options, optimizer)


def _check_arguments(args: TrainingArguments, *, recomputes: bool) -> None:
    """Raises ValueError that names the first argument that a pipeline cannot obey."""
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"{name}: {value!r}, a pipeline cannot obey it: {reason}")
    optim = getattr(args.optim, "value", args.optim)
    if optim not in _OPTIMIZERS:
        raise ValueError(
            f"optim: {optim!r}, a pipeline knows {', '.join(_OPTIMIZERS)}: {_STEPS_OF_THEIR_OWN}; "
            "give another torch optimizer by optimizer_cls_and_kwargs="
        )
    keys = set(args.activation_checkpointing_kwargs or {}) - {"use_reentrant"}
    if recomputes and keys:
        raise ValueError(
            f"activation_checkpointing_kwargs: {sorted(keys)}, a pipeline recomputes whole stages: "
            "give names of modules, pipeline={'recompute': [...]}"
        )
    if args.torch_compile and recomputes:
        raise ValueError(
            "torch_compile: True, activation_checkpointing: True: a compiled stage keeps what its "
            "backward needs: choose one"
        )
    kept = args.accelerator_config.gradient_accumulation_kwargs or {}
    if kept.get("num_steps", args.gradient_accumulation_steps) != args.gradient_accumulation_steps:
        raise ValueError(
            f"accelerator_config: num_steps: {kept['num_steps']}, gradient_accumulation_steps: "
            f"{args.gradient_accumulation_steps}: the latter is the number of microbatches"
        )
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "accelerator_config: dispatch_batches: True, it must be False: the ranks of a replica "
            "read the same batches"
        )
    if args.train_sampling_strategy == "batch_rebalance" and args.world_size > 1:
        raise ValueError(
            "train_sampling_strategy: 'batch_rebalance', a pipeline cannot obey it: it gives each "
            "rank its own batches, the ranks of a replica need the same"
        )
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "save_only_model: True, load_best_model_at_end: True: the best model is loaded from a "
            "whole checkpoint"
        )


def check_model(model: Any) -> None:
    """Raises ValueError if the model's outputs have no names."""
    if not getattr(getattr(model, "config", None), "return_dict", True):
        raise ValueError("return_dict: False, it must be True: outputs are read by their names")


def _arrangement_of(args: TrainingArguments, pipeline: Mapping[str, Any]) -> Arrangement:
    """Returns how the processes are arranged; raises ValueError if they cannot be."""
    for name, reason in _OURS.items():
        if name in pipeline:
            raise ValueError(f"pipeline: {name}: {pipeline[name]!r} given: {reason}")
    if unknown := pipeline.keys() - _KNOWN:
        raise ValueError(
            f"pipeline: {', '.join(sorted(unknown))}: PipelineModule has no such option. Give the "
            "names of docs/reference/options.md, such as num_stages"
        )
    num_stages, per_rank = pipeline.get("num_stages"), pipeline.get("stages_per_rank") or 1
    if not isinstance(num_stages, int) or not isinstance(per_rank, int) or num_stages % per_rank:
        raise ValueError(
            f"pipeline: num_stages: {num_stages!r}, stages_per_rank: {per_rank!r}: num_stages must "
            "be a number that stages_per_rank divides"
        )
    if (launched := int(os.environ.get("WORLD_SIZE", "1"))) != args.world_size:
        raise ValueError(
            f"processes: {launched} of torchrun, {args.world_size} of TrainingArguments: on CPUs "
            "give use_cpu=True"
        )
    ranks = num_stages // per_rank if args.world_size > 1 else 1
    width = pipeline.get("width") or max(1, args.world_size // ranks)
    if width * ranks != args.world_size:
        raise ValueError(
            f"processes: {args.world_size}, num_stages: {num_stages}, stages_per_rank: {per_rank}, "
            f"width: {width}: {width * ranks} processes are needed, or one, with a thread per rank"
        )
    _check_number(args, num_stages, pipeline)
    return Arrangement(ranks_per_replica=ranks, width=width)


def _check_number(args: TrainingArguments, num_stages: int, pipeline: Mapping[str, Any]) -> None:
    """Raises ValueError unless the schedule can have so many microbatches."""
    schedule, m = pipeline.get("schedule") or "2bw", args.gradient_accumulation_steps
    if schedule not in pd2.schedule_names():
        return  # the pipeline checks one's own
    sizes: dict[str, int] = {"num_stages": num_stages, "num_microbatches": m}
    if "stages_per_rank" in pipeline:
        sizes["stages_per_rank"] = pipeline["stages_per_rank"]
    try:
        pd2.make_schedule(schedule, **sizes)
    except ValueError as error:
        raise ValueError(
            f"gradient_accumulation_steps: {m}, it is the number of microbatches: {error}. Raise "
            "it, and lower per_device_train_batch_size so that their product stays"
        ) from None


def _pipeline_options(
    args: TrainingArguments,
    pipeline: Mapping[str, Any],
    arrangement: Arrangement,
    *,
    recomputes: bool,
) -> dict[str, Any]:
    """The options of PipelineModule: what the caller gave, else what the arguments say."""
    options: dict[str, Any] = {
        "num_microbatches": args.gradient_accumulation_steps,
        "width": arrangement.width,
        "dynamic_shapes": True,  # batches are padded to their own lengths
        "timeout": float(args.ddp_timeout),
    }
    if args.ddp_bucket_cap_mb is not None:
        options["bucket_cap_mb"] = float(args.ddp_bucket_cap_mb)
    if recomputes:
        options["recompute"] = True
    if args.torch_compile:
        given = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        options["compile"] = {key: value for key, value in given.items() if value} or True
    if (args.bf16 or args.fp16) and not pipeline.get("autocast"):
        options["precision"] = "bf16" if args.bf16 else "fp16"
    return {**options, **pipeline}


def _optimizer_options(
    args: TrainingArguments, pipeline: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of PipelineOptimizer, as :func:`_pipeline_options`."""
    has_norm = args.max_grad_norm is not None and args.max_grad_norm > 0
    options: dict[str, Any] = {"max_grad_norm": args.max_grad_norm if has_norm else float("inf")}
    if "clip_grad_value" in optimizer:  # which clips in place of the norm
        options = {}
    if pipeline.get("precision") == "fp16" or pipeline.get("autocast") == torch.float16:
        options["loss_scale"] = pd2.LossScale()
    return {**options, **optimizer}
