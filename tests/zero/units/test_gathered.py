"""Parameters that ranks gather by units: the same numbers, bounded memory, stated traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dreamcomm
from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.pool import Pool
from zero.units.beside_one import loss_of, said
from zero.units.sharding import SHARED, made, my_batch, shard, sharded, weights, whole
from zero.units.test_parity import both, check_equal

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

GATHER = {"options": {"gather": True}}


# Numbers.


@pytest.mark.parametrize(
    ("world", "optimizer", "micro", "torchs"),
    [
        (2, "sgd", 1, False),
        (3, "adamw", 3, False),
        pytest.param(4, "sgd", 3, True, marks=pytest.mark.long),
        pytest.param(3, "sgd", 1, True, marks=pytest.mark.long),
        pytest.param(4, "adamw", 1, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", SHARED)
def test_the_bits_are_those_of_ddp(
    pool: Pool, name: str, world: int, optimizer: str, micro: int, torchs: bool
) -> None:
    how = {**GATHER, "torch": torchs}
    check_equal(pool.run(both, name, optimizer, 4, 0.05, micro, how, world=world))


def trained(module: Any, optimizer: Any) -> tuple[list[float], list[Tensor]]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(module, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, weights(module)


def beside_stage_2(name: str, kind: str, gather: bool | None) -> tuple[Any, Any, str]:
    """On the default group, or one of Gloo."""
    group: Any = dist.new_group(backend="gloo") if kind == "gloo" else dist.group.WORLD
    options = {"lr": 0.01, "momentum": 0.9}
    alone = made(name)
    stage = ZeroOptimizer(alone.parameters(), torch.optim.SGD, group, stage=2, **options)
    module = shard(made(name), mesh=DeviceMesh.from_group(group, "cpu"), gather=gather)
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, **options)
    return trained(alone, stage), trained(module, optimizer), module.report()


@pytest.mark.parametrize(
    ("hosts", "gather", "form"),
    [
        ("a,b", None, "gathered by units"),
        ("a,b,a", None, "gathered by units"),
        ("a,b,a,b", None, "one copy of the parameters on each of 2 hosts"),
        ("a,a,b,b", None, "one copy of the parameters on each of 2 hosts"),
        ("a,a,b,b", True, "gathered by units"),
    ],
)
@pytest.mark.parametrize("name", ["gpt", "tied", "strange"])
def test_the_bits_on_several_hosts_are_those_of_stage_2(
    pool: Pool, name: str, hosts: str, gather: bool | None, form: str
) -> None:
    found = pool.run(
        beside_stage_2,
        name,
        "own",
        gather,
        world=len(hosts.split(",")),
        env={"DREAMCOMM_HOSTS": hosts},
    )
    for (losses, theirs), (own, ours), report in found:
        assert form in report
        assert losses == own
        assert all(map(torch.equal, theirs, ours))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "strange"])
def test_the_bits_over_gloo_are_those_of_stage_2(pool: Pool, name: str, world: int) -> None:
    for (losses, theirs), (own, ours), report in pool.run(
        beside_stage_2, name, "gloo", None, world=world
    ):
        assert "does not use the backend dreamcomm" in report
        assert losses == own
        assert all(map(torch.equal, theirs, ours))


def by_ddp_over_gloo(name: str) -> tuple[Any, Any]:
    group = dist.new_group(backend="gloo")
    ddp = dreamcomm.DistributedDataParallel(made(name), process_group=group)
    module = shard(made(name), mesh=DeviceMesh.from_group(group, "cpu"))
    return (
        trained(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, foreach=False)),
        trained(module, torch.optim.SGD(module.parameters(), lr=0.01, foreach=False)),
    )


@pytest.mark.parametrize("world", [2, 3])
def test_over_gloo_it_is_near_ddp(pool: Pool, world: int) -> None:
    """With two ranks the bits are the same."""
    for (losses, theirs), (own, ours) in pool.run(by_ddp_over_gloo, "gpt", world=world):
        assert own == pytest.approx(losses, rel=1e-6)
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one, other) if world == 2 else torch.allclose(one, other, atol=1e-6)


# Use of units in other orders.


class Uses(nn.Module):
    """Units that are used twice, in one another, in another order, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into, self.twice, self.third = (nn.Linear(12, 12) for _ in range(3))
        self.maybe = nn.Linear(12, 12)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        hidden = self.twice(torch.tanh(self.twice(torch.tanh(self.into(x)))))
        if how == "checkpoint":
            hidden = checkpoint(self.third, hidden, use_reentrant=False)
        elif how == "reentrant":
            hidden = checkpoint(self.third, hidden, use_reentrant=True)
        else:
            hidden = self.third(hidden)
        if how == "maybe":
            hidden = hidden + self.maybe(hidden)
        elif how == "backwards":
            hidden = self.into(self.third(hidden)) + x
        out: Tensor = self.out(torch.tanh(hidden))
        return out


