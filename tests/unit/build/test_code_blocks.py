"""Every block of code in the documents runs: a document's Python blocks in order, in one namespace.

What blocks take for granted (a model, a loader) is in ``BEFORE``; ``INSTEAD`` makes some smaller.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipedream2bw.__main__ import main
from pipedream2bw.planner.profiling import profiler
from tests.unit.build.test_documents import DOCUMENTS
from tests.unit.build.test_rooms import ROOT

OF_THE_SITE = {"{toctree}", "{eval-rst}", "{simulated}", "{command-help}", "{code-cell}"}
OF_THE_SITE |= {"{options}", "{exclusions}"}
"""Blocks that are run where the site is built (docs/conf.py, make docs)."""

ELSEWHERE = {
    ("docs/replica_sync.md", "TCPStore("): "test_the_documents_example_learns",
    ("docs/gradient_hooks.md", "register_comm_hook"): "test_the_documents_hooks_run_as_they_are",
}
"""Blocks that need several processes, and the tests of tests/distributed that run them."""

IMPORTS = """
import copy, warnings
import torch
from torch import nn
import pipedream2bw as pd2
from torch.nn.functional import mse_loss as loss_fn

torch.manual_seed(0)
"""
TEXT_MODEL = """
class Flat(nn.Module):
    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

model = nn.Sequential(nn.Embedding(16, 8), *[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 16))
loss_fn = Flat()
tokens = torch.randint(16, (8, 4))
targets = tokens
loader = [(tokens, tokens)] * 3
"""
VECTOR_MODEL = """
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range({layers})])
x, y = torch.randn(16, 4), torch.randn(16, 4)
"""
PIPELINE = (
    VECTOR_MODEL.format(layers=4)
    + """
loss_fn = nn.functional.mse_loss
pipe = pd2.PipelineModule(model, loss_fn, num_stages=2, num_microbatches=4, example_args=(x,))
"""
)
RUN = (
    PIPELINE
    + """
from torch.utils.data import DataLoader, TensorDataset
opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
rows = TensorDataset(torch.randn(48, 4), torch.randn(48, 4))
sampler = pd2.ResumableSampler(len(rows), batch=16)
loader = DataLoader(rows, batch_sampler=sampler)
warm_up = torch.optim.lr_scheduler.ConstantLR(opt)
"""
)
TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16,
    num_hidden_layers=4, num_attention_heads=2))
data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 32
"""

