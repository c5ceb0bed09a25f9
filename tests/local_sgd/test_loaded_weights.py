"""Weights that a model loads between two steps stay, or are refused with a way out."""

from __future__ import annotations

import io
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.local_sgd import DiLoCo, Gossip, LocalSGD
from helpers.pool import Pool
from local_sgd import simulated
from local_sgd.simulated import weights

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.5)
STREAMING = {"every": 4, "fragments": 2, "overlap": 1}


def made(**settings: Any) -> tuple[nn.Module, DiLoCo]:
    module = simulated.model()
    return module, DiLoCo(module, simulated.sgd(module), OUTER, **settings)


def train(module: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        simulated.descend(module, optimizer, step, dist.get_rank())


def said(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def same(module: nn.Module, expected: Any) -> bool:
    found = [one.detach() for one in module.parameters()]
    return all(map(torch.equal, found, expected))


def rolled_back(part: bool) -> tuple[str, str, bool]:
    """What a step and a synchronize() say, and whether weights stay after take_weights()."""
    module, optimizer = made(**STREAMING)
    old = deepcopy(module.state_dict())
    train(module, optimizer, 0, 6)
    if part:
        module[0].load_state_dict(nn.Linear(6, 16).state_dict())  # type: ignore[index]
    else:
        module.load_state_dict(old)
    loaded = weights(module)
    texts = said(lambda: train(module, optimizer, 6, 7)), said(optimizer.synchronize)
    for one in loaded:
        dist.broadcast(one, 0)  # as take_weights()
    optimizer.take_weights()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.outer.param_groups[0]["momentum"] = 0.0  # which has steps of before
    train(module, optimizer, 6, 16)
    return *texts, same(module, loaded)


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_diloco_refuses_loaded_weights_or_takes_them(pool: Pool, part: bool) -> None:
    for rank, (step, synchronize, stay) in enumerate(pool.run(rolled_back, part)):
        for call, text in (("step", step), ("synchronize", synchronize)):
            assert f"DiLoCo.{call}: rank {rank}: parameter '0.weight' was changed" in text
            assert "after step 6" in text
            assert "call take_weights() on all ranks" in text
        assert stay


def taken_before_the_first_step() -> tuple[str, bool]:
    module, optimizer = made(every=2)
    module.load_state_dict(simulated.model(5).state_dict())
    text = said(lambda: train(module, optimizer, 0, 1))
    optimizer.take_weights()
    other = simulated.model(5)
    again = DiLoCo(other, simulated.sgd(other), OUTER, every=2)
    train(module, optimizer, 0, 5)
    train(other, again, 0, 5)
    return text, same(module, weights(other))


def test_diloco_takes_weights_before_the_first_step(pool: Pool) -> None:
    for text, equal in pool.run(taken_before_the_first_step):
        assert "call take_weights() on all ranks afterwards" in text
        assert equal


def swapped(how: str) -> bool:
    """Loads that change nothing: another run without them has the same bits."""
    module, optimizer = made(**STREAMING)
    other, plain = made(**STREAMING)
    train(other, plain, 0, 12)
    for step in range(12):
        train(module, optimizer, step, step + 1)
        own = deepcopy(module.state_dict())
        if how == "an evaluation's":
            module.load_state_dict(simulated.model(5).state_dict())
            module.load_state_dict(own)
        elif how == "a checkpoint's":  # the model's weights last
            state = deepcopy(optimizer.state_dict())
            module.load_state_dict(simulated.model(5).state_dict())
            optimizer.load_state_dict(state)
            module.load_state_dict(own)
        elif how == "a copy's":
            copies: list[nn.Module] = [deepcopy(module)]
            file = io.BytesIO()
            torch.save(module, file)
            file.seek(0)
            copies.append(torch.load(file, weights_only=False))
            for one in copies:
                one.load_state_dict(simulated.model(5).state_dict())
    return same(module, weights(other))


@pytest.mark.parametrize("how", ["an evaluation's", "a checkpoint's", "a copy's"])
def test_loads_that_change_nothing_are_no_error(pool: Pool, how: str) -> None:
    assert pool.run(swapped, how) == [True] * 2


def clamped() -> bool:
    """What a program writes into parameters is training, and is averaged."""
    module, optimizer = made(every=2)
    for step in range(6):
        train(module, optimizer, step, step + 1)
        with torch.no_grad():
            for one in module.parameters():
                one.clamp_(-0.01, 0.01)
    return all(float(one.abs().max()) <= 0.01 for one in weights(module))


def test_parameters_may_be_clamped_between_steps(pool: Pool) -> None:
    assert pool.run(clamped) == [True] * 2


def with_nan(kind: str) -> str:
    module = simulated.model()
    if kind == "half":
        optimizer = DiLoCo(module, simulated.sgd(module), OUTER, every=2)
        module.bfloat16()
        return said(optimizer.step)
    with torch.no_grad():
        module[2].bias[3] = float("nan")  # type: ignore[index]
    return said(DiLoCo(module, simulated.sgd(module), OUTER, every=2).step)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nan", "parameter '2.bias' had NaN already when DiLoCo was made"),
        ("half", "parameter '0.weight' is bfloat16 on cpu, and was float32 on cpu"),
    ],
)
def test_the_first_step_names_what_is_wrong_with_a_parameter(
    pool: Pool, kind: str, words: str
) -> None:
    for text in pool.run(with_nan, kind):
        assert words in text


def stays(way: str) -> bool:
    """Without an outer state loaded weights simply stay, if all ranks load them."""
    module = simulated.model()
    old = deepcopy(module.state_dict())
    inner = simulated.sgd(module)
    optimizer: Any = (
        LocalSGD(module, inner, every=2) if way == "LocalSGD" else Gossip(module, inner)
    )
    train(module, optimizer, 0, 3)
    module.load_state_dict(old)
    optimizer.param_groups[0]["lr"] = 0.0
    train(module, optimizer, 3, 8)
    return same(module, old.values())


@pytest.mark.parametrize("way", ["LocalSGD", "Gossip"])
def test_loaded_weights_stay(pool: Pool, way: str) -> None:
    assert pool.run(stays, way) == [True] * 2


def outstanding() -> tuple[str, bool]:
    """Rounds of the weights before would be added to those that are loaded."""
    module = simulated.model()
    old = deepcopy(module.state_dict())
    optimizer = Gossip(module, simulated.sgd(module), bound=3, seed=1)
    train(module, optimizer, 0, 5)
    module.load_state_dict(old)
    text = said(lambda: train(module, optimizer, 5, 6))
    optimizer.finish()
    module.load_state_dict(old)
    optimizer.param_groups[0]["lr"] = 0.0
    train(module, optimizer, 5, 12)
    return text, same(module, old.values())


def test_gossip_refuses_weights_under_outstanding_rounds(pool: Pool) -> None:
    for rank, (text, equal) in enumerate(pool.run(outstanding)):
        assert f"Gossip.step: rank {rank}: parameter '0.weight' was changed" in text
        assert "call finish() on all ranks" in text
        assert equal