def orders() -> list[float]:
    """The largest difference of a gradient from one process, step by step."""
    module: Any = Uses()
    for one in (module.into, module.twice, module.third, module.maybe):
        fully_shard(one, gather=True)
    fully_shard(module, gather=True)
    alone = Uses()
    gaps = []
    for step, how in enumerate(["", "maybe", "", "backwards", "checkpoint", "reentrant", "", ""]):
        x, y = my_batch(step)
        nn.functional.mse_loss(module(x, how), y).backward()
        nn.functional.mse_loss(alone(x, how), y).backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
                continue
            dist.all_reduce(theirs.grad)
            theirs.grad /= dist.get_world_size()
            gaps.append(float((whole(ours.grad) - theirs.grad).abs().max()))
        module.zero_grad()
        alone.zero_grad()
    assert module._unit.tree.form.pool.in_use == 0
    return gaps


def test_units_may_be_used_in_any_order(pool: Pool) -> None:
    for gaps in pool.run(orders, world=2):
        assert max(gaps) < 1e-7


class Again(nn.Module):
    """A unit in two checkpoints, each of which has a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.into, self.twice, self.out = nn.Linear(12, 700), nn.Linear(700, 700), nn.Linear(700, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.twice, self.into(x), use_reentrant=True)
        hidden = checkpoint(self.twice, torch.tanh(hidden), use_reentrant=True)
        out: Tensor = self.out(hidden)
        return out


def made_again(gather: bool | None) -> list[float]:
    """The first pass reduces a gradient before the second checkpoint adds to it."""
    module: Any = Again()
    for one in (module.into, module.twice):
        fully_shard(one, gather=gather)
    fully_shard(module, gather=gather)
    alone, gaps = Again(), []
    for step in range(3):
        for net in (module, alone):
            net.zero_grad()
            loss_of(net, step).backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            grad = theirs.grad / dist.get_world_size()
            gaps.append(float((whole(ours.grad) - grad).abs().max() / grad.abs().max()))
    return gaps


@pytest.mark.parametrize(("gather", "hosts"), [(True, "a,a"), (True, "a,b"), (None, "a,a,b,b")])
def test_a_gradient_may_be_made_again_in_a_first_pass(
    pool: Pool, gather: bool | None, hosts: str
) -> None:
    world = len(hosts.split(","))
    for gaps in pool.run(made_again, gather, world=world, env={"DREAMCOMM_HOSTS": hosts}):
        assert max(gaps) < 1e-5


def second_derivatives() -> tuple[float, float]:
    module: Any = sharded("mlp", gather=True)
    alone = made("mlp")
    found = []
    for net in (module, alone):
        x = my_batch(0)[0].requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        grads = [one.grad for one in net.parameters() if one.grad is not None]
        found.append([whole(one) for one in grads])
    for one in found[1]:
        dist.all_reduce(one)
        one /= dist.get_world_size()
    gap = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    return gap, max(float(one.abs().max()) for one in found[1])


def test_a_graph_of_a_backward_pass_reads_parameters(pool: Pool) -> None:
    for gap, largest in pool.run(second_derivatives, world=2):
        assert gap <= 1e-6 * largest


class Wide(nn.Module):
    """Several buckets, and parameters that one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(8))
        self.extra = nn.ParameterList(nn.Parameter(torch.randn(600, 600) / 30) for _ in range(2))

    def forward(self, x: Tensor, all_of_them: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if all_of_them and number in (3, 6):
                x = x + x @ self.extra[number // 6]
        return x


def unused_on_one(kind: str) -> list[float]:
    group: Any = dist.new_group(backend="gloo") if kind == "gloo" else dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu")
    module: Any = Wide()
    for one in module.layers:
        fully_shard(one, mesh=mesh, gather=True)
    fully_shard(module, mesh=mesh, gather=True)
    alone = Wide()
    gaps = []
    for step in range(3):
        x = torch.randn(4, 600, generator=torch.Generator().manual_seed(step))
        for net in (module, alone):
            net.zero_grad()
            net(x, dist.get_rank() == 0).square().sum().backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            dist.all_reduce(grad)
            gaps.append(float((whole(ours.grad) - grad / 2).abs().max() / (grad.abs().max() + 1)))
    return gaps


@pytest.mark.parametrize("kind", ["own", "gloo"])
def test_a_rank_may_have_no_gradient_of_some_parameters(pool: Pool, kind: str) -> None:
    """It reduces their buckets at the end of its pass, while the others gather."""
    for gaps in pool.run(unused_on_one, kind, world=2):
        assert max(gaps) < 1e-6


# Memory and traffic.


def stream(width: int, layers: int, keeps: bool) -> tuple[int, int, int, int, int]:
    """Bytes of parameters and of gradients received in a step, of all units, of the root; the most
    units at a time."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    how = {"gather": True, "reshard_after_forward": not keeps}
    for one in module[:-1]:
        fully_shard(one, **how)
    fully_shard(module, gather=True)
    x = torch.randn(4, width)
    form = module._unit.tree.form
    for _ in range(2):
        before, reduced = form.received, dreamcomm.stats(form.reductions())["reduce_scatter"]
        module(x).sum().backward()
        moved = form.received - before
        now = dreamcomm.stats(form.reductions())["reduce_scatter"]
        gradients = now["received"] - reduced["received"]
    assert form.pool.in_use == 0
    each = width * width + width
    return moved, gradients, 4 * each * layers, 4 * each, form.pool.most


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("keeps", [False, True])
def test_units_are_gathered_twice_a_step(pool: Pool, world: int, keeps: bool) -> None:
    """Each rank receives what others have of all units, in each pass; of kept ones once. And rows
    of gradients once."""
    layers = 6
    found = pool.run(stream, 240, layers, keeps, world=world)
    for moved, gradients, everything, root, most in found:
        share = (world - 1) / world
        assert gradients == everything * share
        expected = share * (everything if keeps else 2 * everything - root)
        headers = 2 * layers * 16 * (world - 1)
        assert expected <= moved <= expected * 1.01 + headers
        assert most == (layers if keeps else 3)


def aliases() -> tuple[bool, bool]:
    """What a script keeps of a whole parameter is on its storage, whose version stays."""
    module: Any = nn.Linear(8, 8)
    fully_shard(module, gather=True)
    before = whole(module.weight)
    module.unshard()
    alias, clone = module.weight.detach(), module.weight.detach().clone()
    version = module.weight._version
    same = torch.equal(alias, before) and torch.equal(clone, before)
    module.reshard()
    gone = alias.untyped_storage().nbytes() == 0
    module.unshard()
    back = torch.equal(alias, before) and module.weight._version == version
    module.reshard()
    return same and gone and back, torch.equal(clone, before)


def test_views_of_a_parameter_follow_its_memory(pool: Pool) -> None:
    assert pool.run(aliases, world=2) == [(True, True)] * 2


# Errors.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.into = nn.Linear(12, 5)
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        out: Tensor = (self.left if left else self.right)(self.into(x))
        return out


def branches(kind: str) -> tuple[str, str, bool]:
    group: Any = dist.new_group(backend="gloo") if kind == "gloo" else dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu")
    module: Any = Branches()
    for one in (module.left, module.right):
        fully_shard(one, mesh=mesh, gather=True)
    fully_shard(module, mesh=mesh, gather=True)
    x, y = my_batch(0)

    def act() -> None:
        nn.functional.mse_loss(module(x, dist.get_rank() == 0), y).backward()

    told = said(act)
    module.reset_iter_state()
    module.zero_grad()
    nn.functional.mse_loss(module(x, True), y).backward()
    alone = Branches()
    nn.functional.mse_loss(alone(x, True), y).backward()
    right = True
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            dist.all_reduce(theirs.grad)
            right = right and torch.allclose(whole(ours.grad), theirs.grad / 2, atol=1e-7)
    return told, module.report(), right


@pytest.mark.parametrize("kind", ["own", "gloo"])
def test_branches_that_differ_are_an_error_that_names_the_units(pool: Pool, kind: str) -> None:
    """Units of equal sizes, whose numbers would be taken for one another's."""
    for told, _, right in pool.run(branches, kind, world=2):
        assert "the ranks gather different units: rank 0 'left', rank 1 'right'" in told
        assert right


class Raises(nn.Module):
    """Raises in a pass of one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 5))
        self.raises = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[:2](x)
        if self.raises == "forward":
            raise ValueError("a bad batch")
        if self.raises == "backward":
            x.register_hook(self.hook)
        out: Tensor = self.layers[2:](x)
        return out

    def hook(self, gradient: Tensor) -> None:
        raise ValueError("a bad gradient")


def fails_on_one(where: str) -> tuple[str, float]:
    module: Any = Raises()
    for one in module.layers:
        fully_shard(one, gather=True)
    fully_shard(module, gather=True)
    loss_of(module, 0).backward()
    module.raises = where if dist.get_rank() == 0 else ""
    told = said(lambda: loss_of(module, 1).backward())
    module.raises = ""
    module.reset_iter_state()
    module.zero_grad()
    loss_of(module, 2).backward()
    alone = Raises()
    loss_of(alone, 2).backward()
    gaps = []
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        gaps.append(float((whole(ours.grad) - theirs.grad / 2).abs().max()))
    return told, max(gaps)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_one_rank_ends_the_others_pass(pool: Pool, where: str) -> None:
    first, second = pool.run(fails_on_one, where, world=2)
    assert first[0].startswith("a bad")
    assert "made different calls" in second[0]
    assert max(first[1], second[1]) < 1e-7
