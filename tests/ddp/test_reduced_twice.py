"""Gradients that are reduced, and then added to: what is right, and what is refused.

And what a wrapper keeps from pass to pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dreamcomm
from ddp.models import batch, make
from ddp.test_traps import weight_model
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def alternate(rounds: int) -> None:
    """A step of one pass, then one of two, over and over: no false alarm."""
    model = dreamcomm.DistributedDataParallel(weight_model(), reduce="sum")
    for number in range(rounds):
        model.zero_grad()
        if number % 2:
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
        assert model.module.weight.grad.item() == (4.0 if number % 2 else 2.0)


def test_new_gradients_are_not_taken_for_old_ones(pool: Pool) -> None:
    pool.run(alternate, 200)


def add_after(how: str) -> str:
    """To a reduced sum that was written to."""
    inner = make("mlp")
    model = dreamcomm.DistributedDataParallel(inner, reduce="sum")
    for _ in range(2):
        model(batch(0)[0]).sum().backward()
        if how == "clip":
            model.clip_grad_norm_(0.5)
        elif how == "zero":
            model.zero_grad(set_to_none=False)
        elif how == "data":
            for parameter in model.parameters():
                parameter.grad.data.zero_()
        else:
            model.zero_grad()
    return ""


@pytest.mark.parametrize("how", ["zero", "data", "none"])
def test_a_cleared_sum_may_be_added_to(pool: Pool, how: str) -> None:
    assert pool.run(add_after, how) == ["", ""]


def refuse_after_clip() -> str:
    with pytest.raises(RuntimeError) as caught:
        add_after("clip")
    return str(caught.value)


def test_a_clipped_sum_is_not_added_to(pool: Pool) -> None:
    for error in pool.run(refuse_after_clip):
        assert "which is reduced already" in error


def mix_a_sum() -> str:
    """Also under no_sync(): a later reduction would count the first part twice."""
    model = dreamcomm.DistributedDataParallel(weight_model(), reduce="sum")
    model(torch.ones(1, 1)).sum().backward()
    with model.no_sync(), pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 1)).sum().backward()
    return str(caught.value)


def test_a_sum_is_not_mixed(pool: Pool) -> None:
    for error in pool.run(mix_a_sum):
        assert "which is reduced already" in error


def clip_then_mix() -> str:
    inner = make("mlp")
    model = dreamcomm.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(batch(0)[0]).sum().backward()
    model.clip_grad_norm_(0.5)
    with model.no_sync():
        model(batch(0)[0]).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    model.reduce_gradients()
    optimizer.step()
    return str(caught.value)


def test_a_mix_is_found_after_clipping_too(pool: Pool) -> None:
    for error in pool.run(clip_then_mix):
        assert "is a mix" in error


def two_mixes() -> None:
    """Two models' alarms are open at once, and end."""
    models = [dreamcomm.DistributedDataParallel(make("mlp")) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for _ in range(2):
        for model in models:
            model(batch(0)[0]).sum().backward()
            with model.no_sync():
                model(batch(0)[0]).sum().backward()
        for optimizer in optimizers:
            with pytest.raises(RuntimeError, match="is a mix"):
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            optimizer.step()
            model(batch(0)[0]).sum().backward()
            optimizer.step()
            model.zero_grad()


def test_alarms_of_several_models_end(pool: Pool) -> None:
    pool.run(two_mixes)


def overlapped() -> list[str]:
    """What happens in the third pass after one that makes no gradients."""
    inner = make("gpt")
    model = dreamcomm.DistributedDataParallel(inner, bucket_cap_mb=0.2)
    happened: list[str] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        happened.append("bucket")
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {}
    model.register_comm_hook(None, hook)
    x = batch(0)[0]
    torch.autograd.grad(model(x).sum(), [inner.position])
    assert all(p.grad is None for p in model.parameters())
    for step in range(3):
        happened.clear()
        handle = inner.embedding.weight.register_hook(lambda _: happened.append("last gradient"))
        model(batch(step)[0]).sum().backward()
        handle.remove()
    return happened


def test_a_first_pass_without_gradients_does_not_end_overlap(pool: Pool) -> None:
    for happened in pool.run(overlapped):
        assert happened[0] == "bucket"
        assert happened[-2:] == ["last gradient", "bucket"]


def stale_declaration() -> None:
    inner = make("mlp")
    first = dreamcomm.DistributedDataParallel(inner, unused=["layers.0.weight"])
    del first
    model = dreamcomm.DistributedDataParallel(inner)
    model(batch(0)[0]).sum().backward()
    assert inner.layers[0].weight.grad is not None


def test_a_declaration_ends_with_its_wrapper(pool: Pool) -> None:
    pool.run(stale_declaration)


def shared_buckets() -> list[bool]:
    inner = make("mlp")
    model = dreamcomm.DistributedDataParallel(inner)
    model(batch(0)[0]).sum().backward()
    return [dreamcomm.is_shared(p.grad) for p in inner.parameters()]


def test_all_gradients_are_in_the_heap(pool: Pool) -> None:
    for shared in pool.run(shared_buckets):
        assert all(shared)
