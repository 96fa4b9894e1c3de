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
    """Refuses hooks of earlier stages that write where the loss function reads.

    They run in other threads or processes, several microbatches ahead.

    Raises:
        ValueError: a hook and ``loss_fn`` know the same list, dictionary, set or object.
    """
    hooked = {name: hooks for name, m in root.named_modules() if (hooks := list(hooks_of(m)))}
    if not hooked:
        return
    known = {id(v): name for name, v in _variables("loss_fn", loss_fn, root) if _can_change(v)}
    for program in mode.programs[:-1]:
        nodes = [mode.captured.layer_nodes[index] for index in program.layers]
        around = {name for node in nodes for name in (*modules_around(node), layer_name(node))}
        for name, hooks in hooked.items():
            inside = any(name == each or name.startswith(f"{each}.") for each in around)
            for _, value in _variables("hook", hooks, root) if inside else ():
                if id(value) in known:
                    raise ValueError(
                        f"a hook of module {name!r}, on stage {program.index}, and loss_fn both "
                        f"know {known[id(value)]}: loss_fn runs on stage {len(mode.programs) - 1}, "
                        "for another microbatch. Return the activation with the model's output, "
                        "or add a loss of it by pipedream2bw.add_loss"
                    )


def _variables(name: str, functions: Any, root: nn.Module) -> list[tuple[str, Any]]:
    each = functions if isinstance(functions, list) else [functions]
    return Reads.of([(name, function) for function in each], root.modules()).variables()


def _can_change(value: Any) -> bool:
    is_code = isinstance(value, (type, nn.Module)) or callable(value)
    return isinstance(value, (list, dict, set)) or (hasattr(value, "__dict__") and not is_code)
