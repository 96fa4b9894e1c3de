"""A model whose forward has been computed already: by the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_CAPTURING = "transformers.utils.output_capturing"


class ComputedModel:
    """Gives what the pipeline has computed when it is called, so that the Trainer's code can go on.

    Args:
        model: whose forward that was; all else is asked of it.
        outputs: what it returned.
    """

    def __init__(self, model: nn.Module, outputs: Any) -> None:
        self._model = model
        self._outputs = outputs
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise RuntimeError(
                "compute_loss: it called the model twice, which it may do once: the pipeline has "
                "computed one forward for each microbatch"
            )
        return self._outputs

    def _get_name(self) -> str:
        """The name of the class, by which a LabelSmoother knows models that shift labels."""
        inner = getattr(self._model, "get_base_model", None)
        return type(self._model if inner is None else inner()).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class EvaluatedBatches:
    """A loader's batches, for which the pipeline is called with several at once.

    Args:
        loader: of the batches.
        number: how many at once, at most.
        evaluate: called with these, before the first of them is given.
    """

    def __init__(self, loader: Any, number: int, evaluate: Callable[[Sequence[Any]], None]) -> None:
        self._loader = loader
        self._number = number
        self._evaluate = evaluate

    def __iter__(self) -> Iterator[Any]:
        loader, batches = self._loader, iter(self._loader)
        at_end = False
        while not at_end:
            some: list[Any] = []
            for batch in batches:
                some.append(batch)
                # Asked for one more, Accelerate's loader would no longer be the one in use.
                at_end = getattr(loader, "end_of_dataloader", False)
                if at_end or len(some) == self._number:
                    break
            else:
                at_end = True
            self._evaluate(some)
            for place, batch in enumerate(some):
                if hasattr(loader, "end_of_dataloader"):  # where results are cut to the data's rows
                    loader.end_of_dataloader = at_end and place == len(some) - 1
                yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def prepare_for_capture(model: nn.Module) -> None:
    """Leaves out of the outputs what training does not use, and what tracing would run into.

    Caches of keys and values, also of inner models with a configuration of their own; and the hooks
    by which transformers collects router logits and the like: a model registers them again in its
    next forward, so that what they collect is part of the captured graph.
    """
    for module in model.modules():
        hooks = module._forward_hooks
        for number in [n for n, hook in hooks.items() if hook.__module__ == _CAPTURING]:
            del hooks[number]
        if isinstance(module, PreTrainedModel):
            module._output_capturing_hooks_installed = False  # noqa: SLF001
            if hasattr(module.config, "use_cache"):
                module.config.use_cache = False
