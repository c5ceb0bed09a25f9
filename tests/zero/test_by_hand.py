"""State and groups that a program changes by hand: followed as by torch, or refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.models import batch, make
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
stages = pytest.mark.parametrize("stage", [1, 2])


def no_state(optimizer: Any, module: nn.Module) -> None:
    optimizer.state = defaultdict(dict)


def of_one(optimizer: Any, module: nn.Module) -> None:
    first = next(module.parameters())
    optimizer.state = defaultdict(dict, {first: optimizer.state[first]})


def popped(optimizer: Any, module: nn.Module) -> None:
    first, second, *_ = module.parameters()
    assert first in optimizer.state
    optimizer.state.pop(first)
    assert first not in optimizer.state
    assert optimizer.state.pop(first, None) is None
    del optimizer.state[second]


def in_place(optimizer: Any, module: nn.Module) -> None:
    for one in module.parameters():
        for part in optimizer.state[one].values():
            part.zero_()


def whole_tensors(optimizer: Any, module: nn.Module) -> None:
    for one in module.parameters():
        optimizer.state[one]["exp_avg"] = numbers(one)


def whole_entries(optimizer: Any, module: nn.Module) -> None:
    for one in module.parameters():
        parts = {key: numbers(one) for key in optimizer.state[one] if key != "step"}
        optimizer.state[one] = {**parts, "step": torch.tensor(7.0)}


def numbers(like: Tensor) -> Tensor:
    return torch.linspace(0.1, 1.0, like.numel()).view_as(like)


def other_layout(optimizer: Any, module: nn.Module) -> None:
    for one in module.parameters():
        kept = optimizer.state[one]["exp_avg"]
        optimizer.state[one]["exp_avg"] = torch.stack([kept, kept], dim=-1)[..., 0]


def other_groups(optimizer: Any, module: nn.Module) -> None:
    optimizer.param_groups = [dict(optimizer.param_groups[0], lr=3e-2)]


def other_list(optimizer: Any, module: nn.Module) -> None:
    group = optimizer.param_groups[0]
    group["params"] = list(group["params"])
    group["weight_decay"] = 0.3


FOLLOWED: list[Callable[[Any, nn.Module], None]] = [
    no_state,
    of_one,
    popped,
    in_place,
    whole_tensors,
    whole_entries,
    other_layout,
    other_groups,
    other_list,
]


def followed(stage: int) -> list[str]:
    """Those changes after which the weights are not those of torch's optimizer."""
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.Adamax]  # by kernels, and by torch
    return [
        f"{change.__name__} {kind.__name__}"
        for change in FOLLOWED
        for kind in kinds
        if not torch.equal(*(trained(kind, change, stage if zero else 0) for zero in (True, False)))
    ]


def trained(kind: Any, change: Callable[[Any, nn.Module], None], stage: int) -> Tensor:
    module = make("mlp")
    if stage:
        optimizer = ZeroOptimizer(module.parameters(), kind, stage=stage, lr=1e-2)
    else:
        optimizer = kind(module.parameters(), lr=1e-2, foreach=False)
    for step in range(4):
        if step == 2:
            change(optimizer, module)
        optimizer.zero_grad()
        x, y = batch(step)  # the same on all ranks, so averages are exact
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@stages
def test_what_a_plain_optimizer_follows(pool: Pool, stage: int) -> None:
    assert pool.run(followed, stage) == [[], []]


def fewer(groups: list[Any]) -> Any:
    groups[0]["params"] = groups[0]["params"][:1]
    return groups


def others(groups: list[Any]) -> Any:
    groups[0]["params"] = groups[0]["params"][::-1]
    return groups


def appended(groups: list[Any]) -> Any:
    groups[1]["params"].append(nn.Parameter(torch.ones(3)))
    return groups


def further(groups: list[Any]) -> Any:
    groups.append({"params": [nn.Parameter(torch.ones(3))], "lr": 0.1})
    return groups


def deleted(groups: list[Any]) -> Any:
    del groups[1]
    return groups


