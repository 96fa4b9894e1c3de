"""Frozen layers in files train as those in memory do, and few are in memory at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.extras import streaming
from tests.runs.launch import run_ranks

WIDTH, M = 16, 4
X = torch.randn(8, 3, WIDTH, generator=torch.Generator().manual_seed(1))
Y = X.roll(1, -1).tanh()


def model_of(*, bias: bool = True) -> nn.Sequential:
    """Frozen layers, and trained ones between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        up, down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        layers.append(nn.Sequential(up, nn.GELU(), down, nn.LayerNorm(WIDTH)))
        up.requires_grad_(False)
        down.requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def in_float(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output.float(), target)


def train(
    model: nn.Module, extensions: Any = (), **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, what is left of the state, and the bytes of frozen weights."""
    given = {"num_stages": 2, "schedule": "2bw", "split": ["2"], **options}
    loss_fn = given.pop("loss_fn", mse_loss)
    with pd2.PipelineModule(model, loss_fn, num_microbatches=M, example_args=(X,), **given) as pipe:
        opt = pd2.PipelineOptimizer(
            torch.optim.AdamW(pipe.parameters(), lr=1e-2), extensions=extensions
        )
        losses = []
        for _ in range(6):
            losses.append(pipe.train_step(X, target=Y))
            opt.step()
        pipe.eval()
        losses.append(pipe.eval_step(X, target=Y))
        pipe.train()
        report = pipe.memory_report()
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
        held = sum(stage.frozen_weights for stage in report.values())
        return [float(loss) for loss in losses], state, held


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "2bw_fresh"},
        {"schedule": "1f1b", "recompute": True},
        {"schedule": "2bw_split"},
        {"num_stages": 1, "split": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_the_bits_are_those_of_linear_layers(
    options: dict[str, Any], bias: bool, tmp_path: Path
) -> None:
    plain, whole, _ = train(model_of(bias=bias), **options)
    model = model_of(bias=bias)
    pd2.stream_weights(model, tmp_path, least_bytes=0)
    streamed, state, _ = train(model, **options)
    assert streamed == plain
    left = {n for n in whole if n.endswith(("3.weight", "3.bias")) or n[0] == "4"}
    assert all(torch.equal(state[name], whole[name]) for name in left)
    digests = state.keys() - left
    assert digests == {f"{i}.{j}.digest_of_weights" for i in range(4) for j in (0, 2)}
    assert all(state[name].nbytes == 0 for name in digests)


@pytest.mark.parametrize("ahead", [1, 2])
def test_few_layers_are_in_memory(
    ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, reads = 0, 0
    read = streaming._Layer.read

    def counted(layer: streaming._Layer) -> list[torch.Tensor]:
        nonlocal most, reads
        tensors = read(layer)
        alive.add(tensors[0])
        most, reads = max(most, len(alive)), reads + 1
        return tensors

    monkeypatch.setattr(streaming._Layer, "read", counted)
    model = model_of()
    streamed = pd2.stream_weights(model, tmp_path, ahead=ahead, least_bytes=0)
    gc.collect()
    train(model, num_stages=1, split=None)
    assert 1 + ahead <= most <= 2 + ahead  # a read may begin before the layer in use is dropped
    # Six trainings and an evaluation; nothing is trained before two of the eight layers.
    uses = M * (6 * (8 + 6) + 8)
    assert uses <= reads <= uses + 8 * ahead  # few were fetched for nothing
    size = (2 * WIDTH * WIDTH + 2 * WIDTH) * 4
    assert streamed.most_bytes == (1 + ahead) * size


def test_memory_report_counts_what_is_there(tmp_path: Path) -> None:
    model = model_of()
    streamed = pd2.stream_weights(model, tmp_path, least_bytes=0)
    _, _, without = train(copy_of(model))
    _, _, counted = train(model, extensions=[streamed])
    assert counted == without + 2 * streamed.most_bytes
    assert streamed.nbytes == 8 * (2 * WIDTH * WIDTH * 4) + 4 * (3 * WIDTH * 4)


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)  # of the same files


def in_processes(rank: int, world: int, folder: str) -> list[float]:
    model = model_of()
    pd2.stream_weights(model, folder, least_bytes=0)
    return train(model)[0]


def test_processes_may_share_the_files(tmp_path: Path) -> None:
    plain, _, _ = train(model_of())
    results = run_ranks(in_processes, 2, args=(str(tmp_path),), timeout=60)
    assert [result.value for result in results] == [plain, plain]


def test_what_cannot_be_streamed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stream_weights: 0 frozen nn.Linear of 1048576 bytes"):
        pd2.stream_weights(model_of(), tmp_path)
    with pytest.raises(ValueError, match="ahead: 0, it must be at least 1"):
        pd2.stream_weights(model_of(), tmp_path, ahead=0)
    with pytest.raises(TypeError, match="least_bytes: '1MiB' given, it must be an int"):
        pd2.stream_weights(model_of(), tmp_path, least_bytes="1MiB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: 'gpt' given, it must be a torch\.nn\.Module"):
        pd2.stream_weights("gpt", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stream_weights: 0\.0 is on meta, it must have values"):
        pd2.stream_weights(model_of().to("meta"), tmp_path, least_bytes=0)
    model = model_of()
    pd2.stream_weights(model, tmp_path, least_bytes=0)
    with pytest.raises(
        ValueError, match=r"0.0-\w+.bin: torch.float32, the layer's input: .*with precision="
    ):
        model(X.double())
    (path,) = tmp_path.glob("0.0-*.bin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"0.0-\w+.bin: 2175 bytes, the layer has 2176: the file"):
        model(X)


def test_models_may_share_a_folder_and_be_copied(tmp_path: Path) -> None:
    models = [model_of(), model_of(bias=False)]
    with torch.no_grad():
        models[1][0][0].weight.mul_(2)
    expected = [model(X) for model in models]
    for model in models:
        pd2.stream_weights(model, tmp_path, least_bytes=0)
    torch.save(models[0], tmp_path / "model.pt")
    streaming._layers.clear()  # as in another process
    models[0] = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(torch.equal(m(X), y) for m, y in zip(models, expected, strict=True))


def test_layers_with_hooks_stay_and_shared_ones_stay_shared(tmp_path: Path) -> None:
    hooked, shared = (nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))
    hooked.register_forward_hook(lambda module, args, y: 2 * y)
    model = nn.Sequential(hooked, shared, nn.ReLU(), shared)
    expected = model(X)
    streamed = pd2.stream_weights(model, tmp_path, least_bytes=0)
    assert torch.equal(model(X), expected)
    assert model[0] is hooked
    assert model[1] is model[3]
    assert streamed.nbytes == 4 * (WIDTH * WIDTH + WIDTH)


def opened(
    folder: Path, frozen: int, *, is_streamed: bool, has_digests: bool = True
) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    """A pipeline whose frozen layer has the weights of a seed."""
    torch.manual_seed(frozen)
    middle = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))
    if is_streamed:
        pd2.stream_weights(model, folder / "weights", least_bytes=0)
        if not has_digests:
            del model[1].digest_of_weights
    pipe = pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=M, schedule="1f1b", example_args=(X,)
    )
    return pipe, pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


def stepped(pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer) -> float:
    loss = pipe.train_step(X, target=Y)
    opt.step()
    return float(loss)


LOADS: dict[str, Any] = {
    "load": pd2.load,
    "weights alone": lambda folder, pipe, opt: pd2.load(folder, pipe),
    "resume": lambda folder, pipe, opt: pd2.Checkpointer(folder, pipe, opt, preempt=()).resume(),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("saved_as", ["memory", "streamed", "streamed without digests"])
def test_a_run_goes_on_with_the_frozen_weights_that_it_had_or_not_at_all(
    saved_as: str, load: str, tmp_path: Path
) -> None:
    folder, saved_streamed = tmp_path / "run", saved_as != "memory"
    has_digests = saved_as != "streamed without digests"
    pipe, opt = opened(tmp_path, 1, is_streamed=saved_streamed, has_digests=has_digests)
    with pipe:
        stepped(pipe, opt)
        pd2.save(folder, pipe, opt).wait()
        expected = stepped(pipe, opt)
    pipe, opt = opened(tmp_path, 1, is_streamed=True)
    with pipe:
        LOADS[load](folder, pipe, opt)
        assert stepped(pipe, opt) == expected
    if not has_digests:  # nothing to compare with
        return
    pipe, opt = opened(tmp_path, 2, is_streamed=True)
    with pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        refused = (
            r"1\.digest_of_weights: shape .*they must be equal"
            if saved_streamed
            else r"1\.bias: the model's values differ, the checkpoint step-\S+ has it: they must be"
        )
        with pytest.raises(ValueError, match=refused):
            LOADS[load](folder, pipe, opt)
        assert all(torch.equal(pipe.state_dict()[name], value) for name, value in before.items())


def refused_in_processes(rank: int, world: int, folder: str) -> tuple[bool, str]:
    pipe, opt = opened(Path(folder), 1, is_streamed=False)
    with pipe:
        stepped(pipe, opt)
        pd2.save(f"{folder}/run", pipe, opt).wait()
    pipe, opt = opened(Path(folder), 2, is_streamed=True)
    with pipe:
        with pytest.raises(ValueError, match=r"1\.bias: the model's values differ") as refused:
            pd2.load(f"{folder}/run", pipe, opt)
        return stepped(pipe, opt) > 0, str(refused.value)


def test_every_rank_refuses_what_one_stage_has_otherwise(tmp_path: Path) -> None:
    results = run_ranks(refused_in_processes, 2, args=(str(tmp_path),), timeout=60)
    assert [result.value[0] for result in results] == [True, True]


def test_weights_of_other_layers_are_not_loaded_by_themselves(tmp_path: Path) -> None:
    pipe, _ = opened(tmp_path, 1, is_streamed=True)
    with pipe:
        state = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe, _ = opened(tmp_path, 2, is_streamed=True)
    with pipe, pytest.raises(RuntimeError, match=r"size mismatch for 1\.digest_of_weights"):
        pipe.load_state_dict(state)


class Reads(nn.Module):
    """Asks for a layer's weight, as T5 does for its dtype and fast paths for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.to(self.layer.weight.dtype))
        return y if self.training else y + nn.functional.linear(x, self.layer.weight)


def test_layers_whose_weight_is_read_compute_the_same_and_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    read = streaming._Layer.read

    def counted(layer: streaming._Layer) -> list[torch.Tensor]:
        tensors = read(layer)
        alive.add(tensors[0])
        return tensors

    monkeypatch.setattr(streaming._Layer, "read", counted)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
        frozen = nn.Sequential(*(Reads() for _ in range(4)), encoder).requires_grad_(False)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *frozen, nn.Linear(WIDTH, WIDTH))

    plain = train(made(), split=None)
    model = made()
    pd2.stream_weights(model, tmp_path, least_bytes=0)
    assert torch.equal(model[1].layer.weight, made()[1].layer.weight)
    streamed = train(model, split=None)
    assert streamed[0] == plain[0]
    gc.collect()
    assert len(alive) <= 2  # what this thread has fetched ahead


def test_in_bf16_the_frozen_layers_are_converted_before(tmp_path: Path) -> None:
    plain, streamed = (model_of() for _ in range(2))
    for model in (plain, streamed):
        for layer in model[:-1]:
            layer[0].bfloat16()
            layer[2].bfloat16()
    pd2.stream_weights(streamed, tmp_path, least_bytes=0)
    losses = [train(model, precision="bf16", loss_fn=in_float)[0] for model in (plain, streamed)]
    assert losses[0] == losses[1]
