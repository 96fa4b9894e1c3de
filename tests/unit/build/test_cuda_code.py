"""The machine code of the CUDA kernels: what nvcc makes of them without a GPU."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive

ROOT = Path(__file__).resolve().parents[3]
KERNELS = sorted((ROOT / "csrc" / "kernels" / "cuda").glob("*.cu"))
# Of those that setup.py builds for: compiling takes half a minute each.
ARCHITECTURES = (120, *exhaustive(80, 90))

# With bfloat16 gradients.
NARROW = ("kBfloat16, narrow", "SplitWeights, narrow")
# By whether runs may have error feedback.
FED = {"0": "", "1": "/fed"}
STEPS = [
    f"{rule}/{weights}{fed}"
    for rule in ("SgdStep", "AdamStep")
    for weights in ("float", "double", "kBfloat16", "kFloat16", "SplitWeights", *NARROW)
    for fed in FED.values()
]
NORMS = [
    f"{kernel}/{kind}/{dtype}"
    for kernel in ("sum", "finish")
    for kind in ("kOne", "kTwo", "kMax")
    for dtype in ("float", "double", "bfloat16")
]


def find(tool: str) -> str | None:
    """A tool on PATH, in the usual place, or in one of NVIDIA's Python packages."""
    packages = importlib.util.find_spec("nvidia")
    folders = (
        [Path(folder) for folder in packages.submodule_search_locations or []] if packages else []
    )
    places = [
        Path("/usr/local/cuda/bin") / tool,
        *(f for each in folders for f in each.glob(f"*/bin/{tool}")),
    ]
    return shutil.which(tool) or next((str(place) for place in places if place.is_file()), None)


def needed(tool: str) -> str:
    found = find(tool)
    if found is None:
        # Where there is an nvcc, the test extra brings the other tools.
        assert os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1" or find("nvcc") is None, tool
        # No package of the extras brings an nvcc: without one this is no failure anywhere.
        pytest.skip(f"there is no {tool}; nvcc belongs to a CUDA toolkit, not to the test extra")
    return found


def kernel_of(symbol: str) -> str:
    """Which variant a mangled name stands for, as in STEPS and NORMS."""
    if "step_kernel" in symbol:
        rule = "SgdStep" if "SgdStep" in symbol else "AdamStep"
        for weights, part in (
            ("SplitWeights", "SplitWeights"),
            ("kBfloat16", "MasterWeightsILNS0_10HalfFormatE0E"),
            ("kFloat16", "MasterWeightsILNS0_10HalfFormatE1E"),
            ("float", "PlainWeightsIfE"),
            ("double", "PlainWeightsIdE"),
        ):
            if part in symbol:
                narrow = ", narrow" if "Bfloat16Gradients" in symbol else ""
                fed = re.search(r"Lb([01])E+vT0_", symbol)
                assert fed is not None, symbol
                return f"{rule}/{weights}{narrow}{FED[fed[1]]}"
    found = re.search(r"(sum|finish)_kernelILNS0_8NormKindE(\d)E(f|d|NS1_8Bfloat16)E", symbol)
    assert found is not None, symbol
    kinds = ("kOne", "kTwo", "kMax")
    dtype = {"f": "float", "d": "double"}.get(found[3], "bfloat16")
    return f"{found[1]}/{kinds[int(found[2])]}/{dtype}"


@dataclass
class Usage:
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


@dataclass
class Compiled:
    usage: dict[str, Usage]  # by kernel: what ptxas says
    ptx: dict[str, str]  # by kernel
    object_file: Path


def compile_kernels(folder: Path, architecture: int) -> Compiled:
    nvcc = needed("nvcc")
    usage: dict[str, Usage] = {}
    ptx: dict[str, str] = {}
    for source in KERNELS:
        command = [nvcc, "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", f"-arch=sm_{architecture}"]
        command += ["-Xptxas=-v", "--keep", f"--keep-dir={folder}", "-c", str(source)]
        object_file = folder / f"{source.stem}.o"
        result = subprocess.run(
            [*command, "-o", str(object_file)], capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        for symbol, stack, stores, loads, registers in re.findall(
            r"Function properties for (\S+)\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
            r"(\d+) bytes spill loads\n.*Used (\d+) registers",
            result.stderr,
        ):
            usage[kernel_of(symbol)] = Usage(int(stack), int(stores), int(loads), int(registers))
        text = (folder / f"{source.stem}.ptx").read_text("utf-8")
        for entry in re.split(r"\.entry\s+", text)[1:]:
            ptx[kernel_of(re.split(r"\W", entry, maxsplit=1)[0])] = entry
    return Compiled(usage, ptx, object_file)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compiled by one of pytest's workers, for all of them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / f"cuda-{request.param}"
    folder.mkdir(exist_ok=True)
    kept = folder / "compiled"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = compile_kernels(folder, request.param)
            kept.write_bytes(pickle.dumps(made))
    found: Compiled = pickle.loads(kept.read_bytes())
    return found


def test_no_kernel_keeps_numbers_in_memory(compiled: Compiled) -> None:
    assert sorted(compiled.usage) == sorted([*STEPS, *NORMS])
    for kernel, usage in compiled.usage.items():
        assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0), kernel
        # A multiprocessor has 65,536 registers, which threads get in eights.
        assert 65_536 // (-(-usage.registers // 8) * 8 * 256) >= 2, kernel


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


