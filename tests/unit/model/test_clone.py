"""A structural clone is the same modules over other parameters."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import fx, nn

import pipedream2bw as pd2
from pipedream2bw.model.clone import copy_attributes, structural_clone


def other_weights(root: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    return {
        old: nn.Parameter(torch.full_like(old, 0.25), old.requires_grad)
        for old in root.parameters()
    }


def assert_computes_with_its_own_weights(root: nn.Module, *args: Any) -> nn.Module:
    """The clone gives what a deep copy with its values gives, whatever the original holds."""
    expected = copy.deepcopy(root)
    clone = structural_clone(root, other_weights(root))
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.fill_(0.25)
        for parameter in root.parameters():
            parameter.fill_(float("nan"))
    want, got = expected(*args), clone(*args)
    if isinstance(want, tuple):
        want, got = want[0], got[0]
    assert torch.equal(got, want)
    return clone


def test_parameters_are_mapped_and_nothing_of_the_original_is_changed() -> None:
    root = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    before = list(root.named_parameters())
    weights = other_weights(root)
    clone = structural_clone(root, weights)
    assert [name for name, _ in clone.named_parameters()] == [name for name, _ in before]
    for name, parameter in before:
        assert clone.get_parameter(name) is weights[parameter]
        assert root.get_parameter(name) is parameter
    assert [type(module) for module in clone.modules()] == [type(m) for m in root.modules()]
    assert not {id(module) for module in clone.modules()} & {id(m) for m in root.modules()}
    assert_computes_with_its_own_weights(root, torch.randn(4, 3))


def test_parameters_that_are_not_mapped_stay_the_originals() -> None:
    root = nn.Linear(3, 3)
    clone = structural_clone(root, {root.weight: nn.Parameter(torch.zeros(3, 3))})
    assert clone.bias is root.bias
    assert clone.weight is not root.weight


def test_buffers_are_shared_even_when_assigned_anew() -> None:
    root = nn.BatchNorm1d(3)
    clone = structural_clone(root, {})
    clone(torch.randn(4, 3))
    assert root.num_batches_tracked == 1
    root.running_mean = torch.ones(3)
    assert clone.running_mean is root.running_mean


def test_hooks_registered_later_are_seen_by_the_clone() -> None:
    root = nn.Linear(3, 3)
    clone = structural_clone(root, {})
    calls: list[nn.Module] = []
    handle = root.register_forward_hook(lambda module, *_: calls.append(module))
    clone(torch.randn(1, 3))
    handle.remove()
    clone(torch.randn(1, 3))
    assert calls == [clone]


def test_hooks_that_are_methods_of_a_module_do_not_separate_the_hooks() -> None:
    class Hooked(nn.Linear):
        def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * 0

    root = Hooked(3, 3)
    root.register_forward_hook(root.hook)
    clone = structural_clone(root, {})
    root.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(clone(torch.randn(1, 3)), torch.ones(1, 3))


class Noting(nn.Module):
    """Registers a hook in its first forward, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "noted"):
            self.noted = True
            self.inner.register_forward_hook(lambda module, args, out: out + self.inner.bias)
        return self.inner(x)


def test_hooks_that_a_forward_registers_are_its_clones_own() -> None:
    root, x = Noting(), torch.randn(2, 3)
    first, second = (
        structural_clone(root, other_weights(root), hooked=[root.inner]) for _ in range(2)
    )
    for clone in (first, second):
        weight, bias = clone.inner.weight, clone.inner.bias
        assert all(
            torch.equal(clone(x), nn.functional.linear(x, weight, bias) + bias) for _ in "ab"
        )
    assert not root.inner._forward_hooks
    assert len(first.inner._forward_hooks) == 1


def test_a_clones_own_hooks_run_in_the_order_of_their_registration() -> None:
    root = nn.Linear(3, 3)
    clone = structural_clone(root, {}, hooked=[root])
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    handles = {
        "first": clone.register_forward_hook(note("first"), prepend=True),
        "last": clone.register_forward_hook(note("last"), always_call=True),
        "original": root.register_forward_hook(note("original")),
        "before": clone.register_forward_hook(note("before"), prepend=True),
    }
    order = ["before", "first", "original", "last"]
    for removed in ("", *order):
        if removed:
            handles[removed].remove()
            order.remove(removed)
        calls.clear()
        clone(torch.randn(1, 3))
        assert calls == order


def test_an_originals_hook_that_a_clone_removes_is_gone_from_all() -> None:
    root = nn.Linear(3, 3)
    clones = [structural_clone(root, {}, hooked=[root]) for _ in "ab"]
    handles = [root.register_forward_hook(lambda *_: None) for _ in "abc"]
    clones[1].register_forward_hook(lambda *_: None)
    del clones[0]._forward_hooks[handles[0].id]
    assert [len(module._forward_hooks) for module in (root, *clones)] == [2, 2, 3]
    clones[1]._forward_hooks.clear()
    assert [len(module._forward_hooks) for module in (root, *clones)] == [0, 0, 0]


