"""The window: when ranks meet, and what each part of it is for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm._torch.groups import backend_of
from dreamcomm.zero import ZeroOptimizer
from dreamcomm.zero.units.unit import unit_of
from dreamcomm.zero.units.window import Kind, Window
from helpers.pool import Pool
from zero.units.sharding import my_batch, sharded, weights, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def window_of(module: nn.Module) -> Window:
    unit = unit_of(module)
    assert unit is not None
    return unit.tree.window


def calls() -> int:
    """Made so far on the default group."""
    return int(backend_of(None)._get_sequence_number_for_group())


def counted(module: Any, act: Callable[[], object]) -> tuple[int, int]:
    """Meetings and calls of the group that it takes."""
    meetings, before = window_of(module).barriers, calls()
    act()
    return window_of(module).barriers - meetings, calls() - before


def step(module: Any, optimizer: torch.optim.Optimizer, micro: int) -> None:
    optimizer.zero_grad()
    for number in range(micro):
        x, y = my_batch(number)
        if number < micro - 1:
            with module.no_sync():
                nn.functional.mse_loss(module(x), y).backward()
        else:
            nn.functional.mse_loss(module(x), y).backward()
    optimizer.step()


def evaluate(module: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(my_batch(3)[0])
    return out


def counts(kind: str) -> dict[str, tuple[int, int]]:
    module = sharded("gpt")
    options: dict[str, Any] = {"lr": 0.01}
    optimizer: torch.optim.Optimizer
    if kind == "torch":
        optimizer = torch.optim.SGD(module.parameters(), **options)
    else:
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, **options)
    for _ in range(2):
        step(module, optimizer, 1)  # the first ones learn the order of gradients
    found = {
        "one": counted(module, lambda: step(module, optimizer, 1)),
        "four": counted(module, lambda: step(module, optimizer, 4)),
        "evaluation": counted(module, lambda: evaluate(module)),
    }
    unit = unit_of(module)
    assert unit is not None
    assert unit.tree.engine is not None
    found["buckets"] = (0, len(unit.tree.engine.plan.buckets))
    module.set_reshard_after_forward(False)
    found["first"] = counted(module, lambda: evaluate(module))
    rank = dist.get_rank()
    found["others"] = counted(module, lambda: [evaluate(module) for _ in range(2 + rank)])
    module.set_reshard_after_forward(True)
    found["then"] = counted(module, lambda: step(module, optimizer, 1))
    return found


@pytest.mark.parametrize("kind", ["torch", "zero"])
def test_ranks_meet_twice_a_step(pool: Pool, kind: str) -> None:
    """Whatever the number of units and of micro-batches; all other calls are reductions."""
    for found in pool.run(counts, kind):
        buckets = found["buckets"][1]
        assert found["one"] == (2, 2 + buckets)
        assert found["four"] == (2, 2 + buckets)
        assert found["evaluation"] == (2, 2)
        assert found["first"] == (1, 1)
        assert found["others"] == (0, 0)
        assert found["then"] == (1, 1 + buckets)  # it was open already


# What each part is for: without it one of these comes out wrong.


class Slow(nn.Module):
    """Waits on one rank before it passes its input on."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == self.rank:
            time.sleep(0.3)
        return x


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Leaves one part out, on all ranks."""
    meet = Window._meet

    def without(self: Window, kind: Kind, bits: Any) -> list[bool]:
        left_out = {"no opening": Kind.OPEN, "no closing": Kind.CLOSE}.get(name)
        if kind is left_out:
            return list(bits)
        found = meet(self, kind, bits)
        if (name, kind) in (("no bit at openings", Kind.OPEN), ("no bit at closings", Kind.CLOSE)):
            found[0] = False
        return found

    Window._meet = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        Window._meet = meet  # type: ignore[method-assign]


def reads_after_writes() -> bool:
    """Rank 1 writes its rows late; rank 0 reads them in the next pass."""
    module = sharded("mlp")
    expected = [whole(one) for one in module.parameters()]
    with torch.no_grad():
        if dist.get_rank() == 1:
            time.sleep(0.3)
        for one in module.parameters():
            one.add_(1.0)
        out = evaluate(module)
        x = my_batch(3)[0]
        layers = [(w + 1.0, b + 1.0) for w, b in zip(expected[::2], expected[1::2], strict=True)]
        for number, (w, b) in enumerate(layers):
            x = nn.functional.linear(x, w, b)
            x = torch.tanh(x) if number < 2 else x
    dist.barrier()
    return torch.equal(out, x)


def writes_after_reads() -> bool:
    """Rank 1 reads late; rank 0 writes its rows after its own pass."""
    module = sharded("mlp")
    before = evaluate(module)
    module.layers.insert(0, Slow(1))
    with torch.no_grad():
        out = module(my_batch(3)[0])
        for one in module.parameters():
            one.add_(1.0)
    dist.barrier()
    return torch.equal(out, before)


def graph_is_refused() -> bool:
    """A graph that was kept across a step, of rows of another rank alone."""
    module = sharded("mlp")
    x, y = my_batch(0)
    loss = nn.functional.mse_loss(module(x), y)
    unit = unit_of(module)
    assert unit is not None
    unit.tree.close()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for one in module.parameters():
                one.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def write_is_refused() -> bool:
    """A write of one rank while all read."""
    module = sharded("mlp")
    x, y = my_batch(0)
    loss = nn.functional.mse_loss(module(x), y)
    if dist.get_rank() == 1:
        with torch.no_grad():
            module.layers[4].bias.add_(1.0)
    try:
        loss.backward()
    except RuntimeError as error:
        return "rank 1 has written to 'layers.4.bias'" in str(error)
    return False


CASES: dict[str, Callable[[], bool]] = {
    "no opening": reads_after_writes,
    "no closing": writes_after_reads,
    "no bit at openings": graph_is_refused,
    "no bit at closings": write_is_refused,
}


def outcome(name: str, leaves_out: bool) -> bool:
    with mutant(name if leaves_out else "nothing"):
        return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_each_part_of_the_window_is_needed(pool: Pool, name: str) -> None:
    assert pool.run(outcome, name, False) == [True, True]
    assert not all(pool.run(outcome, name, True))


# Delays at each meeting.


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Sleeps 0 to 3 ms before and after each meeting, at random, by rank."""
    meet = Window._meet
    numbers = random.Random(seed * 100 + dist.get_rank())

    def late(self: Window, kind: Kind, bits: Any) -> list[bool]:
        time.sleep(numbers.uniform(0, 0.003))
        found = meet(self, kind, bits)
        time.sleep(numbers.uniform(0, 0.003))
        return found

    Window._meet = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        Window._meet = meet  # type: ignore[method-assign]


def with_and_without_delays(steps: int) -> bool:
    found = []
    for is_late in (False, True):
        module = sharded("mlp")
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
        with delayed(1) if is_late else mutant("nothing"):
            for number in range(steps):
                optimizer.zero_grad()
                x, y = my_batch(number)
                nn.functional.mse_loss(module(x), y).backward()
                optimizer.step()
        found.append(weights(module))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_delays_change_no_bit(pool: Pool, world: int) -> None:
    assert all(pool.run(with_and_without_delays, 100, world=world))


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_delays_change_no_bit_in_1000_steps(pool: Pool, world: int) -> None:
    assert all(pool.run(with_and_without_delays, 1000, world=world, timeout=200))
