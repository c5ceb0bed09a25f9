"""Ranks with other options, or of which some have loaded a state: an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.models import batch, make
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def rate(optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"] = 1e-5


def pair(optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)


def switch(optimizer: Any) -> None:
    optimizer.param_groups[0]["maximize"] = True


def tensor(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])


def loaded(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


CHANGES: dict[Callable[[Any], None], str] = {
    rate: "option 'lr' of parameter group 1 is 0.001 on ranks 0, 2, and 1e-05 on rank 1.",
    pair: "option 'betas' of parameter group 0 is (0.9, 0.999) on ranks 0, 2, and (0.8, 0.999)",
    switch: "option 'maximize' of parameter group 0 is False on ranks 0, 2, and True on rank 1",
    tensor: "option 'lr' of parameter group 0 is 0.001 on ranks 0, 2, and tensor(0.001",
    loaded: "the number of states loaded is 0 on ranks 0, 2, and 1 on rank 1",
}
HOW: dict[str, dict[str, Any]] = {
    "kernels 1": {},
    "kernels 2": {"stage": 2},
    "torch": {"optimizer_class": torch.optim.NAdam},
    "not reducing": {"reduce": False},
}


def differing(how: str) -> list[str]:
    """Rank 1 alone changes something; then all do, and go on."""
    said = []
    for change in CHANGES:
        module = make("mlp")
        groups = [
            {"params": list(module.parameters())[:2]},
            {"params": list(module.parameters())[2:]},
        ]
        given = {"optimizer_class": torch.optim.AdamW, **HOW[how]}
        optimizer = ZeroOptimizer(groups, lr=1e-3, **given)
        if change in (pair, switch) and how == "torch":
            optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step)
            nn.functional.mse_loss(module(x), y).backward()
            if step == 1 and dist.get_rank() == 1:
                change(optimizer)
            before = [one.detach().clone() for one in module.parameters()]
            if step == 1:
                with pytest.raises(RuntimeError) as error:
                    optimizer.step()
                said.append(str(error.value))
                assert all(map(torch.equal, module.parameters(), before))
                if dist.get_rank() != 1:
                    change(optimizer)
            optimizer.step()
            assert not any(map(torch.equal, module.parameters(), before))
    return said


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_differ_are_named_on_all(pool: Pool, how: str) -> None:
    for rank, said in enumerate(pool.run(differing, how, world=3)):
        for text, expected in zip(said, CHANGES.values(), strict=True):
            assert expected in text
            assert f"rank {rank}: ZeroOptimizer.step()" in text


def filled() -> str:
    """A rate that is a tensor, filled on one rank as schedulers do."""
    module = make("mlp")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=torch.tensor(0.5))
    for step in range(2):
        nn.functional.mse_loss(module(batch(step)[0]), batch(step)[1]).backward()
        if step == 1:
            optimizer.param_groups[0]["lr"].fill_(0.5 + dist.get_rank())
            with pytest.raises(RuntimeError, match="option 'lr'") as error:
                optimizer.step()
            return str(error.value)
        optimizer.step()
    return ""


def test_a_rate_that_is_filled_in_place(pool: Pool) -> None:
    for text in pool.run(filled):
        assert "tensor(0.5" in text
        assert "tensor(1.5" in text


def alike() -> int:
    """What may be written differently, and options of no meaning to the optimizer."""
    module = make("mlp")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rank = dist.get_rank()
    group = optimizer.param_groups[0]
    group["tag"] = object()
    group["lr"] = 1 if rank == 0 else 1.0
    for step in range(3):
        nn.functional.mse_loss(module(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        scheduler.step()
    del group["momentum"]
    with pytest.raises(ValueError, match="parameter group 0 has no option 'momentum'"):
        optimizer.step()
    return step


def grouped_otherwise() -> str:
    """Two groups on rank 0, and one on rank 1."""
    first, *rest = make("mlp").parameters()
    groups: Any = (
        [{"params": [first]}, {"params": rest}] if dist.get_rank() == 0 else [first, *rest]
    )
    optimizer = ZeroOptimizer(groups, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_other_groups_on_a_rank_are_named(pool: Pool) -> None:
    for text in pool.run(grouped_otherwise):
        assert "the number of parameters of group 0 is 1 on rank 0, and 6 on rank 1" in text


def test_equal_options_may_be_written_differently(pool: Pool) -> None:
    assert pool.run(alike) == [2, 2]
