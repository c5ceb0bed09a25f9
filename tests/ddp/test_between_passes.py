"""What a script does between two passes: clears, fails, gives gradients of its own, thaws."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.test_traps import wrap
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

both_wrappers = pytest.mark.parametrize("how", ["ddp", "replicate"])
sizes = pytest.mark.parametrize("size", [4, 300], ids=["small", "large"])


class Two(nn.Module):
    """Its second layer is used on demand; a pass fails on demand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)
        self.fails = False

    def forward(self, x: Tensor, uses_b: bool = True) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.fails:
            x.register_hook(fail)
        return (self.b(x) if uses_b else x).sum()


def fail(_: Tensor) -> None:
    raise ZeroDivisionError("in the middle of a pass")


def row(size: int, rank: int) -> Tensor:
    return torch.full((1, size), 0.1 * (1 + rank))


def found(module: Two) -> list[float | None]:
    return [None if one.grad is None else one.grad.sum().item() for one in module.parameters()]


def expected(module: Two, uses_b: Callable[[int], bool] = lambda _: True) -> list[float | None]:
    """Of one process with all rows."""
    alone, size = Two(module.a.in_features), module.a.in_features
    alone.load_state_dict(module.state_dict())
    sum(alone(row(size, r), uses_b(r)) / 2 for r in range(2)).backward()
    return found(alone)


def cleared(how: str, size: int, clears: str) -> list[Any]:
    """A pass that is given up, and then one in which rank 1 alone uses the second layer."""
    module, rank = Two(size), dist.get_rank()
    model = wrap(module, how)
    if clears == "fails":
        module.fails = True
        try:
            model(row(size, rank)).backward()
        except ZeroDivisionError:
            module.fails = False
    else:
        with model.no_sync():
            model(row(size, rank)).backward()
    module.zero_grad()
    model(row(size, rank), rank == 1).backward()
    return [found(module), expected(module, lambda r: r == 1)]


@both_wrappers
@sizes
@pytest.mark.parametrize("clears", ["fails", "no_sync"])
def test_what_was_cleared_counts_no_more(pool: Pool, how: str, size: int, clears: str) -> None:
    for ours, one_process in pool.run(cleared, how, size, clears):
        assert ours == pytest.approx(one_process, rel=1e-5)


def used_nowhere(how: str, size: int) -> list[float | None]:
    module, rank = Two(size), dist.get_rank()
    model = wrap(module, how)
    with model.no_sync():
        model(row(size, rank)).backward()
    module.zero_grad()
    model(row(size, rank), False).backward()
    return found(module)[2:]


@both_wrappers
@sizes
def test_a_cleared_gradient_that_no_rank_makes_stays_none(pool: Pool, how: str, size: int) -> None:
    assert pool.run(used_nowhere, how, size) == [[None, None]] * 2


def goes_on(how: str, by: str) -> list[Any]:
    """Goes on after a pass that failed on all ranks, without a forward pass of the wrapper's that
    notices."""
    module, rank = Two(4), dist.get_rank()
    zero = how.startswith("zero")
    if zero:
        model: Any = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=int(how[-1]), lr=1.0)
    else:
        model = wrap(module, how)
    before = copy.deepcopy(module)
    call = module if zero else model
    passes = 1 if by == "first" else 3
    for number in range(passes):
        module.fails = number == passes - 1
        try:
            call(row(4, rank)).backward()
        except ZeroDivisionError:
            module.fails = False
        module.zero_grad()
    if by == "no_sync":
        with model.no_sync():
            call(row(4, rank)).backward()
        model.reduce_gradients()
    else:
        inner = model.module if how == "ddp" else call
        inner(row(4, rank)).backward()
    if zero:
        model.step()
        new = [
            (a - b).sum().item()
            for a, b in zip(before.parameters(), module.parameters(), strict=True)
        ]
        return [new, expected(before)]
    return [found(module), expected(module)]


@pytest.mark.parametrize("how", ["ddp", "replicate", "zero 1", "zero 2"])
@pytest.mark.parametrize("by", ["first", "later", "no_sync"])
def test_passes_after_a_failed_one(pool: Pool, how: str, by: str) -> None:
    for ours, one_process in pool.run(goes_on, how, by):
        assert ours == pytest.approx(one_process, rel=1e-4)


# Gradients that a script gives.


def flat_gradients(how: str, size: int) -> list[float]:
    """An optimizer over one flat tensor, of which the gradients are views."""
    module, rank = Two(size), dist.get_rank()
    numel = sum(one.numel() for one in module.parameters())
    flat, total = torch.zeros(numel), nn.Parameter(torch.zeros(numel))
    total.grad = flat
    place = 0
    for one in module.parameters():
        one.grad = flat[place : place + one.numel()].view_as(one)
        place += one.numel()
    model = wrap(module, how)
    differences = []
    for _ in range(3):
        flat.zero_()
        model(row(size, rank)).backward()
        differences.append(sum(one or 0.0 for one in expected(module)) - flat.sum().item())
    return differences


