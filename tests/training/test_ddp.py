"""DistributedDataParallel trains as one process does, and as with Gloo, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import dreamcomm
from helpers.pool import Fresh, Pool
from training.models import STEPS, Mlp, batch, loss_of, sgd, shard, train_alone


def train(model: torch.nn.Module, group: Any, alternate: bool = False) -> list[float]:
    """Mean losses of the ranks, each on its shard."""
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
        out = model(x, skip=step % 2 == 0) if alternate else model(x)
        loss = loss_of(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def compare(
    options: dict[str, Any],
    hook: Callable[[DistributedDataParallel, Any], None] | None = None,
    skippable: bool = False,
    bucket_mb: float = 0.01,
) -> dict[str, list[float]]:
    """Losses of the backend under test, of Gloo and of one process."""
    found = {}
    for name, group in (("ours", dist.group.WORLD), ("gloo", dist.new_group(backend="gloo"))):
        model = DistributedDataParallel(
            Mlp(skippable), process_group=group, bucket_cap_mb=bucket_mb, **options
        )
        if hook:
            hook(model, group)
        found[name] = train(model, group, skippable)
    alone = Mlp(skippable)
    found["alone"] = train_alone(alone, sgd(alone.parameters()), skippable)
    return found


def check(found: list[dict[str, list[float]]], rel: float = 1e-5) -> None:
    for losses in found:
        assert losses["ours"] == found[0]["ours"]  # the same on all ranks
        # Gloo's order of addition differs from two ranks on.
        assert losses["ours"] == pytest.approx(losses["gloo"], rel=1e-6 if len(found) > 2 else 0)
        assert losses["ours"] == pytest.approx(losses["alone"], rel=rel)
        assert losses["ours"][-1] < losses["ours"][0]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}],
    ids=["plain", "static_graph", "gradient_as_bucket_view", "no_buffers"],
)
def test_training(pool: Pool, options: dict[str, Any], world: int) -> None:
    check(pool.run(compare, options, world=world))


@pytest.mark.parametrize("world", [2, 4])
def test_unused_parameters(pool: Pool, world: int) -> None:
    options = {"find_unused_parameters": True}
    check(pool.run(compare, options, skippable=True, world=world))


def default_hook(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(group, default_hooks.allreduce_hook)


def fp16_hook(model: DistributedDataParallel, group: Any) -> None:
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)


def bf16_hook(model: DistributedDataParallel, group: Any) -> None:
    # DDP takes torch's hook by its own name only with CUDA, whatever the backend can do.
    def compress(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    model.register_comm_hook(group, compress)


def powersgd(model: DistributedDataParallel, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def python_hook(model: DistributedDataParallel, group: Any) -> None:
    # Without annotations: DDP compares them with classes, and here they are text.
    def average(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))

    model.register_comm_hook(group, average)


HOOKS = {
    "default": (default_hook, 1e-5),
    "fp16": (fp16_hook, 1e-2),
    "bf16": (bf16_hook, 5e-2),
    "python": (python_hook, 1e-5),
}


def compare_hook(name: str) -> dict[str, list[float]]:
    return compare({}, HOOKS[name][0])


@pytest.mark.parametrize("name", ["default", "fp16", "python"])
def test_communication_hooks(pool: Pool, name: str) -> None:
    check(pool.run(compare_hook, name), HOOKS[name][1])


def bf16_losses() -> dict[str, list[float]]:
    """Gloo cannot add bfloat16: compared with one process only."""
    model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.01)
    bf16_hook(model, dist.group.WORLD)
    alone = Mlp()
    return {
        "ours": train(model, dist.group.WORLD),
        "alone": train_alone(alone, sgd(alone.parameters())),
    }


@pytest.mark.beyond_gloo("bfloat16")
def test_the_bf16_hook(pool: Pool) -> None:
    for losses in pool.run(bf16_losses):
        assert losses["ours"] == pytest.approx(losses["alone"], rel=HOOKS["bf16"][1])


def powersgd_losses() -> dict[str, list[float]]:
    # One bucket: the hook starts collectives from callbacks, and those of several buckets
    # would come in another order on each rank.
    return compare({}, powersgd, bucket_mb=25)


def test_the_powersgd_hook(pool: Pool) -> None:
    """A low-rank approximation: only Gloo trains to the same losses."""
    for losses in pool.run(powersgd_losses):
        assert losses["ours"] == losses["gloo"]
        assert losses["ours"][-1] < losses["ours"][0]


def uneven() -> dict[str, list[float]]:
    """Rank 0 has two steps fewer than the others."""
    found = {}
    for name, group in (("ours", dist.group.WORLD), ("gloo", dist.new_group(backend="gloo"))):
        model = DistributedDataParallel(Mlp(), process_group=group, bucket_cap_mb=0.01)
        optimizer = sgd(model.parameters())
        with Join([model]):
            for step in range(STEPS - 2 * (dist.get_rank() == 0)):
                x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
        found[name] = [p.detach().sum().item() for p in model.parameters()]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_inputs(pool: Pool, world: int) -> None:
    for weights in pool.run(uneven, world=world):
        assert weights["ours"] == pytest.approx(weights["gloo"], rel=0 if world == 2 else 1e-5)


def own_buckets() -> dict[str, Any]:
    """Buckets from the backend's allocator: gradients lie in memory that peers see."""
    model = DistributedDataParallel(Mlp(), gradient_as_bucket_view=True)
    losses = train(model, dist.group.WORLD)
    alone = Mlp()
    addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    shared = [mapping_of(address) for address in addresses]
    return {
        "ours": losses,
        "alone": train_alone(alone, sgd(alone.parameters())),
        "shared": shared,
    }


