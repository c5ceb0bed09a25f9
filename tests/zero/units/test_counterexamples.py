"""What scripts do that sharing one copy could make wrong: each is right, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp.models import batch
from dreamcomm.zero import ZeroOptimizer, fully_shard
from dreamcomm.zero.units.unit import unit_of
from helpers.pool import Pool
from zero.units.sharding import made, my_batch, shard, sharded, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

LR = 0.05


def loss_of(module: nn.Module, number: int, mine: bool = True) -> Tensor:
    x, y = my_batch(number) if mine else batch(number)
    return F.mse_loss(module(x), y)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)


def steps_beside_one_process(
    module: nn.Module, alone: nn.Module, loss: Callable[[nn.Module, int, bool], Tensor]
) -> float:
    """The largest difference of a weight after three steps."""
    ours, theirs = sgd(module), sgd(alone)
    for number in range(3):
        for optimizer, model, mine in ((ours, module, True), (theirs, alone, False)):
            optimizer.zero_grad()
            loss(model, number, mine).backward()
            optimizer.step()
    pairs = zip(weights(module), alone.parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def one_step_is_right(module: Any) -> bool:
    """A step from the weights of now gives what one process gets."""
    name = "mlp"
    alone = made(name)
    for theirs, ours in zip(alone.parameters(), weights(module), strict=True):
        theirs.data.copy_(ours)
    return steps_beside_one_process(module, alone, loss_of) < 1e-6


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing"


# Errors on all ranks, after which the next step works.


def weights_swapped_while_read() -> tuple[str, bool]:
    """An evaluation with gradients leaves all ranks reading."""
    module = sharded("mlp")
    loss_of(module, 0)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(one * 0.5)
    told = said(lambda: loss_of(module, 1).backward())
    module.reset_iter_state()
    return told, one_step_is_right(module)


def step_before_backward(keeps: bool) -> tuple[str, bool]:
    module = sharded("mlp")
    optimizer = sgd(module)
    loss_of(module, 0).backward()
    loss = loss_of(module, 1)
    if keeps:
        loss.backward(retain_graph=True)
    optimizer.step()
    told = said(loss.backward)
    module.reset_iter_state()
    optimizer.zero_grad()
    return told, one_step_is_right(module)


def first_rank_evaluates() -> tuple[str, bool]:
    module = sharded("mlp")
    loss_of(module, 0).backward()
    module.zero_grad()

    def act() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                loss_of(module, 1)
        loss_of(module, 0).backward()

    told = said(act)
    module.reset_iter_state()
    module.zero_grad()
    return told, one_step_is_right(module)


class Raises(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises and dist.get_rank() == 0:
            raise ValueError("a bad batch")
        out: Tensor = self.inner(x)
        return out


def forward_raises_on_one() -> tuple[str, bool]:
    inner = made("mlp")
    shard(inner.layers)
    module: Any = fully_shard(Raises(inner))
    loss_of(module, 0).backward()
    module.zero_grad()
    module.raises = True
    told = said(lambda: loss_of(module, 0).backward())
    module.raises = False
    module.reset_iter_state()
    module.zero_grad()
    return told, one_step_is_right(module)


ERRORS: dict[str, tuple[Callable[..., tuple[str, bool]], tuple[Any, ...], str]] = {
    "weights swapped": (weights_swapped_while_read, (), "has written to 'layers.0.weight'"),
    "step before backward": (step_before_backward, (False,), "modified by an inplace operation"),
    "graph kept over a step": (step_before_backward, (True,), "modified by an inplace operation"),
    "one rank evaluates": (first_rank_evaluates, (), "made different calls"),
    "one rank raises": (forward_raises_on_one, (), "made different calls"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_on_all_ranks(pool: Pool, name: str) -> None:
    act, args, words = ERRORS[name]
    found = pool.run(act, *args)
    for told, _ in found:
        assert words in told or told == "a bad batch", told
    assert [goes_on for _, goes_on in found] == [True, True]


# Right as they are.


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def preference(module: nn.Module, number: int, mine: bool) -> Tensor:
    """Two forward passes, and one without gradients between them."""
    x, y = my_batch(number) if mine else batch(number)
    x = x.clone().requires_grad_()
    chosen = module(x)
    with torch.no_grad():
        reference = module(x)
    rejected = module(x * 0.5)
    return F.mse_loss(chosen - rejected + reference, y)


def two_forwards_with_checkpoints(reentrant: bool) -> float:
    module, alone = Checkpointed(reentrant), Checkpointed(reentrant)
    for layer in module.layers:
        fully_shard(layer)
    return steps_beside_one_process(fully_shard(module), alone, preference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_with_checkpoints(pool: Pool, reentrant: bool) -> None:
    for difference in pool.run(two_forwards_with_checkpoints, reentrant, world=3):
        assert difference < 1e-6


class WithHead(nn.Module):
    """Its head is called by chunks, outside of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.norm, self.head = nn.Linear(12, 64), nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.tanh(self.body(x)))
        return out


