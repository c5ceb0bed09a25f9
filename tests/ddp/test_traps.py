"""Situations in which other wrappers have gone wrong, with the right numbers given."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import batch, make, norm, rows_of
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def weight_model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def wrap(module: nn.Module, how: str, **options: Any) -> Any:
    if how == "replicate":
        return dreamcomm.replicate(module, **options)
    return dreamcomm.DistributedDataParallel(module, **options)


both_wrappers = pytest.mark.parametrize("how", ["ddp", "replicate"])


def train_on_tokens(how: str) -> float:
    """Loss sums over tokens that ranks and micro-batches have unequally many of."""
    rank, counts = dist.get_rank(), [[3, 5], [7, 1]]
    total = sum(map(sum, counts))
    model = wrap(weight_model(), how, reduce="sum")
    for number, count in enumerate(counts[rank]):
        with model.no_sync() if number == 0 else nullcontext():
            x = torch.full((count, 1), float(rank + 1))
            (model(x).sum() / total).backward()
    weight = next(model.parameters())
    return weight.grad.item()


@both_wrappers
def test_a_sum_over_unequal_tokens_is_divided_by_all_of_them(pool: Pool, how: str) -> None:
    expected = (8 * 1.0 + 8 * 2.0) / 16
    assert pool.run(train_on_tokens, how) == [pytest.approx(expected)] * 2


def norms() -> list[float]:
    found = []
    for how in ("ddp", "replicate", "torch", "alone"):
        module = make("mlp")
        model: nn.Module = module
        if how == "torch":
            model = nn.parallel.DistributedDataParallel(module)
        elif how != "alone":
            model = wrap(module, how)
        x, y = batch(0)
        if how != "alone":
            x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in (x, y))
        nn.functional.mse_loss(model(x), y).backward()
        found.append(norm(module))
    return found


def test_all_wrappers_have_one_gradient_norm(pool: Pool) -> None:
    for found in pool.run(norms):
        assert found == [pytest.approx(found[-1], rel=1e-6)] * 4


def accumulate(how: str, case: str) -> float | str:
    """Gradients 1 and 3 on rank 0, 7 and 11 on rank 1: of two micro-batches the average is 11."""
    rank = dist.get_rank()
    values = [[1.0, 3.0], [7.0, 11.0]][rank]
    model = wrap(weight_model(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = next(model.parameters())
    for _ in range(2):  # the second time with learned buckets
        optimizer.zero_grad()
        if case == "around backward alone":
            for number, value in enumerate(values):
                loss = model(torch.tensor([[value]])).sum()
                with model.no_sync() if number == 0 else nullcontext():
                    loss.backward()
        elif case == "sync first":
            for number, value in enumerate(values):
                with model.no_sync() if number == 1 else nullcontext():
                    model(torch.tensor([[value]])).sum().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
        elif case == "reduced later":
            for value in values:
                with model.no_sync():
                    model(torch.tensor([[value]])).sum().backward()
            model.reduce_gradients()
        elif case == "reduced always":
            for value in values:
                model(torch.tensor([[value]])).sum().backward()
    optimizer.step()
    return weight.grad.item()


@both_wrappers
@pytest.mark.parametrize("case", ["around backward alone", "reduced later", "reduced always"])
def test_accumulated_gradients_are_averages(pool: Pool, how: str, case: str) -> None:
    assert pool.run(accumulate, how, case) == [11.0, 11.0]


@both_wrappers
def test_a_step_on_gradients_that_are_reduced_in_part_is_refused(pool: Pool, how: str) -> None:
    for rank, error in enumerate(pool.run(accumulate, how, "sync first")):
        assert isinstance(error, str)
        assert f"rank {rank}: the gradient of 'weight' is a mix" in error


def windows() -> list[float]:
    """Three windows of two micro-batches under a static graph."""
    rank, found = dist.get_rank(), []
    model = dreamcomm.DistributedDataParallel(weight_model(), static_graph=True)
    for window in range(3):
        model.zero_grad()
        for number in range(2):
            with model.no_sync() if number == 0 else nullcontext():
                model(torch.tensor([[float(10 * window + 2 * rank + number)]])).sum().backward()
        found.append(model.module.weight.grad.item())
    return found


def test_a_static_graph_reduces_every_window(pool: Pool) -> None:
    expected = [sum(20.0 * w + 4 * r + 1 for r in range(2)) / 2 for w in range(3)]
    assert pool.run(windows) == [expected] * 2


def assigned() -> tuple[list[float], int]:
    """Gradients that a user assigns, or clears in either way, and a convolution of 1 x 1."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(4, 6, 1).to(memory_format=torch.channels_last), nn.Flatten())
    model = dreamcomm.DistributedDataParallel(inner)
    weight = inner[0].weight
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            if step in (1, 3):
                model.zero_grad(set_to_none=step == 1)
            elif step == 2:
                weight.grad = torch.full_like(weight, float(rank))
                inner[0].bias.grad = None
            elif step == 4:
                weight.grad = None
            model(torch.ones(2, 4, 1, 1) * (rank + 1)).sum().backward()
            found.append(weight.grad[0, 0, 0, 0].item())
    return found, len(caught)


