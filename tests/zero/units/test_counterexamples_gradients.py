"""What scripts do with gradients and optimizers that sharing one copy could make wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp.models import batch
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.units.beside_one import (
    LR,
    loss_of,
    one_step_is_right,
    said,
    sgd,
)
from zero.units.sharding import made, shard, sharded, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def optimizer_in_backward() -> float:
    """Each parameter is stepped when its gradient is there."""
    module, alone = sharded("mlp"), made("mlp")
    steppers = {one: torch.optim.SGD([one], lr=LR) for one in module.parameters()}

    def step(one: Tensor) -> None:
        steppers[one].step()  # type: ignore[index]
        steppers[one].zero_grad()  # type: ignore[index]

    for one in module.parameters():
        one.register_post_accumulate_grad_hook(step)
    theirs = torch.optim.SGD(alone.parameters(), lr=LR)
    for number in range(3):
        loss_of(module, number).backward()
        theirs.zero_grad()
        loss_of(alone, number, False).backward()
        theirs.step()
    pairs = zip(weights(module), alone.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def test_an_optimizer_in_backward(pool: Pool) -> None:
    for difference in pool.run(optimizer_in_backward):
        assert difference < 1e-6


def generation(how: str) -> tuple[bool, bool]:
    """Each rank runs another number of forward passes."""
    module, alone = sharded("mlp"), made("mlp")
    lengths = 3 + 2 * dist.get_rank()
    if how == "setting":
        module.set_reshard_after_forward(False)
    else:
        module.unshard()
    same = True
    with torch.no_grad():
        for number in range(lengths):
            x, _ = batch(number)
            if how == "setting":
                same = same and torch.equal(module(x), alone(x))
            else:
                same = same and torch.equal(module.layers(x), alone.layers(x))
    module.set_reshard_after_forward(True)
    module.reshard()
    return same, one_step_is_right(module)


@pytest.mark.parametrize("how", ["setting"])
def test_generation_with_other_lengths_by_rank(pool: Pool, how: str) -> None:
    assert pool.run(generation, how, world=3) == [(True, True)] * 3


def hooks_see() -> tuple[bool, bool]:
    """Hooks of before see this rank's whole gradient; those on the DTensor its rows of the sum."""
    module = made("mlp")
    seen: dict[str, Tensor] = {}
    module.layers[0].weight.register_hook(lambda g: seen.update(own=g.clone()))
    shard(module)
    module.layers[0].weight.register_post_accumulate_grad_hook(
        lambda one: seen.update(rows=one.grad.to_local().clone())
    )
    alone = made("mlp")
    loss_of(module, 0).backward()
    loss_of(alone, 0).backward()
    own = alone.layers[0].weight.grad
    is_own = torch.allclose(seen["own"], own, atol=1e-7)
    total = own.clone()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return is_own, torch.equal(seen["rows"], total.chunk(2)[dist.get_rank()])


def test_what_hooks_see(pool: Pool) -> None:
    assert pool.run(hooks_see) == [(True, True)] * 2


def aliases() -> list[bool]:
    """A gradient that a script has kept stays as it was, also when the next ones are reduced."""
    module = sharded("mlp")
    found = []
    for clears in (True, False):
        loss_of(module, 0).backward()
        kept = [one.grad for one in module.parameters()]
        copies = [one.to_local().clone() for one in kept]
        if clears:
            module.zero_grad()
        loss_of(module, 1).backward()
        same = [torch.equal(a.to_local(), b) for a, b in zip(kept, copies, strict=True)]
        # Without zero_grad the next one is added to it, in place, as in torch.
        found.append(all(same) if clears else not any(same))
        module.zero_grad()
    return found


def test_a_kept_gradient_stays(pool: Pool) -> None:
    assert pool.run(aliases) == [[True, True]] * 2


def mixtures() -> list[float]:
    """Reduced and held back passes in any order; clearing; a gradient given by hand."""
    found = []
    for plan in ("sn s", "nsns", "ss0s", "nn0ns", "sn0s", "gs", "gns"):
        module, alone = sharded("mlp"), made("mlp")
        for number, act in enumerate(plan.replace(" ", "")):
            if act == "0":
                module.zero_grad()
                alone.zero_grad()
            elif act == "g":
                for one, other in zip(module.parameters(), alone.parameters(), strict=True):
                    one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
            elif act == "n":
                with module.no_sync():
                    loss_of(module, number).backward()
                loss_of(alone, number, False).backward()
            else:
                loss_of(module, number).backward()
                loss_of(alone, number, False).backward()
        module.reduce_gradients()
        pairs = zip(module.parameters(), alone.parameters(), strict=True)
        found.append(max(float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs))
    return found


def test_gradients_of_any_order_of_passes(pool: Pool) -> None:
    for differences in pool.run(mixtures):
        assert max(differences) < 1e-6, differences


def with_zero_optimizer(kind: str) -> float:
    """Steps of a sum that no backward pass has reduced."""
    module, alone = sharded("mlp"), made("mlp")
    ours = (
        sgd(module)
        if kind == "torch"
        else ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=LR, momentum=0.9)
    )
    theirs = sgd(alone)
    for number in range(3):
        for optimizer, model, mine in ((ours, module, True), (theirs, alone, False)):
            optimizer.zero_grad()
            if mine:
                with module.no_sync():
                    loss_of(model, number, mine).backward()
            else:
                loss_of(model, number, mine).backward()
            optimizer.step()
    pairs = zip(weights(module), alone.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["torch", "zero"])
def test_a_step_reduces_what_was_held_back(pool: Pool, kind: str) -> None:
    for difference in pool.run(with_zero_optimizer, kind):
        assert difference < 1e-6


def clipped_by_torch() -> float:
    """torch's norm of sums that are held back is that of the average."""
    module, alone = sharded("mlp"), made("mlp")
    with module.no_sync():
        loss_of(module, 0).backward()
    loss_of(alone, 0, False).backward()
    norms = [
        float(whole(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)))
        for one in (module, alone)
    ]
    module.reduce_gradients()
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    difference = max(float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs)
    return max(difference, abs(norms[0] - norms[1]))


def test_torchs_clipping_of_sums_that_are_held_back(pool: Pool) -> None:
    for difference in pool.run(clipped_by_torch, world=3):
        assert difference < 1e-6


def penalty_before_forward() -> float:
    """A penalty on the DTensors, of after a step, whose graph lives through the forward pass."""
    module, alone = sharded("mlp"), made("mlp")
    for number in range(3):
        for model, mine in ((module, True), (alone, False)):
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            optimizer.zero_grad()
            penalty_of = sum(one.square().sum() for one in model.parameters())
            assert isinstance(penalty_of, Tensor)
            (0.01 * penalty_of).backward()
            loss_of(model, number, mine).backward()
            optimizer.step()
    pairs = zip(weights(module), alone.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def test_a_penalty_on_the_dtensors(pool: Pool) -> None:
    for difference in pool.run(penalty_before_forward):
        assert difference < 1e-6


def kept_graph_of_dtensors() -> str:
    """A graph of the values after the step, which a forward pass does not change."""
    module = sharded("mlp")
    optimizer = sgd(module)
    loss_of(module, 0).backward()
    optimizer.step()
    kept = sum(one.square().sum() for one in module.parameters())
    loss_of(module, 1).backward()
    assert isinstance(kept, Tensor)
    return said(kept.backward)


def test_a_graph_of_dtensors_lives_through_a_pass(pool: Pool) -> None:
    assert pool.run(kept_graph_of_dtensors) == ["nothing"] * 2
