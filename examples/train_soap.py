"""Trains a byte-level GPT with SOAP, whose preconditioners are computed in the pipeline's bubbles.

    python examples/train_soap.py                                       one thread per stage
    torchrun --standalone --nproc-per-node 2 examples/train_soap.py     one process per stage

SOAP (arXiv 2409.11321, algorithm 3) is Adam in the eigenbases of Shampoo's two matrices for each
weight. The bases change slowly, so every few batches each is brought up to date, by a product and a
QR decomposition. As PipeFisher does (arXiv 2211.14133), ``pd2.InBubbles`` has that done while the
stage would wait for others: what batch t begins, batch t + ``--every`` uses. With ``--critical``
the update itself does it, and the losses are the same. Prints the losses, the time, and for the
schedule's idle slots of one batch how many of the decompositions have room there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from byte_text import RandomBatches, load_text
from gpt import GPT, next_token_loss
from loss_curve import draw_losses, mean_of_last

import pipedream2bw as pd2

Bases = tuple[torch.Tensor, torch.Tensor]


class Refreshes:
    """Has bases computed, to be used when the next ones are begun. Shared by stages' optimizers.

    Args:
        bubbles: None: they are computed at once.
    """

    def __init__(self, bubbles: pd2.InBubbles | None) -> None:
        self.bubbles = bubbles
        self.begun: dict[Any, Callable[[Bases], Bases]] = {}  # by parameter
        self.seconds: list[float] = []  # that each took

    def __deepcopy__(self, memo: dict[int, Any]) -> Refreshes:
        return self

    def next(self, parameter: Any, former: Bases, compute: Callable[[Bases], Bases]) -> Bases:
        """Gives what was begun before, or the former bases, and begins to compute the next ones."""
        end = self.begun.pop(parameter, None)
        bases = former if end is None else end(former)

        def timed() -> Bases:
            start = time.perf_counter()
            computed = compute(bases)
            self.seconds.append(time.perf_counter() - start)
            return computed

        if self.bubbles is None:
            computed = timed()
            self.begun[parameter] = lambda _: computed
        else:
            shape = list(parameter.shape)
            self.begun[parameter] = self.bubbles.begin(f"the bases of {shape}", timed).end
        return bases


def refreshed(left: torch.Tensor, right: torch.Tensor, bases: Bases) -> Bases:
    """One step of orthogonal iteration towards the eigenvectors of both matrices."""
    return torch.linalg.qr(left @ bases[0]).Q, torch.linalg.qr(right @ bases[1]).Q


class Soap(torch.optim.Optimizer):
    """SOAP for matrices, Adam for all else.

    Args:
        every: batches after which bases are brought up to date.
    """

    def __init__(
        self, params: Any, refreshes: Refreshes, *, lr: float = 3e-3, beta: float = 0.95, every: int
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "every": every})
        self.refreshes = refreshes

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, group)

    def step_one(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[parameter], group["beta"]
        is_matrix = grad.dim() == 2 and max(grad.shape) <= 1024
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
            if is_matrix:
                state["left"], state["right"] = grad @ grad.T, grad.T @ grad
                for side in ("left", "right"):
                    state[f"{side}_basis"] = torch.linalg.eigh(state[side]).eigenvectors
        state["step"] += 1
        if is_matrix and state["step"] % group["every"] == 0:
            former = state["left_basis"], state["right_basis"]
            sides = state["left"].clone(), state["right"].clone()  # later steps change them
            bases = self.refreshes.next(parameter, former, lambda bases: refreshed(*sides, bases))
            state["left_basis"], state["right_basis"] = bases
        turned = self.turned(grad, state, is_matrix)
        state["mean"].lerp_(grad, 1 - beta)
        state["square"].mul_(beta).addcmul_(turned, turned, value=1 - beta)
        correction = 1 - beta ** state["step"]
        mean = self.turned(state["mean"], state, is_matrix) / correction
        change = mean / ((state["square"] / correction).sqrt() + 1e-8)
        if is_matrix:
            change = state["left_basis"] @ change @ state["right_basis"].T
            state["left"].lerp_(grad @ grad.T, 1 - beta)
            state["right"].lerp_(grad.T @ grad, 1 - beta)
        parameter.add_(change, alpha=-group["lr"])

    @staticmethod
    def turned(x: torch.Tensor, state: dict[str, Any], is_matrix: bool) -> torch.Tensor:
        """The matrix in the bases."""
        return state["left_basis"].T @ x @ state["right_basis"] if is_matrix else x


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains with SOAP, in the pipeline's bubbles.")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    add = parser.add_argument
    add("--data", type=Path, help="a text file or a folder of them; default: Python's library")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png")
    add("--stages", type=int, default=max(2, world))
    add("--steps", type=int, default=100)
    add("--every", type=int, default=5, help="batches between two decompositions")
    add("--critical", action="store_true", help="decompose in the update, not in bubbles")
    add("--rows", type=int, default=16, help="per batch")
    add("--context", type=int, default=64, help="bytes per row")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(
        num_layers=options.layers, width=options.width, num_heads=4, context=options.context
    )
    batches = RandomBatches(load_text(options.data), options.rows, options.context, seed=0)
    tokens, _ = next(batches)
    with pd2.PipelineModule(
        model,
        next_token_loss,
        num_stages=options.stages,
        num_microbatches=max(4, options.stages),
        schedule="1f1b",
        example_args=(tokens,),
    ) as pipe:
        refreshes = Refreshes(None if options.critical else pd2.InBubbles(pipe))
        opt = pd2.PipelineOptimizer(Soap(pipe.parameters(), refreshes, every=options.every))

        def train(steps: int) -> list[float]:
            losses = []
            for _ in range(steps):
                tokens, target = next(batches)
                losses.append(pipe.train_step(tokens, target=target))
                opt.step()
            pipe.flush()
            return [float(loss) for loss in losses]

        losses = train(3)
        start = time.perf_counter()
        losses += train(options.steps)
        seconds = time.perf_counter() - start
        with pipe.timeline() as timeline:
            losses += train(3)
        events = timeline.gather()
        if pipe.rank == 0:
            draw_losses(losses, options.out / "loss.png")
            print(f"loss: {losses[0]:.3f} -> {mean_of_last(losses):.5f}")
            print(f"{1000 * seconds / options.steps:.1f} ms a batch")
            batch = events[0].batch + 1
            mine = [slot for slot in pd2.idle_slots(events, batch) if slot.rank == 0]
            placed = pd2.place_work(mine, refreshes.seconds[-len(refreshes.begun) :])
            print(
                f"idle slots of rank 0 in a batch: {len(mine)}; "
                f"decompositions: {len(placed)}, which have room there: "
                f"{sum(slot is not None for slot in placed)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
