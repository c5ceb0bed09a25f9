"""Running statistics of batch norm have the same bits at every world size, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dreamcomm.invariant.checks import ChangedBuffers, check_module
from dreamcomm.invariant.running_statistics import RunningStatistics
from helpers.pool import Pool

SHARDS = 8


class Net(nn.Module):
    """Layers of all shapes, called once, twice, again in backward, in some shards, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.BatchNorm1d(6, momentum=0.3)
        self.series = nn.BatchNorm1d(3, momentum=None)
        self.image = nn.BatchNorm2d(3, affine=False)
        self.volume = nn.BatchNorm3d(2, momentum=0.0)
        self.twice = nn.BatchNorm1d(6)
        self.again = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh())
        self.some = nn.BatchNorm1d(6, momentum=0.5)
        self.never = nn.BatchNorm1d(6)
        self.evaluated = nn.BatchNorm1d(6).eval()
        self.untracked = nn.BatchNorm1d(6, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(6, momentum=1.0).requires_grad_(False)

    def forward(self, x: Tensor, shard: int) -> Tensor:
        x = self.twice(self.frozen(self.rows(x)) * 3 + self.twice(x))
        x = x + self.series(x.view(-1, 3, 2)).view_as(x)
        x = x + self.image(x.view(-1, 3, 2, 1)).view_as(x)
        x = x + self.volume(x.view(-1, 2, 3, 1, 1)).view_as(x)
        x = self.untracked(self.evaluated(x))
        x = checkpoint(self.again, x, use_reentrant=False)
        out: Tensor = self.some(x) if shard % 3 == 1 else x
        return out


def made(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return Net().to(dtype)


def rows(step: int, shard: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + shard)
    return (torch.randn(4 + shard, 6, generator=generator) * 2 + 3).to(dtype)


def shard_pass(net: nn.Module, step: int, shard: int, dtype: torch.dtype) -> None:
    net(rows(step, shard, dtype).requires_grad_(), shard).square().mean().backward()


def own_shards() -> range:
    per = SHARDS // dist.get_world_size()
    return range(dist.get_rank() * per, (dist.get_rank() + 1) * per)


def train(dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    net = made(dtype)
    statistics = RunningStatistics(net)
    for step in range(steps):
        if step == 2:
            net.get_submodule("evaluated").train()
            net.add_module("later", nn.BatchNorm1d(6, dtype=dtype))
        before = [one.clone() for one in net.buffers()]
        with statistics.step():
            for shard in own_shards():
                with statistics.at(shard):
                    shard_pass(net, step, shard, dtype)
                    if step >= 2:
                        net.later(rows(step, shard, dtype))  # type: ignore[operator]
        assert all(torch.equal(*pair) for pair in zip(net.buffers(), before, strict=True))
        statistics.commit(dist.group.WORLD, own_shards(), SHARDS)  # type: ignore[arg-type]
    return dict(net.named_buffers())


def alone(dtype: torch.dtype, steps: int) -> dict[str, Tensor]:
    net = made(dtype)
    for step in range(steps):
        if step == 2:
            net.get_submodule("evaluated").train()
            net.add_module("later", nn.BatchNorm1d(6, dtype=dtype))
        for shard in range(SHARDS):
            shard_pass(net, step, shard, dtype)
            if step >= 2:
                net.later(rows(step, shard, dtype))  # type: ignore[operator]
    return dict(net.named_buffers())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-2)]
)
def test_as_one_process(pool: Pool, dtype: torch.dtype, tolerance: float) -> None:
    wanted = alone(dtype, 3)
    first = pool.run(train, dtype, 3, world=1)[0]
    for world in (2, 4):
        for found in pool.run(train, dtype, 3, world=world):
            assert all(torch.equal(found[name], first[name]) for name in wanted)
    assert first.keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(first[name], one, rtol=tolerance, atol=tolerance)
    assert int(first["some.num_batches_tracked"]) == 9
    assert int(first["twice.num_batches_tracked"]) == 48


def coarse_updates() -> list[float]:
    layer = nn.BatchNorm1d(1, dtype=torch.bfloat16)
    plain = copy.deepcopy(layer)
    statistics = RunningStatistics(layer)
    x = torch.tensor([[257.0], [259.0]], dtype=torch.bfloat16)
    for one in (layer, plain):
        nn.init.constant_(one.running_mean, 256.0)  # type: ignore[arg-type]
    with statistics.step():
        for shard in own_shards():
            with statistics.at(shard):
                layer(x)
    statistics.commit(dist.group.WORLD, own_shards(), SHARDS)  # type: ignore[arg-type]
    for _ in range(SHARDS):
        plain(x)
    return [float(one.running_mean) for one in (layer, plain)]  # type: ignore[arg-type]