BEFORE = {
    ("docs/guide/failures.md", "ckpt.step()"): RUN + "ckpt = pd2.Checkpointer('other', pipe, opt)",
    ("docs/index.md", "for tokens, targets in loader:"): TEXT_MODEL,
    ("docs/checkpoints.md", "class Weights:"): PIPELINE,
    ("docs/coming_from.md", "for tokens, targets in loader:"): TEXT_MODEL,
    ("docs/checkpoints.md", "pd2.SeededRows"): RUN,
    ("docs/trainer.md", "PipelineTrainer"): TRAINER,
    ("docs/extending.md", "AveragedWeights(decay=0.9)"): PIPELINE,
    ("docs/schedules.md", "fastest_v_schedule"): VECTOR_MODEL.format(layers=32),
    ("docs/which_optimizer.md", "adamw = "): VECTOR_MODEL.format(layers=4)
    + "loss_fn = nn.functional.mse_loss",
    # What matters is that it is any optimizer; the study trains with the real one.
    ("docs/which_optimizer.md", "SOAP"): """
import sys, types
class SOAP(torch.optim.SGD):
    def __init__(self, params, lr, precondition_frequency):
        super().__init__(params, lr)
sys.modules["pytorch_optimizer"] = types.SimpleNamespace(SOAP=SOAP)
"""
    + PIPELINE,
    ("docs/planner.md", 'profile.save("gpt.json")'): TEXT_MODEL,
    ("docs/planner.md", "tensor_parallel="): """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "out", "up", "down"):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x):
        x = x + self.out(self.query(x) * self.key(x) + self.value(x))
        return x + self.down(self.up(x).relu())

x = torch.randn(4, 4)
profile = pd2.profile(nn.Sequential(nn.Linear(4, 4), Block()), loss_fn, example_args=(x,),
    target=x, dry=pd2.KNOWN_DEVICES["v100"])
""",
    ("docs/planner.md", 'plan.save("plan.json")'): VECTOR_MODEL.format(layers=8)
    + "loss_fn = nn.functional.mse_loss",
    ("docs/planner.md", "copy.deepcopy(model).bfloat16()"): VECTOR_MODEL.format(layers=8),
    ("docs/planner.md", 'num_stages="auto"'): VECTOR_MODEL.format(layers=8),
    ("docs/planner.md", "pd2.calibrate"): """
plan = pd2.plan(profile, devices=2, width=1, memory="16GiB", batch=16, precision="bf16")
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
pipe = pd2.PipelineModule(model, loss_fn, plan=plan, precision="bf16", example_args=(x,))
""",
    ("docs/torch_compile.md", 'backend="pipedream2bw"'): VECTOR_MODEL.format(layers=4)
    + """
import torch._dynamo
from pipedream2bw.extras.dynamo.backend import pipedream2bw
if "pipedream2bw" not in torch._dynamo.list_backends():  # where the package is not installed
    torch._dynamo.register_backend(pipedream2bw, name="pipedream2bw")
""",
    ("docs/replica_sync.md", "diloco = "): """
from torch.distributed import HashStore
store, site, num_sites, batch, evaluate = HashStore(), 0, 2, 1, None
""",
}
INSTEAD = {
    # Replicas need processes: eight stages, as threads.
    ("docs/planner.md", 'plan.save("plan.json")'): ("devices=8", "devices=8, width=1"),
    ("docs/planner.md", 'num_stages="auto"'): ('"auto"', '"auto", devices=["cpu"] * 2'),
    ("docs/planner.md", "copy.deepcopy(model).bfloat16()"): ("devices=8", "devices=8, width=1"),
}
ON_A_CPU = ("bf16=True", 'use_cpu=True, report_to="none"')
"""Half precision of a Trainer wants a device that has it."""


class Block(NamedTuple):
    document: str
    language: str
    code: str

    def __str__(self) -> str:
        line = self.code.partition("\n")[0]
        return f"{self.document}: {line}"


def blocks_of(path: Path) -> list[Block]:
    name = str(path.relative_to(ROOT))
    found = re.findall(r"^( *)```([^\n`]*)\n(.*?)^\1```", path.read_text("utf-8"), re.M | re.S)
    return [Block(name, language, textwrap.dedent(code)) for _, language, code in found]


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]


def chosen(table: dict[tuple[str, str], Any], block: Block) -> Any:
    """The entry of a table for a block: of its document, with a phrase that the block has."""
    found = [
        entry
        for (document, phrase), entry in table.items()
        if document == block.document and phrase in block.code
    ]
    assert len(found) <= 1, f"{block}: several entries"
    return found[0] if found else None


def test_every_block_is_run_and_every_entry_is_used() -> None:
    languages = {"python", "bash", "console", "", *OF_THE_SITE}
    for block in BLOCKS:
        assert (block.language.split(" ") or [""])[0] in languages, f"{block}: run by no test"
    for document, phrase in [*ELSEWHERE, *BEFORE, *INSTEAD]:
        has = [b for b in BLOCKS if b.document == document and phrase in b.code]
        assert len(has) == 1, f"{document}: {phrase!r} is in {len(has)} blocks"
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests/distributed").glob("*.py"))
    for name in ELSEWHERE.values():
        assert f"def {name}(" in tests


