"""What nn.Module's methods do on a pipeline, or which words they refuse with."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pipedream2bw as pd2

WIDTH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rest(self.first(x).tanh())
        return result


def make(model: nn.Module, **options: Any) -> pd2.PipelineModule:
    return pd2.PipelineModule(
        model,
        mse_loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.randn(2, WIDTH),),
        timeout=60.0,
        **options,
    )


def train(pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, seed: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    pipe.train_step(x, target=x)
    opt.step()


def sgd(pipe: pd2.PipelineModule) -> pd2.PipelineOptimizer:
    return pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))


def test_modules_are_the_models_own_under_its_names() -> None:
    model = Net()
    names = dict(model.named_modules())
    with make(model) as pipe:
        shown = dict(pipe.named_modules())
        assert shown.pop("") is pipe
        assert names.pop("") is model
        assert shown == names
        assert list(pipe.modules()) == [pipe, *model.modules()]
        assert list(pipe.named_children()) == list(model.named_children())
        assert list(pipe.children()) == list(model.children())
        assert pipe.get_submodule("rest.1") is model.rest[1]
        assert pipe.get_parameter("rest.1.weight") is model.rest[1].weight
        assert pipe.get_buffer("rest.0.running_mean") is model.rest[0].running_mean


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to(torch.float32),
        lambda pipe: pipe.to(device="cpu", dtype=torch.float32, non_blocking=True),
        lambda pipe: pipe.to(torch.zeros(1)),
        lambda pipe: pipe.cpu(),
        lambda pipe: pipe.float(),
        lambda pipe: pipe.type(torch.float32),
    ],
)
def test_a_move_to_where_the_model_is_does_nothing(
    move: Callable[[pd2.PipelineModule], object],
) -> None:
    with make(Net()) as pipe:
        opt = sgd(pipe)
        before = [parameter.data_ptr() for parameter in pipe.parameters()]
        assert move(pipe) is pipe
        assert [parameter.data_ptr() for parameter in pipe.parameters()] == before
        train(pipe, opt, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pipe: pipe.to("meta"), r"to\(\): meta, first.weight is on cpu: .*devices="),
        (lambda pipe: pipe.half(), r"torch.float16, first.weight is torch.float32.*precision="),
        (lambda pipe: pipe.bfloat16(), r"torch.bfloat16, .*precision='bf16'"),
        (lambda pipe: pipe.double(), r"torch.float64, .*convert the model before"),
        (lambda pipe: pipe.to(torch.zeros(1).double()), r"torch.float64, .*convert the model"),
        (lambda pipe: pipe.type(torch.float16), r"torch.float16, .*precision="),
        (lambda pipe: pipe.to_empty(device="cpu"), r"change the model before .*load_state_dict"),
        (lambda pipe: pipe.share_memory(), r"change the model before"),
        (lambda pipe: pipe.apply(print), r"apply\(print\): .*model.apply\(\) before"),
        (lambda pipe: pipe.compile(), r"compile=True"),
        (copy.deepcopy, r"deepcopy\(pipe\): .*full_state_dict\(\)"),
        (copy.copy, r"state_dict\(\)"),
        (pickle.dumps, r"pickle of a pipeline: .*state_dict\(\)"),
        (lambda pipe: torch.save(pipe, io.BytesIO()), r"pickle of a pipeline: .*state_dict\(\)"),
        (AveragedModel, r"AveragedModel.*docs/guide/evaluate"),
    ],
)
def test_what_a_pipeline_cannot_do_names_what_can(
    call: Callable[[pd2.PipelineModule], object], words: str
) -> None:
    with make(Net()) as pipe:
        opt = sgd(pipe)
        with pytest.raises(TypeError, match=words):
            call(pipe)
        train(pipe, opt, 0)  # it goes on


def test_distributed_data_parallel_does_not_take_a_pipeline() -> None:
    with make(Net()) as pipe:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(
                TypeError, match=r"DistributedDataParallel\(pipe\): .* give .*width="
            ):
                nn.parallel.DistributedDataParallel(pipe)
        finally:
            dist.destroy_process_group()
        train(pipe, sgd(pipe), 0)


def test_a_change_of_memory_format_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, WIDTH))
    x = torch.randn(2, 3, 4, 4)
    with pd2.PipelineModule(
        model, mse_loss, num_stages=2, num_microbatches=2, example_args=(x,), timeout=60.0
    ) as pipe:
        assert pipe.to(memory_format=torch.contiguous_format) is pipe
        with pytest.raises(TypeError, match="change the model before"):
            pipe.to(memory_format=torch.channels_last)


def test_a_model_that_cannot_be_moved_to_a_missing_device_says_so_as_torch_does() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with make(Net()) as pipe, pytest.raises((RuntimeError, AssertionError)):
        pipe.cuda()


def test_masters_are_what_a_conversion_sees() -> None:
    with make(Net(), precision="bf16") as pipe:
        assert pipe.float() is pipe
        with pytest.raises(TypeError, match="precision='bf16'"):
            pipe.bfloat16()


def test_a_loss_refuses_a_backward_of_its_own_and_a_scaler() -> None:
    x = torch.randn(8, WIDTH)
    with make(Net()) as pipe:
        opt = sgd(pipe)
        loss: Any = pipe.train_step(x, target=x)
        with pytest.raises(TypeError, match=r"train_step\(\) has submitted .*opt.step\(\)"):
            loss.backward()
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(TypeError, match=r"loss_scale=pipedream2bw\.LossScale"):
            scaler.scale(loss)
        opt.step()
        assert float(loss) > 0


def test_an_averaged_model_follows_the_pipeline() -> None:
    """As in the guide: a copy made before, brought up to date after a drain."""
    torch.manual_seed(0)
    model = Net()
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    want: dict[str, torch.Tensor] = {}
    with make(model) as pipe:
        opt = sgd(pipe)
        for step in range(6):
            train(pipe, opt, step)
            if step % 2 == 1:
                pipe.flush()
                average.update_parameters(pipe)
                for name, value in pipe.named_parameters():
                    now = value.detach().clone()
                    want[name] = want[name].lerp(now, 1 - 0.9) if name in want else now
    assert want.keys() == dict(average.module.named_parameters()).keys()
    for name, value in average.module.named_parameters():
        assert torch.allclose(value, want[name], rtol=1e-6, atol=0), name
        assert not torch.equal(value, model.get_parameter(name)), name


def test_an_average_over_state_dicts_can_be_loaded_and_evaluated() -> None:
    """The guide's way for several processes, each of which averages its part."""
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH)
    with make(Net()) as pipe:
        opt = sgd(pipe)
        average = {name: value.clone() for name, value in pipe.state_dict().items()}
        for step in range(4):
            train(pipe, opt, step)
            for name, value in pipe.state_dict().items():
                if value.is_floating_point():
                    average[name].lerp_(value, 0.1)
        trained = {name: value.clone() for name, value in pipe.state_dict().items()}
        pipe.load_state_dict(average)
        pipe.eval()
        other = Net()
        other.load_state_dict(average)
        assert torch.allclose(pipe(x), other.eval()(x), rtol=1e-5, atol=1e-6)
        pipe.load_state_dict(trained)
        pipe.train()
        train(pipe, opt, 4)
