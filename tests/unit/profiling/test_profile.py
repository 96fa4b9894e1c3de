"""Profiles: what is counted, which layers are timed together, and what their JSON may hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipedream2bw as pd2
from examples.gpt import GPT, next_token_loss
from pipedream2bw.__main__ import main
from pipedream2bw.model.materialize import for_capture
from pipedream2bw.planner.profiling.layer_groups import group_layers
from pipedream2bw.planner.profiling.links import rounds_of_pairs
from pipedream2bw.planner.profiling.prepared import add_loss, capture_finely
from pipedream2bw.planner.profiling.profile import ProfiledLinks
from tests.runs.trajectory import make_pipeline, sgd
from tests.samples.models import TASKS

V100 = pd2.KNOWN_DEVICES["v100"]


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


class Three(nn.Module):
    """Layers whose every byte is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight.requires_grad_(False)
        self.third = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.third(torch.tanh(self.second(y)) * y)


def dry(model: Any, x: torch.Tensor, target: torch.Tensor, **options: Any) -> pd2.Profile:
    options = {"loss_fn": squares, "microbatch_rows": (x.shape[0],), "dry": V100} | options
    return pd2.profile(model, example_args=(x,), target=target, **options)


def measured(model: Any, x: torch.Tensor, target: torch.Tensor, **options: Any) -> pd2.Profile:
    return dry(model, x, target, **{"dry": None, "seconds": 0.01} | options)


def small_gpt(num_layers: int, width: int = 32) -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(num_layers=num_layers, width=width, num_heads=2, context=8)
    return model, torch.randint(256, (2, 8))


EXAMPLE = dry(Three(), torch.randn(2, 8), torch.randn(2, 4), microbatch_rows=(1, 2))
WITH_LINKS = dataclasses.replace(
    EXAMPLE,
    links=ProfiledLinks(((0.0, 1e-5), (1e-5, 0.0)), ((math.inf, 1e9), (1e9, math.inf))),
    all_reduce=((2, 1024, 1e-4),),
)


@pytest.mark.parametrize("make", [dry, measured])
def test_bytes_of_a_model_counted_by_hand(make: Any) -> None:
    found = make(Three(), torch.randn(5, 8), torch.randn(5, 4))
    names = [layer.name for layer in found.layers]
    assert names == ["first", "second", "tanh", "mul", "third"]
    assert [layer.parameter_bytes for layer in found.layers] == [576, 1024, 0, 0, 272]
    assert [layer.trained_bytes for layer in found.layers] == [576, 0, 0, 0, 272]
    (microbatch,) = found.microbatches
    value = 5 * 16 * 4
    # The linear layers: the input, which is the model's; nothing, since frozen; mul's result.
    # tanh: its result. mul: tanh's result, which is counted, and y. The loss: third's result.
    assert sum(microbatch.activation_bytes) == value + value + value + 5 * 4 * 4
    if make is dry:
        assert microbatch.activation_bytes == (0, 0, value, value, value + 5 * 4 * 4)
        assert microbatch.kept == ((value, (2, 3)),)  # tanh's result
    assert microbatch.edges == (
        *((0, 1, value), (1, 2, value), (2, 3, value), (0, 3, value), (3, 4, value)),
    )


@pytest.mark.parametrize("name", ["mlp", "skips", "fan", "gpt", "masked", "structures", "frozen"])
def test_a_dry_profile_keeps_the_bytes_that_autograd_keeps(name: str) -> None:
    task = TASKS[name]
    (batch,) = task.batches([4])
    arguments: dict[str, Any] = {
        "example_args": batch.args,
        "example_kwargs": batch.kwargs,
        "target": batch.target,
        "microbatch_rows": (2, 4),
    }
    model = task.model()
    foretold = pd2.profile(model, task.loss_fn, **arguments, dry=V100)
    found = pd2.profile(model, task.loss_fn, **arguments, seconds=0.01)
    assert found.layers == foretold.layers
    for one, other in zip(foretold.microbatches, found.microbatches, strict=True):
        assert one.activation_bytes == other.activation_bytes
        assert one.edges == other.edges
        assert sum(one.activation_bytes) > 0