@dataclass
class Accesses:
    """Instructions of one width."""

    reads: int = 0
    writes: int = 0

    def doubled(self) -> Accesses:
        return Accesses(2 * self.reads, 2 * self.writes)


@pytest.mark.parametrize("step", STEPS)
def test_every_array_of_a_step_is_read_and_written_without_gaps(
    compiled: Compiled, step: str
) -> None:
    rule, weights, *fed = step.split("/")
    weights, _, narrow = weights.partition(", ")
    # A pack has as many elements as 16 bytes of the arithmetic's type: 8 bytes of a 16-bit array.
    is_split, is_plain = weights == "SplitWeights", weights in ("float", "double")
    whole, half = Accesses(), Accesses()  # of 16 and of 8 bytes
    for num_states in (0, 1) if rule == "SgdStep" else (2, 3):
        whole.reads += num_states + (not is_split) + (not narrow)
        whole.writes += num_states + (not is_split)
        half.reads += 2 * is_split + bool(narrow)
        half.writes += 2 * is_split + (not is_split and not is_plain)
    if fed:  # runs without feedback may be among the others
        whole, half = whole.doubled(), half.doubled()
        if is_split or is_plain:  # else a master leaves nothing to keep
            whole.reads += 2
            whole.writes += 2
    ptx = compiled.ptx[step]
    # Loops may be unrolled, so that an instruction is there several times, and weights are copied.
    for vector, accesses, copies in (("v4", whole, 1), ("v2", half, 0)):
        assert count(rf"ld\.global\.cs\.{vector}\.[a-z]32", ptx) >= accesses.reads + copies
        assert count(rf"st\.global\.cs\.{vector}\.[a-z]32", ptx) >= accesses.writes + copies
    assert ".local" not in ptx
    assert count(r"st\.global\S*\.v[248]\.[a-z](8|16)", ptx) == 0


@pytest.mark.parametrize("dtype", ["float", "double", "bfloat16"])
@pytest.mark.parametrize("kind", ["kOne", "kTwo", "kMax"])
def test_a_norm_reads_16_bytes_at_a_time(compiled: Compiled, kind: str, dtype: str) -> None:
    ptx = compiled.ptx[f"sum/{kind}/{dtype}"]
    assert count(r"ld\.global\.cs\.v4\.[a-z]32", ptx) >= 1
    assert ".local" not in ptx
    assert count(r"\b(atom|red)\.", ptx) == 0


@pytest.mark.parametrize("step", STEPS)
def test_products_and_sums_are_fused_only_where_the_arithmetic_says_so(
    compiled: Compiled, step: str
) -> None:
    ptx = compiled.ptx[step]
    # A product without a rounding mode may be fused with the sum that follows.
    assert count(r"\bmul\.f(32|64)\b", ptx) == 0
    assert count(r"\b(fma|div|sqrt)\.(approx|full)\b", ptx) == 0
    assert "ftz" not in ptx
    assert count(r"\bfma\.rn\.f(32|64)\b", ptx) > 0


def test_the_machine_code_has_whole_accesses_and_no_local_memory(compiled: Compiled) -> None:
    cuobjdump = needed("cuobjdump")
    sass = subprocess.run(
        [cuobjdump, "-sass", str(compiled.object_file)], capture_output=True, text=True, check=True
    ).stdout
    functions = re.split(r"Function : ", sass)[1:]
    assert len(functions) == len(STEPS) + len(NORMS)
    for function in functions:
        kernel = kernel_of(function.split()[0])
        assert count(r"\b(LDL|STL)\b", function) == 0, kernel
        if not kernel.startswith("finish"):
            assert count(r"LDG\.E\.\S*128", function) > 0, kernel
        if kernel in STEPS:
            assert count(r"STG\.E\.\S*128", function) > 0, kernel
