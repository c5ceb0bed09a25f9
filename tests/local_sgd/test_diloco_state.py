"""DiLoCo: what it saves and loads, and what synchronize() leaves."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dreamcomm.local_sgd import DiLoCo
from helpers.pool import Pool
from local_sgd import simulated
from local_sgd.simulated import weights

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
STREAMING = {"every": 6, "fragments": 3, "overlap": 3}


def made(seed: int = 0, **settings: Any) -> tuple[nn.Module, DiLoCo]:
    module = simulated.model(seed)
    return module, DiLoCo(module, simulated.sgd(module), NESTEROV, **settings)


def train(module: nn.Module, optimizer: DiLoCo, first: int, last: int) -> None:
    for step in range(first, last):
        simulated.descend(module, optimizer, step, dist.get_rank())


def filed(state: dict[str, Any], how: str) -> dict[str, Any]:
    """A state after its way through a file of this rank."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        if how == "dcp":
            dcp.save(state, checkpoint_id=Path(folder) / "dcp", no_dist=True)
            dcp_to_torch_save(Path(folder) / "dcp", file)
        else:
            torch.save(state, file)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def resumed(settings: dict[str, Any], at: int, how: str) -> tuple[bool, int]:
    """Saved inside a round, with means under way, and gone on with in another object."""
    module, optimizer = made(**settings)
    train(module, optimizer, 0, at)
    own = deepcopy(module.state_dict())
    state = filed(optimizer.state_dict(), how)
    other, again = made(seed=9, **settings)
    other.load_state_dict(own)
    again.load_state_dict(state)
    train(module, optimizer, at, at + 17)
    train(other, again, at, at + 17)
    return all(map(torch.equal, weights(module), weights(other))), len(state["diloco"]["flights"])


@pytest.mark.parametrize("how", ["torch.save", "dcp"])
def test_resumes_inside_a_round(pool: Pool, how: str) -> None:
    assert pool.run(resumed, STREAMING, 10, how) == [(True, 2)] * 2


@pytest.mark.long
@pytest.mark.parametrize("at", range(1, 13))
def test_resumes_at_any_step(pool: Pool, at: int) -> None:
    for settings in ({**STREAMING, "alpha": 0.5, "wire_dtype": torch.bfloat16}, {"every": 5}):
        for same, _ in pool.run(resumed, settings, at, "torch.save"):
            assert same


def resumed_when_synchronized() -> bool:
    """Both synchronize again without anything new, which has to move neither."""
    module, optimizer = made(every=5)
    train(module, optimizer, 0, 7)
    optimizer.synchronize()
    other, again = made(seed=9, every=5)
    other.load_state_dict(deepcopy(module.state_dict()))
    again.load_state_dict(filed(optimizer.state_dict(), "torch.save"))
    before = weights(module)
    optimizer.synchronize()
    again.synchronize()
    train(module, optimizer, 7, 12)
    train(other, again, 7, 12)
    return all(map(torch.equal, weights(module), weights(other))) and not all(
        map(torch.equal, before, weights(module))
    )


def test_resumes_after_synchronize(pool: Pool) -> None:
    assert pool.run(resumed_when_synchronized) == [True] * 2


def synchronized(alpha: float) -> tuple[bool, bool, bool]:
    """What ranks have in common, and that two runs have the same bits."""
    results = []
    for _ in range(2):
        module, optimizer = made(every=5, fragments=2, overlap=2, alpha=alpha)
        train(module, optimizer, 0, 12)
        apart = equal_on_all(module)
        optimizer.synchronize()
        results.append(weights(module))
    return apart, equal_on_all(module), all(map(torch.equal, *results))


