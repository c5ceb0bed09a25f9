"""Models and losses of other kinds: two trees in one loss, LSTM, autocast, nested roots."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.zero import fully_shard
from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, Mlp, shard_all, stack

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
