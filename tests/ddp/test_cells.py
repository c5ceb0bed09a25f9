"""Static and dynamic graphs, no_sync, unused parameters and checkpointing, in every combination.

Each cell trains as one process does, or raises an error that names the parameter. Single cases:
several forward passes, retained graphs, parameters that are frozen or thawed later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dreamcomm
from ddp.models import ROWS, gradients, rows_of
from dreamcomm.buckets.engine import Caps
from dreamcomm.ddp.engine import Reducer
from dreamcomm.ranks.parameters import find_parameters
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

WIDTH = 190  # a matrix of this width is reduced in place


class Branches(nn.Module):
    """Uses `maybe` as asked for, and runs its middle under a checkpoint if asked to."""

    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.middle = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.maybe, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.checkpointed = checkpointed

    def run_middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(x))

    def forward(self, x: Tensor, uses_maybe: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpointed:
            reentrant = self.checkpointed == "reentrant"
            x = checkpoint(self.run_middle, x, use_reentrant=reentrant)
        else:
            x = self.run_middle(x)
        if uses_maybe:
            x = x + torch.tanh(self.maybe(x))
        out: Tensor = self.last(x)
        return out


def data(step: int) -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))


def loss_of(out: Tensor) -> Tensor:
    return out.square().sum() / ROWS


Uses = Callable[[int, int], bool]  # whether a rank uses `maybe` in a step
USES: dict[str, Uses] = {
    "none unused": lambda step, rank: True,
    "unused": lambda step, rank: False,
    "differing by rank": lambda step, rank: (step + rank) % 2 == 0,
}
MICRO_BATCHES = 2


def one_step(model: nn.Module, step: int, rank: int, world: int, uses: Uses, no_sync: bool) -> None:
    """A step's backward passes of one rank's rows: the last reduces."""
    for part in range(MICRO_BATCHES):
        held = no_sync and part < MICRO_BATCHES - 1
        with model.no_sync() if held else nullcontext():
            x = rows_of(rows_of(data(step), rank, world), part, MICRO_BATCHES)
            # The average over ranks of sums over a rank's rows: times the number of ranks.
            (world * loss_of(model(x, uses(step, rank)))).backward()


def alone(model: nn.Module, step: int, world: int, uses: Uses) -> None:
    """The same rows in this process."""
    for rank in range(world):
        loss_of(model(rows_of(data(step), rank, world), uses(step, rank))).backward()


def run_cell(static: bool, no_sync: bool, used: str, checkpointed: str) -> str:
    """An error's text, or "" if all steps were equal to one process."""
    rank, world, uses = dist.get_rank(), dist.get_world_size(), USES[used]
    model = dreamcomm.DistributedDataParallel(
        Branches(checkpointed), static_graph=static, bucket_cap_mb=0.2
    )
    reference = Branches(checkpointed)
    steppers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for m in (model, reference)
    ]
    for step in range(4):
        for stepper in steppers:
            stepper.zero_grad()
        try:
            one_step(model, step, rank, world, uses, no_sync)
        except RuntimeError as error:
            return str(error)
        alone(reference, step, world, uses)
        compare(model.module, reference)
        for stepper in steppers:
            stepper.step()
    compare(model.module, reference)
    return ""