def none(groups: list[Any]) -> Any:
    return [{"lr": 0.1}, groups[1]]


REFUSED: list[Callable[[list[Any]], Any]] = [fewer, others, appended, further, deleted, none]


def refused(stage: int) -> list[str]:
    said = []
    for change in REFUSED:
        module = make("mlp")
        first, *rest = module.parameters()
        groups = [{"params": rest}, {"params": [first]}]
        optimizer: Any = ZeroOptimizer(groups, torch.optim.SGD, stage=stage, lr=0.1)
        nn.functional.mse_loss(module(batch(0)[0]), batch(0)[1]).backward()
        before = first.detach().clone()
        given = [dict(one, params=list(one["params"])) for one in optimizer.param_groups]
        optimizer.param_groups = change(optimizer.param_groups)
        for call in (
            optimizer.step,
            optimizer.state_dict,
            lambda optimizer=optimizer: optimizer.load_state_dict({"state": {}}),
        ):
            with pytest.raises(RuntimeError, match=r"was changed by hand") as error:
                call()
        said.append(str(error.value))
        assert torch.equal(first, before)
        optimizer.param_groups = given
        optimizer.step()
        assert not torch.equal(first, before)
    return said


@stages
def test_other_parameters_in_groups_are_refused(pool: Pool, stage: int) -> None:
    for rank, said in enumerate(pool.run(refused, stage)):
        assert all(f"rank {rank}:" in text for text in said)
        assert "param_groups[0]" in said[0]
        assert "expected a list of 5 parameters, got a list of 1" in said[0]
        assert "got a list of 5 parameters, others" in said[1]
        assert "param_groups[1]" in said[2]
        assert "param_groups[2] was changed by hand: expected no such group" in said[3]
        assert "param_groups[1]" in said[4]
        assert "got no such group" in said[4]
        assert all("call add_param_group()" in text for text in said)


def misplaced() -> list[str]:
    """State of shapes and of parameters that are not the optimizer's."""
    said = []
    for kind in (torch.optim.AdamW, torch.optim.Adamax):
        module = make("mlp")
        first = next(module.parameters())
        optimizer: Any = ZeroOptimizer(module.named_parameters(), kind, lr=0.1)
        nn.functional.mse_loss(module(batch(0)[0]), batch(0)[1]).backward()
        optimizer.step()
        with pytest.raises(ValueError, match="1 parameters that the optimizer does not have"):
            optimizer.state = {nn.Parameter(torch.ones(3)): {}}
        assert first in optimizer.state
        optimizer.state[first]["exp_avg"] = torch.zeros(7, 12)
        with pytest.raises(ValueError, match="'exp_avg' of parameter") as error:
            optimizer.step()
        said.append(str(error.value))
    return said


def test_state_of_another_shape_is_refused(pool: Pool) -> None:
    for said in pool.run(misplaced):
        for text in said:
            assert "expected shape (200, 12)" in text
            assert "'layers.0.weight'" in text
            assert "got (7, 12)" in text


def turned() -> str:
    """A parameter whose memory is the same, and in another order."""
    weight = nn.Parameter(torch.arange(16.0).view(4, 4))
    optimizer = ZeroOptimizer([weight], torch.optim.SGD, lr=0.1)
    weight.data = weight.data.t()
    weight.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="has got other memory") as error:
        optimizer.step()
    return str(error.value)


def test_memory_in_another_order_is_refused(pool: Pool) -> None:
    for text in pool.run(turned):
        assert "'parameter 0'" in text


def steps_with_an_empty_group() -> bool:
    module = nn.Linear(4, 4)
    groups = [{"params": list(module.parameters())}, {"params": []}]
    optimizer = ZeroOptimizer(groups, torch.optim.Adam, lr=0.1)
    before = module.weight.detach().clone()
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return not torch.equal(module.weight, before)


def test_a_group_may_be_empty(pool: Pool) -> None:
    assert pool.run(steps_with_an_empty_group, world=2) == [True] * 2
