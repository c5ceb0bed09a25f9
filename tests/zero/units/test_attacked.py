"""Backward passes that come to gradients before outputs of units, or to none: right sums."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.sharding import part, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

LR = 0.1


class Net(nn.Module):
    """``scale`` and ``sigma`` are used after the forward pass: as CLIP's, or a weight of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.sigma = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def body(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out

    def forward(self, x: Tensor) -> Any:
        return self.body(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x) * self.sigma * self.scale, y)


class Aside(Net):
    """A part of the loss is left in an attribute, as experts' balance is."""

    def forward(self, x: Tensor) -> Any:
        out = self.body(x)
        self.aside = (self.sigma**2).sum() * self.scale
        return out

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y) + self.aside


class Boxed(Net):
    """Returns tensors where nobody looks for them."""

    def forward(self, x: Tensor) -> Any:
        return type("Output", (), {"logits": self.body(x) * self.sigma * self.scale})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x).logits, y)


class Penalised(Net):
    """Squares of registered parameters, DTensors too, between two forward passes."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        for one in self.parameters():
            square = (one**2).sum()
            loss = loss + (square.full_tensor() if isinstance(square, DTensor) else square) / 10
        return loss + super().loss(x * 2, y)


NETS = {"after": Net, "aside": Aside, "boxed": Boxed, "penalised": Penalised}


def gap(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    return float((whole(ours) - theirs.detach()).abs().max())


def beside_one_process(name: str, units: bool, micro: int, to_none: bool) -> list[float]:
    """The largest difference of a gradient, and of a weight, after each step."""
    torch.manual_seed(3)
    alone = NETS[name]()
    module: Any = NETS[name]()
    module.load_state_dict(alone.state_dict())
    if units:
        fully_shard(module.first)
        fully_shard(module.second)
    fully_shard(module)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=LR) for one in (module, alone))
    gaps = []
    for step in range(3):
        ours.zero_grad(to_none)
        theirs.zero_grad(to_none)
        for number in range(micro):
            torch.manual_seed(100 * step + number)
            x, y = torch.randn(12, 4), torch.randn(12, 3)
            with module.no_sync() if number < micro - 1 else nullcontext():
                module.loss(part(x), part(y)).backward()
            alone.loss(x, y).backward()
        pairs = list(zip(module.parameters(), alone.parameters(), strict=True))
        gaps.append(max(gap(one.grad, other.grad) for one, other in pairs))
        ours.step()
        theirs.step()
        gaps.append(max(gap(one, other) for one, other in pairs))
    return gaps


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("units", [False, True])
def test_gradients_are_those_of_one_process(pool: Pool, name: str, units: bool, micro: int) -> None:
    for to_none in (True, False):
        for gaps in pool.run(beside_one_process, name, units, micro, to_none, world=2):
            assert max(gaps) < 1e-6, gaps


def changed_before_backward(opens: bool) -> tuple[str, bool]:
    """What a pass says that comes to a gradient first, after a script has replaced a parameter."""
    torch.manual_seed(0)
    module: Any = fully_shard(Net())
    x = torch.randn(6, 4)
    module(x)
    loss = (module.sigma**2).sum()
    if not opens:
        module.reshard()
    module.second = nn.Linear(8, 3)
    try:
        loss.backward()
        said = ""
    except RuntimeError as error:
        said = str(error)
        module.reset_iter_state()
    module.zero_grad()
    module(x).square().sum().backward()
    return said, all(one.grad is not None for one in module.second.parameters())


def test_parameters_replaced_within_an_open_window_are_taken_in_later(pool: Pool) -> None:
    assert pool.run(changed_before_backward, True) == [("", True)] * 2


def test_a_pass_that_finds_other_parameters_at_a_gradient_is_refused(pool: Pool) -> None:
    for rank, (said, goes_on) in enumerate(pool.run(changed_before_backward, False)):
        assert f"rank {rank}: fully_shard: modules of FSDPNet got other parameters" in said
        assert goes_on
