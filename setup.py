"""Builds the extension module ``pipedream2bw._C``; everything else is in pyproject.toml.

Environment:
    PIPEDREAM2BW_CUDA    auto (default), 0 or 1. auto builds the CUDA kernels when the installed
                         torch has CUDA and a matching nvcc is found; 1 fails where auto would
                         build without.
    PIPEDREAM2BW_WERROR  1 turns on -Wall -Wextra -Werror for the project's own files.
    PIPEDREAM2BW_TESTING  1 builds, instead of the package's extension, those that tests and
                         benchmarks need: benchmarks/measuring/_delays and tests/device/_checked.
                         Only with --inplace.
    PIPEDREAM2BW_COVERAGE  1 builds without optimization, for gcov to note which lines run. Not with
                         --inplace: see tests/spine.
    PIPEDREAM2BW_WHEEL   1 names the package's version after the torch that it is built for, as in
                         0.1.0+cu130torch2.13cxx11abitrue, and makes it need that minor version of
                         torch.
    CUDA_HOME            where nvcc is, if not on PATH.
    TORCH_CUDA_ARCH_LIST defaults to those of 8.0;8.6;8.9;9.0;10.0;12.0 that nvcc knows, and PTX of
                         the last.
    MAX_JOBS             how many compilers run at once.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests"
# What the package checks at import, and how it names wheels; without importing the package.
BUILD_CHECK = runpy.run_path(str(ROOT / "pipedream2bw" / "_build_check.py"), run_name="build_check")
MINIMUM_TORCH = BUILD_CHECK["OLDEST_TORCH"]
MINIMUM_SETUPTOOLS = 77  # the first to accept pyproject.toml's license expression
# How many files a compiler reads together, by folder: the headers that all of them include take it
# longer than the files, and libtorch's ten seconds.
FILES_OF_A_UNIT = {"bindings": 8, "core": 5, "engine": 16, "planner": 5, "checked_device": 8}
CUDA_ARCHITECTURES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def fail(message: str) -> SystemExit:
    """An error that pip shows as these lines and nothing else."""
    return SystemExit(f"\nerror: pipedream2bw: {message}\n")


def import_build_tools() -> tuple[Any, Any]:
    """Returns (torch, torch.utils.cpp_extension), or ends with the command that installs them."""
    minimum_torch = ".".join(map(str, MINIMUM_TORCH))
    try:
        import torch
    except ImportError as error:
        raise fail(
            f"the build needs torch >= {minimum_torch}, which cannot be imported ({error}).\n"
            "Install it first, then build without isolation, so that the extension is compiled\n"
            "against the torch it will run with:\n"
            f"    pip install torch numpy 'setuptools>={MINIMUM_SETUPTOOLS}' wheel ninja\n"
            "    pip install --no-build-isolation ."
        ) from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        raise fail(
            f"torch: {torch.__version__}, at least {minimum_torch} is needed. Run:\n"
            "    pip install --upgrade torch"
        )
    import setuptools

    if int(setuptools.__version__.split(".")[0]) < MINIMUM_SETUPTOOLS:
        raise fail(
            f"setuptools: {setuptools.__version__}, at least {MINIMUM_SETUPTOOLS} is needed. Run:\n"
            f"    pip install --upgrade 'setuptools>={MINIMUM_SETUPTOOLS}' wheel ninja"
        )
    from torch.utils import cpp_extension

    return torch, cpp_extension


def find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """nvcc of CUDA_HOME if that is set, else the one on PATH, else the usual place."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        candidates = [Path(home) / "bin" / "nvcc"]
    else:
        on_path = shutil.which("nvcc", path=environment.get("PATH"))
        candidates = [Path(on_path)] if on_path else []
        candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    candidates = [nvcc.resolve() for nvcc in candidates if nvcc.is_file()]
    # A script on PATH may call an nvcc elsewhere; torch expects the headers beside bin.
    whole = [nvcc for nvcc in candidates if (nvcc.parents[1] / "include" / "cuda.h").is_file()]
    return next(iter(whole + candidates), None)


def nvcc_version(nvcc: Path) -> str:
    """nvcc's "13.0", or "unknown"."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return "unknown"
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def default_architectures(nvcc: Path) -> str:
    """The value of TORCH_CUDA_ARCH_LIST for what this nvcc can compile."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    known = [each for each in CUDA_ARCHITECTURES if f"sm_{each.replace('.', '')}" in listed.split()]
    if not known:
        raise fail(f"{nvcc} --list-gpu-code names none of {', '.join(CUDA_ARCHITECTURES)}")
    return ";".join(known) + "+PTX"