def compare(model: nn.Module, reference: nn.Module) -> None:
    for one, other in zip(gradients(model), gradients(reference), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    for weight, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(weight, other, rtol=1e-4, atol=1e-6)


CELLS = list(product([False, True], [False, True], USES, ["", "not reentrant"]))


@pytest.mark.parametrize(
    ("static", "no_sync", "used", "checkpointed"),
    CELLS,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_cell_is_as_one_process(
    pool: Pool, static: bool, no_sync: bool, used: str, checkpointed: str
) -> None:
    for error in pool.run(run_cell, static, no_sync, used, checkpointed):
        if static and used == "differing by rank":  # also from step to step
            assert "parameter 'maybe." in error
        else:
            assert error == ""


def change_a_static_graph(first: bool) -> str:
    model = dreamcomm.DistributedDataParallel(Branches(), static_graph=True)
    loss_of(model(data(0), first)).backward()
    with pytest.raises(RuntimeError) as caught:
        loss_of(model(data(1), not first)).backward()
    return str(caught.value)


@pytest.mark.parametrize("first", [True, False])
def test_a_static_graph_that_changes_is_named(pool: Pool, first: bool) -> None:
    for rank, error in enumerate(pool.run(change_a_static_graph, first)):
        got = "got no gradient, but one" if first else "got a gradient, but none"
        assert f"rank {rank} of 2: parameter 'maybe." in error
        assert got in error


@pytest.mark.parametrize("used", USES)
def test_reentrant_checkpoints_are_as_one_process(pool: Pool, used: str) -> None:
    assert pool.run(run_cell, False, True, used, "reentrant", world=3) == [""] * 3


class Twice(nn.Module):
    """One layer in two reentrant checkpoints: autograd makes its gradient twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.first, self.shared = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(times):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
        return x


def run_twice(more: bool) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = dreamcomm.DistributedDataParallel(Twice()), Twice()
    for step in range(4):
        for one in (model, reference):
            one.zero_grad()
        times = 3 if more and step == 2 else 2
        try:
            (world * loss_of(model(rows_of(data(step), rank, world), times))).backward()
        except RuntimeError as error:
            return str(error)
        loss_of(reference(data(step), times)).backward()
        compare(model.module, reference)
    return ""


def test_a_gradient_that_is_made_twice_in_each_pass(pool: Pool) -> None:
    assert pool.run(run_twice, False) == ["", ""]


def test_a_gradient_that_is_made_more_often_than_at_first_is_named(pool: Pool) -> None:
    for error in pool.run(run_twice, True):
        assert "'shared.weight'" in error or "'shared.bias'" in error
        assert "use_reentrant=False" in error


def run_declared(names: list[str], uses: bool) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = dreamcomm.DistributedDataParallel(Branches(), unused=names)
    reference = Branches()
    for step in range(3):
        for one in (model, reference):
            one.zero_grad()
        try:
            (world * loss_of(model(rows_of(data(step), rank, world), uses))).backward()
        except RuntimeError as error:
            return str(error)
        loss_of(reference(data(step), uses)).backward()
        compare(model.module, reference)
    return ""


def test_parameters_that_are_declared_unused(pool: Pool) -> None:
    names = ["maybe.weight", "maybe.bias"]
    assert pool.run(run_declared, names, False) == ["", ""]
    for rank, error in enumerate(pool.run(run_declared, names, True)):
        assert f"rank {rank}: parameter 'maybe." in error
        assert "unused=" in error


def without_exchange(uses: bool) -> str:
    """As on GPUs: each rank has to have all gradients."""
    module = Branches()
    parameters = find_parameters(module, ())
    world = dist.group.WORLD
    assert world is not None
    reducer = Reducer(parameters, world, Caps(1 << 20, 1 << 20), finds_unused=False)
    try:
        loss_of(module(data(0), uses)).backward()
    except RuntimeError as error:
        return str(error)
    assert reducer.passes == 1
    return ""


def test_without_an_exchange_all_gradients_have_to_be_there(pool: Pool) -> None:
    assert pool.run(without_exchange, True) == ["", ""]
    for rank, error in enumerate(pool.run(without_exchange, False)):
        assert f"rank {rank} of 2: parameter 'maybe." in error
        assert "find_unused_parameters=True" in error


def grad_on_one_rank() -> None:
    """torch.autograd.grad, and a backward pass of the inputs alone, call nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = dreamcomm.DistributedDataParallel(Branches()), Branches()
    for step in range(4):
        for one in (model, reference):
            one.zero_grad()
        x = rows_of(data(step), rank, world).requires_grad_()
        if rank == 0:
            torch.autograd.grad(model(x).sum(), x)
            torch.autograd.grad(model(x).sum(), [model.module.first.weight])
            model(x).sum().backward(inputs=[x])
        (world * loss_of(model(x))).backward()
        loss_of(reference(data(step))).backward()
        compare(model.module, reference)
        assert model.reducer.passes == step + 1


def test_gradients_of_inputs_on_one_rank_alone(pool: Pool) -> None:
    pool.run(grad_on_one_rank)


def run_two_forwards() -> None:
    """Two forward passes, then one backward of both; then a backward of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = dreamcomm.DistributedDataParallel(Branches()), Branches()
    for step in range(6):
        for one in (model, reference):
            one.zero_grad()
        uses = step % 2 == 0
        mine = rows_of(data(step), rank, world)
        first, second = model(mine, uses), model(mine.flip(0), not uses)
        expected = [reference(data(step), uses), reference(data(step).flip(0), not uses)]
        if step < 3:
            (world * (loss_of(first) + 2 * loss_of(second))).backward()
            (loss_of(expected[0]) + 2 * loss_of(expected[1])).backward()
        else:
            (world * loss_of(first)).backward()
            (2 * world * loss_of(second)).backward()
            loss_of(expected[0]).backward()
            (2 * loss_of(expected[1])).backward()
        compare(model.module, reference)


def test_several_forward_passes_before_a_backward(pool: Pool) -> None:
    pool.run(run_two_forwards, world=3)


def run_retained() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = dreamcomm.DistributedDataParallel(Branches()), Branches()
    for step in range(3):
        for one in (model, reference):
            one.zero_grad(set_to_none=step != 1)
        ours = world * loss_of(model(rows_of(data(step), rank, world)))
        theirs = loss_of(reference(data(step)))
        for loss in (ours, theirs):
            loss.backward(retain_graph=True)
            loss.backward()
        compare(model.module, reference)


def test_a_retained_graph(pool: Pool) -> None:
    pool.run(run_retained)


def run_frozen() -> None:
    """`middle` is frozen in step 1 and thawed in step 3; `maybe` is frozen before the wrap."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inner, reference = Branches(), Branches()
    for one in (inner, reference):
        one.maybe.requires_grad_(False)
    model = dreamcomm.DistributedDataParallel(inner)
    for step in range(6):
        for one in (inner, reference):
            one.zero_grad()
            one.middle.requires_grad_(step not in (1, 2))
            one.maybe.requires_grad_(step >= 4)
        (world * loss_of(model(rows_of(data(step), rank, world)))).backward()
        loss_of(reference(data(step))).backward()
        compare(inner, reference)


def thaw_between() -> None:
    """What has accumulated before a thaw is reduced, where the last pass adds nothing to it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inner, reference = Branches(), Branches()
    for one in (inner, reference):
        one.middle.requires_grad_(False)
    model = dreamcomm.DistributedDataParallel(inner)
    for step in range(3):
        for one in (inner, reference):
            one.zero_grad()
        with model.no_sync():
            (world * loss_of(model(rows_of(data(step), rank, world), True))).backward()
        loss_of(reference(data(step), True)).backward()
        for one in (inner, reference):
            one.middle.requires_grad_(step > 0)
        (world * loss_of(model(rows_of(data(step), rank, world), False))).backward()
        loss_of(reference(data(step), False)).backward()
        compare(inner, reference)


def test_a_thaw_between_passes_loses_nothing(pool: Pool) -> None:
    pool.run(thaw_between)


def test_parameters_that_are_frozen_and_thawed_later(pool: Pool) -> None:
    pool.run(run_frozen, world=3)


def run_exception() -> Any:
    """A pass that an error of the user ends on all ranks leaves the next ones right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = dreamcomm.DistributedDataParallel(Branches()), Branches()
    for step in range(4):
        for one in (model, reference):
            one.zero_grad()
        out = model(rows_of(data(step), rank, world))
        if step == 2:
            handle = model.module.middle.weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss_of(out).backward()
            handle.remove()
            continue
        (world * loss_of(out)).backward()
        loss_of(reference(data(step))).backward()
        compare(model.module, reference)


def fail(_: Tensor) -> Tensor:
    raise ArithmeticError("a user's hook")


def test_a_pass_that_fails_leaves_the_next_right(pool: Pool) -> None:
    pool.run(run_exception)
