"""Time of one AdamW step: the fused pass of a stage against torch's fused in-place one, and a copy.

Under 2BW a step must leave the old weights alone, so torch's optimizer would have to copy them
first. Here the new ones are written over the gradients, in buffers that take turns. Measured, on
one thread, in alternation:

    in place      torch.optim.AdamW(fused=True)
    copied        the same and torch._foreach_copy_ of all weights
    pipedream2bw  reads W(t), writes W(t+1) over the gradients, in a stage's flat buffers

In mixed precision a step reads and writes 30 bytes per parameter: float32 master and moments, which
it changes (24), the float32 gradient (4) and the bfloat16 weights of the next version (2); with a
split master 28. Measured beside each, in alternation, a plain copy that reads and writes as many.

With error feedback (pd2.ErrorFeedback) a step also reads and writes the step before it. Measured
beside the step, and then the correction, tensor by tensor, by torch.

    python benchmarks/optimizer_step.py [--rounds 15] [--smoke] [--json PATH]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from measuring.report import Figure, arguments, describe, machine, print_table, write_json

from pipedream2bw import _C

NUM_TENSORS = 64
OURS = "pipedream2bw, over the gradients"
IN_PLACE = "torch, fused, in place"
COPIED = "torch, fused, weights copied"
MAX_RATIOS = {IN_PLACE: 1.03, COPIED: 0.78}
FED = "error feedback in the pass"
TWO_PASSES, PLAIN = "the step, then error feedback", "the step without feedback"
# By bytes: 36 a parameter, over 28 and at least 20 in the second pass; as much over 28 alone.
MAX_FED_OVER_TWO_PASSES, MAX_FED_OVER_PLAIN = 0.75, 1.5
MIXED_BYTES = {
    "bfloat16 and master": 30,
    "bfloat16 and master, error feedback": 30,
    "bfloat16 and split master": 28,
}
MIN_BANDWIDTH = 0.9  # of the copy's, per byte read or written
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
ADAMW = [
    _C.GroupOptions(
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        decoupled_weight_decay=True,
    )
]


class StockStep:
    """torch.optim.AdamW over separate parameters, in place."""

    def __init__(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        self.parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def __call__(self) -> None:
        self.optimizer.step()


class StockStepAndCopy(StockStep):
    """The same, and a copy of all weights."""

    def __init__(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        super().__init__(weights, gradients)
        self.copies = [weight.clone() for weight in weights]

    @torch.no_grad()
    def __call__(self) -> None:
        self.optimizer.step()
        torch._foreach_copy_(self.copies, self.parameters)


class FusedStep:
    """pipedream2bw's optimizer in the three buffers of a stage that keeps two versions."""

    def __init__(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        feedback: float = 0.0,
    ) -> None:
        names = [f"parameter{i}" for i in range(len(weights))]
        self.stage = _C.Stage(parameters=weights, names=names, num_versions=2)
        buffers = [self.stage.slot_buffers(slot)[0] for slot in range(3)]
        self.newest, self.gradient, self.other = buffers
        start, slices = self.newest.data_ptr(), []
        for i, gradient in enumerate(gradients):
            offset = (self.stage.weight(0, i).data_ptr() - start) // self.newest.element_size()
            slices.append(_C.ParameterSlice(offset=offset, numel=gradient.numel(), group=0))
            self.stage.weight(1, i).copy_(gradient)
        self.slices = slices
        self.given = self.gradient.clone()
        self.optimizer = _C.FusedOptimizer("adam", slices, self.newest)
        self.has_gradient = [True] * len(slices)
        self.groups = [group.with_feedback(feedback) for group in ADAMW]

    def __call__(self) -> None:
        new = self.gradient
        self.optimizer.step(
            w=self.newest,
            gradient=self.gradient,
            w_out=new,
            groups=self.groups,
            has_gradient=self.has_gradient,
        )

    def accumulate(self) -> None:
        """The next batch's gradients, where the oldest version was."""
        self.newest, self.gradient, self.other = self.gradient, self.other, self.newest
        self.gradient.copy_(self.given)

    def of_each(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[each.offset : each.offset + each.numel] for each in self.slices]

    def weights(self) -> list[torch.Tensor]:
        return self.of_each(self.newest)


