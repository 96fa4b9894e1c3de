"""The tables of options say what the constructors take, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw import extras, options, rules
from pipedream2bw.optimizer import options as optimizer_options
from pipedream2bw.optimizer.options import OptimizerOptions, Stepping
from pipedream2bw.optimizer.staleness import Remedies
from pipedream2bw.options import Options
from pipedream2bw.rules import Exclusion, check_values, refuse, shown

TABLES = {pd2.PipelineModule: Options, pd2.PipelineOptimizer: OptimizerOptions}
BESIDE = {pd2.PipelineModule: {"model", "loss_fn"}, pd2.PipelineOptimizer: {"optimizers"}}
"""Arguments that are no options."""

FIELDS = {field.name: field for table in TABLES.values() for field in dataclasses.fields(table)}
ROOT = Path(__file__).resolve().parents[3]
X = torch.arange(8.0).reshape(2, 4)
CPU = torch.device("cpu")


class Other(torch.optim.SGD):
    """None of torch's."""


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1))]


def without_lr(given: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    made = torch.optim.SGD(given, lr=lr)
    del made.param_groups[0]["lr"]
    return made


OPTIMIZERS = (torch.optim.SGD, torch.optim.Adagrad, Other, without_lr)


def sync() -> pd2.ReplicaSync:
    return pd2.ReplicaSync(4, store=HashStore(), site=0, num_sites=2)


USUAL: dict[str, Any] = {
    "schedule": pd2.make_schedule("2bw", 2, 2),
    "recompute": False,
    "width": 1,
    "num_stages": 2,
    "processes": 1,
    "device": CPU,
    "devices of the stages": [CPU, CPU],
    "'tp' of the mesh": 1,
    "shards": None,
    "optimizer": Stepping(torch.optim.SGD(parameters()), [torch.float32]),
    "tied parameters": [],
    "register_comm_hook": None,
    "fresh forwards": False,
    "late forwards of one's own": False,
}
"""Facts about a pipeline in one process, to which nothing was given."""

OTHERS: dict[str, list[Any]] = {
    "schedule": [pd2.make_schedule(n, 2, m) for n, m in (("pipedream", 1), ("1f1b", 2))]
    + [pd2.make_schedule("chimera", 2, 2)],
    "processes": [2],
    "device": [torch.device("meta")],
    "devices of the stages": [[torch.device("meta")] * 2],
    "'tp' of the mesh": [2],
    "shards": [{"0.weight": 0}],
    "optimizer": [Stepping(make(parameters()), [torch.float32]) for make in OPTIMIZERS]
    + [Stepping(torch.optim.SGD(parameters()), [torch.float64])]
    + [Stepping(torch.optim.Adafactor(parameters()), [torch.float32], has_shards=True)],
    "tied parameters": [["head.weight"]],
    "register_comm_hook": [len],
    "fresh forwards": [True],
    "late forwards of one's own": [True],
    "replica_sync": [sync()],
    "num_stages": ["auto"],
}


def extensions(kind: type[pd2.Extension] = pd2.Extension) -> list[type[pd2.Extension]]:
    assert extras
    below = [each for subclass in kind.__subclasses__() for each in extensions(subclass)]
    return [kind, *below]


EXCLUSIONS = [
    *options.PLANNED_EXCLUSIONS,
    *options.EXCLUSIONS,
    *optimizer_options.EXCLUSIONS,
    *(each for extension in extensions() for each in extension.excludes),
]


def usual(name: str) -> Any:
    return USUAL[name] if name in USUAL else as_fact(name, FIELDS[name].default)


def as_fact(name: str, value: Any) -> Any:
    return Remedies(value) if name == "staleness" else value


def of_field(field: Any) -> tuple[Any, ...]:
    kind, more = field.metadata["kind"], field.metadata["examples"]
    return more if kind is None else (*more, *kind.examples)


def examples(exclusion: Exclusion) -> dict[str, Any]:
    """Values that it holds of, those of the tables first."""
    found = {}
    for name, values in exclusion.values.items():
        of_table = of_field(FIELDS[name]) if name in FIELDS else ()
        tried = [*(as_fact(name, each) for each in of_table), *OTHERS.get(name, ())]
        found[name] = next(value for value in (usual(name), *tried) if values.hold(value))
    return found


def said(exclusion: Exclusion) -> str:
    return ", ".join(f"{name}: {values.words}" for name, values in exclusion.values.items())


# ---------------------------------------------------------------- the tables


@pytest.mark.parametrize("owner", TABLES)
def test_the_table_is_the_signature(owner: type) -> None:
    signature = inspect.signature(owner).parameters
    given = {name: each.default for name, each in signature.items() if name not in BESIDE[owner]}
    assert given == {each.name: each.default for each in dataclasses.fields(TABLES[owner])}
    assert list(given) == [each.name for each in dataclasses.fields(TABLES[owner])]


@pytest.mark.parametrize("owner", TABLES)
def test_the_docstring_names_every_option(owner: type) -> None:
    assert owner.__doc__ is not None
    (arguments,) = re.findall(r"\n    Args:\n(.*?)\n\n    \w", owner.__doc__, re.S)
    heads = re.findall(r"^ {8}(\w[\w, ]*):", arguments, re.M)
    named = {name for head in heads for name in head.split(", ")}
    assert named == {each.name for each in dataclasses.fields(TABLES[owner])} | BESIDE[owner]


@pytest.mark.parametrize("table", TABLES.values())
def test_defaults_and_examples_are_what_an_option_may_be(table: type) -> None:
    check_values(table, {each.name: each.default for each in dataclasses.fields(table)})
    for field in dataclasses.fields(table):
        for value in of_field(field):
            check_values(table, {field.name: value})


def test_settings_are_those_on_which_ranks_agree() -> None:
    found = rules.settings(Options(normalizer=len, metrics={"a": len}, accumulate=3))
    assert found["normalizer"] == "a function"
    assert found["metrics"] == "['a']"
    assert found["accumulate"] == 3
    assert not {"plan", "profile", "example_args", "example_target", "devices"} & found.keys()


# ---------------------------------------------------------------- what does not go together


def test_exclusions_name_options_and_facts_once() -> None:
    page = (ROOT / "docs/reference/options.md").read_text("utf-8")
    facts = set(re.findall(r"^\| `(.+?)` \|", page, re.M))
    named = {name for each in EXCLUSIONS for name in each.values}
    assert named - FIELDS.keys() == facts
    assert len({said(each) for each in EXCLUSIONS}) == len(EXCLUSIONS) > 40
    assert all(each.why and each.instead for each in EXCLUSIONS)


def test_defaults_go_together() -> None:
    refuse(EXCLUSIONS, {name: usual(name) for each in EXCLUSIONS for name in each.values})


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=said)
def test_an_exclusion_names_the_rule_and_the_values(exclusion: Exclusion) -> None:
    given = examples(exclusion)
    with pytest.raises(ValueError, match=re.escape(exclusion.why)) as raised:
        refuse([exclusion], given)
    assert str(raised.value).endswith(f": {exclusion.instead}")
    for name, value in given.items():
        assert f"{name}: {shown(value)}" in str(raised.value)
        if not exclusion.values[name].hold(usual(name)):
            refuse([exclusion], {**given, name: usual(name)})


