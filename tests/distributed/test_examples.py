"""The examples run as their first lines say, in one process and in several."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.exhaustive import exhaustive
from tests.runs.launch import ROOT, run_ranks
from tests.runs.saved import saved
from tests.samples.plans import plan_for

EXAMPLES = ROOT / "examples"
SHAPE = {"layers": 2, "width": 32, "heads": 2, "context": 32, "sample-tokens": 4, "steps": 40}
TINY_GPT = [f"--{name}={value}" for name, value in SHAPE.items()]
pytestmark = pytest.mark.slow


def start_alone(example: str, *arguments: str) -> subprocess.Popen[str]:
    """The example as a plain Python program."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / example), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )


def run_alone(example: str, *arguments: str) -> str:
    """What the example printed, which found torch imported."""
    (result,) = run_ranks(EXAMPLES / example, 1, args=arguments, rendezvous="none", timeout=150)
    return result.stdout


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Text with so little in it that a few batches teach something."""
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh" * 2000, encoding="ascii")
    return path


def losses_of(output: str) -> tuple[float, float]:
    found = re.search(r"loss: ([\d.]+) -> ([\d.]+)", output)
    assert found, output
    return float(found[1]), float(found[2])


def test_gpt_learns_under_torchrun_and_compares_the_schedules(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    out = tmp_path / "out"
    results = run_ranks(
        EXAMPLES / "train_gpt.py",
        2,
        args=[*TINY_GPT, "--data", str(text), "--out", str(out), "--compare-seconds", "1"],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
        timeout=150,
    )
    first, last = losses_of(results[0].stdout)
    assert first == pytest.approx(5.55, abs=0.2)
    assert last < first - 0.5
    assert {"loss.png", "timeline.png", "sample.txt", "throughput.md"} == {
        path.name for path in out.iterdir()
    }
    assert [f"| {name} |" in results[0].stdout for name in ("2bw_fresh", "1f1b", "gpipe")] == [
        True
    ] * 3
    assert results[1].stdout == ""


OURS, TITAN = "train_tensor_parallel.py", "train_torchtitan.py"


@pytest.mark.parametrize(
    ("name", "world", "arguments"),
    [
        (OURS, 4, ["--stages=2", "--shards=2"]),
        (TITAN, 4, ["--stages=2", "--shards=2"]),
        *exhaustive(
            (OURS, 4, ["--stages=1", "--shards=4"]),
            (OURS, 4, ["--stages=2", "--shards=2", "--schedule=1f1b"]),
            (TITAN, 4, ["--stages=4", "--schedule=1f1b"]),
        ),
    ],
)
def test_a_llama_of_tensor_parallel_stages_trains_as_in_one_process(
    name: str, world: int, arguments: list[str]
) -> None:
    """Its norms see a share of the sequence each, so their gradients are sums over the shards."""
    is_needed = os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") == "1"
    if name == TITAN and not is_needed and importlib.util.find_spec("torchtitan") is None:
        pytest.skip("could not import 'torchtitan'")
    script, steps = EXAMPLES / name, "--steps=4"
    results = run_ranks(
        script, world, args=[*arguments, steps], rendezvous="environment", timeout=150
    )
    schedules = [each for each in arguments if each.startswith("--schedule")]
    alone = losses_of(run_alone(script.name, steps, *schedules))
    assert losses_of(results[0].stdout) == pytest.approx(alone, abs=2e-5)


EXPERTS = "train_moe_tensor_parallel.py"


def test_experts_that_a_tensor_group_shares_out_train_as_those_of_one_process() -> None:
    results = run_ranks(
        EXAMPLES / EXPERTS,
        4,
        args=["--stages=2", "--shards=2", "--steps=20"],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
        timeout=150,
    )
    output = results[0].stdout
    alone = losses_of(run_alone(EXPERTS, "--steps=20"))
    assert losses_of(output) == pytest.approx(alone, abs=2e-5)
    assert alone[1] < alone[0] - 1.0
    bytes_of = [int(n.replace(",", "")) for n in re.findall(r": ([\d,]+) bytes", output)]
    # Of 128 tokens of 32 floats half goes on twice; at most two copies travel to and fro.
    assert bytes_of[0] == 128 * 32 * 4
    assert 0 < bytes_of[1] <= 2 * 128 * 32 * 4


def test_shards_without_processes_of_their_own_are_refused() -> None:
    arguments = ["--shards=2"]
    (result,) = run_ranks(
        EXAMPLES / EXPERTS, 1, args=arguments, rendezvous="none", expect_failure=True
    )
    assert result.exit_code == 2
    told = "--stages: 2, --shards: 2, processes: 1: each shard of a stage needs one"
    assert told in result.stderr


@pytest.mark.parametrize(
    ("example", "more"),
    [
        ("serve_bitdelta.py", ["--fine-tune-steps=2"]),
        *exhaustive(("train_delinked.py", []), ("train_soap.py", [])),
    ],
)
def test_the_mean_of_few_losses_is_told(
    example: str, more: list[str], tmp_path: Path, text: Path
) -> None:
    pytest.importorskip("matplotlib")
    data = [f"--data={text}", f"--out={tmp_path}"]
    data += [f"--fine-tune-data={text}"] if example == "serve_bitdelta.py" else []
    tiny = ["--layers=2", "--width=32", "--context=32", "--steps=2"]
    first, last = losses_of(run_alone(example, *tiny, *more, *data))
    assert last == pytest.approx(first, rel=0.2)


def test_blocks_that_shared_weights_go_on_apart(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    tiny = ["--layers=4", "--width=32", "--context=32", "--steps=30"]
    results = run_ranks(
        EXAMPLES / "train_delinked.py",
        2,
        args=[*tiny, "--data", str(text), "--out", str(tmp_path)],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
        timeout=150,
    )
    output = results[0].stdout
    first, last = losses_of(output)
    assert last < first - 0.5
    delinked, ended = re.findall(r"held-out loss: ([\d.]+) -> ([\d.]+)", output)
    assert float(delinked[0]) == pytest.approx(float(delinked[1]), abs=1e-4)
    assert float(ended[1]) < float(ended[0])


def test_one_bit_a_weight_serves_nearly_what_was_fine_tuned(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.txt"
    other.write_text("hgfedcba" * 2000, encoding="ascii")
    tiny = ["--layers=2", "--width=32", "--context=32", "--steps=40", "--fine-tune-steps=40"]
    results = run_ranks(
        EXAMPLES / "serve_bitdelta.py",
        2,
        args=[*tiny, f"--data={text}", f"--fine-tune-data={other}", f"--out={tmp_path}"],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
        timeout=150,
    )
    found = re.findall(r"  ([a-z, -]+): ([\d.]+)\n", results[0].stdout)
    losses = {name: float(loss) for name, loss in found}
    assert losses["served, base"] == pytest.approx(losses["base"], abs=1e-3)
    gained = losses["base"] - losses["fine-tuned"]
    assert gained > 0.3
    assert losses["base"] - losses["served, one bit a weight"] > 0.5 * gained


def test_preconditioners_made_in_bubbles_give_the_same_losses(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    tiny = ["--layers=2", "--width=32", "--context=32", "--steps=30", "--every=3"]
    printed = []
    for more in ([], ["--critical"]):
        results = run_ranks(
            EXAMPLES / "train_soap.py",
            2,
            args=[*tiny, *more, f"--data={text}", f"--out={tmp_path}"],
            rendezvous="environment",
            env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
            timeout=150,
        )
        printed.append(results[0].stdout)
        assert re.search(r"idle slots of rank 0 in a batch: [1-9]", printed[-1])
    in_bubbles, critical = map(losses_of, printed)
    assert in_bubbles == critical
    assert in_bubbles[1] < in_bubbles[0] - 0.5


def test_a_delta_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "serve_bitdelta.py"))
    generator = torch.Generator().manual_seed(0)
    base, fine = (
        {"blocks.0.mlp.0.weight": torch.randn(8, 4, generator=generator)} for _ in range(2)
    )
    delta = example["delta_of"](base, fine)
    state = example["with_delta"](base, delta)
    signs = 2.0 * example["unpacked"](state["blocks.0.mlp.0.bits"]).view(8, 4) - 1
    change = fine["blocks.0.mlp.0.weight"] - base["blocks.0.mlp.0.weight"]
    assert torch.equal(signs, change.sign())
    # By least squares no other scale is nearer.
    best = (change * signs).sum() / signs.square().sum()
    torch.testing.assert_close(state["blocks.0.mlp.0.scale"], best)
    with pytest.raises(ValueError, match=r"delta: of weights with the CRC-32 \w{8}, these have"):
        example["with_delta"](fine, delta)


def test_gpt_learns_as_a_plan_says(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    path = tmp_path / "plan.json"
    gpt = runpy.run_path(str(EXAMPLES / "gpt.py"))
    sizes = {"num_layers": 2, "width": 32, "num_heads": 2, "context": 32}
    example = (torch.zeros(1, 32, dtype=torch.int64),)
    # Process 1 has the first stage.
    devices = [[1], [0]]
    plan = plan_for(
        gpt["GPT"](**sizes),
        ["blocks.1.attention_norm"],
        example,
        schedule="1f1b",
        num_microbatches=4,
        devices=devices,
    )
    plan.save(path)
    results = run_ranks(
        EXAMPLES / "train_gpt.py",
        2,
        args=[*TINY_GPT, "--data", str(text), "--out", str(tmp_path / "out"), "--plan", str(path)],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
        timeout=150,
    )
    first, last = losses_of(results[0].stdout)
    assert last < first - 0.5
    assert "schedule='1f1b', num_stages=2, num_microbatches=4" in results[0].stdout


@pytest.mark.exhaustive
def test_gpt_learns_with_four_stages_in_one_process(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    out = tmp_path / "out"
    output = run_alone(
        "train_gpt.py", *TINY_GPT, "--stages", "4", "--data", str(text), "--out", str(out)
    )
    first, last = losses_of(output)
    assert last < first - 0.5
    assert (out / "timeline.png").exists()


def test_gpt_that_is_told_to_end_goes_on_with_the_same_bits(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    # On another number of stages other forwards would be late under "2bw_fresh".
    common = [*TINY_GPT, "--schedule", "2bw", "--steps", "80", "--microbatches", "4"]
    common += ["--save-every", "10"]

    def run_in(folder: str, stages: int) -> list[str]:
        at = ["--checkpoint", str(tmp_path / folder), "--out", str(tmp_path / "out")]
        return [*common, *at, "--stages", str(stages), "--data", str(text)]

    def weights_of(folder: str) -> bytes:
        (file,) = saved(tmp_path / folder, 80).glob("model-*.safetensors")
        return file.read_bytes()

    run_alone("train_gpt.py", *run_in("undisturbed", 2))
    interrupted = start_alone("train_gpt.py", *run_in("run", 4))
    while not any((tmp_path / "run").glob("step-*/checkpoint.json")):
        assert interrupted.poll() is None, interrupted.communicate()
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGTERM)
    printed = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 128 + signal.SIGTERM, printed
    assert not list((tmp_path / "run").glob("step-00000080-*"))
    run_alone("train_gpt.py", *run_in("run", 2))
    assert weights_of("run") == weights_of("undisturbed")


@pytest.mark.parametrize(
    ("example", "more"),
    [
        ("train_moe.py", []),
        *exhaustive(("train_muon.py", []), ("train_muon.py", ["--no-remedy"])),
    ],
)
def test_small_gpts_learn(tmp_path: Path, text: Path, example: str, more: list[str]) -> None:
    pytest.importorskip("matplotlib")
    tiny = ["--layers=2", "--width=32", "--context=32", "--steps=30", *more]
    output = run_alone(example, *tiny, "--data", str(text), "--out", str(tmp_path))
    first, last = losses_of(output)
    assert first == pytest.approx(5.55, abs=0.2)
    assert last < first - 0.5
    assert (tmp_path / "loss.png").exists()


def test_a_network_is_trained_by_a_schedule_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = run_alone("own_schedule.py", "--steps=40", "--width=16", "--out", str(tmp_path))
    first, last = losses_of(output)
    assert last < 0.9 * first
    assert re.search(r"\ncsv +1.050 +4.5\n2bw +1.000 +4.0\n", output), output
    assert {"loss.png", "schedule.png"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("script", ["torchrun_machines.sh", "slurm/train_gpt.sbatch"])
def test_scripts_name_options_that_the_example_has(script: str) -> None:
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    shell = "sh" if text.startswith("#!/bin/sh") else "bash"
    subprocess.run([shell, "-n", str(EXAMPLES / script)], check=True)
    called = text.partition("train_gpt.py --stages")[2].partition("'")[0]
    options = set(re.findall(r"--[a-z-]+", "--stages" + called))
    source = (EXAMPLES / "gpt_options.py").read_text(encoding="utf-8")
    assert options
    assert options <= set(re.findall(r'add\("(--[a-z-]+)"', source))


def recognised(output: str) -> float:
    found = re.search(r"recognised: (\d+) of (\d+)", output)
    assert found, output
    return int(found[1]) / int(found[2])


@pytest.mark.exhaustive
def test_digits_are_recognised_in_one_process() -> None:
    pytest.importorskip("sklearn")
    assert recognised(run_alone("train_digits.py", "--epochs", "3")) > 0.9


@pytest.mark.parametrize(
    ("example", "epochs", "draws", "share"),
    [
        ("train_digits.py", 3, False, 0.9),
        ("train_stages_apart.py", 8, False, 0.85),
        *exhaustive(("train_vit.py", 8, True, 0.4)),
    ],
)
def test_digits_are_recognised_under_torchrun(
    tmp_path: Path, example: str, epochs: int, draws: bool, share: float
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    results = run_ranks(
        EXAMPLES / example,
        2,
        args=["--epochs", str(epochs), *(("--out", str(tmp_path)) if draws else ())],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])},
        timeout=150,
    )
    assert recognised(results[1].stdout) > share  # of ten digits


def check_lora(output: str, out: Path) -> None:
    found = re.search(r"base: held-out loss: ([\d.]+) -> ([\d.]+)", output)
    assert found, output
    assert float(found[2]) < float(found[1]) - 0.3
    found = re.search(r"LoRA: held-out loss: ([\d.]+) -> ([\d.]+)", output)
    assert found, output
    assert float(found[2]) < float(found[1]) - 0.1
    assert (out / "loss.png").stat().st_size > 1000
    assert (out / "adapter" / "adapter_model.safetensors").exists()


TINY_LORA = ["--width=64", "--layers=2", "--context=32", "--steps=40"]


@pytest.mark.exhaustive
def test_lora_is_trained_in_one_process(tmp_path: Path, text: Path) -> None:
    for package in ("transformers", "peft", "matplotlib"):
        pytest.importorskip(package)
    arguments = [*TINY_LORA, "--data", str(text), "--out", str(tmp_path)]
    check_lora(run_alone("finetune_lora.py", *arguments), tmp_path)


@pytest.mark.exhaustive  # PipelineTrainer's own tests train adapters
def test_lora_is_trained_under_torchrun(tmp_path: Path, text: Path) -> None:
    for package in ("transformers", "peft", "matplotlib"):
        pytest.importorskip(package)
    results = run_ranks(
        EXAMPLES / "finetune_lora.py",
        2,
        args=[*TINY_LORA, "--data", str(text), "--out", str(tmp_path)],
        rendezvous="environment",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES), *sys.path])},
        imported=("tests.runs.trainers",),
        timeout=150,
    )
    check_lora(results[0].stdout, tmp_path)
