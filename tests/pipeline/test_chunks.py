"""Cutting batches into micro-batches, and merging outputs."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.split import MicroBatches, merge_outputs, split_batch, split_targets

Pair = namedtuple("Pair", ["left", "right"])


def count(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device="cpu").reshape(shape)


def same(one: Any, other: Any) -> None:
    leaves, structure = pytree.tree_flatten(one)
    leaves2, structure2 = pytree.tree_flatten(other)
    assert structure == structure2
    for a, b in zip(leaves, leaves2, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


SPECS: list[tuple[Any, Any]] = [
    (None, None),
    ((TensorChunkSpec(0), TensorChunkSpec(1)), {"mask": _Replicate()}),
    ((_Replicate(), TensorChunkSpec(-1)), {"mask": TensorChunkSpec(1)}),
    ((_Replicate, _Replicate), {"mask": _Replicate}),
]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_split_and_merge_as_torch_does(spec: Any, chunks: int) -> None:
    args, kwargs = (count(7, 2), count(7, 7)), {"mask": count(7, 7)}
    expected = split_args_kwargs_into_chunks(args, kwargs, chunks, *spec)
    made = split_batch(args, kwargs, chunks, *spec)
    same(made, list(zip(*expected, strict=True)))


def test_any_pytree_is_split() -> None:
    more = [Pair(count(5), "text"), None, 3]
    batch: dict[str, Any] = {"ids": count(5, 2), "more": more, "one": torch.tensor(2.0)}
    parts = split_batch((batch,), {"flag": True}, 2)
    assert [one[0][0]["ids"].shape[0] for one in parts] == [3, 2]
    assert all(one[0][0]["more"][0].right == "text" for one in parts)
    assert all(one[0][0]["one"] is batch["one"] and one[1] == {"flag": True} for one in parts)
    same(torch.cat([one[0][0]["more"][0].left for one in parts]), count(5))
    specs = ({"ids": TensorChunkSpec(1), "more": _Replicate(), "one": None},)
    parts = split_batch((batch,), None, 2, specs)
    assert [one[0][0]["ids"].shape for one in parts] == [(5, 1), (5, 1)]
    assert all(one[0][0]["more"][0].left is batch["more"][0].left for one in parts)
    parts = split_batch(({"a": count(4, 2), "b": count(3, 2)},), None, 2, (TensorChunkSpec(1),))
    assert [one[0][0]["b"].shape for one in parts] == [(3, 1), (3, 1)]
    assert split_batch((), {}, 3) == [((), {})] * 3


def test_microbatches_are_taken_as_they_are() -> None:
    given = [count(2, 3), count(5).long(), {"a": 1}]
    parts = split_batch((MicroBatches(given), count(3)), {"m": MicroBatches("abc")}, 3)
    assert [one[0][0] for one in parts] == given
    assert [one[1]["m"] for one in parts] == ["a", "b", "c"]
    assert split_targets(MicroBatches(given), 3) == given
    with pytest.raises(ValueError, match="argument 'm': expected 2 micro-batches, got 3"):
        split_batch((), {"m": MicroBatches("abc")}, 2)


def test_block_masks_are_split() -> None:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    for rows, expected in ((4, [2, 2]), (1, [1, 1])):
        mask = create_block_mask(causal, rows, 1, 128, 128, device="cpu")
        parts = split_batch((count(4),), {"mask": mask}, 2)
        assert [one[1]["mask"].kv_num_blocks.size(0) for one in parts] == expected


def test_targets_are_split() -> None:
    same(split_targets(count(5), 2), [count(5)[:3], count(5)[3:]])
    same(split_targets((count(2), "x"), 2), [(count(1), "x"), (count(2)[1:], "x")])
    with pytest.raises(ValueError, match="target: 3 rows do not make 4 micro-batches"):
        split_targets(count(3), 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "specs", "error"),
    [
        ((count(3),), {}, (None, None), "argument 0: 3 rows do not make 4 micro-batches"),
        (
            (count(8), {"ids": count(9)}),
            {},
            (None, None),
            r"argument 1\['ids'\] has 9 rows and argument 0 has 8, .* into 4 micro-batches",
        ),
        ((count(8),), {"m": count(9)}, (None, None), "argument 'm' has 9 rows and argument 0 has"),
        ((count(8),), {}, ((None, None), None), "has 2 specs for 1 positional arguments"),
        ((count(8),), {}, ((TensorChunkSpec(1),), None), "cannot be cut along dim 1, it has 1"),
        ((count(8),), {}, (([None],), None), "argument 0: its chunk spec .* another structure"),
    ],
)
def test_splitting_names_what_does_not_fit(args: Any, kwargs: Any, specs: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        split_batch(args, kwargs, 4, *specs)


MERGES: list[tuple[Any, Any]] = [
    (count(2, 3), None),
    ({"a": count(2, 3), "b": [count(4)]}, None),
    (count(2, 3), TensorChunkSpec(1)),
    ((count(2, 3), torch.tensor(2.0)), (TensorChunkSpec(0), sum_reducer)),
    ((torch.tensor(2.0),), (_CustomReducer(torch.tensor(1.0), torch.mul),)),
    (count(2, 3), (TensorChunkSpec(1),)),
    ((3, count(1)), (_Replicate(), TensorChunkSpec(0))),
]


@pytest.mark.parametrize(("output", "spec"), MERGES)
def test_merge_as_torch_does(output: Any, spec: Any) -> None:
    outputs = [output, pytree.tree_map_only(Tensor, lambda one: one + 1, output)]
    same(merge_outputs(outputs, spec), merge_chunks(outputs, spec))


def test_merge_keeps_what_does_not_fit_together_as_lists() -> None:
    same(merge_outputs([count(2, 3), count(2, 4)]), [count(2, 3), count(2, 4)])
    same(merge_outputs([count(1), count(1).long()]), [count(1), count(1).long()])
    same(merge_outputs([{"a": count(1)}, {"b": count(1)}]), [{"a": count(1)}, {"b": count(1)}])
    merged = merge_outputs([(torch.tensor(1.0), 4, None, "a"), (torch.tensor(2.0), 5, None, "a")])
    same(merged, (torch.tensor([1.0, 2.0]), [4, 5], None, "a"))
    # Rows may differ where that is the dimension to join.
    assert merge_outputs([count(2, 3), count(1, 3)]).shape == (3, 3)
    merged = merge_outputs([(count(2, 3), 1), (count(2, 1), 1)], TensorChunkSpec(-1))
    assert merged[0].shape == (2, 4)


def test_merge_says_what_does_not_fit_its_spec() -> None:
    with pytest.raises(ValueError, match=r"output_merge_spec .* has another structure"):
        merge_outputs([count(1)], (TensorChunkSpec(0), TensorChunkSpec(0)))
    with pytest.raises(ValueError, match="differ in structure"):
        merge_outputs([{"a": count(1)}, {"b": count(1)}], TensorChunkSpec(0))
    with pytest.raises(ValueError, match="differ that were said to be the same"):
        merge_outputs([count(1), count(1) + 1], _Replicate())
    with pytest.raises(ValueError, match="1 dimensions cannot be joined along dim 1"):
        merge_outputs([count(1), count(1)], TensorChunkSpec(1))