class Keeping(nn.Module):
    """Keeps what it has computed; ``attn_hooks`` is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.masks: dict[str, dict[int, torch.Tensor]] = {"causal": {}}
        self.lengths: list[int] = []
        self.seen: set[int] = set()
        self.attn_hooks: dict[str, int] = {}
        self.inner.lengths = self.lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        if n not in self.masks["causal"]:
            self.masks["causal"][n] = x.new_ones(n, n).tril()
            self.attn_hooks["calls"] = 1
            self.lengths.append(n)
            self.seen.add(n)
        return self.inner(x @ self.masks["causal"][n])


def test_what_a_forward_on_trial_keeps_is_not_the_originals() -> None:
    root = Keeping()
    clone = structural_clone(root, {}, on_trial=True)
    clone(torch.randn(2, 3))
    assert clone.lengths == [3]
    assert clone.inner.lengths is clone.lengths
    assert not root.masks["causal"]
    assert not root.lengths
    assert not root.seen
    assert type(clone.attn_hooks) is dict
    assert not root.attn_hooks


def test_a_captured_model_keeps_nothing_of_its_capture() -> None:
    root, x = Keeping(), torch.randn(4, 3)
    pipe = pd2.PipelineModule(
        root, nn.functional.mse_loss, num_stages=1, num_microbatches=2, example_args=(x,)
    )
    with pipe:
        model = pipe.unsplit()
    assert all(type(mask) is torch.Tensor for mask in model.masks["causal"].values())
    assert model(x).shape == x.shape


def test_a_module_reached_twice_is_cloned_once() -> None:
    shared = nn.Linear(3, 3)
    root = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()))
    clone = structural_clone(root, {})
    assert clone.get_submodule("0") is clone.get_submodule("1.0")
    assert clone.get_submodule("0") is not shared


def test_a_tied_parameter_stays_tied() -> None:
    root = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    root[1].weight = root[0].weight
    clone = structural_clone(root, other_weights(root))
    assert clone.get_parameter("0.weight") is clone.get_parameter("1.weight")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_use_the_clones_weights(kind: type[nn.RNNBase]) -> None:
    root = kind(3, 4, num_layers=2)
    clone = structural_clone(root, other_weights(root))
    assert clone._flat_weights[0] is clone.weight_ih_l0
    assert clone._flat_weight_refs[0]() is clone.weight_ih_l0
    assert_computes_with_its_own_weights(root, torch.randn(2, 5, 3))


def test_attention_parametrizations_and_parameter_containers() -> None:
    assert_computes_with_its_own_weights(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(),
        torch.randn(2, 5, 8),
    )
    assert_computes_with_its_own_weights(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), torch.randn(2, 3)
    )

    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ParameterList([torch.randn(3) for _ in range(2)])
            self.named = nn.ParameterDict({"a": torch.randn(3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.items[1] + self.named["a"] * sum(self.items)

    assert_computes_with_its_own_weights(Containers(), torch.randn(2, 3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weight_norm_by_hook_computes_each_clones_weight() -> None:
    root = nn.utils.weight_norm(nn.Linear(3, 3))
    weights = {old: nn.Parameter(old.detach() * 2) for old in root.parameters()}
    clone = structural_clone(root, weights)
    x = torch.randn(2, 3)
    before = root(x)
    direction = clone.weight_v / clone.weight_v.norm(dim=1, keepdim=True)
    want = nn.functional.linear(x, clone.weight_g * direction, clone.bias)
    torch.testing.assert_close(clone(x), want)
    assert torch.equal(root(x), before)


class Attributes(nn.Module):
    """Keeps modules, parameters and methods where nn.Module does not look for them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.listed = [self.linear.weight, 7]
        self.named = {"weights": (self.linear.weight, self.linear.bias)}
        self.hidden = [nn.Linear(3, 3)]
        self.call = self.inner
        self.part = functools.partial(self.inner, scale=3.0)
        self.untouched = {"a": [1, 2]}
        object.__setattr__(self, "alias", self.linear)

    def inner(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.call(x) + self.part(x) + self.alias(x)
        return y * self.listed[0].sum() + self.named["weights"][1]


def test_plain_attributes_that_hold_parameters_modules_and_methods() -> None:
    root = Attributes()
    clone = assert_computes_with_its_own_weights(root, torch.randn(2, 3))
    assert clone.call.__self__ is clone
    assert clone.alias is clone.linear
    assert clone.hidden[0] is not root.hidden[0]
    assert clone.untouched is root.untouched
    assert root.call.__self__ is root


def test_modules_that_point_back_to_their_parent() -> None:
    root = nn.Sequential(nn.Linear(3, 3))
    object.__setattr__(root[0], "parent", root)
    clone = structural_clone(root, {})
    assert clone[0].parent is clone


def test_attributes_are_copied_by_name_and_refer_to_the_clone() -> None:
    root = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    clone = structural_clone(root, {})
    root.eval()
    root[0].p, root[0].other, root[1].call = 0.25, [root[1]], root[0].forward
    del root[1].momentum
    names = {"": ["training"], "0": ["training", "p", "other"], "1": ["momentum", "call"]}
    copy_attributes(root, clone, names)
    assert [module.training for module in clone.modules()] == [False, False, True]
    assert clone[0].p == 0.25
    assert clone[0].other == [clone[1]]
    assert clone[1].call.__self__ is clone[0]
    assert not hasattr(clone[1], "momentum")


def test_modules_whose_parameters_cannot_be_replaced_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 2.10 on, of other classes since 2.14
        scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"TorchScript"):
        structural_clone(nn.Sequential(scripted), {})
    with pytest.raises(TypeError, match=r"torch\.compile"):
        structural_clone(torch.compile(nn.Linear(3, 3)), {})


def test_a_module_compiled_in_place_runs_uncompiled_in_the_clone() -> None:
    root = nn.Linear(3, 3)
    root.compile(backend="eager")
    assert_computes_with_its_own_weights(root, torch.randn(2, 3))


def test_a_graph_module_computes_with_the_clones_weights() -> None:
    root = nn.Sequential(fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh())))
    new = {old: nn.Parameter(torch.randn_like(old)) for old in root.parameters()}
    clone, x = structural_clone(root, new), torch.randn(2, 3)
    weight, bias = new.values()
    assert torch.equal(clone(x), nn.functional.linear(x, weight, bias).tanh())
    assert not torch.equal(clone(x), root(x))
