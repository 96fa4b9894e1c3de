"""The sections, the most important first: a deadline may end those behind."""

from __future__ import annotations

from .section import Section

# cuBLAS chooses the same algorithms on every stream, and streams do not stand behind each other's
# sleeping kernels. To be set before the device is first used.
DETERMINISTIC = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32"))

HERE = "tests.gpu_check"

BUILD = Section("build", 150, "it builds; registers are noted, none spills", HERE + ".building:run")

SECTIONS = (
    Section("kernels", 60, "equal bits to the CPU's passes, but of NaN", HERE + ".kernels:run"),
    Section(
        "bandwidth",
        30,
        ">= 0.9 of a copy's; 200 runs of parameters <= 1.1 of one",
        HERE + ".bandwidth:run",
    ),
    Section(
        "oracle",
        120,
        "threads on one device, late or not, within 1e-6 of the unsplit model",
        HERE + ".oracle:run",
        DETERMINISTIC,
    ),
    Section(
        "user's side",
        40,
        "another stream, buffers written again, synchronize() anywhere: equal bits",
        HERE + ".users_side:run",
        DETERMINISTIC,
    ),
    Section(
        "graphs",
        40,
        "the bits and the memory of a training whose recordings fail or do not",
        HERE + ".graphs:run",
        DETERMINISTIC,
    ),
    Section(
        "waits",
        30,
        "the steady state: no wait of the caller, elsewhere for losses and norms alone",
        HERE + ".waits:run",
    ),
    Section("memory", 40, "the allocator's peak <= 1.05 of memory_report()", HERE + ".memory:run"),
    Section(
        "speed", 60, "d = 1 <= 1.03 of the unsplit model; clipping <= 1.02", HERE + ".speed:run"
    ),
    Section(
        "two processes",
        60,
        "the oracle's numbers; a kill, an error, no memory: raised within 5 s",
        HERE + ".two_processes:run",
        DETERMINISTIC,
    ),
    Section(
        "nccl",
        40,
        "one rank trains; two replicas on one device are refused clearly",
        HERE + ".nccl:run",
    ),
    Section(
        "first use",
        15,
        "noted: does a kernel's first use wait for the device",
        HERE + ".first_use:run",
    ),
)
