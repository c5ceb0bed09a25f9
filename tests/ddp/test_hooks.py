"""Training with the communication hooks, against a reference that adds as they promise."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

import dreamcomm
from ddp.reference import MICRO_BATCHES, STEPS, Crossed, Wire, pieces, train_reference
from dreamcomm import hooks
from helpers.pool import Fresh, Pool, RanksFailed
from training.models import batch, loss_of, sgd, shard

SIXTEEN_BITS = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "bf16_feedback": (torch.bfloat16, True),
    "fp16_feedback": (torch.float16, True),
}
pytestmark = pytest.mark.beyond_gloo("the hooks are of dreamcomm")


def always(step: int) -> bool:
    return True


def every_second(step: int) -> bool:
    return step % 2 == 0


def wrapped(
    name: str, state: hooks.State, module: nn.Module | None = None, **options: Any
) -> DistributedDataParallel:
    model = DistributedDataParallel(
        module or Crossed(), process_group=state.group, bucket_cap_mb=0.01, **options
    )
    model.register_comm_hook(state, getattr(hooks, name))
    return model


def train(
    model: DistributedDataParallel, micro: int = 1, rarely: Any = always, steps: Any = range(STEPS)
) -> list[Tensor]:
    """The weights after the steps."""
    optimizer = sgd(model.parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        parts = list(pieces(step, rank, world, micro))
        for x, y in parts[:-1]:
            with model.no_sync():
                loss_of(model(x, rarely(step)), y).backward()
        x, y = parts[-1]
        loss_of(model(x, rarely(step)), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def as_the_reference(
    name: str, micro: int = 1, rarely: Any = always, own_group: bool = False, **options: Any
) -> tuple[bool, bool]:
    """Whether the weights, and this rank's residuals, are the reference's bit for bit."""
    dtype, feedback = SIXTEEN_BITS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    state = hooks.State(dist.new_group() if own_group else None)
    model = wrapped(name, state, **options)
    weights = train(model, micro, rarely)
    wire = Wire(dtype, feedback, world)
    expected = train_reference(Crossed(), wire, micro, rarely)
    residuals = [state.residual(parameter) for parameter in model.parameters()]
    if wire.residuals is None:
        return equal(weights, expected), residuals == [None] * len(residuals)
    found = [residual for residual in residuals if residual is not None]
    of_reference = [wire.residuals[rank][place] for place in range(len(expected))]
    lost = any(bool(residual.any()) for residual in found)
    return equal(weights, expected), lost and equal(found, of_reference)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sums_are_float32_in_rank_order(pool: Pool, name: str, world: int) -> None:
    assert pool.run(as_the_reference, name, world=world) == [(True, True)] * world


@pytest.mark.parametrize("name", ["bf16", "bf16_feedback"])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"micro": MICRO_BATCHES},
        {"micro": MICRO_BATCHES, "gradient_as_bucket_view": True},
        {"own_group": True},
    ],
    ids=["views", "static_graph", "no_sync", "no_sync_views", "own_group"],
)
def test_settings_change_no_bit(pool: Pool, name: str, options: dict[str, Any]) -> None:
    assert pool.run(as_the_reference, name, **options) == [(True, True)] * 2


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters(pool: Pool, views: bool) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    assert pool.run(as_the_reference, "bf16", rarely=every_second, **options) == [(True, True)] * 2


@pytest.mark.parametrize("name", ["bf16", "bf16_feedback"])
def test_buckets_in_the_shared_heap(fresh: Fresh, name: str) -> None:
    options = {"gradient_as_bucket_view": True, "env": {"DDP_DISABLE_COMM_MEM": "0"}}
    assert fresh.run(as_the_reference, name, **options) == [(True, True)] * 2


def rebuilt() -> tuple[list[list[str]], list[list[str]]]:
    """The parameters of each bucket, in the first pass and in the last one."""
    seen: list[list[list[str]]] = []

    def spy(state, bucket):  # type: ignore[no-untyped-def]
        if bucket.index() == 0:
            seen.append([])
        seen[-1].append([names[id(parameter)] for parameter in bucket.parameters()])
        return hooks.bf16_feedback(state, bucket)

    model = DistributedDataParallel(Crossed(), bucket_cap_mb=0.01)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    model.register_comm_hook(hooks.State(), spy)
    train(model)
    return seen[0], seen[-1]


def test_the_model_of_these_tests_gets_other_buckets(pool: Pool) -> None:
    """Or the tests above would not show that residuals follow their parameters."""
    for first, last in pool.run(rebuilt):
        assert len(last) > 1
        assert [name for names in first for name in names] != [n for names in last for n in names]


def account(name: str) -> tuple[float, float]:
    """Largest error of `sent + residual = sum of gradients`, and the largest residual."""
    state = hooks.State()
    model = wrapped(name, state)
    sent = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    wanted = [torch.zeros_like(total) for total in sent]
    plain = Crossed()
    for step in range(STEPS):
        x, y = batch(step)
        for module in (model, plain):
            module.zero_grad()
            loss_of(module(x), y).backward()
        for totals, module in ((sent, model), (wanted, plain)):
            for total, parameter in zip(totals, module.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
    residuals = [state.residual(parameter) for parameter in model.parameters()]
    error, largest = 0.0, 0.0
    for a, b, residual in zip(sent, wanted, residuals, strict=True):
        assert residual is not None
        error = max(error, (a + residual - b).abs().max().item())
        largest = max(largest, residual.abs().max().item())
    return error, largest


@pytest.mark.parametrize("name", ["bf16_feedback", "fp16_feedback"])
def test_nothing_is_lost_with_feedback(pool: Pool, name: str) -> None:
    """In a world of one rank the average is what that rank sent."""
    ((error, largest),) = pool.run(account, name, world=1)
    assert error < 1e-6  # float32 additions
    assert largest > 10 * error


def averaged(own_group: bool, **options: Any) -> tuple[bool, float, list[float]]:
    """Whether the weights are plain DDP's, the largest difference, the norms' relative errors."""
    state = hooks.State(dist.new_group() if own_group else None)
    model = wrapped("average", state, **options)
    plain = DistributedDataParallel(Crossed(), bucket_cap_mb=0.01)
    errors = []
    for step in range(STEPS):
        train(model, steps=[step])
        train(plain, steps=[step])
        expected = get_total_norm(
            [p.grad.double() for p in model.parameters() if p.grad is not None]
        )
        assert state.finite()
        errors.append(abs(state.norm().item() / expected.item() - 1))
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    return (
        equal([a for a, _ in pairs], [b for _, b in pairs]),
        max((a - b).abs().max().item() for a, b in pairs),
        errors,
    )


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_the_average_is_plain_ddps_and_has_the_norm(pool: Pool, world: int, views: bool) -> None:
    found = pool.run(averaged, views, gradient_as_bucket_view=views, world=world)
    for same, difference, errors in found:
        # Plain DDP divides before it adds, which three ranks' sums round otherwise.
        assert same or world == 3
        assert difference < 1e-5
        assert max(errors) < 1e-7


def test_the_average_in_the_shared_heap(fresh: Fresh) -> None:
    env = {"DDP_DISABLE_COMM_MEM": "0"}
    for same, _, errors in fresh.run(averaged, False, gradient_as_bucket_view=True, env=env):
        assert same
        assert max(errors) < 1e-7


def norms(name: str) -> list[tuple[float, bool]]:
    """Norm and finiteness of three passes; in the second rank 1 alone has a NaN."""
    state = hooks.State(norm=True)
    model = wrapped(name, state)
    found = []
    for step in range(3):
        x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
        if step == 1 and dist.get_rank() == 1:
            x = x.clone()
            x[0, 0] = math.nan
        model.zero_grad()
        loss_of(model(x), y).backward()
        found.append((state.norm().item(), state.finite()))
    return found


@pytest.mark.parametrize("name", ["average", *SIXTEEN_BITS])
def test_a_nan_of_one_rank_is_noticed_on_all(pool: Pool, name: str) -> None:
    ranks = pool.run(norms, name)
    for found in ranks:
        assert [finite for _, finite in found] == [True, False, True]
        assert [math.isnan(norm) for norm, _ in found] == [False, True, False]
        assert found[0] == ranks[0][0]
        assert found[2] == ranks[0][2]


def over_gloo(name: str) -> tuple[float, bool]:
    """The largest difference of weights from plain DDP's on gloo, and whether ranks agree."""
    group = dist.new_group(backend="gloo")
    weights = train(wrapped(name, hooks.State(group, norm=True)))
    plain = train(DistributedDataParallel(Crossed(), process_group=group, bucket_cap_mb=0.01))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, weights, group=group)
    difference = max((a - b).abs().max().item() for a, b in zip(weights, plain, strict=True))
    return difference, all(equal(weights, other) for other in everyones)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["average", *SIXTEEN_BITS])
