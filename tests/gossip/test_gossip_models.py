"""Gossip of models of any dtype and layout, of buffers, of parts of a job; and its checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.gossip import Gossip
from dreamcomm.gossip.pieces import PIECE_BYTES, Pieces, increments
from gossip.gossiping import Pauses, descend, everyone, flat, simulated_ranks
from helpers.pool import Pool
from local_sgd.simulated import model, sgd

# Pieces.


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "matrix": made(40, 30),
        "scalar": made(),
        "empty": made(0, 4),
        "transposed": made(5, 7).t(),
        "channels last": made(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "gaps": made(6, 8)[:, ::2],
        "double": made(33).double(),
        "half": made(50).to(torch.bfloat16),
        "vector": made(13),
    }


@pytest.mark.parametrize("piece_bytes", [1, 64, 1000, 1 << 20])
def test_each_element_is_in_one_piece(piece_bytes: int) -> None:
    given, other = (list(tensors(seed).values()) for seed in (0, 1))
    count = len(given) - 2
    pieces = Pieces(given[:count], given[count:], piece_bytes)
    others = Pieces(other[:count], other[count:], piece_bytes)
    expected = [one + two for one, two in zip(given, other, strict=True)]
    for number, piece in enumerate(pieces.pieces):
        read = pieces.read(number)
        assert torch.equal(read, pieces.copy(number))
        assert read.shape == (piece.numel,)
        has_gaps = any(given[part.tensor].shape == (6, 4) for part in piece.parts)
        assert has_gaps or piece.numel <= max(piece_bytes // read.itemsize, 1)
        assert len({part.tensor >= count for part in piece.parts} | {piece.is_buffer}) == 1
        pieces.add_(number, others.read(number))
    for one, two in zip(given, expected, strict=True):
        assert torch.equal(one, two)
    assert sum(piece.numel for piece in pieces.pieces) == sum(one.numel() for one in given)


def test_pieces_refuse_another_layout() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    pieces = Pieces([parameter], [])
    parameter.data = torch.zeros(4, 3).t()
    with pytest.raises(RuntimeError, match=r"has got the strides \(1, 3\), and had \(4, 1\)"):
        pieces.read(0)


def test_increments_of_two_ranks_cancel_bit_for_bit() -> None:
    one, other = torch.randn(2, 10_001, generator=torch.Generator().manual_seed(0))
    for weight in (0.5, 1 / 3, 0.1):
        here = increments(one, [(weight, other.clone())])
        there = increments(other, [(weight, one.clone())])
        assert torch.equal(here, -there)
        assert torch.equal(here[5:], increments(one[5:], [(weight, other[5:].clone())]))


def test_halves_are_averaged_in_float32() -> None:
    own, theirs = (torch.randn(1000).to(torch.bfloat16) for _ in range(2))
    found = increments(own, [(1 / 3, theirs.clone())])
    assert found.dtype == torch.float32
    assert torch.equal(found, (theirs.float() - own.float()) * (1 / 3))


# Models.


class Module(nn.Module):
    """Any parameters."""

    def __init__(self, given: dict[str, Tensor], buffers: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        for name, one in given.items():
            self.register_parameter("a_" + name, nn.Parameter(one))
        for name, one in (buffers or {}).items():
            self.register_buffer(name, one)


def set_apart(module: nn.Module, seed: int = 10) -> None:
    with torch.no_grad():
        values = tensors(seed + dist.get_rank()).values()
        for one, value in zip(module.parameters(), values, strict=True):
            one.copy_(value)


def mixed(steps: int, options: dict[str, Any]) -> list[Any]:
    module = Module(tensors())
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), **options)
    set_apart(module)
    for _ in range(steps):
        gossip.step()
    gossip.finish()
    return [one.detach().double().numpy() for one in module.parameters()]


@pytest.mark.parametrize("bound", [0, 2])
def test_parameters_of_any_dtype_and_layout_are_averaged(pool: Pool, bound: int) -> None:
    options = {"topology": "ring", "bound": bound}
    found = pool.run(mixed, 6, options, world=3)
    starts = [list(tensors(10 + rank).values()) for rank in range(3)]
    for number, (name, like) in enumerate(tensors().items()):
        start = [rank[number].double().reshape(-1).numpy() for rank in starts]
        ranks = simulated_ranks(start, options)
        for _ in range(6):
            ranks.step()
        ranks.finish()
        most = 0.03 if like.dtype == torch.bfloat16 else 1e-6
        for rank in range(3):
            assert found[rank][number].shape == like.shape
            off = np.abs(found[rank][number].reshape(-1) - ranks.x[rank])
            assert off.max(initial=0) < most, name


def large(options: dict[str, Any], placed: int | None) -> tuple[int, float]:
    """Parameters of several pieces, of which so many bytes are placed in the heap at once."""
    numel = PIECE_BYTES // 4 + 5
    module = Module({str(number): torch.zeros(numel) for number in range(2)})
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), **options)
    if placed is not None:
        gossip._channel.messenger.endpoint.most_placed = placed
    ramp = torch.arange(numel).remainder(1000)
    for number, one in enumerate(module.parameters()):
        one.detach().copy_(ramp + 4 * dist.get_rank() + number)
    for _ in range(4):
        gossip.step()
    gossip.average_now()
    middle = 4 * (dist.get_world_size() - 1) / 2
    off = [(p - ramp - middle - n).abs().max() for n, p in enumerate(module.parameters())]
    return len(gossip._rounds._pieces), float(torch.stack(off).max())


@pytest.mark.parametrize("placed", [None, 5 << 20, 0], ids=["placed", "partly placed", "sent"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bound": 3}, {"bound": 3, "seed": None}],
    ids=["synchronous", "late", "as they arrive"],
)
def test_large_models_travel_in_pieces(
    pool: Pool, options: dict[str, Any], placed: int | None
) -> None:
    for pieces, error in pool.run(large, options, placed, world=2):
        assert pieces == 3
        assert error < 1e-3


def frozen() -> list[Any]:
    """Parameters that the optimizer does not have stay as they are."""
    module = Module({"trained": torch.zeros(3), "kept": torch.zeros(2)})
    gossip = Gossip(module, torch.optim.SGD([module.a_trained], 0.1), topology="full")
    for one in module.parameters():
        one.detach().fill_(dist.get_rank())
    gossip.step()
    return [one.detach().tolist() for one in module.parameters()]


def test_only_the_optimizers_parameters_travel(pool: Pool) -> None:
    found = pool.run(frozen, world=2)
    assert found == [[[0.5] * 3, [float(rank)] * 2] for rank in range(2)]


# Buffers.


def with_buffers(options: dict[str, Any]) -> dict[str, list[float]]:
    buffers = {
        "mean": torch.zeros(3),
        "count": torch.zeros(2, dtype=torch.int64),
        "wide": torch.zeros(1, dtype=torch.float64),
    }
    module = Module({"weight": torch.zeros(2)}, buffers)
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), **options)
    for one in module.buffers():
        one.fill_(2 * dist.get_rank())
    gossip.step()
    gossip.finish()
    return {name: one.tolist() for name, one in module.named_buffers()}


def test_floating_buffers_are_averaged(pool: Pool) -> None:
    found = pool.run(with_buffers, {"topology": "full"}, world=3)
    for rank, one in enumerate(found):
        assert one == {"mean": [2.0] * 3, "count": [2 * rank] * 2, "wide": [2.0]}


def test_local_buffers_stay(pool: Pool) -> None:
    found = pool.run(with_buffers, {"topology": "full", "buffers": "local"}, world=2)
    for rank, one in enumerate(found):
        assert one["mean"] == [2.0 * rank] * 3


def falling(options: dict[str, Any]) -> float:
    """A variance that is forgotten quickly, while others' were 0 before."""
    module = Module({"weight": torch.zeros(2)}, {"variance": torch.ones(1)})
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), **options)
    least = float("inf")
    module.variance.fill_(1.0 if dist.get_rank() == 0 else 1e-6)
    for _ in range(12):
        module.variance.mul_(0.5)
        gossip.step()
        least = min(least, float(module.variance))
    gossip.finish()
    return least


