"""Gradients in int8: what is rounded, what stays, and that nothing is lost over the steps."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import dreamcomm
from dreamcomm import hooks
from dreamcomm.ddp.int8_blocks import BLOCK
from helpers.pool import Pool
from training.models import Mlp, batch, loss_of, shard

pytestmark = pytest.mark.beyond_gloo("the hooks are of dreamcomm")

SIZES = (5000, 3, 7001)  # a cut block, less than a block for a rank, several blocks


class Vectors(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in SIZES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((v * g).sum() for v, g in zip(self.vectors, gradients, strict=True))  # type: ignore[return-value]


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    scales = (1.0, 1e-3, 30.0)
    return [
        (torch.randn(size, generator=generator) * scale).to(dtype)
        for size, scale in zip(SIZES, scales, strict=True)
    ]


def wrapped(module: nn.Module, state: hooks.State, torchs: bool = False) -> Any:
    kind = nn.parallel.DistributedDataParallel if torchs else dreamcomm.DistributedDataParallel
    model: Any = kind(module, process_group=state.group, bucket_cap_mb=0.03)
    model.register_comm_hook(state, hooks.int8_feedback)
    return model


def passed(model: Any, gradients: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(gradients).backward()
    return [one.grad.clone() for one in model.module.vectors]


def group_on(where: str) -> Any:
    """None is the default group; "gloo", or the host of each rank."""
    if not where:
        return None
    if where == "gloo":
        return dist.new_group(backend="gloo")
    return dist.new_group(pg_options=dreamcomm.Options(hosts=where))


def once(dtype: torch.dtype, torchs: bool, where: str) -> tuple[list[Tensor], list[float]]:
    state = hooks.State(group_on(where), norm=True)
    model = wrapped(Vectors(dtype), state, torchs)
    got = passed(model, gradients_of(dist.get_rank(), 0, dtype))
    exact = sum(float(one.double().square().sum()) for one in got) ** 0.5
    return got, [float(state.norm()), exact, float(state.finite())]


@pytest.mark.parametrize(
    ("world", "dtype", "torchs", "where"),
    [
        (1, torch.float32, False, ""),
        (2, torch.float32, False, ""),
        (3, torch.float64, False, ""),
        (4, torch.float32, True, ""),
        (2, torch.bfloat16, True, ""),
        (2, torch.float16, False, ""),
        (3, torch.float32, False, "gloo"),
        (4, torch.float32, False, "a,a,b,b"),
        (3, torch.float32, False, "a,b,a"),
    ],
)
def test_an_average(pool: Pool, world: int, dtype: torch.dtype, torchs: bool, where: str) -> None:
    found = pool.run(once, dtype, torchs, where, world=world)
    every = [gradients_of(rank, 0, dtype) for rank in range(world)]
    for got, (norm, exact, finite) in found:
        assert finite
        assert norm == pytest.approx(exact, rel=1e-5)
        for number, mean in enumerate(got):
            assert torch.equal(mean, found[0][0][number]), "bits differ between ranks"
            inputs = torch.stack([one[number].double() for one in every])
            # Half a step of the values sent, and half a step of their average. A block may reach
            # over the edge of a parameter, to larger ones in its bucket. Hosts round their sums.
            step = max(float(g.abs().max()) for one in every for g in one) / 127
            most = step * (1.5 if where == "a,a,b,b" else 1.0) * 1.001
            slack = float(inputs.abs().max()) * torch.finfo(dtype).eps
            assert float((mean.double() - inputs.mean(0)).abs().max()) <= most + slack


def summed(
    steps: int, dtype: torch.dtype = torch.float32, where: str = "", torchs: bool = False
) -> list[Tensor]:
    """The sum of all ranks' averages, with the residuals of all ranks."""
    state = hooks.State(group_on(where))
    model = wrapped(Vectors(dtype), state, torchs)
    total = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step in range(steps):  # torch's class makes its buckets again after the first
        averages = passed(model, gradients_of(dist.get_rank(), step, dtype))
        for one, got in zip(total, averages, strict=True):
            one += got.double()
    rest = [state.residual(one) for one in model.module.vectors]
    assert all(one is not None and bool(one.any()) for one in rest)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rest)
    world = len(every)
    return [
        world * one + torch.stack([of[number].double() for of in every]).sum(0)
        for number, one in enumerate(total)
    ]