def can_be_given(exclusion: Exclusion) -> bool:
    """Whether a pipeline in one process can be made such, on a CPU."""
    takes = {*FIELDS, "schedule", "optimizer"} - {"num_stages", "width"}
    return all(
        name in takes or (name == "num_stages" and "graphs" not in exclusion.values)
        if not values.hold(USUAL.get(name))
        else True
        for name, values in exclusion.values.items()
        if name in USUAL
    )


GIVEN = [each for each in EXCLUSIONS if can_be_given(each)]


@pytest.mark.parametrize("exclusion", GIVEN, ids=said)
def test_the_constructors_refuse_it(exclusion: Exclusion) -> None:
    given = {n: v for n, v in examples(exclusion).items() if n in FIELDS or n == "optimizer"}
    of_optimizer = {n: v for n, v in given.items() if n in OptimizerOptions.__annotations__}
    if "staleness" in of_optimizer:
        tried = FIELDS["staleness"].metadata["examples"]
        wanted = repr(of_optimizer["staleness"])
        of_optimizer["staleness"] = next(each for each in tried if repr(each) == wanted)
    dtype = torch.float64 if "of float64" in said(exclusion) else torch.float32
    base: dict[str, Any] = {"timeout": 5.0}
    base["num_microbatches"] = None if "schedule" in given else 2
    if "split_master" in given and "precision" not in given:
        base["precision"] = "bf16"
    if given.get("num_stages") == "auto":
        base |= {"example_target": X, "devices": ["cpu", "cpu"]}
    of_pipe = base | {n: v for n, v in given.items() if n in Options.__annotations__}
    make = type(given["optimizer"].optimizer) if "optimizer" in given else torch.optim.SGD
    if 'without "lr"' in said(exclusion):
        make = without_lr
    with pytest.raises(ValueError, match=re.escape(exclusion.why)) as raised:
        model = [nn.Linear(4, 4, dtype=dtype) for _ in range(2)]
        with pd2.PipelineModule(model, mse_loss, example_args=(X.to(dtype),), **of_pipe) as pipe:
            pd2.PipelineOptimizer(make(pipe.parameters(), lr=0.1), **of_optimizer)
    for name, value in given.items():
        if name != "optimizer":
            assert f"{name}: {shown(value)}" in str(raised.value)


def test_most_exclusions_are_tried_by_a_constructor() -> None:
    assert len(GIVEN) > 30


def test_an_extension_brings_its_rules_under_any_name() -> None:
    class Schedule(pd2.Extension):
        name = "schedule"  # as an option is called
        excludes = rules.exclusions("schedule: given, clip_grad_value: given | why => instead")

    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pd2.PipelineModule(model, mse_loss, num_microbatches=2, example_args=(X,)) as pipe:
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"replica_sync: every: 4, shard_state: True: "):
            pd2.PipelineOptimizer(sgd, extensions=[sync()], shard_state=True)
        with pytest.raises(ValueError, match=r"clip_grad_value: 1\.0: why: instead"):
            pd2.PipelineOptimizer(sgd, extensions=[Schedule()], clip_grad_value=1.0)
        pd2.PipelineOptimizer(sgd, extensions=[Schedule()], staleness=pd2.ErrorFeedback())


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16])
def test_a_dtype_and_its_name_are_one_everywhere(dtype: str | torch.dtype) -> None:
    table = Options(precision=dtype, gradient_dtype=dtype, autocast=dtype)  # type: ignore[arg-type]
    assert table.precision == "bf16"
    assert table.gradient_dtype is table.autocast is torch.bfloat16
    with pytest.raises(ValueError, match="precision: 'bf17', known: 'bf16'"):
        check_values(Options, {"precision": "bf17"})
