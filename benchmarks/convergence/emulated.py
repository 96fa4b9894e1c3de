"""Late forwards without a pipeline: the unsplit model in PyTorch, as quick as without a delay.

A batch's gradient under "2bw" and "2bw_fresh" is that of a model whose stage i reads W(t-1) in the
first s_i microbatches and W(t) in the others. Here every layer with parameters does so by itself,
for its stage's rows of a batch: one forward and one backward a batch, at any depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.func import functional_call

import pipedream2bw as pd2

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TwoVersions(nn.Module):
    """A layer whose first ``num_late`` rows are computed with the old version of its weights."""

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old, self.new = old, new
        self.num_late = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_late == 0:
            return self.new(x)
        if self.num_late == len(x):
            return self.old(x)
        return torch.cat([self.old(x[: self.num_late]), self.new(x[self.num_late :])])


class Emulated:
    """Trains ``model`` with late forwards; it always holds the newest weights.

    Parameters that belong to no layer of their own are broadcast over the rows where they are used.

    Args:
        late: of each parameter by its name, how many microbatches of a batch read the old version.
        feedback: the coefficient of the ``ErrorFeedback`` that corrects the steps; 0: of none.
        warmup_batches: so many first ones have no delay.
        merged: whether all microbatches are one forward. Sums then differ in their last bits from
            the pipeline's, which has one microbatch after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        late: Mapping[str, int],
        num_microbatches: int,
        *,
        feedback: float = 0.0,
        warmup_batches: int = 0,
        merged: bool = True,
    ) -> None:
        self.model, self._old, self._loss_fn = model, copy.deepcopy(model), loss_fn
        self._num_microbatches, self._is_merged = num_microbatches, merged
        self._late, self._warmup_batches = late, warmup_batches
        self._shares = [
            feedback * late[name] / num_microbatches for name, _ in model.named_parameters()
        ]
        self._feedback = feedback > 0
        self._kept: list[torch.Tensor] | None = None
        self._num_steps = 0
        self._news, self._olds = list(model.parameters()), list(self._old.parameters())
        for new, old in zip(self._news, self._olds, strict=True):
            new.grad = old.grad = torch.zeros_like(new)  # one sum, in the microbatches' order
        self._layers: dict[str, TwoVersions] = {}  # by a parameter's name
        self._loose: list[str] = []  # names of parameters outside of layers
        self._both = copy.deepcopy(model)
        for name, _ in model.named_parameters():
            path, _, _ = name.rpartition(".")
            layer = model.get_submodule(path)
            if any(layer.children()):
                self._loose.append(name)
            elif isinstance(found := self._both.get_submodule(path), TwoVersions):
                self._layers[name] = found
            else:
                self._layers[name] = TwoVersions(self._old.get_submodule(path), layer)
                self._both.set_submodule(path, self._layers[name])

    def train_step(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The batch's loss; its gradients are in the parameters of ``model``."""
        for parameter in self._news:
            assert parameter.grad is not None
            parameter.grad.zero_()
        m = self._num_microbatches
        assert len(inputs) % m == 0, (len(inputs), m)
        size = len(inputs) // m
        total = torch.zeros(())
        has_delay = self._num_steps >= self._warmup_batches
        for part in range(1 if self._is_merged else m):
            rows = slice(None) if self._is_merged else slice(part * size, (part + 1) * size)
            first, last = (0, m) if self._is_merged else (part, part + 1)
            num_late = {
                name: size * (min(max(s, first), last) - first) * has_delay
                for name, s in self._late.items()
            }
            output = self._forward(inputs[rows], num_late)
            loss = self._loss_fn(output, target[rows]) / (m if not self._is_merged else 1)
            loss.backward()
            total += loss.detach()
        return total

    def _forward(self, inputs: torch.Tensor, num_late: Mapping[str, int]) -> torch.Tensor:
        for name, layer in self._layers.items():
            layer.num_late = num_late[name]
        loose = {name: self._loose_one(name, len(inputs), num_late[name]) for name in self._loose}
        return functional_call(self._both, loose, (inputs,))

    def _loose_one(self, name: str, rows: int, num_late: int) -> torch.Tensor:
        old, new = self._old.get_parameter(name), self.model.get_parameter(name)
        if num_late in (0, rows):
            return old if num_late else new
        return torch.cat(
            [old.expand(num_late, *old.shape), new.expand(rows - num_late, *new.shape)]
        )

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]) -> None:
        """Makes W(t+1) of W(t)."""
        for old, new in zip(self._olds, self._news, strict=True):
            old.copy_(new)
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
        if self._feedback and self._num_steps >= max(1, self._warmup_batches):  # the first has none
            steps = [new - old for new, old in zip(self._news, self._olds, strict=True)]
            if self._kept is not None:
                changes = zip(self._news, steps, self._kept, self._shares, strict=True)
                for new, step, kept, share in changes:
                    new.add_((step - kept) * share)
            self._kept = steps
        self._num_steps += 1

    @torch.no_grad()
    def uncorrected(self) -> nn.Module:
        """A copy of the model at w(t) = W(t) - c u(t-1), of which feedback makes plain steps."""
        model = copy.deepcopy(self.model)
        if self._kept is not None:
            for w, kept, share in zip(model.parameters(), self._kept, self._shares, strict=True):
                w.sub_(kept * share)
        return model


def late_forwards(
    model: nn.Module,
    loss_fn: LossFunction,
    example: torch.Tensor,
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    late: Sequence[int] = (),
) -> dict[str, int]:
    """How many of a batch's forwards are late for each parameter, as the product splits the model.

    Args:
        model: which becomes the pipeline's. Where it is split depends on what it and the loss cost.
        example: a batch as the pipeline is given.
        late: of each stage; by default as many as under the schedule.
    """
    late = late or pd2.make_schedule(schedule, num_stages, num_microbatches).late_forwards
    names = [name for name, _ in model.named_parameters()]
    if len(set(late)) == 1:  # the stages do not matter
        return dict.fromkeys(names, late[0])
    with pd2.PipelineModule(
        model,
        loss_fn,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        example_args=(example,),
    ) as pipe:
        programs = pipe.session.modes.first.programs
        found = {n: late[program.index] for program in programs for n in program.parameters}
    return {name: found[name] for name in names}
