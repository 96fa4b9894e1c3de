"""A model made ready for profiling: captured, with its loss, divided into groups of layers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...capture.capture import capture_finely
from ...capture.captured import Captured, Layer, names_of_layers
from ...capture.chain import as_root
from ...capture.costs import CostCounter
from ...capture.device_figures import NOMINAL, DeviceFigures
from ...capture.dry_run import dry_run
from ...checks import check_whole_number
from ...model.fingerprint import describe_parameters
from ...model.materialize import Example, for_capture, home_of, is_on_meta
from ...model.metrics import computed_loss
from ...model.refusals import refuse_untrainable
from ...model.surroundings import plain_modes
from ...options import Options
from ...rules import FUNCTION, check_values
from .layer_groups import Group, group_layers
from .profile import MicrobatchProfile, Profile, ProfiledDevice, ProfiledLayer, SharedParameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is profiled; the fields are the arguments of :func:`pipedream2bw.profile`."""

    model: nn.Module | Sequence[nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    example_args: Sequence[Any]
    example_kwargs: Mapping[str, Any] | None
    target: Any
    microbatch_rows: Sequence[int]
    replicated: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A captured model, its graphs with the loss, and which layers are timed together.

    Attributes:
        device: where the model is.
        loss: the name of the loss function.
        graphs: one for each number of rows, increasing.
    """

    root: nn.Module
    device: torch.device
    loss: str
    graphs: list[LossGraph]
    groups: list[Group]
    layers: tuple[ProfiledLayer, ...]
    shared_parameters: tuple[SharedParameter, ...]

    @classmethod
    def of(cls, subject: Subject, dry: DeviceFigures | None) -> Prepared:
        """Checks and captures the model.

        Raises:
            ValueError, TypeError: with the rule and both values.
        """
        root, loss_fn = as_root(subject.model), subject.loss_fn
        example = _checked_example(root, subject)
        rows = checked_rows(subject.microbatch_rows)
        device = home_of(root, example)
        if dry is None and is_on_meta(root):
            raise ValueError(
                "the model is on meta, a measured profile needs weights: give dry= for a profile "
                "from a device's figures"
            )
        with for_capture(root, example) as (held, call), plain_modes():
            target = subject.target
            if held is not root:  # stand-ins, which are on the CPU
                target = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, target)
            captured = capture_finely(held, call, subject.replicated)
            graphs = [
                add_loss(
                    captured,
                    held,
                    loss_fn,
                    target,
                    rows=count,
                    replicated=subject.replicated,
                    figures=dry or NOMINAL,
                )
                for count in rows
            ]
            for graph in graphs:
                if (error := graph.captured.found.error) is not None:
                    raise ValueError(
                        f"the model or loss_fn refuses {graph.rows} rows: {error}"
                    ) from error
            nominal = [layer.forward_cost + layer.backward_cost for layer in captured.layers]
            groups = group_layers(graphs[-1].captured, held, [*nominal, 0.0])
            layers = _layers(captured, held, groups)
        return cls(
            root=root,
            device=device,
            loss=getattr(loss_fn, "__name__", type(loss_fn).__name__),
            graphs=graphs,
            groups=groups,
            layers=layers,
            shared_parameters=_shared_parameters(captured, root),
        )

    def layers_of_group(self, index: int) -> str:
        """Names the first and the last layer of a group, but for the loss."""
        group = self.groups[index]
        names = [layer.name for layer in self.layers[group.first : group.end]]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def profile(
        self,
        device: ProfiledDevice,
        microbatches: Sequence[MicrobatchProfile],
        *,
        seconds_per_update_byte: Mapping[str, float],
        seconds_per_action: float = 0.0,
    ) -> Profile:
        """The profile of the model from the costs of its microbatches, without links."""
        return Profile(
            model_name=type(self.root).__name__,
            parameters=describe_parameters(self.root),
            device=device,
            torch_version=torch.__version__,
            loss=self.loss,
            layers=self.layers,
            shared_parameters=self.shared_parameters,
            microbatches=tuple(microbatches),
            seconds_per_update_byte=seconds_per_update_byte,
            seconds_per_action=seconds_per_action,
            links=None,
            all_reduce=(),
        )


def _checked_example(root: nn.Module, subject: Subject) -> Example:
    FUNCTION.check("loss_fn", subject.loss_fn)
    example = {"example_args": subject.example_args, "example_kwargs": subject.example_kwargs}
    check_values(Options, example)
    refuse_untrainable(root, subject.loss_fn)
    return tuple(subject.example_args), dict(subject.example_kwargs or {})


def checked_rows(rows: Sequence[int]) -> Sequence[int]:
    """The numbers of rows; ValueError unless they are positive and increase."""
    if not isinstance(rows, (tuple, list)) or not rows:
        raise ValueError(f"microbatch_rows: {rows!r} given, it must be a sequence of numbers")
    for count in rows:
        check_whole_number("microbatch_rows", count)
    for before, count in itertools.pairwise(rows):
        if count <= before:
            raise ValueError(f"microbatch_rows: {count} after {before}, they must increase")
    return rows


def _layers(
    captured: Captured, root: nn.Module, groups: Sequence[Group]
) -> tuple[ProfiledLayer, ...]:
    parameters, names = dict(root.named_parameters()), names_of_layers(captured)
    layers: list[ProfiledLayer] = []
    held: set[str] = set()
    for group in groups:
        shift = groups[group.like].first - group.first
        for index in group.layers:
            if index == len(captured.layers):
                break  # the loss
            used = [name for name in captured.layer_parameters[index] if name not in held]
            held.update(used)
            new = [parameters[name] for name in used]
            layers.append(
                ProfiledLayer(
                    name=names[index],
                    parameter_bytes=sum(parameter.nbytes for parameter in new),
                    trained_bytes=sum(each.nbytes for each in new if each.requires_grad),
                    can_cut_after=index == group.end - 1,
                    repeats=index + shift if shift else None,
                )
            )
    return tuple(layers)


def _shared_parameters(captured: Captured, root: nn.Module) -> tuple[SharedParameter, ...]:
    parameters = dict(root.named_parameters())
    users: dict[str, list[int]] = {}
    for index, names in enumerate(captured.layer_parameters):
        for name in names:
            users.setdefault(name, []).append(index)
    sizes: dict[tuple[int, ...], list[int]] = {}  # bytes of all, and of those that are trained
    for name, layers in users.items():
        if len(layers) > 1:
            both = sizes.setdefault(tuple(layers), [0, 0])
            both[0] += parameters[name].nbytes
            both[1] += parameters[name].nbytes * parameters[name].requires_grad
    return tuple(
        SharedParameter(whole, trained, layers) for layers, (whole, trained) in sizes.items()
    )


# ---------------------------------------------------------------- the loss


@dataclasses.dataclass(frozen=True)
class LossGraph:
    """A captured model with its loss as the last layer, for microbatches of some number of rows.

    Attributes:
        rows: rows of a microbatch.
        captured: the model's capture with one layer more, the loss; costs are for these rows.
        inputs: a microbatch's inputs of the graph, by name.
    """

    rows: int
    captured: Captured
    inputs: dict[str, torch.Tensor]


def add_loss(
    captured: Captured,
    root: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    target: Any,
    *,
    rows: int,
    replicated: Sequence[str],
    figures: DeviceFigures,
) -> LossGraph:
    """Adds ``loss_fn(output, target)`` to a capture and finds its costs for a number of rows.

    Tensors of the example call and of ``target`` are cut or repeated along dimension 0.
    """
    leaves, structure = pytree.tree_flatten(target)
    is_input = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(captured.graph, copies)
    (old_output,) = (node for node in captured.graph.nodes if node.op == "output")
    spec = old_output.meta.get("out_spec")
    targets = [graph.placeholder("target") for given in is_input if given]

    def loss_of(output: Any, given: Sequence[torch.Tensor]) -> torch.Tensor:
        tensors = iter(given)
        target = pytree.tree_unflatten(
            [next(tensors) if i else leaf for leaf, i in zip(leaves, is_input, strict=True)],
            structure,
        )
        value = output if spec is None else pytree.tree_unflatten(list(output), spec)
        return computed_loss(loss_fn, value, target)

    loss = graph.call_function(loss_of, (output, targets))
    graph.output(loss)
    whole = set(replicated)
    examples = [
        of_rows(leaf.example, rows) if leaf.carries_batch(whole) else leaf.example.detach()
        for leaf in captured.signature.tensors
    ]
    given = [of_rows(leaf, rows) for leaf, i in zip(leaves, is_input, strict=True) if i]
    tensors = [*examples, *given]
    counter = CostCounter(figures, count_saved=True)
    found = dry_run(root, graph, captured.attribute_of, tensors, counter)
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, tensors, strict=True))
    assert found.costs is not None
    costs = found.costs
    made = dataclasses.replace(
        captured,
        layers=[*captured.layers, Layer("loss", costs.forward[-1], costs.backward[-1])],
        model_inputs=(*captured.model_inputs, *(node.name for node in targets)),
        graph=graph,
        layer_nodes=[*(copies[node] for node in captured.layer_nodes), loss],
        layer_parameters=[*captured.layer_parameters, ()],
        layer_buffers=[*captured.layer_buffers, ()],
        found=found,
    )
    return LossGraph(rows, made, {name: values[name] for name in made.model_inputs})


def of_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A new tensor with so many of the tensor's rows, which are repeated if there are fewer."""
    index = torch.arange(rows, device=tensor.device) % tensor.shape[0]
    return tensor.detach()[index]
