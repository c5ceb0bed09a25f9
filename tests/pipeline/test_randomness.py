"""Random numbers of blocks: the same for any spread over stages, and when recomputed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dreamcomm.pipeline.compute.randomness import BlockRandomness


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) + torch.rand(x.shape[-1], device="cpu")


def blocks() -> dict[str, nn.Module]:
    return {f"layers.{n}": Block() for n in range(4)}


def run(units: dict[str, nn.Module], random: BlockRandomness, at: tuple[int, int]) -> list[Tensor]:
    with random.at(*at):
        return [unit(torch.ones(64)) for unit in units.values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_spread_over_stages() -> None:
    units = blocks()
    wanted = [run(units, BlockRandomness(units, 7), (2, m)) for m in range(3)]
    names = list(units)
    for cut in range(5):
        halves = [{n: units[n] for n in part} for part in (names[:cut], names[cut:])]
        stages = [(half, BlockRandomness(half, 7)) for half in halves]
        for m in (2, 0, 1):
            torch.rand(cut, device="cpu")
            found = [
                out for half, own in reversed(stages) for out in reversed(run(half, own, (2, m)))
            ]
            assert same(found[::-1], wanted[m])


def test_each_call_has_its_own() -> None:
    units = blocks()
    outs = [
        out
        for seed in (1, 2)
        for step in (0, 1)
        for m in (0, 1)
        for out in run(units, BlockRandomness(units, seed), (step, m))
    ]
    random = BlockRandomness(units, 1)
    with random.at(0, 0):
        first, second = (units["layers.0"](torch.ones(64)) for _ in range(2))
    assert torch.equal(first, outs[0])
    outs.append(second)
    assert len({tuple(out.tolist()) for out in outs}) == len(outs)


def test_recomputed() -> None:
    units = blocks()
    random = BlockRandomness(units, 7)
    assert same(run(units, random, (0, 1)), run(units, random, (0, 1)))
    x = torch.ones(64, requires_grad=True)
    with random.at(0, 0):
        out = checkpoint(units["layers.0"], x, use_reentrant=False)
    with random.at(0, 0):
        out.sum().backward()
    mask = (out.detach() >= 2).float() * 2
    assert torch.equal(x.grad, mask)  # type: ignore[arg-type]


def test_generator_is_as_before() -> None:
    units = blocks()
    random = BlockRandomness(units, 7)
    torch.manual_seed(3)
    torch.randn(3, device="cpu")  # leaves a second normal number in the generator
    before = torch.get_rng_state()
    run(units, random, (0, 0))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(IndexError), random.at(0, 0):
        units["layers.0"](torch.ones(()))
    assert torch.equal(torch.get_rng_state(), before)
    with random.at(0, 0), pytest.raises(RuntimeError, match="within another"), random.at(0, 1):
        pass


def test_evaluation_is_not_seeded() -> None:
    unit = Block().eval()
    random = BlockRandomness({"unit": unit}, 7)
    torch.manual_seed(3)
    wanted = torch.rand(4, device="cpu")
    torch.manual_seed(3)
    with random.at(0, 0):
        assert torch.equal(unit(torch.zeros(4)), wanted)


def test_units_are_left_as_they_were() -> None:
    units = blocks()
    random = BlockRandomness(units, 7)
    run(units, random, (0, 0))
    assert not any(unit._forward_pre_hooks for unit in units.values())
    pickle.dumps(units)
    copied = copy.deepcopy(units)
    assert same(run(copied, BlockRandomness(copied, 7), (0, 0)), run(units, random, (0, 0)))