def why_no_cuda(torch_cuda: str | None, nvcc: Path | None) -> str | None:
    """The reason why CUDA kernels cannot be built, or None if they can."""
    if torch_cuda is None:
        return "the installed torch is built without CUDA (torch.version.cuda is None)"
    if nvcc is None:
        return f"torch is built for CUDA {torch_cuda}, but there is no nvcc: set CUDA_HOME or PATH"
    version = nvcc_version(nvcc)
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return f"torch is built for CUDA {torch_cuda}, but {nvcc} is of CUDA {version}"
    return None


def use_cuda(setting: str, torch_cuda: str | None, nvcc: Path | None) -> bool:
    """Decides by PIPEDREAM2BW_CUDA; raises SystemExit if it cannot be followed."""
    if setting not in ("auto", "0", "1"):
        raise fail(f"PIPEDREAM2BW_CUDA: {setting!r}, must be auto, 0 or 1")
    if setting == "0":
        return False
    reason = why_no_cuda(torch_cuda, nvcc)
    if reason is None:
        return True
    if setting == "1":
        raise fail(f"PIPEDREAM2BW_CUDA: 1, but {reason}")
    print(f"pipedream2bw: building without CUDA: {reason}")
    return False


def is_on(name: str, environment: Mapping[str, str]) -> bool:
    """Reads a switch; raises SystemExit if it is neither on nor off."""
    setting = environment.get(name, "0")
    if setting not in ("", "0", "1"):
        raise fail(f"{name}: {setting!r}, must be 0 or 1")
    return setting == "1"


def units(root: Path, folder: str) -> list[Path]:
    """Files under build/ that include all C++ files of root/folder, several each."""
    sources = sorted((root / folder).rglob("*.cpp"))
    length = FILES_OF_A_UNIT[folder]
    made = []
    for number, first in enumerate(range(0, len(sources), length)):
        lines = (
            f'#include "{source.relative_to(root).as_posix()}"\n'
            for source in sources[first : first + length]
        )
        unit = ROOT / "build" / "units" / f"{folder}_{number}.cpp"
        text = "".join(lines)
        if not unit.is_file() or unit.read_text(encoding="utf-8") != text:
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text, encoding="utf-8")
        made.append(unit)
    for unit in set((ROOT / "build" / "units").glob(f"{folder}_*.cpp")).difference(made):
        unit.unlink()  # of a checkout with more files; tests link what is there
    return made


def sources_of_package(with_cuda: bool) -> list[Path]:
    sources = []
    for folder in sorted(path.name for path in CSRC.iterdir()):
        in_folder = sorted((CSRC / folder).rglob("*.cpp"))
        sources += units(CSRC, folder) if folder in FILES_OF_A_UNIT else in_folder
        sources += sorted((CSRC / folder).rglob("*.cu")) if with_cuda else []
    return sources


def sources_for_testing() -> dict[str, list[Path]]:
    """By the extension modules that tests and benchmarks need."""
    check = CSRC / "core" / "check.cpp"
    return {
        "benchmarks.measuring._delays": [check, *sorted((TESTS / "delays").glob("*.cpp"))],
        "tests.device._checked": [
            check,
            CSRC / "engine" / "weights" / "grid_passes.cpp",
            CSRC / "kernels" / "grid" / "step_table.cpp",
            CSRC / "transport" / "shared_memory.cpp",
            *units(TESTS, "checked_device"),
        ],
    }


def extension(
    cpp_extension: Any,
    name: str,
    sources: list[Path],
    *,
    with_cuda: bool,
    werror: bool,
    testing: bool,
    coverage: bool,
) -> Any:
    # gcc and clang drop a -I that is given with -isystem too: no warnings from others' headers.
    system_includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    isystem = [flag for path in system_includes for flag in ("-isystem", path)]
    # The kernels say where they fuse a multiplication with an addition, since results are bitwise
    # specified; the compiler must not choose.
    # at::parallel_for is inline and needs OpenMP here; its runtime is the one that torch loads, so
    # it is not linked again.
    cxx = [
        "-std=c++20",
        *(["-O0", "--coverage", "-fprofile-update=atomic"] if coverage else ["-O2"]),
        "-fopenmp",
        "-g0",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        *isystem,
    ]
    if werror:
        # gcc 12 finds overlaps in std::string that are not there (its bug 105651).
        not_restrict = ["-Wno-unknown-warning-option", "-Wno-restrict"]
        cxx += ["-Wall", "-Wextra", "-Werror", *not_restrict]
    nvcc = ["-std=c++20", "-O3", *isystem]
    if werror:
        nvcc += ["-Werror=all-warnings"]
    make = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return make(
        name,
        # setuptools wants paths relative to setup.py
        [str(source.relative_to(ROOT)) for source in sources],
        include_dirs=[str(CSRC), *([str(TESTS)] if testing else [])],
        define_macros=[("PD2_WITH_CUDA", None)] if with_cuda else [],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc} if with_cuda else {"cxx": cxx},
        extra_link_args=["--coverage"] if coverage else [],
    )