def test_late_variances_stay_positive(pool: Pool) -> None:
    options = {"topology": "full", "bound": 6, "seed": 1}
    assert min(pool.run(falling, options, world=4)) > 0


# Groups.


def in_part_of_a_job() -> Any:
    """Ranks 1 and 2 of three, as ranks 0 and 1 of a group."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    module = Module({"weight": torch.zeros(4)})
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), group=group)
    module.a_weight.detach().fill_(dist.get_rank())
    gossip.step()
    gossip.finish()
    return module.a_weight.tolist()


def test_a_group_of_some_ranks_gossips(pool: Pool) -> None:
    assert pool.run(in_part_of_a_job, world=3) == [None, [1.5] * 4, [1.5] * 4]


def two_at_once(bound: int) -> list[Any]:
    """Two models in one group; ranks step them in another order."""
    modules = [model(seed) for seed in (0, 1)]
    gossips = [Gossip(one, sgd(one), bound=bound) for one in modules]
    rank = dist.get_rank()
    for step in range(1, 9):
        for number in (0, 1) if bound == 0 or rank == 0 else (1, 0):
            descend(modules[number], gossips[number], step, rank)
    for one in gossips:
        one.finish()
    return [flat(one) for one in modules]


def one_alone(number: int, bound: int) -> Any:
    module = model(number)
    gossip = Gossip(module, sgd(module), bound=bound)
    for step in range(1, 9):
        descend(module, gossip, step, dist.get_rank())
    gossip.finish()
    return flat(module)


def test_two_models_gossip_in_one_group(pool: Pool) -> None:
    both = pool.run(two_at_once, 0, world=2)
    for number in (0, 1):
        for found, alone in zip(both, pool.run(one_alone, number, 0, world=2), strict=True):
            assert np.array_equal(found[number], alone)


# Checkpoints.


def resumed(first: int, second: int, options: dict[str, Any], pauses: int) -> tuple[Any, Any, int]:
    """A run that saves in the middle and goes on, and one that goes on from there."""
    module, pause, rank = model(), Pauses(pauses), dist.get_rank()
    gossip = Gossip(module, sgd(module), **options)

    def run(module: nn.Module, gossip: Gossip, begin: int, end: int) -> None:
        for step in range(begin, end):
            pause()
            descend(module, gossip, step, rank)

    run(module, gossip, 1, 1 + first)
    saved = copy.deepcopy((gossip.state_dict(), module.state_dict()))
    run(module, gossip, 1 + first, 1 + first + second)
    ahead = flat(module)
    gossip.finish()

    again = model(5)
    loaded = Gossip(again, sgd(again), **options)
    for step in (1, 2):  # what is outstanding is dropped
        descend(again, loaded, step, rank)
    loaded.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    run(again, loaded, 1 + first, 1 + first + second)
    found = flat(again)
    loaded.finish()
    return ahead, found, loaded.steps


@pytest.mark.parametrize("topology", ["ring", "shift_one"])
@pytest.mark.parametrize("bound", [0, 3])
def test_a_resumed_run_has_the_same_bits(pool: Pool, bound: int, topology: str) -> None:
    options = {"topology": topology, "bound": bound, "seed": 2}
    for ahead, found, steps in pool.run(resumed, 7, 9, options, 3, world=3):
        assert np.array_equal(ahead, found)
        assert steps == 16


def scheduled() -> list[float]:
    """A scheduler's rates, and the wrapped optimizer's."""
    module = model()
    gossip = Gossip(module, sgd(module), topology="full")
    scheduler = torch.optim.lr_scheduler.StepLR(gossip, 2, 0.1)
    rates = []
    for step in range(4):
        descend(module, gossip, step, dist.get_rank())
        scheduler.step()
        rates.append(gossip.optimizer.param_groups[0]["lr"])
    return rates


def test_schedulers_work(pool: Pool) -> None:
    assert pool.run(scheduled, world=2)[0] == pytest.approx([0.05, 0.005, 0.005, 0.0005])


# Without shared memory.


def over_gloo(steps: int, options: dict[str, Any]) -> Any:
    module = model()
    gossip = Gossip(module, sgd(module), **options)
    for step in range(1, steps + 1):
        descend(module, gossip, step, dist.get_rank())
    before, report = flat(module), gossip.report()
    gossip.finish()
    return before, np.stack(everyone(flat(module))).mean(0), report


APART = {"DREAMCOMM_SHARED_MEMORY": "0"}


@pytest.mark.beyond_gloo("is about dreamcomm over Gloo")
@pytest.mark.parametrize("bound", [0, 3])
def test_ranks_without_shared_memory_have_the_same_bits(pool: Pool, bound: int) -> None:
    found = [
        pool.run(over_gloo, 12, {"bound": bound, "seed": 2}, world=3, env=env)
        for env in (APART, None)
    ]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one[0], other[0])


@pytest.mark.beyond_gloo("is about dreamcomm over Gloo")
def test_ranks_without_shared_memory_see_what_has_arrived(pool: Pool) -> None:
    options = {"bound": 3, "seed": None}
    for _, mean, report in pool.run(over_gloo, 12, options, world=3, env=APART):
        assert max(report.delays) <= 3
        assert report.outstanding <= 3
        assert report.rounds + report.outstanding == 12
        assert np.isfinite(mean).all()
