"""Methods other than forward that read parameters, and contexts that are shared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn

from dreamcomm.zero import fully_shard, register_fsdp_forward_method, share_comm_ctx
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, kinds, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Vision(nn.Module):
    """Read through a method of its own, as encoders of images are."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = nn.Linear(12, 12), Mlp(12)

    def features(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.block(self.patches(x)) * scale
        return out

    def raising(self, x: Tensor) -> Tensor:
        raise ValueError("no features")


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.vision, self.head = Vision(), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.vision.features(x, scale=0.5))
        return out

    def generate(self, x: Tensor) -> Tensor:
        """Calls parameters directly."""
        return nn.functional.linear(self.vision.features(x), self.head.weight, self.head.bias)


def shard(register: Any) -> Any:
    def made(net: Any) -> Any:
        fully_shard(net.vision)
        fully_shard(net)
        register(net.vision, "features")
        register(net, "generate")
        return net

    return made


def trained(whose: str) -> tuple[float, str, set[bool]]:
    """By forward, by the registered method of a child alone, and of the root."""
    register = {
        "ours": register_fsdp_forward_method,
        "torch's": torchs.register_fsdp_forward_method,
    }
    beside = Beside.of(Both(), shard(register[whose]))

    def child(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.vision.features(x).square().mean()

    def generated(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(net.generate(x), y)

    beside.run(range(2)).run([2], child).run([3, 4], generated)
    net: Any = beside.net
    return beside.end(), net.generate.__doc__, set(kinds(net).values())


@pytest.mark.parametrize("whose", ["ours", "torch's"])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_register_fsdp_forward_method(pool: Pool, whose: str, world: int) -> None:
    for worst, doc, registered in pool.run(trained, whose, world=world):
        assert worst < CLOSE
        assert doc == "Calls parameters directly."
        assert registered == {True}


def evaluated() -> list[float]:
    """Without gradients, each rank as often as it likes where the root keeps reading."""
    net: Any = Both()
    alone = copy.deepcopy(net)
    fully_shard(net, reshard_after_forward=False)
    register_fsdp_forward_method(net, "generate")
    found = []
    with torch.no_grad():
        for number in range(1 + 3 * dist.get_rank()):
            x = torch.full((2, 12), float(number))
            found.append(float((net.generate(x) - alone.generate(x)).abs().max()))
    return found


def test_registered_methods_without_gradients(pool: Pool) -> None:
    one, other = pool.run(evaluated)
    assert (one, other) == ([0.0], [0.0] * 4)


def refused() -> tuple[list[str], bool]:
    plain, net = nn.Linear(3, 3), fully_shard(Both())
    before = plain.extra_repr
    register_fsdp_forward_method(plain, "extra_repr")
    found = []
    try:
        register_fsdp_forward_method(net, "nothing")
    except ValueError as error:
        found.append(str(error))
    return found, plain.extra_repr == before


def test_register_fsdp_forward_method_refused(pool: Pool) -> None:
    for found, unchanged in pool.run(refused):
        assert len(found) == 1
        assert "nothing" in found[0]
        assert unchanged


def raised() -> tuple[str, float]:
    """All ranks' registered methods raise; then all reset."""
    beside = Beside.of(Both(), shard(register_fsdp_forward_method))
    net: Any = beside.net
    register_fsdp_forward_method(net.vision, "raising")
    try:
        net.vision.raising(torch.zeros(1, 12))
    except ValueError as error:
        found = str(error)
    net.reset_iter_state()
    return found, beside.run(range(2)).end()


def test_reset_iter_state_after_a_registered_method(pool: Pool) -> None:
    for found, worst in pool.run(raised):
        assert found == "no features"
        assert worst < CLOSE


def shared_context() -> float:
    """Two roots that have no parent in common, in one loss."""
    nets = [shard_all(stack(1)), shard_all(stack(2))]
    both = nn.ModuleList(nets)
    alone = nn.ModuleList([stack(1), stack(2)])
    share_comm_ctx(nets)
    beside = Beside(both, alone)

    def loss(pair: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(pair[0](x) + pair[1](x), y)

    return beside.run(range(3), loss).end()


def test_share_comm_context(pool: Pool) -> None:
    assert max(pool.run(shared_context, world=3)) < CLOSE