def build_info(torch: Any, with_cuda: bool) -> str:
    """The text of pipedream2bw/_build_info.py, which _build_check.py compares at import."""
    return (
        '"""Written by setup.py: what pipedream2bw._C was built with."""\n\n'
        f"TORCH_VERSION = {str(torch.__version__)!r}\n"
        f"TORCH_CUDA = {torch.version.cuda!r}\n"
        f"CXX11_ABI = {bool(torch.compiled_with_cxx11_abi())!r}\n"
        f"WITH_CUDA = {with_cuda!r}\n"
    )


def package_version() -> str:
    """The version that the package says it has."""
    text = (ROOT / "pipedream2bw" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    assert found is not None, "pipedream2bw/__init__.py: no __version__"
    return found.group(1)


def named_for_torch(version: str, torch: str, cuda: str | None, cxx11_abi: bool) -> tuple[str, str]:
    """The version of a wheel, and what it needs, for a torch, its CUDA and its C++ ABI.

    As flash-attn names its wheels. libtorch's interface changes with every minor version.
    """
    major, minor = map(int, torch.split(".")[:2])
    needed = f"torch>={major}.{minor},<{major}.{minor + 1}"
    # A local version has small letters only: setuptools would change others.
    return version.lower() + BUILD_CHECK["TorchBuild"](torch, cuda, cxx11_abi).wheel, needed


def main() -> None:
    torch, cpp_extension = import_build_tools()
    from setuptools import setup

    nvcc = find_nvcc(os.environ)
    setting = os.environ.get("PIPEDREAM2BW_CUDA", "auto")
    testing = is_on("PIPEDREAM2BW_TESTING", os.environ)
    coverage = is_on("PIPEDREAM2BW_COVERAGE", os.environ)
    with_cuda = not testing and use_cuda(setting, torch.version.cuda, nvcc)
    if with_cuda:
        assert nvcc is not None
        # torch looked for CUDA when it was imported, by rules of its own: both must take one nvcc.
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(nvcc.parents[1])
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(nvcc))

    class BuildExtension(cpp_extension.BuildExtension):
        """Keeps the object files of every torch apart, and records the torch it built with."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # ninja does not track system headers, and an editable install would build in a
            # temporary folder: one folder per compiler input keeps rebuilds both right and short.
            tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
            kind = "-testing" if testing else "-cuda" if with_cuda else ""
            kind += "-coverage" if coverage else ""
            self.build_temp = str(ROOT / "build" / f"temp-{tag}{kind}")
            self.force = True  # ninja decides what to compile, setuptools cannot see headers

        def run(self) -> None:
            if testing and not self.inplace:
                raise fail("PIPEDREAM2BW_TESTING: 1, but it is for build_ext --inplace alone")
            if coverage and self.inplace:
                raise fail("PIPEDREAM2BW_COVERAGE: 1, but not for build_ext --inplace")
            super().run()
            if testing:
                return
            target = ROOT if self.inplace else Path(self.build_lib)
            info = target / "pipedream2bw" / "_build_info.py"
            info.write_text(build_info(torch, with_cuda), encoding="utf-8")

    package = {"pipedream2bw._C": sources_of_package(with_cuda)}
    werror = is_on("PIPEDREAM2BW_WERROR", os.environ)
    modules = [
        extension(
            cpp_extension,
            name,
            sources,
            with_cuda=with_cuda,
            werror=werror,
            testing=testing,
            coverage=coverage,
        )
        for name, sources in (sources_for_testing() if testing else package).items()
    ]
    version, needed = package_version(), f"torch>={'.'.join(map(str, MINIMUM_TORCH))}"
    if is_on("PIPEDREAM2BW_WHEEL", os.environ):
        if torch.version.cuda is not None and not with_cuda:
            raise fail(
                f"PIPEDREAM2BW_WHEEL: 1, torch is built for CUDA {torch.version.cuda}, the wheel "
                "would be without: set PIPEDREAM2BW_CUDA=1"
            )
        version, needed = named_for_torch(
            version,
            torch.__version__,
            torch.version.cuda,
            bool(torch.compiled_with_cxx11_abi()),
        )
    setup(
        version=version,
        install_requires=[needed],
        ext_modules=modules,
        cmdclass={"build_ext": BuildExtension},
    )


if __name__ == "__main__":
    main()
