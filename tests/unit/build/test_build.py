"""setup.py's decisions and messages, and the check that the package makes when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pipedream2bw
from pipedream2bw._build_check import (
    OLDEST_TORCH,
    TorchBuild,
    check,
    check_loaded_torch,
    check_range,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_nvcc(folder: Path, version: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
    nvcc.chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "cuda.h").touch()
    return nvcc


def python(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )


def test_cuda_is_used_where_torch_and_nvcc_have_one_major_version(
    setup_py: ModuleType, tmp_path: Path
) -> None:
    nvcc = fake_nvcc(tmp_path, "13.2")
    assert setup_py.use_cuda("auto", "13.0", nvcc)
    assert setup_py.use_cuda("1", "13.0", nvcc)
    assert not setup_py.use_cuda("0", "13.0", nvcc)


def test_cuda_1_names_what_is_missing_and_auto_does_without(
    setup_py: ModuleType, tmp_path: Path
) -> None:
    nvcc = fake_nvcc(tmp_path, "12.9")
    for torch_cuda, compiler, message in (
        (None, nvcc, "torch is built without CUDA"),
        ("13.0", None, "torch is built for CUDA 13.0, but there is no nvcc"),
        ("13.0", nvcc, "torch is built for CUDA 13.0, but .* is of CUDA 12.9"),
    ):
        assert not setup_py.use_cuda("auto", torch_cuda, compiler)
        with pytest.raises(SystemExit, match=message):
            setup_py.use_cuda("1", torch_cuda, compiler)


def test_other_settings_are_refused(setup_py: ModuleType) -> None:
    with pytest.raises(SystemExit, match="PIPEDREAM2BW_CUDA: 'yes', must be auto, 0 or 1"):
        setup_py.use_cuda("yes", None, None)
    with pytest.raises(SystemExit, match="PIPEDREAM2BW_WERROR: 'on', must be 0 or 1"):
        setup_py.is_on("PIPEDREAM2BW_WERROR", {"PIPEDREAM2BW_WERROR": "on"})
    assert setup_py.is_on("PIPEDREAM2BW_WERROR", {"PIPEDREAM2BW_WERROR": "1"})
    assert not setup_py.is_on("PIPEDREAM2BW_WERROR", {})


SHARED_WITH_TEST_DOUBLES = {"check.cpp", "grid_passes.cpp", "step_table.cpp", "shared_memory.cpp"}


def test_no_test_double_is_in_the_package(setup_py: ModuleType) -> None:
    package = set(setup_py.sources_of_package(with_cuda=True))
    for sources in setup_py.sources_for_testing().values():
        assert len(sources) > 1
        shared = {path.name for path in set(sources) & package}
        assert shared <= SHARED_WITH_TEST_DOUBLES
    result = python(
        "import runpy, sys; sys.argv[1:] = ['-q', 'build_ext']; "
        "runpy.run_path('setup.py', None, '__main__')",
        PIPEDREAM2BW_TESTING="1",
    )
    assert result.returncode != 0
    assert "PIPEDREAM2BW_TESTING: 1, but it is for build_ext --inplace alone" in result.stderr


def test_cuda_home_decides_which_nvcc_is_taken(setup_py: ModuleType, tmp_path: Path) -> None:
    wanted, other = fake_nvcc(tmp_path / "a", "13.0"), fake_nvcc(tmp_path / "b", "12.0")
    path = {"PATH": str(other.parent)}
    assert setup_py.find_nvcc({"CUDA_HOME": str(tmp_path / "a"), **path}) == wanted
    assert setup_py.find_nvcc({"CUDA_HOME": str(tmp_path / "none"), **path}) is None
    assert setup_py.find_nvcc(path) == other


def test_the_architectures_are_those_that_nvcc_knows(setup_py: ModuleType, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    for known, expected in (
        ("sm_80 sm_86 sm_89 sm_90 sm_90a", "8.0;8.6;8.9;9.0+PTX"),
        ("sm_75 sm_80 sm_90 sm_100 sm_120 sm_121", "8.0;9.0;10.0;12.0+PTX"),
    ):
        lines = known.replace(" ", "\n")
        nvcc.write_text(f"#!/bin/sh\n[ $1 = --list-gpu-code ] && echo '{lines}'\n")
        nvcc.chmod(0o755)
        assert setup_py.default_architectures(nvcc) == expected
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(SystemExit, match="--list-gpu-code names none of"):
        setup_py.default_architectures(nvcc)


def test_without_torch_the_build_ends_with_the_command_that_installs_it(tmp_path: Path) -> None:
    hidden = tmp_path / "torch.py"
    hidden.write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    result = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert "pip install torch" in result.stderr
    assert "pip install --no-build-isolation ." in result.stderr
    assert "Traceback" not in result.stderr


BUILT = TorchBuild("2.13.0+cpu", None, True)


@pytest.mark.parametrize(
    "loaded",
    [
        TorchBuild("2.12.0", None, True),
        TorchBuild("2.14.0", None, True),
        TorchBuild("3.13.0", None, True),
        TorchBuild("2.13.0", "13.0", True),
        TorchBuild("2.13.0", None, False),
    ],
    ids=str,
)
def test_another_torch_is_an_import_error_that_names_both(loaded: TorchBuild) -> None:
    with pytest.raises(ImportError) as caught:
        check(BUILT, loaded)
    for part in (str(BUILT), str(loaded), "pip install --no-build-isolation"):
        assert part in str(caught.value)


def test_an_old_torch_is_refused_with_the_range_and_the_way_out() -> None:
    for version in ("2.8.0", "2.8.0+cu126", "1.13.1"):
        with pytest.raises(ImportError) as caught:
            check_range(version)
        for part in (f"torch {version} is loaded", "2.9 or newer", "2.15", "pip install --upgrade"):
            assert part in str(caught.value)
    for version in ("2.9.0", "2.13.0+cpu", "2.14.0a0+git1234", "3.0.0"):
        check_range(version)


def test_wheels_are_named_for_the_torch_that_they_need(setup_py: ModuleType) -> None:
    for version, cuda, abi, name, needed in (
        ("2.13.0+cpu", None, True, "cputorch2.13cxx11abitrue", "torch>=2.13,<2.14"),
        ("2.9.1+cu130", "13.0", False, "cu130torch2.9cxx11abifalse", "torch>=2.9,<2.10"),
    ):
        name = f"0.1.0+{name}"
        assert setup_py.named_for_torch("0.1.0", version, cuda, abi) == (name, needed)
        wanted = TorchBuild(version, cuda, abi)
        assert name.endswith(wanted.wheel)
        with pytest.raises(ImportError) as caught:
            check(TorchBuild("2.11.0", cuda, True), wanted)
        assert f"install the wheel whose version ends in {wanted.wheel}" in str(caught.value)
    assert setup_py.package_version() == pipedream2bw.__version__


def test_the_oldest_torch_is_one_everywhere(setup_py: ModuleType) -> None:
    assert setup_py.MINIMUM_TORCH == OLDEST_TORCH


def test_patch_releases_and_cuda_minor_versions_fit() -> None:
    check(BUILT, TorchBuild("2.13.1", None, True))
    check(TorchBuild("2.13.0", "13.0", True), TorchBuild("2.13.0+cu132", "13.2", True))


def test_the_recorded_build_is_of_the_torch_in_use() -> None:
    check_loaded_torch()
    from pipedream2bw import _build_info

    assert torch.__version__ == _build_info.TORCH_VERSION
    assert not (_build_info.WITH_CUDA and torch.version.cuda is None)


def test_importing_the_package_under_another_torch_raises_before_the_extension_loads() -> None:
    result = python(
        "import sys, torch; torch.__version__ = '2.1.0'\n"
        "try: import pipedream2bw\n"
        "except ImportError as error: print(error); print('pipedream2bw._C' in sys.modules)"
    )
    assert "torch 2.1.0" in result.stdout, result.stderr
    assert result.stdout.endswith("False\n")


FROM_A_CHECKOUT = """
import sys, warnings
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path[:0] = sys.argv[1:]
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import pipedream2bw
print(pipedream2bw._C.__file__)
print(*(warning.message for warning in warned if "not built" in str(warning.message)))
"""


def test_in_a_checkouts_folder_the_installed_package_is_imported(tmp_path: Path) -> None:
    package = Path(pipedream2bw.__file__).parent
    checkout = tmp_path / "checkout" / "pipedream2bw"
    checkout.mkdir(parents=True)
    for name in ("__init__.py", "_build_check.py"):
        (checkout / name).write_text((package / name).read_text("utf-8"), "utf-8")
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "pipedream2bw").symlink_to(package)

    def imported(*places: str) -> subprocess.CompletedProcess[str]:
        folders = [str(tmp_path / place) for place in places]
        command = [sys.executable, "-c", FROM_A_CHECKOUT, *folders]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)

    found = imported("checkout", "installed")
    assert found.returncode == 0, found.stderr
    extension, warning = found.stdout.splitlines()
    assert extension.startswith(str(tmp_path / "installed"))
    assert f"the sources in {checkout} are not built" in warning
    alone = imported("checkout")
    assert "pipedream2bw._C is not built" in alone.stderr
