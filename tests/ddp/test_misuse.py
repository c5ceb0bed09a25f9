"""What is refused: an error that names what and where, before anything has moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def model_of(case: str) -> Any:
    torch.manual_seed(dist.get_rank())
    made: dict[str, Any] = {
        "no module": lambda: "words",
        "no parameters": lambda: nn.ReLU(),
        "frozen": lambda: nn.Linear(2, 2).requires_grad_(False),
        "lazy": lambda: nn.LazyLinear(3),
        "elsewhere": lambda: nn.Linear(2, 2, device="meta"),
        "on two devices": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
        "wrapped": lambda: nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
        "shapes": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + dist.get_rank())),
        "types": lambda: nn.Linear(2, 2).to([torch.float32, torch.float64][dist.get_rank()]),
        "counts": lambda: nn.Linear(2, 2, bias=dist.get_rank() == 0),
        "strides": lambda: nn.Conv2d(2, 2, 2).to(
            memory_format=[torch.contiguous_format, torch.channels_last][dist.get_rank()]
        ),
        "sparse": lambda: nn.Embedding(3, 2, sparse=dist.get_rank() == 1),
    }
    return made.get(case, lambda: nn.Linear(2, 2))()


def refused(case: str, options: dict[str, Any]) -> tuple[str, str]:
    """The error's class and text."""
    model = model_of(case)
    weights = (
        [p.detach().clone() for p in model.parameters()] if case in ("shapes", "counts") else []
    )
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        dreamcomm.DistributedDataParallel(model, **options)
    kept = list(model.parameters()) if weights else []
    for before, after in zip(weights, kept, strict=True):
        assert torch.equal(before, after)
    total = torch.ones(1)
    dist.all_reduce(total)  # the group is as usable as before
    assert total.item() == dist.get_world_size()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("no module", "TypeError", "expected a torch.nn.Module, got str"),
        ("no parameters", "RuntimeError", "ReLU has no parameter that requires a gradient"),
        ("frozen", "RuntimeError", "Linear has no parameter that requires a gradient"),
        ("lazy", "ValueError", "parameter 'weight' has no shape yet"),
        ("elsewhere", "ValueError", "parameter 'weight' is on meta, and its group reduces"),
        ("on two devices", "ValueError", "'0.weight' on cpu, '1.weight' on meta"),
        ("wrapped", "ValueError", "0 is a DistributedDataParallel already"),
        ("shapes", "ValueError", "parameter 2 is '1.weight' of shape (3, 2)"),
        ("types", "ValueError", "torch.float64, strides (2, 1) on rank 1"),
        ("counts", "ValueError", "rank 0 has 2 parameters, and rank 1 has 1"),
        ("strides", "ValueError", "parameter 0 is 'weight' of shape (2, 2, 2, 2)"),
        ("sparse", "ValueError", "sparse gradient on rank 1"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused(
    pool: Pool, case: str, kind: str, words: str
) -> None:
    for found, text in pool.run(refused, case, {}):
        assert found == kind
        assert words in text
        assert "DistributedDataParallel: " in text


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"reduce": "median"},
            "ValueError",
            "expected reduce to be 'mean', 'sum', 'tokens' or a factor",
        ),
        ({"reduce": -1}, "ValueError", "got -1"),
        ({"bucket_cap_mb": 0}, "ValueError", "caps of buckets above 0 MiB"),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, "ValueError", "not both"),
        ({"unused": ["wait"]}, "ValueError", "no parameter 'wait'"),
        ({"unused": ["weight", "bias"]}, "RuntimeError", "no parameter that requires a gradient"),
        ({"device_ids": [0]}, "ValueError", "for a module on one GPU"),
        (
            {"broadcast_buffers": True, "forward_sync_buffers": False},
            "ValueError",
            "contradict each other",
        ),
        (
            {"mixed_precision": "bfloat16"},
            "NotImplementedError",
            "'autocast' (torch.autocast)",
        ),
        ({"delay_all_reduce_named_params": []}, "NotImplementedError", "leave it out"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(
    pool: Pool, options: dict[str, Any], kind: str, words: str
) -> None:
    for found, text in pool.run(refused, "", options):
        assert found == kind
        assert words in text


def wrap_twice(how: str) -> str:
    inner = nn.Linear(2, 2)
    first = dreamcomm.DistributedDataParallel(inner)
    wraps = {
        "replicate": lambda: dreamcomm.replicate(inner),
        "ddp": lambda: dreamcomm.DistributedDataParallel(nn.Sequential(inner)),
    }
    with pytest.raises(ValueError, match="is already reduced") as caught:
        wraps[how]()
    del first
    again = dreamcomm.DistributedDataParallel(inner)  # the first one is gone
    again(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("how", ["ddp", "replicate"])
def test_a_second_wrapper_is_refused_while_the_first_lives(pool: Pool, how: str) -> None:
    for text in pool.run(wrap_twice, how):
        assert "'weight' is already reduced" in text or "'0.weight' is already reduced" in text


def no_default_group() -> None:
    dreamcomm.DistributedDataParallel(nn.Linear(1, 1))


def test_without_a_group_the_remedy_is_told() -> None:
    with pytest.raises(ValueError, match="call init_process_group"):
        no_default_group()


def dense_for_sparse(sparse: bool) -> str:
    """An embedding whose gradient is not of the kind that its module says."""
    inner = nn.Embedding(4, 2, sparse=not sparse)
    model = dreamcomm.DistributedDataParallel(inner)
    inner.sparse = sparse
    with pytest.raises(RuntimeError) as caught:
        model(torch.tensor([1])).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_gradient_of_the_wrong_layout_is_named(pool: Pool, sparse: bool) -> None:
    for rank, text in enumerate(pool.run(dense_for_sparse, sparse)):
        kind = "sparse" if sparse else "dense"
        assert f"rank {rank} of 2: the gradient of parameter 'weight' is {kind}" in text


def hook_twice() -> list[str]:
    model = dreamcomm.DistributedDataParallel(nn.Linear(2, 2))
    errors = []
    for hook in ("no function", lambda state, bucket: None, lambda state, bucket: None):
        try:
            model.register_comm_hook(None, hook)  # type: ignore[arg-type]
            errors.append("")
        except (TypeError, ValueError, RuntimeError) as error:
            errors.append(str(error))
    return errors


def test_a_hook_has_to_be_callable_and_the_only_one(pool: Pool) -> None:
    for errors in pool.run(hook_twice):
        assert "must be callable" in errors[0]
        assert errors[1] == ""
        assert "is registered already" in errors[2]


def wrap_what_torch_has_wrapped() -> str:
    inner = nn.Linear(2, 2)
    first = nn.parallel.DistributedDataParallel(inner)
    with pytest.raises(ValueError, match="another wrapper, torch's") as caught:
        dreamcomm.DistributedDataParallel(inner)
    del first
    dreamcomm.DistributedDataParallel(inner)
    return str(caught.value)


def test_a_module_that_torch_has_wrapped_is_refused(pool: Pool) -> None:
    for text in pool.run(wrap_what_torch_has_wrapped):
        assert "parameter 'weight'" in text


def hook_and_sum() -> str:
    model = dreamcomm.DistributedDataParallel(nn.Linear(2, 2), reduce="sum")
    with pytest.raises(ValueError, match="leave reduce= and invariant_shards= out") as caught:
        model.register_comm_hook(None, lambda state, bucket: None)
    return str(caught.value)


def test_a_hook_and_a_factor_contradict_each_other(pool: Pool) -> None:
    pool.run(hook_and_sum)