@pytest.mark.parametrize("name", ["mlp", "skips", "gpt", "batch norm"])
def test_a_stage_keeps_what_the_profile_says(name: str) -> None:
    task = TASKS[name]
    (batch,) = task.batches([8])
    model = task.model()
    profile = pd2.profile(
        model,
        task.loss_fn,
        example_args=batch.args,
        target=batch.target,
        microbatch_rows=(2,),
        seconds=0.01,
    )
    with make_pipeline(task, 1, 4, batch, schedule="gpipe") as pipe:
        optimizer = pd2.PipelineOptimizer(sgd(pipe.parameters()))
        pipe.train_step(*batch.args, target=batch.target)
        optimizer.step()
        pipe.flush()
        memory = pipe.memory_report()[0]
    assert memory.most_in_flight == 4
    (microbatch,) = profile.microbatches
    assert 4 * sum(microbatch.activation_bytes) == pytest.approx(memory.activations, rel=0.03)


def test_every_name_is_one_where_a_stage_may_begin() -> None:
    model, tokens = small_gpt(2)
    profile = dry(model, tokens, tokens, loss_fn=next_token_loss)
    cuts = [i + 1 for i, layer in enumerate(profile.layers) if layer.can_cut_after]
    names = [profile.layers[cut].name for cut in cuts]
    pipe = pd2.PipelineModule(
        model,
        next_token_loss,
        num_stages=len(names) + 1,
        num_microbatches=1,
        schedule="gpipe",
        split=names,
        example_args=(tokens,),
    )
    with pipe:
        begins = [program.first_layer_name for program in pipe.session.modes.first.programs[1:]]
    assert begins == names


def test_equal_blocks_are_timed_once() -> None:
    model, tokens = small_gpt(12, width=64)
    profile = dry(model, tokens, tokens, loss_fn=next_token_loss)
    ends = [0, *(i + 1 for i, layer in enumerate(profile.layers) if layer.can_cut_after)]
    timed = [begin for begin in ends if profile.layers[begin].repeats is None]
    assert len(ends) >= 16
    assert len(timed) <= 8
    parts = [profile.layers[begin:end] for begin, end in itertools.pairwise([*ends, None])]
    by_begin = dict(zip(ends, parts, strict=True))
    for begin, part in by_begin.items():
        if part[0].repeats is not None:
            original = by_begin[part[0].repeats]
            assert [layer.repeats for layer in part] == list(
                range(part[0].repeats, part[0].repeats + len(original))
            )
            sizes = [layer.parameter_bytes for layer in part]
            assert sizes == [layer.parameter_bytes for layer in original], begin


