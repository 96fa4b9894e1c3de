"""Hooks that keep activations for the loss function, which runs on the last stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..capture.captured import layer_name, modules_around
from ..model.hooks import hooks_of
from ..model.reads import Reads
from .modes import Mode


def refuse_kept_activations(mode: Mode, root: nn.Module, loss_fn: Callable[..., Any]) -> None:
    """Raises ValueError if hooks of earlier stages may write where the loss function reads.

    They run in other threads or processes, several microbatches ahead.
    """
    hooked = {name: hooks for name, m in root.named_modules() if (hooks := list(hooks_of(m)))}
    if not hooked:
        return
    of_loss = Reads.of([("loss_fn", loss_fn)], root.modules()).variables()
    known = {id(value): name for name, value in of_loss if _can_change(value)}
    for name, hooks in hooked.items():
        of_hooks = Reads.of([("hook", hook) for hook in hooks], root.modules()).variables()
        both = [known[id(value)] for _, value in of_hooks if id(value) in known]
        stage = _earlier_stage(mode, name) if both else None
        if stage is not None:
            raise ValueError(
                f"a hook of module {name!r}, on stage {stage}, and loss_fn both know {both[0]}: "
                f"loss_fn runs on stage {len(mode.programs) - 1}, for another microbatch. Return "
                "the activation with the model's output, or add a loss of it by "
                "pipedream2bw.add_loss"
            )


def _earlier_stage(mode: Mode, name: str) -> int | None:
    """The first stage before the last one that calls the module; None: none does."""
    for program in mode.programs[:-1]:
        for node in (mode.captured.layer_nodes[index] for index in program.layers):
            around = (*modules_around(node), layer_name(node))
            if any(name == each or name.startswith(f"{each}.") for each in around):
                return program.index
    return None


def _can_change(value: Any) -> bool:
    is_code = isinstance(value, (type, nn.Module)) or callable(value)
    return isinstance(value, (list, dict, set)) or (hasattr(value, "__dict__") and not is_code)
