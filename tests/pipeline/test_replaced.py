"""What a script changes between steps: parameters and blocks replaced, frozen, tied by memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dreamcomm.pipeline import Pipeline, PipelineError
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def layers(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))


class Net(nn.Module):
    """Parameters outside of its blocks, at its beginning and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.ones(4)) for _ in range(2))
        self.blocks = nn.ModuleList(layers())

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first
        for block in self.blocks:
            x = block(x)
        return x * self.last


def parameters_replaced() -> list[Tensor | None]:
    """Outside of blocks: in the whole module, then in the pipeline's; and inside of one."""
    net, rank = Net(), dist.get_rank()
    pipe = Pipeline(net, 2, loss_fn=F.mse_loss)
    name = ("first", "last")[rank]
    found: list[Tensor | None] = []
    for module in (net, pipe.module):
        new = nn.Parameter(torch.full((4,), 3.0))
        setattr(module, name, new)
        pipe.step(X, target=X)
        assert getattr(net, name) is getattr(pipe.module, name) is new
        assert new.grad is not None
        found.append(new.grad.clone())
    net.blocks[rank].weight = nn.Parameter(torch.eye(4))
    pipe.step(X, target=X)
    found.append(net.blocks[rank].weight.grad)
    return found


def test_replaced_parameters_are_followed(pool: Pool) -> None:
    first, last = pool.run(parameters_replaced)
    for number in range(3):
        net = Net()
        net.first, net.last = (nn.Parameter(torch.full((4,), 3.0)) for _ in range(2))
        if number == 2:
            for block in net.blocks:
                block.weight = nn.Parameter(torch.eye(4))
        F.mse_loss(net(X), X).backward()
        ends = [net.first, net.last] if number < 2 else [one.weight for one in net.blocks]
        torch.testing.assert_close(first[number], ends[0].grad)
        torch.testing.assert_close(last[number], ends[1].grad)


def block_replaced(form: str) -> str:
    net = Net() if form in ("traced", "list") else layers()
    pipe = Pipeline(net, 2, loss_fn=F.mse_loss)
    blocks: Any = net.blocks if isinstance(net, Net) else net
    if dist.get_rank() == 1:
        if form == "list":
            net.blocks = nn.ModuleList(layers())
        elif form == "pipe":
            pipe.module._modules["1"] = nn.Linear(4, 4)
        else:
            blocks[1] = nn.Linear(4, 4)
    with pytest.raises(PipelineError) as caught:
        pipe.step(X, target=X)
    return str(caught.value)


def test_replaced_blocks_are_refused(pool: Pool) -> None:
    for form, name in {"traced": "blocks.1", "list": "blocks.1", "chain": "1", "pipe": "1"}.items():
        texts = pool.run(block_replaced, form)
        assert texts[0] == texts[1]
        assert f"rank 1: RuntimeError: the module {name!r}, or one that it is in," in texts[0]


def frozen() -> tuple[Tensor, Tensor]:
    """A shared parameter with a gradient of an earlier step is frozen."""
    net = nn.Sequential(*layers(), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    pipe = Pipeline(net, 2, split=[1], loss_fn=F.mse_loss)
    pipe.step(X, target=X)
    weight = net[0].weight
    assert weight.grad is not None
    before, kept = weight.grad, weight.grad.clone()
    weight.requires_grad_(False)
    pipe.step(X, target=X)
    assert weight.grad is before
    return kept, before


def test_a_frozen_shared_parameter_keeps_its_gradient(pool: Pool) -> None:
    for before, after in pool.run(frozen):
        assert torch.equal(before, after)


def tied(cross: bool, how: str) -> list[Tensor] | str:
    """Three steps of SGD with a model whose weights are tied."""
    net = layers(4)
    a, b = (net[0], net[3]) if cross else (net[0], net[1])
    if how == "data":
        b.weight.data = a.weight.data
    else:
        b.weight.data = a.weight.data.t()
    try:
        pipe = Pipeline(net, 2, loss_fn=F.mse_loss)
    except ValueError as error:
        return str(error)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        pipe.step(X, target=X)
        optimizer.step()
    return [one.detach().clone() for one in pipe.parameters()]


def test_weights_tied_by_data_across_ranks_are_refused_by_name(pool: Pool) -> None:
    for text in pool.run(tied, True, "data"):
        assert "0.weight of stage 0 and 3.weight of stage 1 are tied by .data" in text
        assert "(b.weight = a.weight)" in text
    for text in pool.run(tied, True, "transposed"):
        assert "'0.weight of stage 0' and '3.weight of stage 1' overlap in memory" in text


@pytest.mark.parametrize("how", ["data", "transposed"])
def test_weights_tied_by_data_on_one_rank_stay_tied(pool: Pool, how: str) -> None:
    net = layers(4)
    net[1].weight.data = net[0].weight.data if how == "data" else net[0].weight.data.t()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(net(X), X).backward()
        optimizer.step()
    first, last = pool.run(tied, False, how)
    for found, parameter in zip([*first, *last], net.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.detach())
