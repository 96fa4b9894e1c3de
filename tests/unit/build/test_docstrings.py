"""Every example of a docstring does what it shows."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.build.test_rooms import PACKAGE, module_of

COMMON = """
import torch
from torch import nn
from torch.nn.functional import mse_loss as loss_fn
from torch.utils.data import DataLoader, TensorDataset
import pipedream2bw as pd2

model = nn.Sequential(*[nn.Linear(4, 4) for _ in range({layers})])
x, y = torch.randn(8, 4), torch.randn(8, 4)
"""
PIPELINE = """
import copy
unsplit = copy.deepcopy(model)
pipe = pd2.PipelineModule(model, loss_fn, num_stages=2, num_microbatches=4, example_args=(x,))
opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
dataset = TensorDataset(torch.randn(256, 4), torch.randn(256, 4))
sampler = pd2.ResumableSampler(len(dataset), batch=64)
batches = [(x, y)] * 3
"""
BEFORE = {
    "fastest_v_schedule": COMMON.format(layers=16),
    "deferred_init": COMMON.format(layers=4)
    + """
class GPT(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(4, width), nn.Linear(width, 4))
config, tokens = 8, x
""",
    "use_local_shards": COMMON.format(layers=2)
    + """
from torch.distributed import HashStore, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp"))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.down(self.up(x).relu())
model = nn.Sequential(Block())
""",
    "plan": COMMON.format(layers=4)
    + """
pd2.profile(model, loss_fn, example_args=(x,), target=y, microbatch_rows=(1, 2),
            dry=pd2.KNOWN_DEVICES["v100"]).save("gpt.json")
""",
    "collect_losses": COMMON.format(layers=4),
    "PipelineTrainer": """
import torch
import pipedream2bw as pd2
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from pipedream2bw.extras.transformers import PipelineTrainer
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16,
    num_hidden_layers=4, num_attention_heads=2))
data = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
args = TrainingArguments("out", per_device_train_batch_size=1, gradient_accumulation_steps=4,
    use_cpu=True, report_to="none")
""",
}
"""By the last part of an object's name what its example takes for granted."""

AFTER = """
for made in [each for each in list(globals().values()) if isinstance(each, pd2.PipelineModule)]:
    made.close()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

NEEDS = {"PipelineTrainer": "transformers", "simulate": "matplotlib"}


FOUND = [
    (path, name)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in (text := path.read_text("utf-8"))
    for name in re.findall(r"(?:class|def) (\w+)(?:(?!\n *(?:class|def) ).)*?\n +>>> ", text, re.S)
]
"""The functions and classes with examples, found without an import of optional packages."""


def test_examples_were_found_and_none_is_without_a_prompt() -> None:
    names = [name for _, name in FOUND]
    assert len(names) >= 12
    assert len(set(names)) == len(names)
    assert set(BEFORE) <= set(names)
    for path in PACKAGE.rglob("*.py"):
        assert not re.findall(r"^.*::\n\n +(?!>>>)\S", path.read_text("utf-8"), re.M), path


@pytest.mark.parametrize(("path", "name"), FOUND, ids=[name for _, name in FOUND])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_example_of_a_docstring_does_what_it_shows(
    path: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(module_of(path))
    names: dict[str, Any] = {"__name__": "example"}
    exec(BEFORE.get(name, COMMON.format(layers=4) + PIPELINE), names)
    (test,) = [
        each
        for each in doctest.DocTestFinder(recurse=True).find(module, globs=names)
        if each.name.rpartition(".")[2] == name and each.examples
    ]
    printed: list[str] = []
    try:
        found = doctest.DocTestRunner(verbose=False).run(
            test, out=printed.append, clear_globs=False
        )
        names |= test.globs
    finally:
        exec(AFTER, names)
    assert found.attempted > 0
    assert found.failed == 0, "".join(printed)
