"""Options of commands that are arguments of a function, whose types and defaults they have."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..capture.device_figures import KNOWN_DEVICES, DeviceFigures


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a command, passed on to a function.

    Attributes:
        function: takes each option as the argument of the option's name, or of that name after
            "num_" or "microbatch_".
        helps: the help of each option, by its name without dashes.
    """

    function: Callable[..., Any]
    helps: Mapping[str, str]

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Adds the options to a parser, or to a group of one; none is required."""
        for name, text in self.helps.items():
            parameter = self._parameter(name)
            kind, metavar = _TYPES[parameter.annotation]
            default = parameter.default
            if default not in (None, inspect.Parameter.empty):
                values = default if isinstance(default, tuple) else (default,)
                text = f"{text}; default: {','.join(map(str, values))}"
            parser.add_argument(
                f"--{name}", dest=parameter.name, type=kind, metavar=metavar, help=text
            )

    def given(self, namespace: argparse.Namespace) -> dict[str, Any]:
        """The function's arguments that are given."""
        values = {(p := self._parameter(name).name): getattr(namespace, p) for name in self.helps}
        return {name: value for name, value in values.items() if value is not None}

    def refuse(self, namespace: argparse.Namespace, reason: str) -> None:
        """Raises ValueError if any of the options is given."""
        given = self.given(namespace)
        for name in self.helps:
            if (value := given.get(self._parameter(name).name)) is not None:
                raise ValueError(f"--{name}: {value}, {reason}")

    def _parameter(self, name: str) -> inspect.Parameter:
        parameters = inspect.signature(self.function).parameters
        own = name.replace("-", "_")
        return next(
            parameters[each]
            for each in (own, f"num_{own}", f"microbatch_{own}")
            if each in parameters
        )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}, it must be whole numbers, like 1,2,4")
    return [int(part) for part in parts]


def _known_device(name: str) -> DeviceFigures:
    if name not in KNOWN_DEVICES:
        raise argparse.ArgumentTypeError(f"{name!r}, known: {', '.join(KNOWN_DEVICES)}")
    return KNOWN_DEVICES[name]


_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "N"),
    "int | None": (int, "N"),
    "float": (float, "X"),
    "PerStage": (float, "TIME"),
    "PerStage | None": (float, "TIME"),
    "str": (str, "NAME"),
    "str | None": (str, "NAME"),
    "str | Sequence[str]": (_names, "NAME,..."),
    "Sequence[int]": (_whole_numbers, "N,..."),
    "DeviceFigures | None": (_known_device, "DEVICE"),
    "Calibration | str | os.PathLike[str] | None": (str, "PATH"),
}
"""How an option becomes an argument, and its placeholder in the help, by the annotation."""