def equal_on_all(module: nn.Module) -> bool:
    flat = torch.cat([one.detach().reshape(-1) for one in module.parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(one, every[0]) for one in every)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_synchronize_makes_ranks_equal(pool: Pool, alpha: float) -> None:
    assert pool.run(synchronized, alpha, world=3) == [(False, True, True)] * 3


def outer_steps(steps: int, settings: dict[str, Any]) -> list[int]:
    """How often synchronize() steps each parameter's outer copy."""
    module, optimizer = made(**settings)
    train(module, optimizer, 0, steps)
    counts = [0] * len(weights(module))

    def count(*_: Any) -> None:
        for group in optimizer.outer.param_groups:
            for number, one in enumerate(group["params"]):
                counts[number] += one.grad is not None

    optimizer.outer.register_step_pre_hook(count)
    optimizer.synchronize()
    optimizer.synchronize()
    return counts


@pytest.mark.parametrize(
    ("steps", "settings"),
    [
        (11, {"every": 5, "overlap": 3}),  # its mean began a step ago
        (12, {"every": 5, "fragments": 2, "overlap": 2}),
        (13, {"every": 6, "fragments": 3}),  # none is under way
        (14, {"every": 6, "fragments": 3, "overlap": 3}),
    ],
    ids=["one", "first", "none", "some"],
)
def test_synchronize_steps_each_parameter_once(
    pool: Pool, steps: int, settings: dict[str, Any]
) -> None:
    for counts in pool.run(outer_steps, steps, settings):
        assert counts == [1] * 6


def settled() -> tuple[bool, bool]:
    """At a round's end, and twice, there is nothing new: no momentum moves the weights."""
    module, optimizer = made(every=3)
    found = []
    for steps in (3, 2):
        train(module, optimizer, 0, steps)
        if steps == 2:
            optimizer.synchronize()
        before = weights(module)
        optimizer.synchronize()
        found.append(all(map(torch.equal, before, weights(module))))
    return found[0], found[1]


def test_synchronize_without_news_changes_nothing(pool: Pool) -> None:
    assert pool.run(settled) == [(True, True)] * 2


def refused(kind: str) -> tuple[str, bool]:
    """The error, and whether the optimizer is as before."""
    module, optimizer = made(**STREAMING)
    train(module, optimizer, 0, 10)
    state = deepcopy(optimizer.state_dict())
    own: dict[str, Any] = state["diloco"]
    settings: dict[str, Any] = STREAMING
    if kind == "fragments":
        settings = {**STREAMING, "fragments": 4}
    elif kind == "lost":
        own["flights"].pop()
    elif kind == "mean":
        own["flights"][0]["means"][0] = torch.zeros(3)
    elif kind == "key":
        del own["outer_parameters"]
    elif kind == "shapes":
        own["outer_parameters"][0] = torch.zeros(2)
    elif kind == "steps":
        own["steps"] = -1
    elif kind == "foreign":
        state = simulated.sgd(module).state_dict()
    _, again = made(seed=9, **settings)
    before = deepcopy(again.state_dict())
    try:
        again.load_state_dict(state)
    except ValueError as error:
        return str(error), same(before, again.state_dict())
    return "", False


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fragments", "means under way of {'every': 6, 'fragments': 3, 'overlap': 3}"),
        ("lost", "expected 2 means under way, got 1"),
        ("mean", "of fragment 0, got 3"),
        ("key", "without 'outer_parameters'"),
        ("shapes", "outer parameters of the shapes [(16, 6)"),
        ("steps", "a number of steps from 0 on, got -1"),
        ("foreign", "without 'diloco'"),
    ],
)
def test_states_that_do_not_fit_are_refused(pool: Pool, kind: str, words: str) -> None:
    for text, unchanged in pool.run(refused, kind):
        assert words in text
        assert unchanged


def other_schedule() -> int:
    """A state without means under way goes into another schedule, and on from there."""
    module, optimizer = made(every=6, fragments=3)
    train(module, optimizer, 0, 10)
    _, again = made(seed=9, **{**STREAMING, "fragments": 2})
    again.load_state_dict(optimizer.state_dict())
    last, once_more = made(seed=9, **{**STREAMING, "fragments": 2})
    once_more.load_state_dict(again.state_dict())
    train(last, once_more, 10, 20)
    return once_more.steps


def test_a_settled_state_goes_into_another_schedule(pool: Pool) -> None:
    assert pool.run(other_schedule) == [20] * 2