class Scaled(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(*shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("change", ["width", "setting", "frozen", "one more", "order", "parameter"])
def test_blocks_that_differ_are_not_taken_for_equal(change: str) -> None:
    def block(*, odd: bool) -> nn.Module:
        width = 24 if odd and change == "width" else 16
        act: nn.Module = nn.GELU("tanh" if odd and change == "setting" else "none")
        parts = [nn.Linear(8, width), act, nn.Linear(width, 8)]
        if odd and change == "order":
            parts = [nn.Linear(8, 8), nn.Linear(8, 8), act]
        if odd and change == "frozen":
            parts[0].weight.requires_grad_(False)
        scaled = Scaled(*((1, 8) if odd and change == "parameter" else (8,)))
        return nn.Sequential(*parts, scaled)

    blocks = [block(odd=i == 2) for i in range(5)]
    if change == "one more":
        blocks[2] = nn.Sequential(nn.Dropout(0.5), *blocks[2])
    model = nn.Sequential(*blocks)
    x = torch.randn(4, 8)
    captured = capture_finely(model, ((x,), {}), ())
    graph = add_loss(captured, model, squares, x, rows=4, replicated=(), figures=V100)
    seconds = [layer.forward_cost + layer.backward_cost for layer in graph.captured.layers]
    groups = group_layers(graph.captured, model, seconds)
    odd_layers = {
        index
        for index, node in enumerate(graph.captured.layer_nodes)
        if str(node.target).startswith("2.")
        or any(str(used.target).startswith("2.") for used in node.all_input_nodes)
    }
    for group in groups:
        if not odd_layers.isdisjoint(group.layers):
            continue
        assert odd_layers.isdisjoint(groups[group.like].layers)
    with_odd = [group for group in groups if not odd_layers.isdisjoint(group.layers)]
    assert any(groups.index(group) == group.like for group in with_odd)


def test_a_model_too_large_for_this_machine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(8)))
    x = torch.randn(2, 16384)
    profile = dry(model, x, x)
    assert sum(layer.parameter_bytes for layer in profile.layers) == 8 * 4 * (16384**2 + 16384)
    assert all(parameter.is_meta for parameter in model.parameters())
    (microbatch,) = profile.microbatches
    # Weights are read once for each of three products.
    seconds = 4 * 16384**2 / (900e9 * 0.8)
    assert microbatch.forward[3] == pytest.approx(seconds, rel=0.05)
    assert microbatch.weight_grad[0] > microbatch.input_grad[0] == 0.0
    with pytest.raises(ValueError, match="on meta"):
        measured(model, x, x)
    with pytest.raises(ValueError, match="example_args: a tensor on meta"):
        dry(model, x.to("meta"), x)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 4)
    random = torch.get_rng_state()
    measured(model, x, x, parallel=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("profile", [EXAMPLE, WITH_LINKS])
def test_a_profile_survives_its_file(tmp_path: Path, profile: pd2.Profile) -> None:
    profile.save(tmp_path / "profile.json")
    assert pd2.Profile.load(tmp_path / "profile.json") == profile


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def document_of(profile: pd2.Profile, file: Path) -> Any:
    profile.save(file)
    return json.loads(file.read_text(encoding="utf-8"))


with tempfile.TemporaryDirectory() as folder:
    DOCUMENT = document_of(WITH_LINKS, Path(folder, "profile.json"))
NONSENSE = [None, -1, -0.5, 7, math.nan, math.inf, "x", True, [], {}, 10**400]


def load_or_reason(file: Path) -> pd2.Profile | str:
    try:
        return pd2.Profile.load(file)
    except ValueError as error:
        return str(error)


@given(
    path=st.sampled_from([path for path in places(DOCUMENT) if path]),
    new=st.sampled_from([..., *NONSENSE]),
)
@settings(max_examples=400, deadline=None)
def test_a_damaged_field_is_refused_by_name_or_read_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[Any, ...], new: Any
) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    if new is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    found = load_or_reason(file)
    if not isinstance(found, str):
        assert document_of(found, file) == document
    elif new is not math.inf and new is not math.nan:  # these are no JSON
        assert any(str(key) in found for key in path if isinstance(key, str)) or (
            # Fewer layers: what no longer fits them is named.
            path[0] == "layers" and "layers" in found
        ), found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: 'other', it must be 'pipedream2bw.profile'"),
        ({"version": 1}, "version: 1, it must be 2"),
        ({"version": True}, "version: True, it must be 2"),
        ({"extra": 1}, "extra: unknown"),
        ({"seconds_per_action": -1.0}, r"seconds_per_action.*-1.0.*>= 0"),
        ({"layers": []}, "layers: 0"),
        ({"torch_version": 3}, "torch_version: 3, it must be a string"),
        ({"device": {}}, "device.name: missing, fields given: none"),
        ({"links": {"latency": [[0, 1]], "bandwidth": [[None]]}}, r"links.latency: rows of \[2\]"),
        ({"links": {"latency": [[0]], "bandwidth": [[1.0]]}}, r"links.bandwidth\[0\]\[0\]: 1.0"),
        ({"all_reduce": [[1, 4, 0.1]]}, r"all_reduce\[0\]\[0\]: 1, it must be at least 2"),
    ],
)
def test_nonsense_in_a_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(DOCUMENT | change), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        pd2.Profile.load(file)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("forward", lambda values: values[:-1], r"microbatches\[0\].forward: 4 items, layers: 5"),
        ("forward", lambda values: (*values[:-1], math.nan), r"forward\[4\]: nan"),
        ("activation_bytes", lambda values: (-1, *values[1:]), r"activation_bytes\[0\]: -1"),
        ("edges", lambda values: (*values, (1, 9, 4)), r"\[0\].edges\[5\]: layer 9, layers: 5"),
        ("edges", lambda values: (*values, (3, 3, 4)), r"edges\[5\]: from layer 3 to 3"),
        ("kept", lambda _: ((4, (1, 5)),), r"\[0\].kept\[0\]\[1\]: layer 5, layers: 5"),
        ("kept", lambda _: ((4, (2, 1)),), r"kept\[0\]\[1\]: \[2, 1\]"),
        ("kept", lambda _: ((4, (2,)),), r"kept\[0\]\[1\]: \[2\]"),
        ("kept", lambda _: ((-4, (2, 3)),), r"kept\[0\]\[0\]: -4"),
        ("rows", lambda value: 0, r"rows: 0, it must be at least 1"),
        ("rows", lambda value: 2, r"microbatches\[1\].rows: 2, it must be more than 2"),
    ],
)
def test_lists_that_do_not_fit_the_layers(name: str, change: Any, message: str) -> None:
    first = EXAMPLE.microbatches[0]
    with pytest.raises(ValueError, match=message):
        broken = dataclasses.replace(first, **{name: change(getattr(first, name))})
        dataclasses.replace(EXAMPLE, microbatches=(broken, EXAMPLE.microbatches[1]))


