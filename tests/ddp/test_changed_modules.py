"""Modules that get other parameters or buffers after they were wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import dreamcomm
from ddp.test_traps import wrap
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

both_wrappers = pytest.mark.parametrize("how", ["ddp", "replicate"])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def head(module: nn.Sequential) -> None:
    module[2] = nn.Linear(4, 3)  # each rank's own values


def parameter(module: nn.Sequential) -> None:
    module[0].bias = nn.Parameter(torch.randn(4))


def removed(module: nn.Sequential) -> None:
    module[0].bias = None


def dropped(module: nn.Sequential) -> None:
    del module[1]


def longer(module: nn.Sequential) -> None:
    module.append(nn.Linear(2, 2))


def assign(module: nn.Sequential) -> None:
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def weight_norm(module: nn.Sequential) -> None:
    parametrizations.weight_norm(module[2])


def pruned(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[2], "weight", 0.5)


def bfloat16(module: nn.Sequential) -> None:
    module.bfloat16()


def float64(module: nn.Sequential) -> None:
    module.double()


def shape(module: nn.Sequential) -> None:
    module[2].weight.data, module[2].bias.data = torch.ones(5, 4), torch.ones(5)


CHANGES: list[Callable[[nn.Sequential], None]] = [
    head, parameter, removed, dropped, longer, assign, weight_norm, pruned, bfloat16, float64,
    shape,
]  # fmt: skip


def norms(gradients: Iterable[Tensor | None]) -> list[float | None]:
    return [None if one is None else one.double().norm().item() for one in gradients]


def norms_of(module: nn.Module) -> list[float | None]:
    return norms(one.grad for one in module.parameters())


def change(how: str, step: int) -> dict[str, list[list[float | None]]]:
    """For each change, after that many steps, the norms of this rank's gradients, and of the mean
    of the ranks' losses in one process."""
    results = {}
    rank, world = dist.get_rank(), dist.get_world_size()
    for changes in CHANGES:
        torch.manual_seed(rank + 1)
        module = net()
        model = wrap(module, how)
        x = torch.full((1, 4), 1.0 + rank)
        for _ in range(step):
            model(x).square().sum().backward()
        changes(module)
        module.zero_grad()
        x = x.to(module[0].weight.dtype)
        model(x).square().sum().backward()
        with model.no_sync():  # the module has rank 0's values by now
            losses = [module((x / (1 + rank)) * (1 + r)).square().sum() for r in range(world)]
        parameters = list(module.parameters())
        whole = torch.autograd.grad(sum(losses) / world, parameters, allow_unused=True)
        results[changes.__name__] = [norms([p.grad for p in parameters]), norms(whole)]
    return results


@both_wrappers
@pytest.mark.parametrize("step", [0, 2])
def test_changes_are_taken_in(pool: Pool, how: str, step: int) -> None:
    first, second = pool.run(change, how, step)
    for name, (found, expected) in first.items():
        close = 2e-2 if name == "bfloat16" else 1e-5
        assert found == pytest.approx(expected, rel=close), name
        assert second[name][0] == found, name


def one_changes(how: str) -> str:
    module = net()
    model = wrap(module, how)
    if dist.get_rank() == 0:
        module[2] = nn.Linear(4, 3)
    try:
        model(torch.ones(1, 4)).sum().backward()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@both_wrappers
def test_a_change_on_one_rank_is_an_error_on_all(pool: Pool, how: str) -> None:
    for text in pool.run(one_changes, how, group_timeout=5.0):
        assert text != "no error"


def under_zero(how: str) -> list[str]:
    module = net()
    model = wrap(module, how)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    errors = []
    for _ in range(2):  # it is not forgotten
        module[2] = nn.Linear(4, 2)
        try:
            model(torch.ones(1, 4)).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))
    del optimizer
    return errors


def test_a_change_under_a_sharded_optimizer_is_refused(pool: Pool) -> None:
    for errors in pool.run(under_zero, "ddp"):
        assert len(errors) == 2
        assert all("make the optimizer anew" in one and "rank" in one for one in errors)


def accumulated(how: str) -> float:
    """A parameter that was replaced under no_sync, and accumulates before it is taken in."""
    module = nn.Linear(1, 1, bias=False)
    model = wrap(module, how)
    module.weight = nn.Parameter(torch.zeros(1, 1))
    x = torch.full((1, 1), 1.0 + dist.get_rank())
    with model.no_sync():
        model(x).sum().backward()
    model.reduce_gradients()
    assert module.weight.grad is not None
    return module.weight.grad.item()


@both_wrappers
def test_reduce_gradients_takes_changes_in(pool: Pool, how: str) -> None:
    assert pool.run(accumulated, how) == [1.5, 1.5]


