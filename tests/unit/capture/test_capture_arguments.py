"""A call is taken apart by the structure of the example call, and nothing else is accepted."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from pipedream2bw.capture.arguments import CallSignature
from pipedream2bw.capture.capture import capture, split_model_args

X, Y, Z = (torch.full((2, 3), float(i)) for i in range(3))


def forward(x: Any, mask: Any = None, *more: Any, scale: float = 1.0, **named: Any) -> None: ...


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [float(tensor.flatten()[0]) for tensor in tensors]


def test_the_same_arguments_by_position_and_by_keyword() -> None:
    signature = CallSignature(forward, (X,), {"mask": Y, "scale": 2.0})
    assert [leaf.path for leaf in signature.tensors] == ["x", "mask"]
    assert values(signature.tensors_of((X, Y), {"scale": 2.0})) == [0.0, 1.0]
    assert values(signature.tensors_of((), {"scale": 2.0, "mask": Y, "x": X})) == [0.0, 1.0]


def test_containers_are_opened_and_put_together_again() -> None:
    ordered = collections.OrderedDict(a=X, b=1)
    batch = {"t": (X, None, [Y]), "n": "text", "o": ordered}
    signature = CallSignature(forward, (batch,), {"extra": Z})
    assert [leaf.path for leaf in signature.tensors] == [
        "x['t'][0]",
        "x['t'][2][0]",
        "x['o']['a']",
        "extra",
    ]
    assert [leaf.name for leaf in signature.tensors] == ["x_t_0", "x_t_2_0", "x_o_a", "extra"]
    assert signature.tensors[2].keys == ("x", "o", "a")
    args, kwargs = signature.rebuild([1, 2, 3, 4])
    assert args == ({"t": (1, None, [2]), "n": "text", "o": {"a": 3, "b": 1}},)
    assert type(args[0]["o"]) is collections.OrderedDict
    assert kwargs == {"extra": 4}


def test_the_order_of_keys_does_not_matter() -> None:
    signature = CallSignature(forward, ({"a": X, "b": Y},), {"p": X, "q": Z})
    assert values(signature.tensors_of(({"b": Y, "a": X},), {"q": Z, "p": X})) == [
        0.0,
        1.0,
        0.0,
        2.0,
    ]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, ValueError, r"do not fit .*missing.*'x'"),
        ((X,), {}, ValueError, r"given: x, in the example call: mask, scale, x"),
        ((X, Y), {"scale": 3.0}, ValueError, r"scale: 3\.0 given, 2\.0 in the example call"),
        ((X, Y), {"scale": 2}, ValueError, r"scale: 2 given, 2\.0 in the example"),
        ((X, None), {"scale": 2.0}, TypeError, r"mask: NoneType given, a tensor in the example"),
        (
            (X, Y),
            {"scale": X},
            ValueError,
            r"scale: a tensor of shape \(2, 3\) given, 2\.0 in the example",
        ),
        ((X, Y, Z), {"scale": 2.0}, ValueError, r"given: mask, more\[0\], scale, x, in the ex"),
        ((X, Y), {"scale": 2.0, "new": Z}, ValueError, r"given: mask, new, scale, x, in the ex"),
        ((X, [Y]), {"scale": 2.0}, TypeError, r"mask: list given, a tensor in the example"),
    ],
)
def test_another_call_than_the_example_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    signature = CallSignature(forward, (X, Y), {"scale": 2.0})
    with pytest.raises(error, match=message):
        signature.tensors_of(args, kwargs)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": X}, r"x: keys a given, a, b in the example call"),
        ([X, X], r"x: list given, dict in the example call"),
        ({"a": X, "b": (Y,)}, r"x\['b'\]: 1 elements given, 2 in the example call"),
        ({"a": X, "b": [Y, 3]}, r"x\['b'\]: list given, tuple in the example call"),
        ({"a": X, "b": (Y, 4)}, r"x\['b'\]\[1\]: 4 given, 3 in the example call"),
    ],
)
def test_another_structure_than_the_examples_is_refused(batch: Any, message: str) -> None:
    signature = CallSignature(forward, ({"a": X, "b": (Y, 3)},), {})
    with pytest.raises(ValueError, match=message):
        signature.tensors_of((batch,), {})


def test_a_container_that_is_changed_later_is_compared_as_it_was() -> None:
    batch = {"a": X, "b": 3}
    signature = CallSignature(forward, (batch,), {})
    batch["b"] = 4
    with pytest.raises(ValueError, match=r"x\['b'\]: 4 given, 3 in the example call"):
        signature.tensors_of((batch,), {})


def test_example_arguments_that_the_signature_refuses() -> None:
    with pytest.raises(
        ValueError, match=r"example_args and example_kwargs.*\(x, mask=None.*missing"
    ):
        CallSignature(forward, (), {})


def test_inputs_that_the_model_does_not_use_are_not_carried() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, ids: Any, x: Any, unused: Any = None, *, y: Any) -> Any:
            return self.linear(x) + y

    captured = capture(Model(), num_stages=2, example_args=(X, X, X), example_kwargs={"y": X})
    assert captured.model_inputs == ("x", "y")
    assert values(split_model_args(captured, (Z, Y), {"unused": Z, "y": X})) == [1.0, 0.0]
