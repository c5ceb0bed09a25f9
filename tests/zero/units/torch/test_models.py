"""Models and losses of other kinds: two trees in one loss, LSTM, autocast, nested roots."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, furthest, loss_of, mean, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def pair() -> list[nn.Module]:
    torch.manual_seed(30)
    generator = nn.Sequential(Mlp(12), nn.Linear(12, 12))
    critic = nn.Sequential(Mlp(12), nn.Linear(12, 1))
    return [generator, critic]


def adversaries() -> float:
    """Each of two roots is trained through the other; the critic's gradients are dropped then."""
    alone = pair()
    ours = [shard_all(one) for one in copy.deepcopy(alone)]
    beside = [Beside(one, other, lr=0.05) for one, other in zip(ours, alone, strict=True)]
    for step in range(4):
        for one in beside:
            one.clear()
        for (generator, critic), (x, _) in zip((ours, alone), beside[0].batches(step), strict=True):
            fake = generator(x)
            loss = critic(x).mean() - critic(fake.detach()).mean()
            loss.backward()
        beside[1].compare()
        beside[1].step()
        for one in beside:
            one.clear()
        for (generator, critic), (x, _) in zip((ours, alone), beside[0].batches(step), strict=True):
            critic(generator(x)).mean().backward()
        for one in beside:
            one.compare()
        beside[0].step()
    return max(one.end() for one in beside)


def test_two_roots_in_one_loss(pool: Pool) -> None:
    assert max(pool.run(adversaries, world=3)) < CLOSE


def guided() -> float:
    """A teacher without gradients, beside a student: both are sharded."""
    teacher, beside = shard_all(stack(1)), Beside.of(stack(2))
    whole_teacher = stack(1)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            aim = (teacher if net is beside.net else whole_teacher)(x)
        return nn.functional.mse_loss(net(x), aim)

    return beside.run(range(3), loss).end()


def test_teacher_and_student(pool: Pool) -> None:
    assert max(pool.run(guided)) < CLOSE


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


def mixed(reuses: bool) -> tuple[float, list[torch.dtype], list[torch.dtype]]:
    """In bfloat16 by autocast: gradients and parameters stay float32."""
    beside = Beside.of(stack())
    seen: list[torch.dtype] = []

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=reuses):
            out = net(x)
            if reuses:
                out = out + net(x * 0.5)
            seen.append(out.dtype)
        return nn.functional.mse_loss(out.float(), y)

    beside.run(range(4), loss)
    grads = [one.grad.dtype for one in beside.net.parameters() if one.grad is not None]
    return beside.end(), sorted(set(seen), key=str), grads


@pytest.mark.parametrize("reuses", [True, False])
def test_autocast(pool: Pool, reuses: bool) -> None:
    for worst, seen, grads in pool.run(mixed, reuses):
        assert worst < 2e-2  # bfloat16's sums over other batches
        assert seen == [torch.bfloat16]
        assert grads == [torch.float32] * 14


class Encoded(nn.Module):
    """Its parts are run alone in evaluation, by a script that never calls the root then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(33)
        self.encoder, self.decoder = stack(1, 12), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


def parts() -> tuple[float, list[float]]:
    def shard(net: Any) -> Any:
        shard_all(net.encoder)
        fully_shard(net.decoder)
        return fully_shard(net)

    beside = Beside.of(Encoded(), shard)
    net, alone = beside.net, beside.alone
    found = []
    for step in range(3):
        beside.run([step])
        x = beside.batches(step)[1][0]
        with torch.no_grad():
            found.append(float((net.encoder(x) - alone.encoder(x)).abs().max()))  # type: ignore[operator]
        with torch.inference_mode():
            found.append(float((net(x) - alone(x)).abs().max()))
    return beside.end(), found


def test_evaluation_of_parts(pool: Pool) -> None:
    for worst, found in pool.run(parts):
        assert worst < CLOSE
        assert max(found) < CLOSE


def divided(factor: float) -> list[bool]:
    """Sums of gradients are divided by a factor in place of the number of ranks."""
    net, other = shard_all(stack()), shard_all(stack())
    net[0].set_gradient_divide_factor(factor)
    for one in (net, other):
        loss_of(one, *Beside(one, stack()).batches(0)[0]).backward()
    found = []
    world = float(torch.distributed.get_world_size())
    for (name, one), two in zip(net.named_parameters(), other.parameters(), strict=True):
        expected = two.grad.full_tensor() * (world / factor if name.startswith("0.") else 1.0)
        found.append(torch.allclose(one.grad.full_tensor(), expected, rtol=1e-6, atol=0))
    return found


@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_set_gradient_divide_factor(pool: Pool, factor: float) -> None:
    for found in pool.run(divided, factor, world=3):
        assert found == [True] * 14


def summed() -> tuple[float, float]:
    """A factor of 1 for all units: the gradients of a loss that is summed over the batch."""

    def shard(net: Any) -> Any:
        for one in shard_all(net).modules():
            if hasattr(one, "set_gradient_divide_factor"):
                one.set_gradient_divide_factor(1.0)
        return net

    beside = Beside.of(stack(), shard, lr=1e-3)
    for step in range(3):
        beside.clear()
        ours = []
        for net, (x, y) in zip((beside.net, beside.alone), beside.batches(step), strict=True):
            loss = nn.functional.mse_loss(net(x), y, reduction="sum")
            loss.backward()
            ours.append(loss)
        beside.compare()
        beside.step()
    difference = abs(mean(ours[0]) * torch.distributed.get_world_size() - float(ours[1]))
    return beside.end(), difference + furthest([], [])


def test_gradients_of_sums(pool: Pool) -> None:
    for worst, difference in pool.run(summed):
        assert worst < 2e-5
        assert difference < 1e-4