def by_chunks(module: Any, number: int, mine: bool) -> Tensor:
    x, y = my_batch(number) if mine else batch(number)
    hidden = module(x)
    parts = zip(hidden.chunk(3), y.chunk(3), strict=True)
    total = sum(F.mse_loss(module.head(h), part, reduction="sum") for h, part in parts)
    assert isinstance(total, Tensor)
    return total / y.numel()


def chunked_head(together: bool) -> float:
    module, alone = WithHead(), WithHead()
    fully_shard(module.body)
    fully_shard([module.norm, module.head] if together else module.head)
    return steps_beside_one_process(fully_shard(module), alone, by_chunks)


@pytest.mark.parametrize("together", [False, True])
def test_a_head_that_is_called_by_chunks(pool: Pool, together: bool) -> None:
    for difference in pool.run(chunked_head, together):
        assert difference < 1e-6


def adversaries() -> float:
    """Two trees, each stepped by a loss that goes through both."""
    pairs = [[made("mlp"), nn.Linear(5, 12)] for _ in range(2)]
    for (generator, discriminator), mine in zip(pairs, (True, False), strict=True):
        torch.manual_seed(5)
        discriminator.reset_parameters()
        if mine:
            shard(generator)
            fully_shard(discriminator)
        optimizers = [sgd(generator), sgd(discriminator)]
        for number in range(4):
            x, _ = my_batch(number) if mine else batch(number)
            made_up = generator(x)
            real = discriminator(made_up.detach()).square().mean()
            fooled = (discriminator(made_up) - 1).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            (real if number % 2 else fooled).backward()
            optimizers[number % 2].step()
    ours = [one for module in pairs[0] for one in weights(module)]
    theirs = [one.detach() for module in pairs[1] for one in module.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_two_trees_in_one_loss(pool: Pool) -> None:
    for difference in pool.run(adversaries):
        assert difference < 1e-6


def penalty(module: nn.Module, number: int, mine: bool) -> Tensor:
    """A loss of a gradient, as of a gradient penalty."""
    x, y = my_batch(number) if mine else batch(number)
    x = x.clone().requires_grad_()
    out = module(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + slope.square().mean()


def with_penalty() -> float:
    return steps_beside_one_process(sharded("mlp"), made("mlp"), penalty)


def test_a_loss_of_gradients(pool: Pool) -> None:
    for difference in pool.run(with_penalty, world=3):
        assert difference < 1e-6


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.into, self.first, self.second = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 5)

    def tie_weights(self) -> None:
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(torch.tanh(self.into(x))))))
        out: Tensor = self.out(hidden)
        return out


def tied_after_wrapping(runs_before: bool) -> tuple[float, int]:
    module, alone = Untied(), Untied()
    for part in (module.first, module.second):
        fully_shard(part)
    fully_shard(module)
    if runs_before:
        with torch.no_grad():
            module(my_batch(0)[0])
    for model in (module, alone):
        model.tie_weights()
    difference = steps_beside_one_process(module, alone, loss_of)
    assert module.first.weight is module.second.weight
    unit = unit_of(module)
    assert unit is not None
    return difference, len(unit.tree.records())


@pytest.mark.parametrize("runs_before", [False, True])
def test_weights_tied_after_wrapping(pool: Pool, runs_before: bool) -> None:
    for difference, count in pool.run(tied_after_wrapping, runs_before):
        assert difference < 1e-6
        assert count == 7


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