def test_a_profile_of_another_model() -> None:
    model, x = Three(), torch.randn(2, 8)
    EXAMPLE.check_model(model)
    model.second.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter 2 is second.weight .* in the model, .*frozen"):
        EXAMPLE.check_model(model)
    with pytest.raises(ValueError, match="parameter 5 is none in the model"):
        dry(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), x, x).check_model(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        )
    other = dry(Three(), x, torch.randn(2, 4))
    assert other.fingerprint == EXAMPLE.fingerprint
    assert dry(model, x, torch.randn(2, 4)).fingerprint != EXAMPLE.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch_rows": (2, 2)}, "microbatch_rows: 2 after 2"),
        ({"microbatch_rows": (0,)}, "microbatch_rows: 0"),
        ({"microbatch_rows": ()}, "microbatch_rows"),
        ({"parallel": 0}, "parallel: 0"),
        ({"seconds": 0.0}, "seconds: 0.0"),
        ({"timeout": math.inf}, "timeout: inf"),
        ({"loss_fn": lambda output, target: output}, r"loss_fn returned shape \[2, 4\]"),
    ],
)
def test_arguments_that_make_no_profile(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry(Three(), torch.randn(2, 8), torch.randn(2, 4), **options)


def test_a_device_by_its_name_is_refused_with_the_figures_that_it_has() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match=r"dry: 'v100' given, .*KNOWN_DEVICES\[\"v100\"\]"):
        pd2.profile(nn.Linear(4, 4), squares, example_args=(x,), target=x, dry="v100")  # type: ignore[arg-type]


def test_layers_that_fake_tensors_cannot_run_have_no_dry_profile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="V100 SXM2 16GB, layers whose shapes depend on values"):
        dry(model, torch.randn(4, 4), torch.randn(4, 4))


def test_figures_that_no_device_has() -> None:
    with pytest.raises(ValueError, match="bytes_per_second: 0"):
        dataclasses.replace(V100, bytes_per_second=0)
    with pytest.raises(ValueError, match=r"efficiency: 1\.5, it must be at most 1"):
        dataclasses.replace(V100, efficiency=1.5)
    with pytest.raises(ValueError, match="float32 is missing"):
        dataclasses.replace(V100, flops_per_second={torch.float16: 1e12})


@pytest.mark.parametrize("count", range(2, 12))
def test_every_pair_of_ranks_meets_once(count: int) -> None:
    rounds = rounds_of_pairs(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    for together in rounds:
        busy = [rank for pair in together for rank in pair]
        assert len(busy) == len(set(busy))
    assert len([pairs for pairs in rounds if pairs]) == count - 1 + count % 2


MODEL = """
import torch
from torch import nn

def build():
    x = torch.randn(4, 8)
    return {
        "model": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        "loss_fn": nn.functional.mse_loss,
        "example_args": (x,),
        "target": x,
    }

def broken():
    return {"model": nn.Linear(8, 8)}
"""


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_to_profile.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["profile", "--model", "model_to_profile:build", "-o", "out.json", "--dry", "a100"]
    assert main([*command, "--rows", "2,4"]) == 0
    assert "3 layers" in capsys.readouterr().out
    profile = pd2.Profile.load("out.json")
    assert [item.rows for item in profile.microbatches] == [2, 4]
    assert profile.device.name == "A100 SXM4 80GB"
    for wrong, reason in (
        (["--model", "model_to_profile:broken"], "returned no 'loss_fn'"),
        (["--model", "model_to_profile:none"], "has no function 'none'"),
        (["--model", "model_to_profile"], "MODULE:FUNCTION"),
        (["--rows", "2,x"], "--rows/--microbatch-rows: '2,x'"),
        (["--dry", "v1000"], "--dry: 'v1000', known: v100"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *wrong])
        assert reason in capsys.readouterr().err


def test_a_model_on_meta_is_held_only_while_it_is_captured() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with for_capture(model, ((torch.randn(2, 4),), {})) as (held, _):
        assert held is not model
    dry(model, torch.randn(2, 4), torch.randn(2, 4))
