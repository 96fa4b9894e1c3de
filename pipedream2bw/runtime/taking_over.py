"""How a process takes a model over: the weights of its stages, and the clones that serve them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..model.clone import copies_of_buffers, copy_training_flags, structural_clone
from ..model.precision import Precision
from .stage_values import take_over
from .stage_weights import StageSpec, StageWeights, another_copy


def share_out(
    model: nn.Module, specs: Sequence[StageSpec], hooked: Collection[str]
) -> list[StageWeights]:
    """Takes the model over: the weights of the stages that this process runs.

    Args:
        hooked: names of the modules on which a forward registers hooks.
    """
    made: list[StageWeights] = []
    taken: dict[nn.Module, set[str]] = {}  # by root
    for pipeline in sorted({spec.pipeline for spec in specs}):
        mine = [spec for spec in specs if spec.pipeline == pipeline]
        root = (
            model
            if pipeline == 0 or mine[0].copies is None
            else _second_model(model, mine[0].precision)
        )
        of_pipeline: list[StageWeights] = []
        names = taken.setdefault(root, set())
        for spec in mine:
            of_pipeline.append(StageWeights(model, root, spec, frozenset(names)))
            names.update(of_pipeline[-1].in_root)
        for group in _without_common_parameters(of_pipeline):
            _make_clones(model, root, group, hooked)
        made += of_pipeline
    take_over(made, {spec.index: spec.group for spec in specs}.get)
    return made


def _second_model(model: nn.Module, precision: Precision) -> nn.Module:
    """The model over parameters and buffers of its own, for a second pipeline in this process."""
    parameters = {parameter: another_copy(parameter, precision) for parameter in model.parameters()}
    return structural_clone(model, parameters, copies_of_buffers(model))


def _without_common_parameters(stages: Sequence[StageWeights]) -> list[list[StageWeights]]:
    """Groups of stages that one clone serves."""
    groups: list[list[StageWeights]] = []
    for stage in stages:
        for group in groups:
            if all(stage.in_root.keys().isdisjoint(other.in_root) for other in group):
                group.append(stage)
                break
        else:
            groups.append([stage])
    return groups


def _make_clones(
    model: nn.Module, root: nn.Module, stages: Sequence[StageWeights], hooked: Collection[str]
) -> None:
    modules = [root.get_submodule(name) for name in hooked]
    for slot in range(max(stage.engine.num_slots for stage in stages)):
        mapping: dict[nn.Parameter, nn.Parameter] = {}
        for stage in stages:
            mapping.update(stage.in_slot(slot % stage.engine.num_slots))
        clone = structural_clone(root, mapping, hooked=modules)
        copy_training_flags(model, clone)
        for stage in stages:
            if slot < stage.engine.num_slots:
                stage.clones.append(clone)