def test_groups_of_another_backend(pool: Pool, name: str, world: int) -> None:
    for difference, agree in pool.run(over_gloo, name, world=world):
        assert difference < (1e-6 if name == "average" else 2e-3)
        assert agree


def without_shared_memory() -> bool:
    group = dist.new_group(pg_options=dreamcomm.Options(shared_memory=False))
    weights = train(wrapped("bf16", hooks.State(group)))
    gloo = dist.new_group(backend="gloo")
    return equal(weights, train(wrapped("bf16", hooks.State(gloo))))


def test_a_group_without_shared_memory_is_served_as_gloo(pool: Pool) -> None:
    assert pool.run(without_shared_memory) == [True, True]


def of_mixed_group() -> bool:
    group = dist.new_group(backend="cpu:gloo,cuda:dreamcomm")
    weights = train(wrapped("bf16", hooks.State(group)))
    gloo = dist.new_group(backend="gloo")
    return equal(weights, train(wrapped("bf16", hooks.State(gloo))))


def test_the_backend_of_the_gradients_device_counts(pool: Pool) -> None:
    assert pool.run(of_mixed_group) == [True, True]


def sparse() -> None:
    model = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    model.register_comm_hook(hooks.State(), hooks.bf16)
    model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused(fresh: Fresh) -> None:
    with pytest.raises(RanksFailed, match="expected dense gradients on cpu or cuda"):
        fresh.run(sparse)


