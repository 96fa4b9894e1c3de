"""The capture of models that have to be traced: which way serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..model.clone import structural_clone, trial_copy
from ..model.sources import sources_kept
from ..progress import Begin
from .arguments import CallSignature
from .bytecode import read_bytecode
from .captured import Captured, Draft, first_layers
from .exporting import export
from .parameter_writes import WrittenParameterError
from .traced import Traced, reason_of
from .tracing import trace


@dataclasses.dataclass(kw_only=True)
class Search:
    """Tries the ways of capture that trace a model until one serves.

    Attributes:
        names: that ``split=`` gives.
        demand: gives the reason why a capture does not serve, None if it does.
        reasons: why the ways that were tried do not serve.
    """

    root: nn.Module
    signature: CallSignature
    num_stages: int
    names: tuple[str, ...]
    replicated: set[str]
    dynamic_shapes: bool
    demand: Callable[[Captured], str | None]
    reasons: list[str] = dataclasses.field(default_factory=list)

    def capture(self, prefer: str | None, begin: Begin) -> Captured:
        """The best capture; ``prefer`` is tried first. ValueError if no way serves."""
        root, signature = self.root, self.signature
        second_best: list[Draft] = []
        ways = ("fx", "export", "dynamo")
        for how in sorted(ways, key=lambda way: way != prefer):
            begin(how)
            try:
                traced = self._traced(how)
            except WrittenParameterError:
                raise
            except Exception as error:
                self.reasons.append(f"{how}: {reason_of(error)}")
                continue
            draft = Draft(root, how, traced, signature, notes=self.reasons)
            sizes = draft.parameter_bytes
            if len(sizes) < self.num_stages:
                self.reasons.append(f"{how}: {len(sizes)} layers, num_stages: {self.num_stages}")
                continue
            # Costs, which take a run on fake tensors, are found where no other way serves.
            reason = self._why_unbalanced("parameters", sizes, draft) or self._why_not(draft)
            if reason is None:
                return draft.captured
            second_best.append(draft)
            self.reasons.append(f"{how}: {reason}")
        served = []
        for draft in second_best:
            captured = draft.captured
            if (reason := self._why_unfit(captured)) is None:
                served.append(captured)
            else:
                self.reasons.append(f"{captured.how}: {reason}")
        if not served:
            tried = "".join(f"\n  {reason}" for reason in dict.fromkeys(self.reasons))
            raise ValueError(
                f"the model ({type(root).__name__}, in {'train' if root.training else 'eval'} "
                f"mode) could not be captured for {self.num_stages} "
                f"stage{'' if self.num_stages == 1 else 's'}. Give fewer stages if there are fewer "
                "layers. Move what else the reasons name from the forward into a module inside, "
                "which is called as it is. Or pass a list of modules, one for each stage. "
                f"What was tried:{tried}"
            )
        # Names that neither graph knows are refused where the stages' boundaries are chosen.
        best = min(served, key=lambda captured: len(_unknown(captured, self.names)))
        return dataclasses.replace(best, notes=tuple(dict.fromkeys([*best.notes, *self.reasons])))

    def _traced(self, how: str) -> Traced:
        # With dictionaries of buffers of its own: a forward may assign to them.
        buffers = {buffer: buffer for buffer in self.root.buffers()}
        scratch = structural_clone(self.root, {}, buffers, on_trial=True)
        if how == "fx":
            return trace(scratch, self.signature)
        make = export if how == "export" else read_bytecode
        return make(scratch, self.signature, self.replicated, dynamic_shapes=self.dynamic_shapes)

    def _why_unfit(self, captured: Captured) -> str | None:
        return captured.found.unfit or self.demand(captured)

    def _why_not(self, draft: Draft) -> str | None:
        captured = draft.captured
        if (reason := self._why_unfit(captured)) is not None:
            return reason
        if unknown := _unknown(captured, self.names):
            return f"split names {unknown[0]!r}, where its graph has no layer"
        costs = [
            (layer.name, layer.forward_cost + layer.backward_cost) for layer in captured.layers
        ]
        return self._why_unbalanced("cost", costs, draft)

    def _why_unbalanced(
        self, what: str, sizes: Sequence[tuple[str, float]], draft: Draft
    ) -> str | None:
        """Names a module that could not be traced and is too large for stages of equal cost."""
        whole, leaves = sum(size for _, size in sizes), draft.traced.leaves
        for name, size in sizes:
            if name in leaves and size * self.num_stages > 1.1 * whole:
                return (
                    f"{name} has {size / whole:.0%} of the {what}, num_stages: {self.num_stages}, "
                    f"and cannot be traced: {leaves[name]}"
                )
        return None


def explained(root: nn.Module, captured: Captured, error: Exception) -> Captured:
    """A capture of which a layer failed on fake tensors, with a note that says so.

    The model runs, on copies of all that it may write to, to see whether its arguments are wrong.

    Raises:
        ValueError: they are.
    """
    clone = trial_copy(root)
    examples = [leaf.example.detach().clone() for leaf in captured.signature.tensors]
    args, kwargs = captured.signature.rebuild(examples)
    try:
        with sources_kept(root), torch.no_grad():
            clone(*args, **kwargs)
    except Exception as refusal:
        reasons = "; then ".join(dict.fromkeys([reason_of(error), reason_of(refusal)]))
        raise ValueError(
            f"the model refuses the example arguments: {reasons}. Give example_args and "
            "example_kwargs of a call that the model takes, with as many rows as a microbatch"
        ) from refusal
    note = f"costs of {', '.join(captured.found.unknown)} are guessed: {reason_of(error)}"
    return dataclasses.replace(captured, notes=(*captured.notes, note))


def _unknown(captured: Captured, names: Sequence[str]) -> list[str]:
    known = first_layers(captured)
    return [name for name in names if name not in known]
