"""Gives objects of the user back their states: all of them, or none."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

log = logging.getLogger("pipedream2bw")


class GivenBack:
    """The objects that have got a state, and what they had before."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], object]]] = []

    def give(
        self,
        name: str,
        state: Any,
        load: Callable[[Any], object],
        former: Callable[[], Any],
    ) -> None:
        """Gives an object its state.

        Args:
            load: gives the object a state.
            former: gives the state that it has.

        Raises:
            ValueError: the object refuses it; names the object.
        """
        with contextlib.suppress(Exception):  # which has no state yet: what it gets may stay
            kept = deepcopy(former())
            self._undo.append((name, lambda: load(kept)))
        try:
            load(state)
        except Exception as error:
            raise ValueError(
                f"{name}: the saved state is refused: {type(error).__name__}: {error}"
            ) from error

    def take_back(self) -> None:
        """Gives all of them what they had before, as far as they take it."""
        for name, undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:
                log.warning("%s does not take its former state either: %s", name, error)
