"""Frozen parameters, and what comes after the wrapper was made: parameters, weights, buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.local_sgd import DiLoCo, Gossip, LocalSGD
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
DECAYS = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3)).to(dtype)


def train(module: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        dtype = next(module.parameters()).dtype
        x = torch.randn(8, 40, generator=generator).to(dtype)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def equal_on_all(tensor: Tensor, near: float = 0.0) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.detach().contiguous())
    return all(torch.allclose(one, every[0], rtol=0.0, atol=near) for one in every)


def frozen_from_the_start(outer: Any, dtype: torch.dtype, settings: dict[str, Any]) -> bool:
    module = model(dtype)
    module[0].requires_grad_(False)
    before = module[0].weight.detach().clone()
    inner = torch.optim.AdamW(module.parameters(), weight_decay=0.1)
    optimizer = DiLoCo(module, inner, outer, **settings)
    start = module[1].weight.detach().clone()
    train(module, optimizer, 20)
    optimizer.synchronize()
    assert not torch.equal(start, module[1].weight)
    return torch.equal(before, module[0].weight)


@pytest.mark.parametrize(
    ("outer", "dtype", "settings"),
    [
        (OUTER, torch.float32, {"every": 2}),
        (DECAYS, torch.float32, {"every": 4, "fragments": 3, "overlap": 1}),
        (OUTER, torch.bfloat16, {"every": 2, "alpha": 0.3}),
        (OUTER, torch.float32, {"every": 2, "alpha": 0.1, "wire_dtype": torch.bfloat16}),
    ],
    ids=["momentum", "decay", "alpha", "wire"],
)
def test_a_layer_that_is_frozen_stays(
    pool: Pool, outer: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    assert pool.run(frozen_from_the_start, outer, dtype, settings) == [True] * 2


def frozen_later() -> tuple[bool, bool]:
    """Whether ranks have equal layers after the next round, and keep them."""
    module = model()
    inner = torch.optim.SGD(module.parameters(), 0.1)
    optimizer = DiLoCo(module, inner, OUTER, every=4, alpha=0.5)
    train(module, optimizer, 6)
    module[0].requires_grad_(False)
    train(module, optimizer, 2)
    equal, kept = equal_on_all(module[0].weight), module[0].weight.detach().clone()
    train(module, optimizer, 8)
    return equal, torch.equal(kept, module[0].weight)


def test_a_layer_that_is_frozen_in_a_round_becomes_equal_and_stays(pool: Pool) -> None:
    assert pool.run(frozen_later) == [(True, True)] * 2


MADE: dict[str, Any] = {
    "LocalSGD": lambda module, inner: LocalSGD(module, inner, every=2),
    "DiLoCo": lambda module, inner: DiLoCo(module, inner, OUTER, every=2),
    "Gossip": lambda module, inner: Gossip(module, inner),
}


def grown(way: str) -> str:
    module = model()
    inner = torch.optim.SGD(module[1].parameters(), 0.1)
    optimizer = MADE[way](module, inner)
    train(module, optimizer, 1)
    inner.add_param_group({"params": list(module[0].parameters())})
    try:
        train(module, optimizer, 1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", MADE)
def test_parameters_added_to_the_wrapped_optimizer_are_refused(pool: Pool, way: str) -> None:
    for text in pool.run(grown, way):
        assert f"{way}.step: the wrapped optimizer has got other parameters since" in text


def added() -> bool:
    """LocalSGD averages parameters that its own add_param_group has added."""
    module = model()
    optimizer = LocalSGD(module, torch.optim.SGD(module[1].parameters(), 0.1), every=2)
    optimizer.add_param_group({"params": list(module[0].parameters())})
    train(module, optimizer, 2)
    return equal_on_all(module[0].weight)


def test_local_sgd_averages_added_parameters(pool: Pool) -> None:
    assert pool.run(added) == [True] * 2


def loaded_late() -> str:
    module = model()
    optimizer = DiLoCo(module, torch.optim.SGD(module.parameters(), 0.1), OUTER, every=2)
    torch.manual_seed(5)
    module.load_state_dict(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3)).state_dict())
    try:
        train(module, optimizer, 1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_diloco_refuses_weights_that_come_after_it(pool: Pool) -> None:
    for text in pool.run(loaded_late):
        assert "load weights before DiLoCo is made" in text


def resumed_apart() -> str:
    """Each rank loads a state of another step."""
    module = model()
    optimizer = LocalSGD(module, torch.optim.SGD(module.parameters(), 0.1), every=4)
    state = optimizer.state_dict()
    state["local_sgd"] = {"steps": 4 * dist.get_rank()}
    optimizer.load_state_dict(state)
    try:
        train(module, optimizer, 4)
    except ValueError as error:
        return str(error)
    return ""


def test_local_sgd_refuses_ranks_of_different_steps(pool: Pool) -> None:
    for text in pool.run(resumed_apart):
        assert "LocalSGD.step: expected all ranks to have made as many steps" in text


class Averages(nn.Module):
    """Replaces its buffer in each pass, as many moving averages do."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 3)
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)[:3]
        out: Tensor = self.layer(x)
        return out


def replaced(options: dict[str, Any]) -> tuple[bool, str]:
    module = Averages()
    optimizer = Gossip(
        module, torch.optim.SGD(module.parameters(), 0.1), topology="full", **options
    )
    train(module, optimizer, 3)
    equal = bool(options) or equal_on_all(module.seen, 1e-6)  # each rank rounds its own sum
    optimizer.average_now()
    equal = equal and equal_on_all(module.seen)
    module.seen = torch.zeros(4)
    try:
        optimizer.step()
    except RuntimeError as error:
        return equal, str(error)
    return equal, ""


@pytest.mark.parametrize("options", [{}, {"bound": 1}], ids=["synchronous", "late"])
def test_gossip_averages_buffers_that_a_model_replaces(pool: Pool, options: dict[str, Any]) -> None:
    for equal, text in pool.run(replaced, options, world=3):
        assert equal
        assert "the model has buffers of [((4,), torch.float32)]" in text
