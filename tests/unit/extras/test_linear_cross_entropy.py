"""Cross-entropy without a batch's logits in memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pipedream2bw as pd2
from pipedream2bw.extras.chunked_cross_entropy import loss_and_gradients


def plain(hidden, weight, target, bias=None, **keywords):
    logits = functional.linear(hidden, weight, bias).flatten(0, -2)
    return functional.cross_entropy(logits, target.flatten(), **keywords)


def problem(rows, dtype=torch.float64, classes=11):
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, 5), (classes, 5), (classes,))
    )
    return hidden, weight, torch.randint(classes, (rows,), generator=generator), bias


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 7, 16, 29])
def test_loss_and_gradients_are_those_of_cross_entropy(rows, reduction):
    hidden, weight, target, bias = problem(rows)
    target[1::3] = -100
    losses = [
        function(hidden, weight, target, bias, reduction=reduction) * 3
        for function in (pd2.linear_cross_entropy, plain)
    ]
    found, expected = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in losses)
    torch.testing.assert_close(losses[0], losses[1])
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)


def test_gradients_are_differences_of_losses():
    hidden, weight, target, bias = problem(6)

    def loss(*given):
        return pd2.linear_cross_entropy(given[0], given[1], target, given[2], num_chunks=3)

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_16_bit_inputs_have_losses_and_sums_of_32():
    hidden, weight, target, bias = problem(40, torch.bfloat16)
    loss = pd2.linear_cross_entropy(hidden, weight, target, bias)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    expected = torch.autograd.grad(plain(exact[0], exact[1], target, exact[2]), exact)
    for mine, its in zip(gradients, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), its, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_that_all_do_not_count_contribute_nothing(reduction):
    hidden, weight, target, _ = problem(4)
    loss = pd2.linear_cross_entropy(
        hidden, weight, torch.full_like(target, 7), ignore_index=7, reduction=reduction
    )
    assert loss.item() == 0
    assert not any(each.any() for each in torch.autograd.grad(loss, (hidden, weight)))


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_no_tensor_is_larger_than_the_logits_of_a_chunk():
    hidden, weight, target, _ = problem(800, classes=100)
    with torch.no_grad(), Largest() as largest:
        loss_and_gradients(hidden, weight, target, None, "mean", -100, 8, [True, True, False])
    assert largest.elements == 100 * 100


def test_gradients_that_nobody_wants_are_not_computed():
    hidden, weight, target, _ = problem(8)
    weight.requires_grad_(False)
    with torch.profiler.profile() as profiled:
        pd2.linear_cross_entropy(hidden, weight, target, num_chunks=1).backward()
    products = [event for event in profiled.events() if event.name == "aten::mm"]
    assert len(products) == 2  # the logits', and of their gradient that of hidden
    assert weight.grad is None


def test_autocast_casts_as_linear_does():
    hidden, weight, target, bias = problem(8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = pd2.linear_cross_entropy(hidden, weight, target, bias)
    lowered = (each.to(torch.bfloat16) for each in (hidden, weight, bias))
    one, two, three = lowered
    assert torch.equal(loss, pd2.linear_cross_entropy(one, two, target, three))
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 13, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for layer in self.body:
            x = layer(x).relu()
        return pd2.linear_cross_entropy(x, self.head.weight, labels, num_chunks=2)


class Exported(Language):
    """Which torch.fx cannot follow."""

    def forward(self, tokens, labels):
        for _ in range(tokens.shape[1] - 5):
            tokens = tokens + 1
        return super().forward(tokens, labels)


class Reduced(nn.Module):
    """The same by way of the loss function, with the weight among the model's outputs."""

    def __init__(self):
        super().__init__()
        self.inner = Language()

    def forward(self, tokens):
        x = self.inner.embedding(tokens)
        for layer in self.inner.body:
            x = layer(x).relu()
        return x, self.inner.head.weight


@pytest.mark.parametrize("schedule", ["1f1b", "2bw_split"])
@pytest.mark.parametrize("make", [Language, Exported, Reduced])
def test_pipelines_train_as_the_unsplit_model(make, schedule):
    torch.manual_seed(3)
    in_loss_function = make is Reduced
    model = make()
    reference = make()
    reference.load_state_dict(model.state_dict())

    def of_outputs(output, labels):
        return pd2.linear_cross_entropy(*output, labels, num_chunks=2)

    def given(output, _):
        return output

    loss_fn = of_outputs if in_loss_function else given
    tokens, labels = torch.randint(13, (2, 8, 5))
    arguments = (tokens,) if in_loss_function else (tokens, labels)
    pipe = pd2.PipelineModule(
        model,
        num_stages=2,
        num_microbatches=4,
        schedule=schedule,
        loss_fn=loss_fn,
        example_args=tuple(each[:2] for each in arguments),
    )
    optimizer = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    loss = pipe.train_step(*arguments, target=labels)
    optimizer.step()
    expected = 0.0
    for rows, chosen in zip(tokens.chunk(4), labels.chunk(4), strict=True):
        part = reference(rows) if in_loss_function else reference(rows, chosen)
        part = loss_fn(part, chosen) / 4
        part.backward()
        expected += part.item()
    alone.step()
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    trained = pipe.unsplit().state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(trained[name], value), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"hidden: shape \[4, 5\], target: .*\[3\]"),
        ({"weight": torch.zeros(11, 6)}, r"hidden: shape \[4, 5\], weight: shape \[11, 6\]"),
        ({"bias": torch.zeros(4)}, r"bias: shape \[4\], weight: shape \[11, 5\]"),
        ({"reduction": "none"}, r"reduction: 'none', it must be one of mean, sum"),
        ({"num_chunks": 0}, r"num_chunks: 0"),
    ],
)
def test_wrong_values_are_refused(change, message):
    hidden, weight, target, bias = problem(4, torch.float32)
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        pd2.linear_cross_entropy(**given)


def test_wrong_types_are_refused():
    hidden, weight, target, _ = problem(4)
    with pytest.raises(TypeError, match=r"target: torch.float32, it must be torch.int64"):
        pd2.linear_cross_entropy(hidden, weight, target.float())
    with pytest.raises(TypeError, match=r"hidden: torch.int64"):
        pd2.linear_cross_entropy(hidden.long(), weight, target)


def test_ignored_rows_do_not_ask_for_a_class():
    hidden, weight, target, bias = problem(4, torch.float32)
    bias = bias.detach().index_fill(0, torch.tensor([0]), -torch.inf)
    target[:2] = torch.tensor([-100, 3])
    loss = pd2.linear_cross_entropy(hidden, weight, target, bias=bias)
    want = torch.nn.functional.cross_entropy(hidden @ weight.T + bias, target)
    assert float(loss) == pytest.approx(float(want), rel=1e-6)
