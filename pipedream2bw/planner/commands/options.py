"""Options of commands that are arguments of a function, whose types and defaults they have."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...capture.device_figures import DeviceFigures
from ...optimizer.staleness import ErrorFeedback, NesterovCorrection, Remedy
from ..profiling.peaks import KNOWN_DEVICES


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a command, passed on to a function.

    Attributes:
        function: takes each option as the argument of the option's name, or of that name after
            "num_" or "microbatch_". The argument's name is an option too, as errors say it.
        helps: the help of each option, by its name without dashes.
    """

    function: Callable[..., Any]
    helps: Mapping[str, str]

    def add_to(self, parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """Adds the options to a parser, or to a group of one; none is required."""
        for flag, parameter in self._parameters().items():
            flags = sorted({f"--{flag}", f"--{parameter.name.replace('_', '-')}"}, key=len)
            if parameter.annotation == "bool":
                parser.add_argument(
                    *flags,
                    dest=parameter.name,
                    action="store_const",
                    const=True,
                    help=self.helps[flag],
                )
                continue
            kind, metavar = _TYPES[parameter.annotation]
            text, default = self.helps[flag], parameter.default
            if default not in (None, (), inspect.Parameter.empty):
                values = default if isinstance(default, tuple) else (default,)
                text += f"; default: {','.join(map(str, values))}"
            parser.add_argument(*flags, dest=parameter.name, type=kind, metavar=metavar, help=text)

    def given(self, namespace: argparse.Namespace) -> dict[str, Any]:
        """The function's arguments that are given."""
        names = (parameter.name for parameter in self._parameters().values())
        return {name: value for name in names if (value := getattr(namespace, name)) is not None}

    def refuse(self, namespace: argparse.Namespace, reason: str) -> None:
        """Raises ValueError if any of the options is given."""
        for flag, parameter in self._parameters().items():
            if (value := getattr(namespace, parameter.name)) is not None:
                raise ValueError(f"--{flag}: {getattr(value, 'name', value)}, {reason}")

    def _parameters(self) -> dict[str, inspect.Parameter]:
        """The function's parameter of each option."""
        known = inspect.signature(self.function).parameters
        names = {flag: flag.replace("-", "_") for flag in self.helps}
        return {
            flag: next(known[p] for p in (name, f"num_{name}", f"microbatch_{name}") if p in known)
            for flag, name in names.items()
        }


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


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r}, it must be a dtype of torch, like bfloat16")
    return dtype


def _correction(name: str) -> Remedy:
    known: dict[str, Remedy] = {
        "ErrorFeedback": ErrorFeedback(),
        "NesterovCorrection": NesterovCorrection(),
    }
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r}, known: {', '.join(known)}")
    return known[name]


_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "N"),
    "int | None": (int, "N"),
    "float": (float, "X"),
    "PerStage": (float, "TIME"),
    "PerStage | None": (float, "TIME"),
    "str": (str, "NAME"),
    "str | None": (str, "NAME"),
    "str | Sequence[str]": (_names, "NAME,..."),
    "int | Sequence[int]": (_whole_numbers, "N,..."),
    "Sequence[int]": (_whole_numbers, "N,..."),
    "torch.dtype | None": (_dtype, "DTYPE"),
    "Remedy | Sequence[Remedy]": (_correction, "NAME"),
    "DeviceFigures | None": (_known_device, "DEVICE"),
    "Calibration | str | os.PathLike[str] | None": (str, "PATH"),
}
"""How an option becomes an argument, and its placeholder in the help, by the annotation."""
