"""One script, run by plain python and by torchrun, trains the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
import torch, pipedream2bw as pd2
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
pipe = pd2.PipelineModule(model, nn.functional.mse_loss, num_stages=2, num_microbatches=2,
                          example_args=(torch.zeros(1, 4),))
opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
losses = []
with pipe:
    for batch in range(5):
        x = torch.randn(4, 4)
        losses.append(pipe.train_step(x, target=x.sin()))
        opt.step(); sched.step(); opt.zero_grad()
    with torch.no_grad():
        output = pipe(torch.ones(3, 4))
    assert (output is not None) == pipe.is_last_stage
    state = pipe.full_state_dict()
    losses = [float(loss) for loss in losses]
# In files: the ranks' lines on stdout may mix.
with open(os.path.join(sys.argv[1], str(pipe.rank)), "w") as file:
    json.dump({"losses": losses, "state": {k: v.tolist() for k, v in state.items()},
               "output": None if output is None else output.tolist(),
               "stages": pipe.stages, "environment": "RANK" in os.environ}, file)
"""

FAILING = SCRIPT.replace(
    "with pipe:",
    """
if pipe.is_last_stage:
    def fail(*_):
        raise ZeroDivisionError("on purpose")
    pipe.session.stages[-1].runner.loss_fn = fail
with pipe:""",
)

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, so that all of it can be ended
    )


def finish(process: subprocess.Popen[str], timeout: float = 150.0) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=timeout)
    finally:
        leftovers = is_alive(process.pid)
        if leftovers:
            os.killpg(process.pid, signal.SIGKILL)
    assert not leftovers, "processes were left behind"
    return process.returncode, errors


def is_alive(group: int) -> bool:
    """Whether a process of the group is left, after a moment for the kernel to end them."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_one_script_trains_the_same_in_one_process_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = {}
    for name, launcher in (("python", []), ("torchrun", TORCHRUN)):
        folder = tmp_path / name
        folder.mkdir()
        code, errors = finish(start([*launcher, str(script), str(folder)]))
        assert code == 0, errors
        assert "Traceback" not in errors and "Warning" not in errors, errors  # noqa: PT018
        results[name] = {p.name: json.loads(p.read_text()) for p in folder.iterdir()}
    (alone,) = results["python"].values()
    assert alone["stages"] == [0, 1]
    assert not alone["environment"]
    assert sorted(results["torchrun"]) == ["0", "1"]
    for rank, result in results["torchrun"].items():
        assert result["stages"] == [int(rank)]
        assert result["environment"]
        assert result["losses"] == alone["losses"]
    assert results["torchrun"]["0"]["state"] == alone["state"]
    assert results["torchrun"]["1"]["state"] == {}
    assert results["torchrun"]["1"]["output"] == alone["output"]


@pytest.mark.slow
def test_torchrun_ends_when_a_stage_fails_and_shows_the_cause(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    begin = time.monotonic()
    code, errors = finish(start([*TORCHRUN, str(script), str(tmp_path)]))
    assert code != 0
    assert time.monotonic() - begin < 100
    for rank in (0, 1):
        mine = "\n".join(line for line in errors.splitlines() if line.startswith(f"[rank{rank}]"))
        assert (
            "StageError: stage 1, batch 0, microbatch 0, forward: ZeroDivisionError: on" in mine
        ), errors
        assert 'raise ZeroDivisionError("on purpose")' in mine, errors  # of the other rank, too


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        # One process: tests/unit/runtime/test_ending.py.
        pytest.param([], id="python", marks=pytest.mark.exhaustive),
        pytest.param(TORCHRUN, id="torchrun"),
    ],
)
def test_ctrl_c_ends_every_process(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("range(5)", "range(10**9)").replace(
        "losses.append(", "open(sys.argv[1] + '/begun', 'w').close(); loss = ("
    ))  # fmt: skip
    process = start([*launcher, str(script), str(tmp_path)])
    deadline = time.monotonic() + 100
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    code, errors = finish(process, timeout=60)
    assert code != 0
    assert "KeyboardInterrupt" in errors or "SignalException" in errors, errors