def functional(how: str) -> list[float | None]:
    """Other tensors take the parameters' places for one call: nothing has changed."""
    module = net()
    model = wrap(module, how)
    plans = model.reducer.backward if how == "ddp" else module._replicate_reducer.backward
    for _ in range(2):
        module.zero_grad()
        scaled = {name: 2 * one for name, one in model.named_parameters()}
        x = torch.full((1, 4), 1.0 + dist.get_rank())
        torch.func.functional_call(model, scaled, (x,)).sum().backward()
    now = model.reducer.backward if how == "ddp" else module._replicate_reducer.backward
    return [float(plans is now), *norms_of(module)]


@both_wrappers
def test_a_functional_call_changes_nothing(pool: Pool, how: str) -> None:
    first, second = pool.run(functional, how)
    assert first == second
    assert first[0] == 1.0


# Buffers.


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.full((4,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        for buffer in self.buffers():
            out = out + buffer.sum()
        return out


def renamed(how: str, when: str) -> str:
    """Ranks have as many buffers of one shape, of other names."""
    module = Buffered()
    name = "left" if dist.get_rank() == 0 else "right"
    if when == "before":
        module.register_buffer(name, torch.full((4,), 7.0 + dist.get_rank()))
    try:
        model = wrap(module, how)
        model(torch.ones(1, 4)).sum().backward()
        module.register_buffer(name, torch.full((4,), 7.0 + dist.get_rank()))
        model(torch.ones(1, 4)).sum().backward()
    except ValueError as error:
        return str(error)
    return "no error"


@both_wrappers
@pytest.mark.parametrize("when", ["before", "later"])
def test_buffers_that_differ_are_named(pool: Pool, how: str, when: str) -> None:
    for text in pool.run(renamed, how, when):
        assert "modules differ: buffer 1 is 'left' of shape (4,)" in text
        assert "'right'" in text


def replaced(how: str) -> list[Any]:
    """Buffers that are made anew, or added to a module that had none."""
    module = nn.Sequential(nn.Linear(4, 4))
    model = wrap(module, how)
    module[0].register_buffer("count", torch.tensor([1.0 + dist.get_rank()]))
    model(torch.ones(1, 4)).sum().backward()
    first = module[0].count.item()
    module[0].count = torch.tensor([3.0 + dist.get_rank(), 4.0])
    model(torch.ones(1, 4)).sum().backward()
    return [first, module[0].count.tolist()]


@both_wrappers
def test_new_buffers_get_rank_0s_values(pool: Pool, how: str) -> None:
    assert pool.run(replaced, how) == [[1.0, [3.0, 4.0]]] * 2


def own_buffers() -> list[float | None]:
    """Ranks that keep their own buffers may have different ones."""
    module = nn.Linear(4, 4)
    if dist.get_rank() == 0:
        module.register_buffer("own", torch.ones(3))
    model = dreamcomm.DistributedDataParallel(module, broadcast_buffers=False)
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    return norms_of(module)


def test_ranks_own_buffers_are_not_compared(pool: Pool) -> None:
    first, second = pool.run(own_buffers)
    assert first == second


# Steps within a backward pass.


def in_backward(how: str, what: str) -> str:
    module = net()
    model = wrap(module, how)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def hook(one: Tensor) -> None:
        if what == "takes":
            one.grad = None
        elif what == "steps":
            optimizer.step()
        else:
            with torch.no_grad():
                parameters[0].mul_(0.5)

    parameters[-1].register_post_accumulate_grad_hook(hook)
    texts = []
    for _ in range(2):  # the first pass reduces at its end, later ones before
        try:
            model(torch.full((1, 4), 1.0 + dist.get_rank())).square().sum().backward()
        except RuntimeError as error:
            texts.append(str(error))
    return " | ".join(texts)


@both_wrappers
@pytest.mark.parametrize("what", ["takes", "steps", "changes another"])
def test_a_step_within_backward_is_an_error(pool: Pool, how: str, what: str) -> None:
    word = "has taken the gradient of parameter '2.bias'" if what == "takes" else "was changed"
    for text in pool.run(in_backward, how, what):
        assert text.count(word) == 2, text
        assert "Step the optimizer after backward()" in text


# Parameters without elements.


class Empty(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.extra = nn.Parameter(torch.empty(0))
        self.used = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.used.sum()
        return out


def train_empty(how: str, hooked: bool) -> list[float]:
    module = Empty()
    if how.startswith("zero"):
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=int(how[-1]), lr=0.1)
        model: nn.Module = module
    else:
        model = wrap(module, how, bucket_cap_mb=1e-6)
        if hooked:
            model.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.average)  # type: ignore[operator]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
        optimizer.step()
    return [one.sum().item() for one in module.parameters()]


@pytest.mark.parametrize("how", ["ddp", "replicate", "zero 1", "zero 2"])
def test_parameters_without_elements(pool: Pool, how: str) -> None:
    first, second = pool.run(train_empty, how, False)
    assert first == second


def test_a_hook_gets_empty_buckets(pool: Pool) -> None:
    first, second = pool.run(train_empty, "ddp", True)
    assert first == second