@pytest.mark.parametrize(
    ("world", "dtype", "where", "torchs"),
    [
        (2, torch.float32, "", True),
        (3, torch.float32, "", False),
        (4, torch.float32, "", True),
        (4, torch.float32, "a,b,b,a", False),
        (2, torch.bfloat16, "", False),
        (3, torch.float16, "gloo", True),
    ],
)
def test_nothing_is_lost_over_the_steps(
    pool: Pool, world: int, dtype: torch.dtype, where: str, torchs: bool
) -> None:
    every = [gradients_of(rank, step, dtype) for rank in range(world) for step in range(6)]
    exact = [torch.stack([one[number].double() for one in every]).sum(0) for number in range(3)]
    largest = max(float(one.abs().max()) for one in exact)
    for found in pool.run(summed, 6, dtype, where, torchs, world=world):
        for total, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(total, wanted, rtol=0, atol=1e-6 * largest)


class Beside(nn.Module):
    """A model beside a parameter of large gradients, which have no effect in the long run."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.vector = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return self.mlp(x), self.vector.sum() * (20.0 if step % 2 else -20.0)


def trained(feedback: bool | None) -> list[float]:
    """Losses of all rows after each step; None is without a hook."""
    module, state = Beside(), hooks.State()
    model: Any = dreamcomm.DistributedDataParallel(module)
    if feedback is not None:
        model.register_comm_hook(state, hooks.int8_feedback)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(150):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        out, large = model(shard(x, rank, world), step)
        (loss_of(out, shard(y, rank, world)) + large).backward()
        if feedback is False:
            for residual in state._residuals._parts.values():
                residual.zero_()
        optimizer.step()
        losses.append(float(loss_of(module.mlp(x), y).detach()))
    return losses


def test_trains_as_float32(pool: Pool) -> None:
    """Where most gradients are less than the step of their block."""
    exact, ours = pool.run(trained, None)[0], pool.run(trained, True)
    assert ours == [pool.run(trained, True)[0]] * 2  # and run to run
    last = slice(-4, None)  # the four batches
    assert sum(ours[0][last]) < 1.03 * sum(exact[last])
    assert sum(pool.run(trained, False)[0][last]) > 1.2 * sum(exact[last])


def broken(where: int, value: float) -> list[tuple[bool, bool, float]]:
    """A pass with a value that is not finite on rank 1, and the next one."""
    state = hooks.State(norm=True)
    model = wrapped(Vectors(), state)
    found = []
    for step in range(3):
        gradients = gradients_of(dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 1:
            gradients[2][where] = value
        got = passed(model, gradients)
        rest = [state.residual(one) for one in model.module.vectors]
        clean = all(one is not None and bool(one.isfinite().all()) for one in rest)
        found.append((state.finite(), clean, float(got[2][where])))
    return found


@pytest.mark.parametrize(("where", "value"), [(6000, math.inf), (0, -math.inf), (3, math.nan)])
def test_what_is_not_finite_reaches_all_ranks_and_goes(
    pool: Pool, where: int, value: float
) -> None:
    first, second = pool.run(broken, where, value)
    assert [one[:2] for one in first] == [(True, True), (False, True), (True, True)]
    assert [one[:2] for one in second] == [one[:2] for one in first]
    assert math.isnan(first[1][2])
    assert math.isnan(second[1][2])
    assert first[2] == second[2]


def extreme(values: list[float], dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """The gradients of such values on all ranks, and the residuals."""
    state = hooks.State()
    module = nn.Linear(len(values), 1, bias=False, dtype=dtype)
    model: Any = dreamcomm.DistributedDataParallel(module)
    model.register_comm_hook(state, hooks.int8_feedback)
    model(torch.tensor([values], dtype=dtype)).sum().backward()
    residual = state.residual(module.weight)
    assert module.weight.grad is not None
    assert residual is not None
    return module.weight.grad[0].tolist(), residual[0].tolist()


@pytest.mark.parametrize(
    ("values", "dtype", "wanted", "left"),
    [
        # Halves of steps are rounded to even.
        ([127.0, 0.5, 1.5, -2.5], torch.float32, [127.0, 0.0, 2.0, -2.0], [0.0, 0.5, -0.5, -0.5]),
        ([0.0, 0.0], torch.float32, [0.0, 0.0], [0.0, 0.0]),
        # No scale of normal numbers: nothing is sent, and nothing lost.
        ([1e-40, 2e-38], torch.float32, [0.0, 0.0], [1e-40, 2e-38]),
        ([1.6e38, -1.6e38], torch.float32, [1.6e38, -1.6e38], [0.0, 0.0]),
        ([65504.0, 65504.0], torch.float16, [65504.0, 65504.0], [0.0, 0.0]),
    ],
    ids=["ties", "zeros", "small", "large", "halves"],
)
def test_extreme_values(
    pool: Pool, values: list[float], dtype: torch.dtype, wanted: list[float], left: list[float]
) -> None:
    for got, residual in pool.run(extreme, values, dtype):
        assert got == pytest.approx(wanted, rel=1e-6, abs=0)
        slack = 1e-6 * max(map(abs, values))
        assert residual == pytest.approx(left, rel=0, abs=slack)


def resumed(keeps: bool) -> bool:
    """Whether a run from a checkpoint has the bits of one without."""
    state = hooks.State()
    model = wrapped(Vectors(), state)
    rank = dist.get_rank()
    for step in range(2):
        passed(model, gradients_of(rank, step))
    again = hooks.State()
    if keeps:
        again.load_state_dict(deepcopy(state.state_dict()))
    other = wrapped(Vectors(), again)
    expected = [passed(model, gradients_of(rank, step)) for step in range(2, 5)]
    got = [passed(other, gradients_of(rank, step)) for step in range(2, 5)]
    return all(
        torch.equal(a, b)
        for x, y in zip(got, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_resumes_with_its_residuals(pool: Pool, keeps: bool) -> None:
    assert pool.run(resumed, keeps) == [keeps] * 2


def sent(where: str, counter: str) -> int:
    """Bytes of a pass after the first, whose buckets tell more."""
    group = group_on(where)
    module = nn.Linear(1024, 1024, bias=False)
    model: Any = dreamcomm.DistributedDataParallel(module, process_group=group, bucket_cap_mb=25)
    model.register_comm_hook(hooks.State(group), hooks.int8_feedback)
    model(torch.randn(2, 1024)).sum().backward()
    before = bytes_of(group, counter)
    model(torch.randn(2, 1024)).sum().backward()
    return bytes_of(group, counter) - before


def bytes_of(group: Any, counter: str) -> int:
    exchanges = {"all_to_all", "all_gather"}
    stats = dreamcomm.stats(group)
    return sum(one.get(counter, 0) for name, one in stats.items() if name in exchanges)


@pytest.mark.parametrize("world", [2, 4])
def test_a_quarter_of_the_bytes(pool: Pool, world: int) -> None:
    numel = 1024 * 1024
    wire = numel + 4 * numel // BLOCK  # and scales
    for bytes_ in pool.run(sent, "", "sent", world=world):
        assert bytes_ == 2 * (world - 1) * wire // world


@pytest.mark.parametrize("where", ["a,b", "a,a,b,b"])
def test_hosts_send_as_much_whatever_their_ranks(pool: Pool, where: str) -> None:
    """And not each rank's values, as if it were alone."""
    numel = 1024 * 1024
    found = pool.run(sent, where, "sent_between_hosts", world=len(where.split(",")))
    handshakes = 1000 * len(found)
    assert 0 <= sum(found) / 2 - (numel + 4 * numel // BLOCK) < handshakes


def uneven() -> list[float]:
    """Rank 0 has two steps fewer; the sums of the weights."""
    module = Mlp()
    model: Any = dreamcomm.DistributedDataParallel(module, bucket_cap_mb=0.01)
    model.register_comm_hook(hooks.State(), hooks.int8_feedback)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with Join([model]):
        for step in range(5 - 2 * (dist.get_rank() == 0)):
            x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return [float(parameter.detach().sum()) for parameter in module.parameters()]


def test_uneven_inputs(pool: Pool) -> None:
    one, other = pool.run(uneven)
    assert one == other
    assert all(map(math.isfinite, one))


def under_other_defaults() -> tuple[str, str]:
    state = hooks.State(norm=True)
    module = nn.Linear(3, 2)
    model: Any = dreamcomm.DistributedDataParallel(module)
    model.register_comm_hook(state, hooks.int8_feedback)
    data = torch.ones(1, 3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            model(data).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    residual = state.residual(module.weight)
    assert residual is not None
    assert float(state.norm()) == pytest.approx(8**0.5)
    return str(residual.dtype), residual.device.type


def test_defaults_have_no_say(pool: Pool) -> None:
    assert pool.run(under_other_defaults) == [("torch.float32", "cpu")] * 2


def misused(sparse: bool) -> str:
    module = nn.Embedding(4, 3, sparse=True) if sparse else nn.Linear(3, 2)
    model: Any = nn.parallel.DistributedDataParallel(module)  # ours calls no hook for a sparse one
    model.register_comm_hook(hooks.State() if sparse else None, hooks.int8_feedback)
    try:
        model(torch.tensor([1, 2]) if sparse else torch.ones(1, 3)).sum().backward()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sparse", "words"),
    [(False, "expected a dreamcomm.hooks.State"), (True, "expected dense gradients")],
)
def test_misuse_is_refused(pool: Pool, sparse: bool, words: str) -> None:
    for text in pool.run(misused, sparse):
        assert words in text