def test_assigned_and_cleared_gradients_lose_nothing(pool: Pool) -> None:
    for found, warned in pool.run(assigned):
        assert found == [3.0, 3.0, 0.5 + 3.0, 3.0, 3.0]
        assert warned == 0


def unused_weights(by_rank: bool) -> tuple[bool, float, float]:
    """Whether the unused gradient is None, how far its weight moved, and the gradient."""
    from ddp.test_cells import Branches, data, loss_of

    rank = dist.get_rank()
    inner = Branches()
    model = dreamcomm.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    before = inner.maybe.weight.detach().clone()
    gradient = 0.0
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(data(step), by_rank and rank == 1)).backward()
        if inner.maybe.weight.grad is not None:
            gradient = float(inner.maybe.weight.grad.norm())
        optimizer.step()
    moved = float((inner.maybe.weight.detach() - before).norm())
    return inner.maybe.weight.grad is None, moved, gradient


def test_a_parameter_that_no_rank_uses_does_not_move(pool: Pool) -> None:
    for is_none, moved, _ in pool.run(unused_weights, False):
        assert is_none
        assert moved == 0.0


def test_a_parameter_that_one_rank_uses_gets_the_average_with_zeros(pool: Pool) -> None:
    first, second = pool.run(unused_weights, True)
    assert first == second
    assert not first[0]
    assert first[2] > 0