def uneven(name: str) -> list[float]:
    """Rank 0 has two steps fewer; the sums of the weights."""
    model = wrapped(name, hooks.State())
    optimizer = sgd(model.parameters())
    with Join([model]):
        for step in range(STEPS - 2 * (dist.get_rank() == 0)):
            x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return [parameter.detach().sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["bf16", "bf16_feedback", "average"])
def test_uneven_inputs(pool: Pool, name: str) -> None:
    one, other = pool.run(uneven, name)
    assert one == other
    assert all(math.isfinite(weight) for weight in one)


def resumed(name: str) -> tuple[bool, bool]:
    """Whether a run from a checkpoint equals one without, and whether it does without residuals."""
    state = hooks.State()
    model = wrapped(name, state)
    descend(model, range(2))
    saved = {"model": copy.deepcopy(model.module.state_dict()), "hook": state.state_dict()}
    straight = descend(model, range(2, STEPS))

    def from_checkpoint(residuals: bool) -> list[Tensor]:
        module, again = Crossed(), hooks.State()
        module.load_state_dict(saved["model"])
        if residuals:
            again.load_state_dict(saved["hook"])
        return descend(wrapped(name, again, module), range(2, STEPS))

    return equal(from_checkpoint(True), straight), equal(from_checkpoint(False), straight)


def descend(model: DistributedDataParallel, steps: range) -> list[Tensor]:
    """Plain gradient descent: no state but the weights and the hook's."""
    for step in steps:
        x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
        model.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_checkpoint_of_the_residuals(pool: Pool) -> None:
    assert pool.run(resumed, "bf16_feedback") == [(True, False)] * 2


CHANGES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "fewer": lambda residuals: residuals[:-1],
    "more": lambda residuals: [*residuals, torch.zeros(1)],
    "in another order": lambda residuals: residuals[::-1],
}


def load_changed(how: str, late: bool) -> None:
    """Loads wrong residuals before the first backward pass, or after it."""
    state = hooks.State()
    model = wrapped("bf16_feedback", state)
    train(model, steps=[0])
    residuals = CHANGES[how](state.state_dict()["residuals"])
    if not late:
        state = hooks.State()
        model = wrapped("bf16_feedback", state)
    state.load_state_dict({"residuals": residuals})
    train(model, steps=[1])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_residuals_of_another_model_are_refused(pool: Pool, how: str, late: bool) -> None:
    with pytest.raises(RanksFailed, match="expected residuals of the model"):
        pool.run(load_changed, how, late)


def fewer_buckets() -> float:
    """The relative error of the norm after a pass with fewer buckets than the one before."""
    state = hooks.State()
    train(wrapped("average", state), steps=[0, 1])  # the first step has one bucket
    model = DistributedDataParallel(Crossed())
    model.register_comm_hook(state, hooks.average)
    train(model, steps=[0])
    expected = get_total_norm([p.grad.double() for p in model.parameters() if p.grad is not None])
    return abs(state.norm().item() / expected.item() - 1)


