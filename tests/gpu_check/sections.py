"""The sections, the most decisive and cheapest first: a deadline may end those behind.

A limit includes the start of the section's process, its import of torch and its first use of the
device, which are six seconds or so, and all of that again for processes of its own. With a build
that takes as long as expected the limits fit into nine minutes; the parts of the whole fit into
four each, of which the first one builds besides. What a section has no time for it says itself.
"""

from __future__ import annotations

from .section import Section

# cuBLAS chooses the same algorithms on every stream, and streams do not stand behind each other's
# sleeping kernels. To be set before the device is first used.
DETERMINISTIC = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32"))
# What cuBLAS takes for each stream and thread is of no report: 8 MiB in place of 32 on an H100.
SMALL_WORKSPACES = (("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8"),)
# With this NCCL lets ranks share a device, from 2.30 on.
SHARING = (("NCCL_MULTI_RANK_GPU_ENABLE", "1"),)

WHOLE, PART = 540.0, 240.0
"""Seconds for everything, and for one part."""

EXPECTED_BUILD = 75.0
"""Seconds, with kernels for one kind of GPU: two cores take 80."""

HERE = "tests.gpu_check"

BUILD = Section("build", 240, "it builds; registers are noted, none spills", HERE + ".building:run")

FIRST = (
    Section(
        "bandwidth",
        10,
        ">= 0.9 of a copy's; 200 runs of parameters <= 1.1 of one",
        HERE + ".bandwidth:run",
    ),
    Section(
        "one stage",
        38,
        "d = 1 <= 1.03 of the unsplit model; clipping <= 1.02; a launch <= 30 us",
        HERE + ".one_stage:run",
    ),
    Section(
        "ring",
        28,
        "two processes on one device: the numbers of the definition",
        HERE + ".ring:run",
        environment=DETERMINISTIC,
    ),
)
SECOND = (
    Section("kernels", 15, "equal bits to the CPU's passes, but of NaN", HERE + ".kernels:run"),
    Section(
        "graphs",
        22,
        "the bits and the memory of a training whose recordings fail or do not",
        HERE + ".graphs:run",
        environment=DETERMINISTIC,
    ),
    Section(
        "user's side",
        18,
        "another stream, buffers written again, synchronize() anywhere: equal bits",
        HERE + ".users_side:run",
        environment=DETERMINISTIC,
    ),
    Section(
        "waits",
        14,
        "the steady state: no wait of the caller, elsewhere for losses and norms alone",
        HERE + ".waits:run",
    ),
    Section(
        "memory",
        28,
        "the allocator's peak <= 1.05 of memory_report()",
        HERE + ".memory:run",
        environment=SMALL_WORKSPACES,
    ),
    Section(
        "speed", 32, "noted: time at every depth over the unsplit model's", HERE + ".speed:run"
    ),
    Section(
        "streams",
        18,
        "noted: which streams wait for others, and for a kernel's first use",
        HERE + ".streams:run",
    ),
    Section(
        "oracle",
        25,
        "threads on one device, late or not, within 1e-6 of the unsplit model",
        HERE + ".oracle:run",
        environment=DETERMINISTIC,
    ),
)
THIRD = (
    Section(
        "train",
        60,
        "noted: a GPT in bf16 against the unsplit model and torch's 1F1B",
        HERE + ".train:run",
        environment=SHARING,
    ),
    Section(
        "chains",
        50,
        "three and four processes on one device: the numbers of the definition",
        HERE + ".chains:run",
        environment=DETERMINISTIC,
    ),
    Section(
        "failing",
        38,
        "a kill, an error, no memory: raised within 5 s; the weights can be read",
        HERE + ".failing:run",
    ),
    Section(
        "nccl",
        20,
        "one rank trains; two on one device do, or are refused clearly",
        HERE + ".nccl:run",
        environment=SHARING,
    ),
    Section(
        "allocators",
        22,
        "the numbers of the definition with torch's other allocators",
        HERE + ".allocators:run",
        environment=DETERMINISTIC,
    ),
    Section(
        "sanitizer", 24, "compute-sanitizer finds nothing in the passes", HERE + ".sanitizer:run"
    ),
)

PARTS = {1: FIRST, 2: SECOND, 3: THIRD}
SECTIONS = FIRST + SECOND + THIRD
