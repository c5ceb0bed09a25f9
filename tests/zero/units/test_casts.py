"""MixedPrecisionPolicy: passes in 16 bits, and sums, steps and states in the parameters' type."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ddp.models import Block
from helpers.pool import Pool
from zero.units.sharding import made, my_batch, shard, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WORLDS = [2, 3, 4]
FORMS = pytest.mark.parametrize("gather", [False, True])


def wide_loss(module: nn.Module, number: int) -> Tensor:
    x, y = my_batch(number)
    return nn.functional.mse_loss(module(x).float(), y)


def average(own: Tensor) -> Tensor:
    """Over the ranks, in rank order."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.contiguous())
    total = everyone[0].clone()
    for one in everyone[1:]:
        total += one
    return total / dist.get_world_size()


def narrowed(module: nn.Module) -> nn.Module:
    """A copy in 16 bits, whose gradients are added up in float32, as those of a tied weight."""
    narrow = copy.deepcopy(module).to(torch.bfloat16)
    for one in narrow.parameters():
        one.grad_dtype = torch.float32
    return narrow


class Masters:
    """The same by hand: float32 weights of each rank, of which each pass has a copy in 16 bits."""

    def __init__(self, module: nn.Module) -> None:
        self.wide = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, foreach=False)

    def gradients(self, number: int) -> tuple[float, list[Tensor | None]]:
        """The loss, and this rank's gradients."""
        narrow = narrowed(self.wide)
        x, y = my_batch(number)
        loss = nn.functional.mse_loss(narrow(x.to(torch.bfloat16)).float(), y)
        loss.backward()
        return float(loss), [one.grad for one in narrow.parameters()]

    def step(self, grads: list[Tensor | None]) -> None:
        for one, grad in zip(self.wide.parameters(), grads, strict=True):
            one.grad = None if grad is None else average(grad)
        self.optimizer.step()


def beside_masters(name: str, gather: bool) -> tuple[list[bool], list[bool], int, str]:
    """Losses and weights of five steps are equal; how often rows were cast; the state's types."""
    module = shard(made(name), mp_policy=BF16, gather=gather)
    alone = Masters(made(name))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, foreach=False)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = wide_loss(module, step)
        loss.backward()
        optimizer.step()
        expected, grads = alone.gradients(step)
        alone.step(grads)
        losses.append(float(loss) == expected)
    equal = [
        torch.equal(a, b) for a, b in zip(weights(module), alone.wide.parameters(), strict=True)
    ]
    types = {str(one.dtype) for one in module.state_dict().values() if one.is_floating_point()}
    return losses, equal, module._unit.tree.form.casts, " ".join(sorted(types))


@FORMS
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "tied"])
def test_steps_are_those_of_float32_masters(
    pool: Pool, name: str, world: int, gather: bool
) -> None:
    """All bits, and one cast an opening."""
    for losses, equal, casts, types in pool.run(beside_masters, name, gather, world=world):
        assert all(losses)
        assert all(equal)
        assert casts == 5
        assert types == "torch.float32"


def accumulated(gather: bool, local: torch.dtype, micro: int) -> list[bool]:
    """Whether gradients are the float32 sum of micro-batches in 16 bits, rounded once."""
    module = made("mlp").to(local)
    alone = copy.deepcopy(module)
    sharded: Any = shard(module, mp_policy=BF16, gather=gather)
    for number in range(micro):
        with sharded.no_sync():
            wide_loss(sharded, number).backward()
    sharded.reduce_gradients()
    sums = [torch.zeros(one.shape) for one in alone.parameters()]
    for number in range(micro):
        narrow = narrowed(alone)
        x, y = my_batch(number)
        nn.functional.mse_loss(narrow(x.to(torch.bfloat16)).float(), y).backward()
        for total, one in zip(sums, narrow.parameters(), strict=True):
            assert one.grad is not None
            total += one.grad
    expected = [average(one).to(local) for one in sums]
    found = [whole(one.grad) for one in sharded.parameters()]
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]


@FORMS
@pytest.mark.parametrize("local", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_micro_batches_are_summed_in_float32(
    pool: Pool, world: int, local: torch.dtype, gather: bool
) -> None:
    for equal in pool.run(accumulated, gather, local, 64, world=world):
        assert all(equal)


def beside_torch(
    name: str, gather: bool, policy: MixedPrecisionPolicy
) -> list[tuple[float, float]]:
    """Losses of both, of six steps with two micro-batches, the first of which is held back."""
    theirs: Any = made(name)
    for part in [one for one in theirs.modules() if isinstance(one, Block)]:
        fully_shard(part, mp_policy=policy)
    fully_shard(theirs, mp_policy=policy)
    ours = shard(made(name), mp_policy=policy, gather=gather)
    steppers = [torch.optim.SGD(one.parameters(), lr=0.002) for one in (ours, theirs)]
    found = []
    for step in range(6):
        pair = []
        for module, optimizer in zip((ours, theirs), steppers, strict=True):
            optimizer.zero_grad()
            module.set_requires_gradient_sync(False)
            wide_loss(module, 2 * step).backward()
            module.set_requires_gradient_sync(True)
            loss = wide_loss(module, 2 * step + 1)
            loss.backward()
            optimizer.step()
            pair.append(float(loss))
        found.append((pair[0], pair[1]))
    return found


@FORMS
@pytest.mark.parametrize("reduce", [None, torch.bfloat16, torch.float32])
def test_losses_are_those_of_fsdp2(pool: Pool, gather: bool, reduce: torch.dtype | None) -> None:
    """To the rounding of bfloat16. Also fresh gradients beside accumulated ones of other types."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for found in pool.run(beside_torch, "gpt", gather, policy, world=2):
        for ours, theirs in found:
            assert ours == pytest.approx(theirs, rel=2**-7)


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        self.types += [x.dtype, scale.dtype]
        return {"y": self.inner(x) * scale, "n": torch.ones(1, dtype=torch.int64)}


def types_of(policy: MixedPrecisionPolicy, gather: bool) -> tuple[list[torch.dtype], torch.dtype]:
    from dreamcomm.zero import fully_shard as ours

    module: Any = ours(Seen(), mp_policy=policy, gather=gather)
    scale = torch.ones(1, dtype=module.inner.weight.dtype)
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        x, scale = torch.randn(2, 8, dtype=policy.param_dtype), scale.to(policy.param_dtype)
    else:
        x = torch.randn(2, 8)
    out = module(x, scale=scale)
    out["y"].sum().backward()
    assert out["n"].dtype == torch.int64
    assert module.inner.weight.grad.dtype == torch.float32
    return module.types, out["y"].dtype


@FORMS
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("output", [None, torch.float64])
def test_arguments_and_outputs_are_cast(
    pool: Pool, output: torch.dtype | None, casts: bool, gather: bool
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=output, cast_forward_inputs=casts
    )
    for types, out in pool.run(types_of, policy, gather, world=2):
        assert types == [torch.bfloat16] * 2
        assert out == (output or torch.bfloat16)
