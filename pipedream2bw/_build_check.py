"""Refuses to load the extension under a torch that it was not built for.

libtorch's C++ interface changes with every minor release. Loading the extension under another one
ends in an undefined symbol at best and in silent memory corruption at worst.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
OLDEST_TORCH = (2, 9)
NEWEST_TORCH = (2, 15)  # of those that are tested
_OLDEST, _NEWEST = (".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
TESTED_TORCH = f"{_OLDEST} to {_NEWEST}"


@dataclass(frozen=True)
class TorchBuild:
    """What of a torch release decides whether an extension fits it."""

    version: str
    cuda: str | None
    """torch.version.cuda, such as "13.0"; None for a CPU build."""
    cxx11_abi: bool

    def __str__(self) -> str:
        cuda = "CPU" if self.cuda is None else f"CUDA {self.cuda}"
        return f"torch {self.version} ({cuda}, C++11 ABI {'on' if self.cxx11_abi else 'off'})"

    @property
    def wheel(self) -> str:
        """How the version of a wheel for it ends."""
        major, minor = self.version.split(".")[:2]
        built = "cpu" if self.cuda is None else "cu" + self.cuda.replace(".", "")
        return f"+{built}torch{major}.{minor}cxx11abi{self.cxx11_abi}".lower()

    @property
    def compatibility(self) -> tuple[object, ...]:
        major, minor = self.version.split(".")[:2]
        return major, minor, self.cuda and self.cuda.split(".")[0], self.cxx11_abi


def check(built: TorchBuild, loaded: TorchBuild) -> None:
    """Compares two builds of torch.

    Patch releases and CUDA minor versions may differ.

    Raises:
        ImportError: they differ otherwise; names both and the command that rebuilds.
    """
    if built.compatibility != loaded.compatibility:
        raise ImportError(
            f"pipedream2bw was built with {built}, but {loaded} is loaded: install the wheel whose "
            f"version ends in {loaded.wheel}, or rebuild it in its source folder with:\n"
            f"    {REBUILD}"
        )


def check_range(version: str) -> None:
    """Raises ImportError if torch is older than any that the package can be built for."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        raise ImportError(
            f"torch {version} is loaded, pipedream2bw needs {_OLDEST} or newer (tested up to "
            f"{_NEWEST}). Run:\n    pip install --upgrade torch"
        )


def check_loaded_torch() -> None:
    """Compares the torch that is importable with the one recorded by setup.py.

    Raises:
        ImportError: torch is too old, or the extension was not built, or for another torch.
    """
    import torch

    check_range(torch.__version__)
    if importlib.util.find_spec("pipedream2bw._build_info") is None:
        _use_installed()
    from pipedream2bw import _build_info

    check(
        TorchBuild(_build_info.TORCH_VERSION, _build_info.TORCH_CUDA, _build_info.CXX11_ABI),
        TorchBuild(torch.__version__, torch.version.cuda, torch.compiled_with_cxx11_abi()),
    )


def _use_installed() -> None:
    """In a checkout's folder, whose package has no extension, imports the installed package.

    Raises:
        ImportError: none is installed.
    """
    here = Path(__file__).parent
    places = [Path(place or ".").resolve() / here.name for place in sys.path]
    for place in places:
        if place != here and (place / "_build_info.py").exists():
            sys.modules["pipedream2bw"].__path__[:] = [str(place)]
            warnings.warn(
                f"pipedream2bw is imported from {place}: the sources in {here} are not built. To "
                "use these run: pip install --no-build-isolation -e .",
                stacklevel=2,
            )
            return
    raise ImportError(
        "pipedream2bw._C is not built. Build it in its source folder with:\n"
        "    pip install --no-build-isolation -e ."
    )
