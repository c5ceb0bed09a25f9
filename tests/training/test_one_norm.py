"""Every way of training finds the same norm, to the bit, of the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from dreamcomm.buckets.norm import BLOCK
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("the kernels are dreamcomm's")

WIDTH = 67  # blocks of the norm cross rows and ranks' shards


def make() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3 * WIDTH))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Of each parameter, in float32, of very different sizes."""
    generator = torch.Generator().manual_seed(11)
    found = {}
    for number, (name, one) in enumerate(module.named_parameters()):
        found[name] = torch.randn(one.shape, generator=generator) * 10.0 ** (number % 7 - 3)
    return found


def give(module: nn.Module, prefix: str = "") -> None:
    known = gradients(make())
    for name, one in module.named_parameters():
        one.grad = known[name.removeprefix(prefix)].clone()


def alone() -> float:
    module = make()
    assert max(one.numel() for one in module.parameters()) > 2 * BLOCK
    model = dreamcomm.DistributedDataParallel(module)
    give(module)
    return float(model.clip_grad_norm_(1.0))


def by_zero(stage: int) -> float:
    module = make()
    optimizer = ZeroOptimizer(module.named_parameters(), torch.optim.SGD, stage=stage, lr=0.1)
    give(module)
    return float(optimizer.clip_grad_norm_(1.0))


def by_pipeline() -> float:
    pipe = Pipeline(make(), 2, loss_fn=nn.functional.mse_loss)
    known = gradients(make())
    for name, one in pipe.named_parameters():
        one.grad = known[name].clone()
    return float(pipe.clip_grad_norm_(1.0))


def by_mix(stage: int) -> float:
    """Two stages, each on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipe = Pipeline(make(), 2, loss_fn=nn.functional.mse_loss, mesh=mesh)
    group = mesh["data"].get_group()
    keep = ZeroOptimizer(pipe.named_parameters(), torch.optim.SGD, group, stage=stage, lr=0.1)
    known = gradients(make())
    for name, one in pipe.named_parameters():
        one.grad = known[name].clone()
    norm = float(pipe.clip_grad_norm_(1.0))
    del keep
    return norm


def by_hook() -> float:
    module = make()
    model = dreamcomm.DistributedDataParallel(module)
    state = dreamcomm.hooks.State()
    model.register_comm_hook(state, dreamcomm.hooks.average)
    model(torch.zeros(1, WIDTH))  # makes the pass known
    known = gradients(make())
    loss = sum((one * known[name]).sum() for name, one in module.named_parameters())
    assert isinstance(loss, Tensor)
    loss.backward()
    for name, one in module.named_parameters():
        assert one.grad is not None
        assert torch.equal(one.grad, known[name])
    return float(state.norm())


def of_ones(stage: int) -> float:
    """The norm of 300 ones under another default dtype, which cannot tell it from 17.375."""
    module = nn.Linear(300, 1, bias=False)
    model: dreamcomm.DistributedDataParallel | ZeroOptimizer
    if stage == 0:
        model = dreamcomm.DistributedDataParallel(module)
    else:
        model = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1)
    module.weight.grad = torch.ones(1, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return float(model.clip_grad_norm_(1.0))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_norm_has_float32_whatever_the_default_dtype(pool: Pool, stage: int) -> None:
    expected = float(
        torch.tensor(300.0**0.5, dtype=torch.float32)
    )  # torch's sqrt is not exact on all CPUs
    assert pool.run(of_ones, stage, world=2) == [expected] * 2


@pytest.mark.parametrize("world", [2, 4])
def test_all_ways_find_the_bits_of_one_process(pool: Pool, world: int) -> None:
    # Averages of 2 or 4 equal gradients are exact.
    expected = pool.run(alone, world=1)[0]
    squares = sum(float(one.double().square().sum()) for one in gradients(make()).values())
    assert expected == pytest.approx(squares**0.5, rel=1e-6)
    for way, *given in ((alone,), (by_zero, 1), (by_zero, 2), (by_pipeline,), (by_hook,)):
        assert pool.run(way, *given, world=world) == [expected] * world, (way.__name__, given)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_mix_finds_the_bits_of_one_process(pool: Pool, stage: int) -> None:
    expected = pool.run(alone, world=1)[0]
    assert pool.run(by_mix, stage, world=4) == [expected] * 4