def test_the_norm_is_of_the_latest_pass_alone(pool: Pool) -> None:
    assert max(pool.run(fewer_buckets)) < 1e-7


def too_early() -> None:
    hooks.State().norm()


def test_a_norm_before_any_pass_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="no norm was collected"):
        pool.run(too_early)


def large_halves(name: str) -> list[float]:
    """Gradients of 40000 on every rank, whose sum no float16 holds."""
    model = nn.Linear(3, 1, bias=False).half()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(hooks.State(), getattr(hooks, name))
    ddp(torch.full((1, 3), 40000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad is not None
    found: list[float] = model.weight.grad.flatten().tolist()
    return found


@pytest.mark.parametrize("name", ["average", "fp16", "fp16_feedback"])
def test_sums_of_halves_do_not_overflow(pool: Pool, name: str) -> None:
    for found in pool.run(large_halves, name):
        assert found == [40000.0] * 3


def of_another_default() -> torch.dtype:
    torch.set_default_dtype(torch.float64)
    try:
        state = hooks.State()
        model = nn.Linear(3, 2).float()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, hooks.bf16_feedback)
        ddp(torch.ones(1, 3, dtype=torch.float32)).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    residual = state.residual(model.weight)
    assert residual is not None
    return residual.dtype


def test_residuals_are_float32_whatever_the_default(pool: Pool) -> None:
    assert set(pool.run(of_another_default)) == {torch.float32}


def under_another_default_device(name: str) -> tuple[float, str, str]:
    """As users have it who make their models on the meta device."""
    state = hooks.State(norm=True)
    model = nn.Linear(3, 2)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, getattr(hooks, name))
    data = torch.ones(1, 3)
    with torch.device("meta"):
        ddp(data).sum().backward()
        norm = state.norm()
        shared = dreamcomm.empty(3)
    return norm.item(), norm.device.type, shared.device.type


@pytest.mark.parametrize("name", ["average", "bf16", "bf16_feedback"])
def test_the_default_device_has_no_say(pool: Pool, name: str) -> None:
    for norm, *devices in pool.run(under_another_default_device, name):
        assert (norm, devices) == (pytest.approx(8**0.5), ["cpu", "cpu"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "expected what state_dict"),
        (None, "got NoneType"),
        ({"residuals": [1.0]}, "an item of type float"),
        ({"residuals": [torch.zeros(3).double()]}, "an item of type torch.float64"),
    ],
)
def test_what_is_no_state_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hooks.State().load_state_dict(state)


class TwoTypes(nn.Module):
    """Whose gradients do not fit into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(5))
        self.halved = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, factor: float) -> Tensor:
        return (self.single.sum() + self.halved.float().sum()) * factor


def norms_of_a_static_graph() -> list[float]:
    ddp = DistributedDataParallel(TwoTypes(), static_graph=True)
    state = hooks.State()
    ddp.register_comm_hook(state, hooks.average)
    norms = []
    for factor in (1.0, 2.0, 3.0):
        ddp.zero_grad()
        ddp(factor).backward()
        norms.append(state.norm().item())
    return norms


def test_the_first_pass_of_a_static_graph_has_a_norm(pool: Pool) -> None:
    """torch numbers its buckets in another way."""
    expected = [8**0.5 * factor for factor in (1.0, 2.0, 3.0)]
    for norms in pool.run(norms_of_a_static_graph):
        assert norms == pytest.approx(expected)


def stateless() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(None, hooks.bf16)
    with pytest.raises(TypeError, match=r"expected a dreamcomm\.hooks\.State .* got NoneType"):
        ddp(torch.ones(1, 2)).sum().backward()


def test_a_hook_without_its_state_is_refused(fresh: Fresh) -> None:
    fresh.run(stateless)


def interrupted() -> str:
    """What norm() says after a backward pass that raised in its middle."""
    first, last = nn.Linear(8, 64), nn.Linear(64, 8)
    model = nn.Sequential(first, last)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = hooks.State()
    ddp.register_comm_hook(state, hooks.average)
    ddp(torch.ones(1, 8)).sum().backward()
    ddp(torch.ones(1, 8)).sum().backward()
    assert state.norm() > 0

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("in the middle")

    first.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        ddp(torch.ones(1, 8)).sum().backward()
    try:
        return f"norm {state.norm().item()}"
    except RuntimeError as error:
        return str(error)


def test_no_norm_of_half_a_pass(fresh: Fresh) -> None:
    for text in fresh.run(interrupted):
        assert "no norm was collected" in text
