"""Layers of torch that treat their parameters in ways of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Recurrent(nn.Module):
    """Its LSTM has a list of its weights beside those that are registered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(31)
        make = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind]
        self.inner = make(4, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.inner(x.view(-1, 3, 4))
        out: Tensor = self.head(found[:, -1])
        return out


def recurrent(kind: str, apart: bool) -> float:
    def shard(net: Any) -> Any:
        if apart:
            fully_shard(net.inner)
        return fully_shard(net)

    return Beside.of(Recurrent(kind), shard).run(range(4)).end()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("apart", [True, False])
def test_recurrent_modules(pool: Pool, kind: str, apart: bool) -> None:
    assert max(pool.run(recurrent, kind, apart, world=3)) < CLOSE


def parametrized(kind: str) -> float:
    """Weights that are computed of others in each forward pass."""
    torch.manual_seed(34)
    norm = getattr(nn.utils.parametrizations, kind)
    net = nn.Sequential(norm(nn.Linear(12, 12)), nn.Tanh(), norm(nn.Linear(12, 5)))

    def shard(one: Any) -> Any:
        fully_shard(one[0])
        return fully_shard(one)

    return Beside.of(net, shard).run(range(3)).end()


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_parametrizations(pool: Pool, kind: str) -> None:
    assert max(pool.run(parametrized, kind)) < CLOSE


class Attends(nn.Module):
    """torch's layer reads the parameters of its children itself, and has another path without
    gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(35)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.view(-1, 3, 4)
        for one in self.layers:
            hidden = one(hidden)
        out: Tensor = self.head(hidden.mean(1))
        return out


def attending() -> tuple[float, float]:
    def shard(net: Any) -> Any:
        for one in net.layers:
            fully_shard(one)
        return fully_shard(net)

    beside = Beside.of(Attends(), shard)
    beside.run(range(3))
    x = beside.batches(9)[1][0]
    for net in (beside.net, beside.alone):
        net.eval()
    with torch.no_grad():
        difference = float((beside.net(x) - beside.alone(x)).abs().max())
    for net in (beside.net, beside.alone):
        net.train()
    return beside.run(range(3, 5)).end(), difference


def test_transformer_layers(pool: Pool) -> None:
    for worst, difference in pool.run(attending, world=3):
        assert worst < CLOSE
        assert difference < 2e-6


class Precise(nn.Module):
    """Parameters of two dtypes in one unit, which torch refuses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(36)
        self.into, self.out = nn.Linear(12, 12), nn.Linear(12, 5)
        self.inner = nn.Linear(12, 12, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(torch.tanh(self.into(x)).double())).float()
        out: Tensor = self.out(hidden)
        return out


def of_two_dtypes() -> tuple[float, set[torch.dtype]]:
    beside = Beside.of(Precise(), fully_shard)
    worst = beside.run(range(3)).end()
    return worst, {one.dtype for one in beside.net.parameters()}


def test_parameters_of_two_dtypes(pool: Pool) -> None:
    for worst, dtypes in pool.run(of_two_dtypes, world=3):
        assert worst < CLOSE
        assert dtypes == {torch.float32, torch.float64}