def test_each_update_is_rounded(pool: Pool) -> None:
    """A bfloat16 of 256 stays that in all eight steps towards 258; together they would move it."""
    assert pool.run(coarse_updates) == [[256.0, 256.0]] * 2


def calls_of(statistics: RunningStatistics, run: Callable[[], object]) -> list[str]:
    """The collectives of a step."""
    called: list[str] = []
    kept = dist.all_gather

    def counted(every: list[Tensor], own: Tensor, **options: Any) -> Any:
        called.append(str(own.dtype))
        return kept(every, own, **options)

    dist.all_gather = counted  # type: ignore[assignment]
    try:
        with statistics.step(), statistics.at(own_shards()[0]):
            run()
        statistics.commit(dist.group.WORLD, own_shards(), SHARDS)  # type: ignore[arg-type]
    finally:
        dist.all_gather = kept
    return called


def count_calls() -> list[list[str]]:
    layer, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    x = torch.randn(4, 3)
    statistics, others = RunningStatistics(layer), RunningStatistics(plain)
    return [
        calls_of(statistics, lambda: layer(x)),
        calls_of(statistics, lambda: dist.get_rank() and layer(x)),
        calls_of(statistics, lambda: None),
        calls_of(others, lambda: plain(x)),
    ]


def test_calls(pool: Pool) -> None:
    both = ["torch.int64", "torch.float32"]
    assert pool.run(count_calls) == [[both, both, ["torch.int64"], []]] * 2


def errors() -> list[str]:
    layer = nn.Sequential(nn.BatchNorm1d(3))
    statistics = RunningStatistics(layer)
    before = copy.deepcopy(layer.state_dict())

    def commit() -> None:
        statistics.commit(dist.group.WORLD, own_shards(), SHARDS)  # type: ignore[arg-type]

    texts = []
    with pytest.raises(KeyError), statistics.step(), statistics.at(own_shards()[0]):
        {}[layer(torch.randn(4, 3))]
    commit()
    with pytest.raises(RuntimeError, match="another step"), statistics.step(), statistics.step():
        pass
    with statistics.step():
        layer(torch.randn(4, 3))  # in no shard
    commit()
    assert all(torch.equal(one, before[name]) for name, one in layer.state_dict().items())
    assert not layer[0]._forward_hooks
    assert not layer[0]._forward_pre_hooks
    with statistics.step(), statistics.at(own_shards()[0]):
        if dist.get_rank() == 1:
            layer[0].forward(torch.randn(4, 3))
    with pytest.raises(RuntimeError) as raised:
        commit()
    texts.append(str(raised.value))
    with statistics.step(), statistics.at(own_shards()[0]):
        layer(torch.ones(4, 3) * 10)
    commit()
    assert int(layer[0].num_batches_tracked) == 2 + (dist.get_rank() == 1)  # type: ignore[arg-type]
    return texts


def test_errors(pool: Pool) -> None:
    for (text,) in pool.run(errors):
        assert "layer '0' on rank 1 changed its running statistics" in text


def test_sync_batch_norm_is_refused() -> None:
    check_module(nn.Sequential(nn.BatchNorm1d(3)), "the model")
    with pytest.raises(ValueError, match=r"the model: layer '1.0' is SyncBatchNorm"):
        check_module(nn.Sequential(nn.ReLU(), nn.Sequential(nn.SyncBatchNorm(3))), "the model")


class Buffers(nn.Module):
    count: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("kept", torch.full((3,), float("nan")))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def in_place(self) -> None:
        self.count.add_(1)

    def replaced(self) -> None:
        self.count = self.count + 1

    def by_data(self) -> None:
        self.count.data.add_(1)

    def allowed(self) -> None:
        self.scratch.add_(1)
        self.norm(torch.randn(4, 3))


@pytest.mark.parametrize("change", ["in_place", "replaced", "by_data"])
def test_changed_buffers(change: str) -> None:
    module = nn.Sequential(Buffers(), nn.InstanceNorm1d(3, track_running_stats=True))
    changed = ChangedBuffers(module, "the model", compares=change == "by_data")
    for _ in range(2):
        changed.note()
        module[0].allowed()  # type: ignore[operator]
        changed.check()
    changed.note()
    getattr(module[0], change)()
    with pytest.raises(RuntimeError, match=r"a pass changed buffer '0.count'"):
        changed.check()
    changed.note()
    module[1](torch.randn(2, 3, 4))
    with pytest.raises(RuntimeError, match=r"buffer '1.running_mean'"):
        changed.check()