class Steps(nn.Module):
    """Counts forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += dist.get_rank() + 1
        out: Tensor = self.linear(x)
        return out


def buffers(how: str, sync: bool) -> float:
    module = Steps()
    module.seen += 10 * dist.get_rank()
    model = wrap(module, how, forward_sync_buffers=sync)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    return module.seen.item()


@both_wrappers
def test_buffers_are_those_of_rank_0(pool: Pool, how: str) -> None:
    assert pool.run(buffers, how, True) == [3.0, 4.0]  # the last forward pass is a rank's own
    assert pool.run(buffers, how, False) == [3.0, 6.0]


def scaled(kind: Any, bad_rank: int, element: int, value: float) -> list[tuple[float, bool]]:
    """The loss scale, and whether the weights moved, after each of three steps."""
    inner = make("mlp")
    model = dreamcomm.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=8.0, growth_interval=100)
    weight = inner.layers[2].weight
    found = []
    for step in range(3):
        optimizer.zero_grad()
        before = weight.detach().clone()
        x, y = (rows_of(one, dist.get_rank(), dist.get_world_size()) for one in batch(step))

        def spoil(gradient: Tensor, step: int = step) -> Tensor:
            if step == 1 and dist.get_rank() == bad_rank:
                gradient = gradient.clone()
                gradient.view(-1)[element] = value
            return gradient

        handle = weight.register_hook(spoil)
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        handle.remove()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not torch.equal(before, weight)))
    return found


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, dreamcomm.GradScaler])
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize(("element", "value"), [(0, float("inf")), (-1, float("nan"))])
def test_one_element_that_is_not_finite_has_all_ranks_skip(
    pool: Pool, kind: Any, bad_rank: int, element: int, value: float
) -> None:
    found = pool.run(scaled, kind, bad_rank, element, value, world=3)
    assert found == [[(8.0, True), (4.0, False), (4.0, True)]] * 3


def sparse() -> list[float]:
    """An embedding with sparse gradients, beside a dense layer."""
    torch.manual_seed(5)
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3))
    reference = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3))
    reference.load_state_dict(inner.state_dict())
    model = dreamcomm.DistributedDataParallel(inner)
    found = []
    for step in range(3):
        x = torch.randint(50, (12,), generator=torch.Generator().manual_seed(step))
        for one in (inner, reference):
            one.zero_grad()
        model(rows_of(x, rank, world)).square().mean().backward()
        reference(x).square().mean().backward()
        difference = inner[0].weight.grad.to_dense() - reference[0].weight.grad.to_dense()
        found.append(float(difference.abs().max()))
        assert torch.allclose(inner[1].weight.grad, reference[1].weight.grad, atol=1e-6)
    return found


def test_sparse_gradients(pool: Pool) -> None:
    for found in pool.run(sparse, world=3):
        assert max(found) < 1e-6


def mixed_types() -> bool:
    torch.manual_seed(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = nn.ModuleList([nn.Linear(200, 200), nn.Linear(200, 200).double()])
    inner[0].to(torch.bfloat16)
    whole = [p.detach().clone() for p in inner.parameters()]
    assert whole

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = inner

        def forward(self, x: Tensor) -> Tensor:
            middle = self.layers[0](x.bfloat16()).double()
            out: Tensor = self.layers[1](middle)
            return out

    module = Both()
    model = dreamcomm.DistributedDataParallel(module)
    data = torch.randn(12, 200, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        model.zero_grad()
        model(rows_of(data, rank, world)).sum().backward()
    ours = [p.grad.clone() for p in module.parameters()]
    parts = []
    for other in range(world):
        module.zero_grad()
        with model.no_sync():
            model(rows_of(data, other, world)).sum().backward()
        parts.append([p.grad.clone() for p in module.parameters()])
    # 16 bits are added in float32 in rank order, divided, and rounded once.
    wide = [torch.float32 if one.dtype == torch.bfloat16 else one.dtype for one in ours]
    expected = [
        (sum(part.to(t) for part in same) / world).to(same[0].dtype)
        for t, same in zip(wide, zip(*parts, strict=True), strict=True)
    ]
    return all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("world", [2, 3])
def test_types_are_mixed_and_16_bits_are_rounded_once(pool: Pool, world: int) -> None:
    assert pool.run(mixed_types, world=world) == [True] * world


def clipped(p: float) -> tuple[float, list[Tensor], float]:
    inner, reference = make("odd"), make("odd")
    model = dreamcomm.DistributedDataParallel(inner)
    x, y = batch(0)
    mine = [rows_of(one, dist.get_rank(), dist.get_world_size()) for one in (x, y)]
    nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
    nn.functional.mse_loss(reference(x), y).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, p)
    found = model.clip_grad_norm_(0.01, p)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert norm(inner) == pytest.approx(norm(reference), rel=1e-5)
    return found.item(), [g.grad for g in inner.parameters() if g.grad is not None], norm(inner)


@pytest.mark.parametrize("p", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_one_norm_on_all_ranks(pool: Pool, p: float) -> None:
    found = pool.run(clipped, p, world=3)
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert all(map(torch.equal, other[1], found[0][1]))


def factors() -> list[float]:
    rank, found = dist.get_rank(), []
    for reduce in ("mean", "sum", 0.25):
        model = dreamcomm.DistributedDataParallel(weight_model(), reduce=reduce)
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([[2.0 + 4 * rank]])).sum().backward()
        found.append(model.module.weight.grad.item())
    return found


def test_what_the_sum_is_multiplied_by(pool: Pool) -> None:
    assert pool.run(factors) == [[4.0, 8.0, 2.0]] * 2


def add_to_a_sum() -> str:
    model = dreamcomm.DistributedDataParallel(weight_model(), reduce="sum")
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 1)).sum().backward()
    return str(caught.value)


def test_a_sum_is_not_added_to_a_sum(pool: Pool) -> None:
    for rank, error in enumerate(pool.run(add_to_a_sum)):
        assert f"rank {rank} of 2: this backward pass adds to the gradient of 'weight'" in error
