"""Models that a pipeline cannot train are refused with the rule and both values."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import mse_loss
from torch.testing._internal.two_tensor import TwoTensor

import pipedream2bw as pd2
from pipedream2bw.model.refusals import refuse_untrainable


def test_lazy_parameters() -> None:
    with pytest.raises(ValueError, match=r"parameter '0.weight' is lazy .* run one forward"):
        refuse_untrainable(nn.Sequential(nn.LazyLinear(3), nn.ReLU()))


def test_complex_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64), nn.ReLU())
    with pytest.raises(ValueError, match=r"parameter '0.weight' has dtype torch.complex64"):
        refuse_untrainable(model)


def test_tensors_that_wrap_others() -> None:
    values = TwoTensor(torch.ones(3, 3), torch.ones(3, 3))  # as quantized ones do
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[1].register_buffer("table", values)
    with pytest.raises(ValueError, match=r"buffer 1\.table: a TwoTensor, which has no memory"):
        refuse_untrainable(model)
    model[0].weight = nn.Parameter(values, requires_grad=False)
    with pytest.raises(ValueError, match=r"parameter 0\.weight: a TwoTensor, which has no memory"):
        refuse_untrainable(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kind: Any) -> None:
    model = nn.Sequential(kind(5, 3, sparse=True), nn.ReLU())
    with pytest.raises(ValueError, match=r"module '0' has sparse=True"):
        refuse_untrainable(model)


@pytest.mark.parametrize(
    ("wrap", "instead"), [(nn.DataParallel, "width="), (torch.compile, "compile=")]
)
def test_wrappers_whose_work_stages_would_leave_out(wrap: Any, instead: str) -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    for model, where in ((wrap(inner), "^"), (nn.Sequential(wrap(inner)), r"module '0' \(")):
        with pytest.raises(
            TypeError, match=rf"{where}.* is a wrapper.* that module, and give {instead}"
        ):
            refuse_untrainable(model)


def test_a_gradients_hooks_may_be_another_pipelines() -> None:
    def make(model: nn.Module) -> pd2.PipelineModule:
        return pd2.PipelineModule(
            model, mse_loss, num_stages=2, num_microbatches=2, example_args=(torch.ones(2, 3),)
        )

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with (
        make(model),
        pytest.raises(ValueError, match=r"parameter 0.weight: 1 hooks .* call close\(\) of that"),
    ):
        make(model)
    make(model).close()


def test_a_pipeline_that_was_dropped_leaves_no_guard() -> None:
    def make(model: nn.Module) -> None:
        pipe = pd2.PipelineModule(
            model, mse_loss, num_stages=2, num_microbatches=2, example_args=(torch.ones(2, 3),)
        )
        del pipe
        gc.collect()

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    make(model)
    make(model)
    model(torch.ones(2, 3)).sum().backward()
    assert type(model[0].weight.grad) is torch.Tensor


def test_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        with pytest.raises(ValueError, match=r"inference_mode\(\) is on.* outside it"):
            refuse_untrainable(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(ValueError, match=r"0.weight: made in inference_mode\(\).* outside it"):
        refuse_untrainable(model)


def test_parameters_on_several_devices_name_both() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with FakeTensorMode():  # where there is every device
        elsewhere = torch.empty(3, 3, device="cuda")
    model[1].weight = nn.Parameter(elsewhere)
    with pytest.raises(ValueError, match=r"'1.weight' is on cuda:0, '0.weight' is on cpu"):
        refuse_untrainable(model)


def test_parameters_on_meta_have_no_device_yet() -> None:
    refuse_untrainable(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")))
