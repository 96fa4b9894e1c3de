"""Splitting a batch into microbatches and joining their outputs."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedream2bw import _C
from pipedream2bw.runtime.evaluation import join_outputs
from pipedream2bw.runtime.microbatch import (
    SplitTree,
    common_rows,
    hash_of_shapes,
    microbatch_rows,
    split_values,
)

CPU = _C.StageStreams(torch.device("cpu"))
Pair = namedtuple("Pair", ["x", "mask"])


@given(rows=st.integers(1, 200), count=st.integers(1, 40))
def test_sizes_are_those_of_tensor_split(rows: int, count: int) -> None:
    parts = torch.arange(rows).tensor_split(count)
    assert microbatch_rows(rows, count) == [len(part) for part in parts]


@given(rows=st.integers(1, 50), count=st.integers(1, 12), columns=st.integers(0, 3))
def test_microbatches_are_the_batch_in_order(rows: int, count: int, columns: int) -> None:
    count = min(rows, count)
    batch = torch.arange(rows * columns).reshape(rows, columns)
    sizes = microbatch_rows(rows, count)
    parts = [values[0] for values in split_values([batch], [False], sizes, CPU)]
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), batch)
    assert torch.equal(join_outputs(parts, sizes), batch)


def test_splitting_copies_nothing_and_needs_no_gradient() -> None:
    batch = torch.randn(6, 2, requires_grad=True)
    for (part,) in split_values([batch], [False], [2, 2, 2], CPU):
        assert part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
        assert not part.requires_grad


@pytest.mark.parametrize(
    "tree",
    [
        torch.arange(6),
        {"a": torch.arange(6), "b": [torch.arange(6.0), "text", None, 3]},
        Pair(torch.arange(6), (torch.arange(12).reshape(6, 2),)),
    ],
    ids=["tensor", "nested", "namedtuple"],
)
def test_every_tensor_of_a_tree_is_split_and_all_else_stays(tree: Any) -> None:
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(tree)
    split = SplitTree.of(tree, "target", ())
    assert split.rows == 6
    parts = split.split([4, 2], CPU)
    for part, rows in zip(parts, (slice(0, 4), slice(4, 6)), strict=True):
        got, got_spec = pytree.tree_flatten(part)
        assert got_spec == spec
        for value, leaf in zip(got, leaves, strict=True):
            expected = leaf[rows] if isinstance(leaf, torch.Tensor) else leaf
            assert value is leaf or torch.equal(value, expected)


def test_replicated_names_are_passed_whole_at_any_depth() -> None:
    mask, table = torch.ones(3, 3), torch.ones(2)
    tree = {"x": torch.arange(4), "mask": mask, "more": {"table": table}}
    parts = SplitTree.of(tree, "target", ("mask", "table")).split([2, 2], CPU)
    for part in parts:
        assert part["x"].shape == (2,)
        assert torch.equal(part["mask"], mask)
        assert torch.equal(part["more"]["table"], table)


def test_a_tree_without_tensors_has_no_rows() -> None:
    trees: list[Any] = [None, 3, {"a": "text"}, []]
    for tree in trees:
        split = SplitTree.of(tree, "target", ())
        assert split.rows is None
        assert split.split([2, 1], CPU) == [tree, tree]


def test_rows_that_differ_name_both_tensors_and_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"y: 5 rows in dimension 0, x: 4: .*replicated"):
        common_rows([("x", torch.ones(4)), ("y", torch.ones(5))])
    with pytest.raises(ValueError, match=r"x: shape \[\], .*replicated"):
        common_rows([("x", torch.tensor(1.0))])
    with pytest.raises(ValueError, match=r"target\['b'\]\[0\]: 5 rows.*target\['a'\]: 4"):
        SplitTree.of({"a": torch.ones(4), "b": [torch.ones(5)]}, "target", ())
    assert common_rows([]) is None


def test_the_signature_tells_what_changes_a_message_but_not_the_rows() -> None:
    def of(*tensors: torch.Tensor, whole: bool = False, mode: object = None) -> int:
        return hash_of_shapes(tensors, [whole] * len(tensors), mode)

    x = torch.ones(4, 3)
    assert of(x) == of(torch.zeros(9, 3))
    different = [
        of(x),
        of(x, whole=True),
        of(x, mode="eval"),
        of(x.double()),
        of(torch.ones(4, 5)),
        of(torch.ones(4, 3, 1)),
        of(x, x),
    ]
    assert len(set(different)) == len(different)
    assert all(0 <= number < 2**62 for number in different)


def test_outputs_of_any_structure_are_joined() -> None:
    outputs = [{"a": torch.full((n, 2), n), "b": (torch.ones(n), "same")} for n in (2, 1)]
    joined = join_outputs(outputs, [2, 1])
    assert joined["a"].tolist() == [[2, 2], [2, 2], [1, 1]]
    assert joined["b"][0].shape == (3,)
    assert joined["b"][1] == "same"


def test_outputs_without_the_microbatchs_rows_are_refused() -> None:
    number = torch.ones((), dtype=torch.long)
    for outputs in ([number, number], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(ValueError, match=r"shape \[2?\] for a microbatch of 3 rows"):
            join_outputs(outputs, [3, 3])
    assert join_outputs([torch.ones(())], [3]).shape == ()  # one microbatch: nothing to join