def small(block: Block) -> str:
    old, new = chosen(INSTEAD, block) or ("", "")
    assert old in block.code
    code = block.code.replace(old, new) if old else block.code
    return code.replace(*ON_A_CPU) if "TrainingArguments(" in code else code


@pytest.fixture(autouse=True)
def quick_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are measured in the fewest rounds: no document says what they are."""
    for function in (profiler.profile, profiler.profile_together):
        quick = {**(function.__kwdefaults__ or {}), "seconds": 0.05}
        monkeypatch.setattr(function, "__kwdefaults__", quick)


PYTHON = {
    name: [b for b in BLOCKS if b.document == name and b.language == "python"]
    for name in dict.fromkeys(block.document for block in BLOCKS)
}


@pytest.mark.parametrize("document", [name for name, blocks in PYTHON.items() if blocks])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_python_of_a_document_runs(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any("Trainer" in block.code for block in PYTHON[document]):
        pytest.importorskip("transformers")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict[str, Any] = {"__name__": "document"}
    exec(IMPORTS, names)
    try:
        for block in PYTHON[document]:
            if chosen(ELSEWHERE, block):
                continue
            if script := re.match(r"# (\w+\.py)\n", block.code):
                Path(script[1]).write_text(block.code, "utf-8")
                continue
            exec(chosen(BEFORE, block) or "", names)
            exec(compile(small(block), str(block), "exec"), names)
            close_pipelines(names)
        run_scripts_of(document, {path.name for path in tmp_path.glob("*.py")})
    finally:
        sys.modules.pop("pytorch_optimizer", None)
        close_pipelines(names, but=())


def close_pipelines(names: dict[str, Any], but: tuple[str, ...] = ("pipe",)) -> None:
    """Ends what a block has made and no later one uses."""
    from pipedream2bw import PipelineModule

    for name, made in names.items():
        if isinstance(made, PipelineModule) and name not in but:
            made.close()


def run_scripts_of(document: str, saved: set[str]) -> None:
    """Runs the scripts that the document told its reader to save."""
    for block in BLOCKS:
        for command in filter(None, commands_of(block)):
            script = command[-1]
            runs_here = command[0] in ("python", "torchrun") and "--nnodes" not in command
            if block.document == document and runs_here and script in saved:
                subprocess.run(
                    command, check=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)}
                )


def commands_of(block: Block) -> list[list[str]]:
    """The command lines of a block for a shell; none of one that shows files or output."""
    if block.language not in ("bash", ""):
        return []
    lines = block.code.replace("\\\n", " ").splitlines()
    known = ("pipedream2bw", "torchrun", "make", "pip", "python", "PIPEDREAM2BW_CUDA", "export")
    return [
        shlex.split(line, comments=True)
        for line in lines
        if block.language == "bash" or line.startswith(known)
    ]


COMMANDS = [(block, command) for block in BLOCKS for command in commands_of(block) if command]
MODEL = """
import torch
from torch import nn

def build():
    x = torch.randn(4, 8)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    return {"model": model, "loss_fn": nn.functional.mse_loss, "example_args": (x,), "target": x}
"""


@pytest.mark.parametrize(
    ("block", "command"), COMMANDS, ids=[f"{b.document}: {' '.join(c)}" for b, c in COMMANDS]
)
def test_the_commands_of_a_document_are_right(
    block: Block, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *arguments = command
    if program == "make":
        subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=60
        )
    elif program == "pipedream2bw" or "pipedream2bw" in arguments:
        arguments = (
            arguments[arguments.index("pipedream2bw") + 1 :]
            if program != "pipedream2bw"
            else arguments
        )
        for name in ("mymod", "mymodule"):
            (tmp_path / f"{name}.py").write_text(MODEL)
            sys.modules.pop(name, None)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(arguments) == 0
    else:
        subprocess.run(["bash", "-n", "-c", shlex.join(command)], check=True, timeout=60)
        assert re.match(r"python$|torchrun$|pip$|export$|[A-Z_0-9]+=", program), command