class StepThenFeedback(FusedStep):
    """The step, and the correction in a second pass."""

    def __init__(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        super().__init__(weights, gradients)
        self.kept = [torch.zeros_like(gradient) for gradient in gradients]

    def __call__(self) -> None:
        super().__call__()
        both = zip(self.of_each(self.newest), self.of_each(self.gradient), strict=True)
        for i, (before, after) in enumerate(both):
            step = after - before
            after.add_((step - self.kept[i]) * 1.0)
            self.kept[i] = step


class MixedStep:
    """The same with bfloat16 versions and float32 masters; the gradients stay where they are."""

    def __init__(
        self,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        *,
        split: bool,
        feedback: float,
    ) -> None:
        names = [f"parameter{i}" for i in range(len(weights))]
        dtypes = [torch.bfloat16] * len(weights)
        self.stage = _C.Stage(
            parameters=weights, names=names, num_versions=2, dtypes=dtypes, split_master=split
        )
        self.slots = [self.stage.slot_buffers(slot)[0] for slot in range(2)]
        (self.master,) = self.stage.master_buffers()
        self.gradient = torch.zeros(self.master.shape)
        start, slices = self.slots[0].data_ptr(), []
        for i, gradient in enumerate(gradients):
            offset = (self.stage.weight(0, i).data_ptr() - start) // 2
            slices.append(_C.ParameterSlice(offset=offset, numel=gradient.numel(), group=0))
            self.gradient[offset : offset + gradient.numel()] = gradient
        self.optimizer = _C.FusedOptimizer("adam", slices, self.gradient)
        self.has_gradient = [True] * len(slices)
        self.groups = [group.with_feedback(feedback) for group in ADAMW]

    def __call__(self) -> None:
        newest, other = self.slots
        self.optimizer.step(
            w=newest,
            gradient=self.gradient,
            w_out=other,
            groups=self.groups,
            has_gradient=self.has_gradient,
            master=self.master,
        )
        self.slots.reverse()


class Copy:
    """Reads and writes ``num_bytes``."""

    def __init__(self, num_bytes: int) -> None:
        self.source = torch.ones(num_bytes // 8)
        self.target = torch.zeros(num_bytes // 8)

    def __call__(self) -> None:
        self.target.copy_(self.source)


def relative_distance(actual: list[torch.Tensor], expected: list[torch.nn.Parameter]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((a - e.detach()).norm() / e.detach().norm()) for a, e in pairs)


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, one step of each kind in turn; two rounds to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(-2, rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - start)
            if isinstance(step, FusedStep):
                step.accumulate()
    return seconds


def main() -> None:
    options = arguments(__doc__.splitlines()[0], rounds=15).parse_args()
    rounds = 5 if options.smoke else options.rounds
    num_parameters = (1 if options.smoke else 32) * 1024 * 1024
    where = machine()
    print(describe(where), flush=True)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = list(torch.randn(num_parameters).chunk(NUM_TENSORS))
    gradients = list(torch.randn(num_parameters).chunk(NUM_TENSORS))
    in_place = StockStep(weights, gradients)
    fused = FusedStep(weights, gradients)
    steps = {IN_PLACE: in_place, COPIED: StockStepAndCopy(weights, gradients), OURS: fused}
    seconds = measure(steps, rounds)
    distance = relative_distance(fused.weights(), in_place.parameters)
    if not distance < 1e-6:
        raise SystemExit(f"the weights differ by {distance:.1e} of their norm: must be below 1e-6")
    print(
        f"\nAdamW, {num_parameters:,} float32 parameters in {NUM_TENSORS} tensors, one thread, "
        f"{rounds} rounds; the weights differ by {distance:.1e} of their norm"
    )
    times = [
        Figure(name, "milliseconds", [1e3 * value for value in values])
        for name, values in seconds.items()
    ]
    figures = [
        Figure(
            OURS,
            f"time over {name}'s",
            [mine / theirs for mine, theirs in zip(seconds[OURS], seconds[name], strict=True)],
            at_most=limit,
        )
        for name, limit in MAX_RATIOS.items()
    ]
    del in_place, fused, steps
    fed = {
        FED: FusedStep(weights, gradients, feedback=1.0),
        TWO_PASSES: StepThenFeedback(weights, gradients),
        PLAIN: FusedStep(weights, gradients),
    }
    seconds = measure(dict(fed), rounds)
    times += [
        Figure(name, "milliseconds", [1e3 * value for value in values])
        for name, values in seconds.items()
        if name != PLAIN
    ]
    figures += [
        Figure(
            name,
            f"time over {other}'s",
            [mine / theirs for mine, theirs in zip(seconds[name], seconds[other], strict=True)],
            at_most=limit,
        )
        for name, other, limit in (
            (FED, TWO_PASSES, MAX_FED_OVER_TWO_PASSES),
            (FED, PLAIN, MAX_FED_OVER_PLAIN),
        )
    ]
    del fed
    for name, bytes_each in MIXED_BYTES.items():
        is_split, is_fed = "split" in name, "feedback" in name
        mixed = MixedStep(weights, gradients, split=is_split, feedback=float(is_fed))
        copy = f"a copy, {bytes_each} bytes per parameter"
        taken = measure({name: mixed, copy: Copy(bytes_each * num_parameters)}, rounds)
        times += [
            Figure(kind, "milliseconds", [1e3 * value for value in values])
            for kind, values in taken.items()
        ]
        ratios = [theirs / mine for mine, theirs in zip(taken[name], taken[copy], strict=True)]
        figures.append(Figure(name, "bandwidth over the copy's", ratios, at_least=MIN_BANDWIDTH))
        del mixed
    print_table(times, judged=False)
    print_table(figures, judged=not options.smoke)
    write_json(options.json, where, figures + times, rounds=rounds, smoke=options.smoke)


if __name__ == "__main__":
    main()