def mapping_of(address: int) -> str:
    """The name of the file mapped at `address`, or nothing."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *rest = line.split(maxsplit=5)
            first, last = (int(part, 16) for part in span.split("-"))
            if first <= address < last:
                return rest[4].strip() if len(rest) > 4 else ""
    return ""


@pytest.mark.beyond_gloo("gloo allocates no buckets")
@pytest.mark.parametrize("env", [{}, {"DDP_DISABLE_COMM_MEM": "0"}], ids=["default", "asked"])
def test_buckets_from_the_backend(fresh: Fresh, env: dict[str, str]) -> None:
    for found in fresh.run(own_buckets, env=env):
        assert found["ours"] == pytest.approx(found["alone"], rel=1e-5)
        assert found["shared"]
        assert all("memfd" in name for name in found["shared"]), found["shared"]


def in_place_calls() -> tuple[int, int]:
    """All that DDP made, and those among them."""
    model = DistributedDataParallel(Mlp())
    before = dreamcomm.stats()["all_reduce"]
    for step in range(3):
        x, y = batch(step)
        loss_of(model(x), y).backward()
    after = dreamcomm.stats()["all_reduce"]
    return after["calls"] - before["calls"], after["in_place"] - before["in_place"]


def by_default() -> tuple[tuple[int, int], int, str]:
    """Also of DDP on a group of Gloo's: how many of its gradients lie in shared memory."""
    group = dist.new_group(backend="gloo")
    ours = in_place_calls()
    model = DistributedDataParallel(Mlp(), process_group=group, gradient_as_bucket_view=True)
    train(model, group)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return ours, sum(map(dreamcomm.is_shared, gradients)), dreamcomm.explain("all_reduce", 4000)


@pytest.mark.beyond_gloo("gloo allocates no buckets")
def test_buckets_are_reduced_in_place_by_default_and_those_of_gloo_stay(fresh: Fresh) -> None:
    for (calls, in_place), of_gloo, said in fresh.run(by_default):
        assert calls == in_place > 0
        assert of_gloo == 0
        assert "buckets of DistributedDataParallel: in shared memory" in said


@pytest.mark.beyond_gloo("gloo allocates no buckets")
def test_who_wants_no_buckets_from_the_backend_gets_none(fresh: Fresh) -> None:
    for (calls, in_place), _, said in fresh.run(by_default, env={"DDP_DISABLE_COMM_MEM": "1"}):
        assert calls > in_place == 0
        assert "with DDP_DISABLE_COMM_MEM=0 in the environment" in said


def pretend_gpus_and_begin(rank: int, store: str) -> str | None:
    torch.accelerator.device_count = lambda: 1
    dist.init_process_group("dreamcomm", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = os.environ.get("DDP_DISABLE_COMM_MEM")
    dist.destroy_process_group()
    return found


@pytest.mark.beyond_gloo("gloo allocates no buckets")
def test_where_there_are_gpus_the_choice_is_the_users(fresh: Fresh, tmp_path: Path) -> None:
    """It would hold for groups of NCCL's as well."""
    store = str(tmp_path / "store")
    assert fresh.run(pretend_gpus_and_begin, store, group=False) == [None, None]
