"""The wrapped optimizer's groups and state are the wrapper's, whoever replaces them, and when."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
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

OUTER = partial(torch.optim.SGD, lr=0.7)
MADE: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "LocalSGD": lambda module, inner: LocalSGD(module, inner, every=2),
    "DiLoCo": lambda module, inner: DiLoCo(module, inner, OUTER, every=2),
    "Gossip": lambda module, inner: Gossip(module, inner),
}


def load(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


def assign(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.state = defaultdict(dict, optimizer.state)


REPLACED: dict[str, Callable[[Any], None]] = {
    "the inner one's load_state_dict": lambda wrapper: load(wrapper.optimizer),
    "the inner one's attributes": lambda wrapper: assign(wrapper.optimizer),
    "the wrapper's load_state_dict": load,
    "the wrapper's attributes": assign,
    "the inner one's __setstate__": lambda wrapper: wrapper.optimizer.__setstate__(
        {"param_groups": [dict(group) for group in wrapper.param_groups]}
    ),
    "another inner one": lambda wrapper: setattr(
        wrapper,
        "optimizer",
        torch.optim.SGD(wrapper.param_groups[0]["params"], lr=0.05, momentum=0.9),
    ),
}


def replaced(way: str) -> list[str]:
    """The replacements after which a schedule over the wrapper is not what the steps take."""
    wrong = []
    for how, replace in REPLACED.items():
        module = simulated.model()
        optimizer = MADE[way](module, simulated.sgd(module))
        simulated.descend(module, optimizer, 0, dist.get_rank())
        replace(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
        schedule.step()
        before = weights(module)
        simulated.descend(module, optimizer.optimizer, 1, dist.get_rank())
        inner = optimizer.optimizer
        same = (
            all(map(torch.equal, before, weights(module)))  # the rate is 0
            and inner.param_groups is optimizer.param_groups
            and inner.state is optimizer.state
            and inner.defaults is optimizer.defaults
            and inner.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 0.0
        )
        wrong += [] if same else [how]
    return wrong


@pytest.mark.parametrize("way", MADE)
def test_a_schedule_reaches_steps_after_groups_are_replaced(pool: Pool, way: str) -> None:
    assert pool.run(replaced, way) == [[]] * 2


def hooked() -> list[str]:
    """Hooks of the state's calls work on either, also those of later."""
    module, calls = simulated.model(), list[str]()
    optimizer = LocalSGD(module, simulated.sgd(module), every=2)
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saves"))
    optimizer.optimizer.register_load_state_dict_post_hook(lambda _: calls.append("has loaded"))
    load(optimizer)
    return calls


def test_hooks_of_states_are_shared(pool: Pool) -> None:
    assert pool.run(hooked) == [["saves", "has loaded"]] * 2


def exchanged(way: str) -> str:
    """As many parameters as before, but others."""
    module, other = simulated.model(), simulated.model()
    inner = simulated.sgd(module)
    optimizer = MADE[way](module, inner)
    inner.param_groups[0]["params"] = list(other.parameters())
    try:
        simulated.descend(other, optimizer, 0, dist.get_rank())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", MADE)
def test_as_many_other_parameters_are_refused(pool: Pool, way: str) -> None:
    for text in pool.run(exchanged, way):
        assert f"{way}.step: the wrapped optimizer has got other parameters since" in text


def copied(how: Callable[[Any], Any]) -> list[str]:
    found = []
    for way, make in MADE.items():
        module = simulated.model()
        optimizer = make(module, simulated.sgd(module))
        try:
            how(optimizer)
        except TypeError as error:
            found.append(str(error))
        else:
            found.append(f"{way} was copied")
    return found


@pytest.mark.parametrize("how", [copy, deepcopy, pickle.dumps])
def test_copies_are_refused_by_name(pool: Pool, how: Callable[[Any], Any]) -> None:
    for texts in pool.run(copied, how):
        for way, text in zip(MADE, texts, strict=True):
            assert text.startswith(f"{way}: it cannot be copied or pickled")


def skipped() -> list[tuple[int, int, bool]]:
    """A wrapper of a wrapper under a GradScaler, where rank 0 has an infinity in step 2."""
    module = simulated.model()
    inner = LocalSGD(module, torch.optim.SGD(module.parameters(), 0.01), every=2)
    optimizer = DiLoCo(module, inner, OUTER, every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(1, 5):
        x, y = simulated.batch(step, dist.get_rank())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        if step == 2 and dist.get_rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    finite = all(bool(one.isfinite().all()) for one in weights(module))
    return [(inner.steps, optimizer.steps, finite)]


def test_a_skipped_step_counts_in_both_of_two_wrappers(pool: Pool) -> None:
    assert pool.run(skipped) == [[(4, 4, True)]] * 2


def assigned(way: str) -> str:
    """load_state_dict(assign=True) gives a model parameters that no optimizer steps."""
    module = simulated.model()
    optimizer = MADE[way](module, simulated.sgd(module))
    simulated.descend(module, optimizer, 0, dist.get_rank())
    module.load_state_dict(deepcopy(module.state_dict()), assign=True)
    try:
        simulated.descend(module, optimizer, 1, dist.get_rank())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", MADE)
def test_replaced_parameters_are_refused(pool: Pool, way: str) -> None:
    for text in pool.run(assigned, way):
        assert f"{way}.step: the model has lost parameter '0.weight'" in text


def regrouped(way: str) -> tuple[bool, str]:
    """A layer within another module keeps its parameters; another layer has others."""
    module: Any = simulated.model()
    optimizer = MADE[way](module, simulated.sgd(module))
    simulated.descend(module, optimizer, 0, dist.get_rank())
    module[2] = nn.Sequential(module[2])
    for step in range(1, 4):
        simulated.descend(module, optimizer, step, dist.get_rank())
    trained = optimizer.steps == 4
    module[2] = nn.Linear(16, 16)
    try:
        for step in range(4, 6):
            simulated.descend(module, optimizer, step, dist.get_rank())
    except RuntimeError as error:
        return trained, str(error)
    return trained, ""


@pytest.mark.parametrize("way", MADE)
def test_a_replaced_layer_is_refused_and_one_in_another_module_is_not(pool: Pool, way: str) -> None:
    for trained, text in pool.run(regrouped, way):
        assert trained
        assert f"{way}.step: the model has lost parameter '2.weight'" in text
