"""LocalSGD and DiLoCo refuse what cannot work, on all ranks, and at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.local_sgd import DiLoCo, LocalSGD
from helpers.pool import Pool
from local_sgd import simulated
from local_sgd.simulated import weights

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

SGD = torch.optim.SGD
NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ""


def of_local_sgd(kind: str) -> str:
    rank = dist.get_rank()
    module: Any = simulated.model()
    inner: Any = simulated.sgd(module)
    settings: dict[str, Any] = {"every": 4}
    if kind == "every":
        settings["every"] = 0
    elif kind == "start":
        settings["start"] = -1
    elif kind == "one rank" and rank == 1:
        settings["every"] = True
    elif kind == "differs":
        settings["every"] = 4 + rank
    elif kind == "model" and rank == 1:
        module = nn.Linear(6, 4)
        inner = simulated.sgd(module)
    elif kind == "statistics":
        module = simulated.Normed(affine=False)
        if rank == 1:
            module.norm = nn.Identity()  # has no parameters, as the other
        inner = simulated.sgd(module)
    elif kind == "stepped" and rank == 1:
        inner = simulated.sgd(module[2:])
    elif kind == "foreign":
        inner = simulated.sgd(nn.Linear(2, 2))
    elif kind == "buffers":
        settings["buffers"] = "none"
    elif kind == "optimizer":
        inner = SGD
    elif kind == "module":
        module = list(module.parameters())
    return said(lambda: LocalSGD(module, inner, **settings))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("every", "every to be an int of at least 1, got 0"),
        ("start", "start to be an int of at least 0, got -1"),
        ("one rank", "every to be an int of at least 1, got True"),
        ("differs", "every is 5 on rank 1, and 4 on rank 0"),
        ("model", "modules differ"),
        ("statistics", "buffer 'norm.running_mean' is missing on rank 1"),
        ("stepped", "parameter '0.weight' is not stepped on rank 1"),
        ("foreign", "only 0 of them are the model's"),
        ("buffers", "expected buffers to be one of"),
        ("optimizer", "expected an optimizer of torch, got type"),
        ("module", "expected a module, got list"),
    ],
)
def test_local_sgd_is_refused_on_all_ranks(pool: Pool, kind: str, words: str) -> None:
    first, second = pool.run(of_local_sgd, kind)
    assert words in first
    assert words in second
    assert first.startswith("LocalSGD: rank 1 has failed") == (kind == "one rank")


def of_diloco(kind: str) -> str:
    rank = dist.get_rank()
    module = simulated.model()
    inner: Any = simulated.sgd(module)
    outer: Any = NESTEROV
    settings: dict[str, Any] = {"every": 4}
    if kind == "overlap":
        settings["overlap"] = 4
    elif kind == "fragments":
        settings["fragments"] = 7
    elif kind == "no fragment":
        settings["fragments"] = 0
    elif kind == "alpha":
        settings["alpha"] = 1.0
    elif kind == "wire":
        settings["wire_dtype"] = torch.int64
    elif kind == "outer":
        outer = SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    elif kind == "stepped":
        outer = SGD(module.parameters(), lr=1.0, momentum=0.9)
        simulated.descend(module, outer, 0, rank)
    elif kind == "differs":
        settings["overlap"] = rank
    elif kind == "rates":
        outer = partial(SGD, lr=0.5 + rank)
    elif kind == "makes":
        outer = len
    elif kind == "calls":
        outer = 0.7
    elif kind == "subset":
        outer = lambda parameters: SGD(parameters[:2], lr=1.0)  # noqa: E731
    elif kind == "fails" and rank == 1:
        outer = partial(SGD, lr=-1.0)
    return said(lambda: DiLoCo(module, inner, outer, **settings))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("overlap", "overlap below every"),
        ("fragments", "at most a fragment for each of 6 parameters, got 7"),
        ("no fragment", "fragments to be an int of at least 1, got 0"),
        ("alpha", "alpha from 0 to below 1, got 1.0"),
        ("wire", "wire_dtype"),
        ("outer", "other parameters than the inner one"),
        ("stepped", "the outer optimizer has stepped already"),
        ("differs", "overlap is 1 on rank 1, and 0 on rank 0"),
        ("rates", "outer.param_groups[0]['lr'] is 1.5 on rank 1, and 0.5 on rank 0"),
        ("makes", "outer to make an optimizer, got a int"),
        ("calls", "outer to be a function or an optimizer, got float"),
        ("subset", "the 6 parameters that it is given, got one of 2"),
        ("fails", "Invalid learning rate: -1.0"),
    ],
)
def test_diloco_is_refused_on_all_ranks(pool: Pool, kind: str, words: str) -> None:
    for text in pool.run(of_diloco, kind):
        assert words in text


def at_other_steps(name: str, first: str) -> tuple[str, str]:
    """Rank 1 has loaded a state of two steps later; the error, and what the same steps say."""
    rank = dist.get_rank()
    module = simulated.model()
    inner = simulated.sgd(module)
    optimizer: Any
    if name == "LocalSGD":
        optimizer = LocalSGD(module, inner, every=4)
    else:
        optimizer = DiLoCo(module, inner, NESTEROV, every=4, fragments=2)

    def train(steps: int) -> None:
        for step in range(steps):
            simulated.descend(module, optimizer, step, rank)

    def at(steps: int) -> str:
        state = optimizer.state_dict()
        state[optimizer.OWN_KEY]["steps"] = steps
        optimizer.load_state_dict(state)
        return said(lambda: train(4) if first == "step" else getattr(optimizer, first)())

    train(5)  # all are in step at first
    return at(4 + 2 * rank), at(4)


@pytest.mark.parametrize(
    ("name", "first", "words"),
    [
        ("LocalSGD", "step", "rank 0 after 8, rank 1 after 8"),
        ("LocalSGD", "average_now", "rank 0 after 4, rank 1 after 6"),
        ("DiLoCo", "synchronize", "rank 0 after 4, rank 1 after 6"),
        ("DiLoCo", "step", "rank 0 after 6, rank 1 after 8"),
    ],
)
def test_other_numbers_of_steps_are_refused(pool: Pool, name: str, first: str, words: str) -> None:
    for other, equal in pool.run(at_other_steps, name, first):
        if words == "rank 0 after 8, rank 1 after 8":
            assert other == ""
        else:
            assert f"{name}.{first}: expected all ranks to have made as many steps" in other
            assert words in other
        assert equal == ""


def states_refused() -> tuple[str, str]:
    module = simulated.model()
    inner = simulated.sgd(module)
    optimizer = LocalSGD(module, inner, every=2)
    without = said(lambda: optimizer.load_state_dict(inner.state_dict()))
    return without, said(
        lambda: optimizer.load_state_dict(inner.state_dict() | {"local_sgd": {"steps": 1.5}})
    )


def test_states_of_others_are_refused(pool: Pool) -> None:
    for without, wrong in pool.run(states_refused):
        assert "without 'local_sgd'" in without
        assert "a number of steps from 0 on, got 1.5" in wrong


def groups_added() -> tuple[str, str, bool]:
    """A foreign group is not added, and training goes on; DiLoCo adds none."""
    module, other = simulated.model(), simulated.model()
    optimizer = LocalSGD(module, simulated.sgd(module), every=2)
    foreign = said(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    for step in range(2):
        simulated.descend(module, optimizer, step, dist.get_rank())
    diloco = DiLoCo(other, SGD(other[0].parameters(), lr=0.1), NESTEROV, every=2)  # type: ignore[index]
    added = said(lambda: diloco.add_param_group({"params": list(other[2].parameters())}))  # type: ignore[index]
    same = len(optimizer.param_groups) == len(diloco.param_groups) == 1
    return foreign, added, same and bool(weights(module))


def test_groups_that_cannot_be_averaged_are_not_added(pool: Pool) -> None:
    for foreign, added, same in pool.run(groups_added):
        assert "the optimizer has 7 parameters, and only 6" in foreign
        assert "the fragments are fixed" in added
        assert same