@both_wrappers
@sizes
def test_gradients_stay_views_of_what_a_script_gave(pool: Pool, how: str, size: int) -> None:
    for differences in pool.run(flat_gradients, how, size):
        assert differences == pytest.approx([0.0] * 3, abs=2e-2 if size == 300 else 1e-5)


def kept_under_no_sync(how: str, size: int) -> list[Any]:
    module, rank = Two(size), dist.get_rank()
    model = wrap(module, how)
    with model.no_sync():
        model(row(size, rank)).backward()
    kept = [one.grad for one in module.parameters()]
    for one in kept:
        assert one is not None
        one.zero_()
    model(row(size, rank)).backward()
    return [[one.sum().item() for one in kept if one is not None], expected(module)]


@both_wrappers
@sizes
def test_a_gradient_object_keeps_being_the_gradient(pool: Pool, how: str, size: int) -> None:
    for ours, one_process in pool.run(kept_under_no_sync, how, size):
        assert ours == pytest.approx(one_process, rel=1e-4)


def turned(stage: int, size: int) -> list[float]:
    """Gradients in another order of memory than their parameters."""
    torch.manual_seed(0)
    module = nn.Linear(size, size, bias=False)
    alone = copy.deepcopy(module)
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    differences = []
    for step in range(3):
        x = torch.randn(3, size, generator=torch.Generator().manual_seed(step))
        for model, by in ((module, optimizer), (alone, other)):
            by.zero_grad()
            with optimizer.no_sync():
                model(x).square().sum().backward()
        assert module.weight.grad is not None
        module.weight.grad = module.weight.grad.t().contiguous().t()
        optimizer.step()
        other.step()
        differences.append((module.weight - alone.weight).abs().max().item())
    return differences


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [4, 200])
def test_zero_takes_gradients_in_any_order_of_memory(pool: Pool, stage: int, size: int) -> None:
    for differences in pool.run(turned, stage, size):
        assert max(differences) < 1e-5


def sparse_rest(how: str) -> list[float]:
    module = nn.Embedding(4, 2, sparse=True)
    model = wrap(module, how)
    model(torch.tensor([0])).sum().backward()
    if dist.get_rank() == 1:
        with model.no_sync():
            model(torch.tensor([1])).sum().backward()
    model.reduce_gradients()
    assert module.weight.grad is not None
    return module.weight.grad.to_dense().sum(1).tolist()


@both_wrappers
def test_a_sparse_average_is_reduced_once_more(pool: Pool, how: str) -> None:
    assert pool.run(sparse_rest, how) == [[2.0, 1.0, 0.0, 0.0]] * 2


def other_dtype(how: str) -> str:
    module = nn.Linear(4, 4).bfloat16()
    module.weight.grad_dtype = torch.float32
    model = wrap(module, how)
    try:
        model(torch.ones(1, 4).bfloat16()).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@both_wrappers
def test_gradients_of_another_dtype_are_refused(pool: Pool, how: str) -> None:
    for text in pool.run(other_dtype, how):
        assert "the gradient of 'weight' is Float, expected BFloat16" in text


# Frozen parameters.


def thaw(how: str, by: str) -> list[Any]:
    module, rank = Two(4), dist.get_rank()
    module.a.requires_grad_(False)
    model = wrap(module, how)
    module.a.requires_grad_(True)
    try:
        if by == "reduce_gradients":
            with model.no_sync():
                model(row(4, rank)).backward()
            model.reduce_gradients()
        else:
            model.module(row(4, rank)).backward()
    except RuntimeError as error:
        return [str(error)]
    return [found(module), expected(module)]


@both_wrappers
def test_thawed_parameters_are_reduced_by_hand(pool: Pool, how: str) -> None:
    for ours, one_process in pool.run(thaw, how, "reduce_gradients"):
        assert ours == pytest.approx(one_process, rel=1e-5)


def test_thawed_parameters_are_refused_beside_the_wrapper(pool: Pool) -> None:
    for (text,) in pool.run(thaw, "ddp", "module"):
        assert "parameter 'a.weight', which was frozen, has changed" in text


def declared(how: str) -> str:
    module = Two(4)
    module.a.requires_grad_(False)
    model = dreamcomm.DistributedDataParallel(module, unused=["a.weight", "a.bias"])
    module.a.requires_grad_(True)
    try:
        model(row(4, dist.get_rank())).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_parameter_that_is_declared_unused_may_not_thaw(pool: Pool) -> None:
    for text in pool.run(declared, "ddp"):
        assert "is declared unused" in text


def sliced(how: str) -> float:
    model = dreamcomm.replicate(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    part = copy.deepcopy(model[:1])
    return part(torch.zeros(1, 2)).sum().item()


def test_a_slice_of_a_replicated_module_can_be_copied(pool: Pool) -> None:
    pool.run(sliced, "replicate")
