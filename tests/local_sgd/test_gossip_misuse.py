"""What gossip refuses, and ranks that end, stop or step differently: no rank is left waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.local_sgd.gossip import Gossip, GossipError
from helpers.pool import Fresh, Pool
from helpers.processes import replies
from local_sgd.gossiping import PARTLY, UNEQUAL
from local_sgd.simulated import model, sgd

pytestmark = pytest.mark.long

# At construction.


def refused(by_rank: list[dict[str, Any]]) -> tuple[str, str]:
    module = model()
    try:
        Gossip(module, sgd(module), **by_rank[dist.get_rank() % len(by_rank)])
    except (ValueError, TypeError) as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bound": -1}, "expected bound to be an int of at least 0, got -1"),
        ({"bound": 1.5}, "expected bound to be an int of at least 0, got 1.5"),
        ({"seed": "a"}, "expected seed to be an int or None, got 'a'"),
        ({"topology": "star"}, "expected topology to be one of 'ring'"),
        ({"buffers": "all"}, "expected buffers to be one of ('average', 'local'), got 'all'"),
        ({"weights": [[1, 0], [0, 1]]}, "rank 1 never averages with rank 0"),
        ({"weights": [[0.5, 0.5], [0.5, 0.4]]}, "weights: row 1 sums to 0.9"),
        ({"weights": UNEQUAL}, "it has 3 rows, and the group 2 ranks"),
        ({"weights": [[0.5] * 2] * 2, "topology": "full"}, "give either topology='full' or weigh"),
    ],
    ids=["bound", "float", "seed", "topology", "buffers", "apart", "sum", "size", "both"],
)
def test_bad_settings_are_refused(pool: Pool, options: dict[str, Any], words: str) -> None:
    for kind, text in pool.run(refused, [options], world=2):
        assert kind == "ValueError"
        assert text.startswith("Gossip: ")
        assert words in text


OTHER = [[0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.25, 0.25, 0.5], [0, 0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ({"bound": 1}, {"bound": 2}, "rank 1 has bound=2, and rank 0 has bound=1"),
        ({}, {"seed": None}, "rank 1 has seed=None, and rank 0 has seed=0"),
        ({}, {"topology": "full"}, "rank 1 has topology='full', and rank 0 has topology='ring'"),
        ({}, {"weights": PARTLY}, "rank 1 has topology='weights', and rank 0 has topology='ring'"),
        ({"weights": PARTLY}, {"weights": [PARTLY] * 2}, "rank 1 has len(weights)=2"),
        ({"weights": PARTLY}, {"weights": OTHER}, "rank 1 has weights[0][0]=[0.5, 0.5, 0.0, 0.0]"),
        ({}, {"buffers": "local"}, "rank 1 has buffers='local', and rank 0 has buffers='average'"),
    ],
    ids=["bound", "seed", "topology", "kind", "length", "weights", "buffers"],
)
def test_settings_that_differ_are_refused_on_all_ranks(
    pool: Pool, first: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    for kind, text in pool.run(refused, [first, other, first, first], world=4):
        assert kind == "ValueError"
        assert words in text


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    found = pool.run(refused, [{}, {"weights": "abc"}, {}], world=3)
    assert found[1][0] == "TypeError"
    for rank in (0, 2):
        assert found[rank][0] == "ValueError"
        assert "rank 1 has failed to make it: Gossip: weights: expected a matrix" in found[rank][1]


def other_models(kind: str) -> str:
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(3, 4 + (kind == "shape" and rank == 1)), nn.BatchNorm1d(4))
    if kind == "buffer" and rank == 1:
        module[1].running_mean = torch.zeros(5)
    given = [*module.parameters()][: 2 if kind == "part" and rank == 1 else None]
    if kind == "foreign":
        given = [nn.Parameter(torch.zeros(1))]
    try:
        Gossip(module, torch.optim.SGD(given, 0.1))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "the ranks' modules differ: parameter 0 is '0.weight' of shape (4, 3)"),
        ("buffer", "rank 1 has buffer 1.running_mean=((5,), 'torch.float32', (1,))"),
        ("part", "rank 1 has optimizer.parameters=['0.weight', '0.bias']"),
        ("foreign", "the optimizer has 1 parameters, and only 0 of them are the model's"),
    ],
    ids=["shape", "buffer", "part", "foreign"],
)
def test_models_that_differ_are_refused(pool: Pool, kind: str, words: str) -> None:
    for text in pool.run(other_models, kind, world=2):
        assert words in text


def misused() -> list[str]:
    module = model()
    gossip = Gossip(module, sgd(module))
    calls: list[Callable[[], Any]] = [
        lambda: gossip.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        lambda: gossip.load_state_dict(gossip.optimizer.state_dict()),
        lambda: gossip.load_state_dict(gossip.state_dict() | {"gossip": {"steps": -1}}),
        lambda: Gossip(module, "sgd"),  # type: ignore[arg-type]
        lambda: Gossip(sgd(module), sgd(module)),  # type: ignore[arg-type]
    ]
    texts = []
    for call in calls:
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    gossip.step()
    return [*texts, str(gossip.steps)]


def test_misuse_is_refused_and_changes_nothing(pool: Pool) -> None:
    for group, state, steps, optimizer, module, made in pool.run(misused, world=2):
        assert group.startswith("RuntimeError: Gossip.add_param_group: the messages are fixed")
        assert state.startswith("ValueError: Gossip.load_state_dict: expected a state_dict of")
        assert "expected a number of steps from 0 on, got -1" in steps
        assert optimizer == "TypeError: Gossip: expected an optimizer of torch, got str"
        assert module == "TypeError: Gossip: expected a module, got SGD"
        assert made == "1"


# Later.

BOUNDS: list[dict[str, Any]] = [{}, {"bound": 2}, {"bound": 2, "seed": None}]


def outcome(call: Callable[[], Any]) -> tuple[float, str]:
    """The seconds until a GossipError, and its text."""
    begin = time.monotonic()
    try:
        call()
    except GossipError as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, ""


def one_stops(how: str, options: dict[str, Any]) -> Any:
    """Rank 1 makes two steps fewer than the others."""
    module = nn.Linear(100, 100)
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), **options)
    for _ in range(3):
        gossip.step()
    gossip.finish()
    if dist.get_rank() != 1:
        found = outcome(lambda: [gossip.step() for _ in range(10)])
        again = outcome(gossip.step)
        return (*found, again[1])
    if how == "killed":
        os._exit(7)
    if how == "leaves":
        return None
    return (*outcome(getattr(gossip, how)), "")


LONG = [pytest.param(one, marks=pytest.mark.long) for one in BOUNDS[1:]]  # new processes: slow


@pytest.mark.beyond_gloo("notices it at once")
@pytest.mark.parametrize(
    "options", [BOUNDS[0], *LONG], ids=["synchronous", "late", "as they arrive"]
)
def test_a_neighbour_that_ends_is_named(
    fresh: Fresh, options: dict[str, Any], slack: float
) -> None:
    found = replies(fresh.start(one_stops, "killed", options, world=4), 30)
    for rank in (0, 2, 3):
        seconds, text, again = found[rank].value
        assert seconds < 1.0 + slack
        assert "the process of rank 1 has ended" in text
        assert "it waits for rank" in text
        assert again == f"{text}; make a new Gossip"


@pytest.mark.beyond_gloo("notices it at once")
@pytest.mark.parametrize("options", BOUNDS, ids=["synchronous", "late", "as they arrive"])
def test_a_neighbour_that_leaves_the_group_is_named(
    pool: Pool, options: dict[str, Any], slack: float
) -> None:
    found = pool.run(one_stops, "leaves", options, world=4)
    for rank in (0, 2, 3):
        seconds, text, _ = found[rank]
        assert seconds < 1.0 + slack
        assert "rank 1 has left the group" in text
        assert "it waits for rank 1 and its parameters of step 4" in text


@pytest.mark.parametrize("options", BOUNDS, ids=["synchronous", "late", "as they arrive"])
@pytest.mark.parametrize("how", ["finish", "state_dict", "average_now"])
def test_ranks_that_step_differently_are_named(
    pool: Pool, how: str, options: dict[str, Any], slack: float
) -> None:
    for seconds, text, _ in pool.run(one_stops, how, options, world=3):
        assert seconds < 1.0 + slack
        stopped = f"rank 1 is in {how}() after step 3" in text
        ahead = f"Gossip: rank 1, in {how}() after step 3: rank " in text and "is in step 4" in text
        assert stopped or ahead
        assert "all ranks have to call step() equally often" in text


def other_calls() -> tuple[float, str]:
    module = model()
    gossip = Gossip(module, sgd(module))
    gossip.step()
    return outcome(gossip.finish if dist.get_rank() else gossip.average_now)


def test_different_calls_are_named(pool: Pool, slack: float) -> None:
    for seconds, text in pool.run(other_calls, world=3):
        assert seconds < 1.0 + slack
        assert "is in average_now() after step 1" in text or "is in finish() after step 1" in text


def other_states(case: str) -> tuple[float, str]:
    module = model()
    gossip = Gossip(module, sgd(module), bound=1)
    gossip.step()
    state = gossip.state_dict()
    if case == "steps":
        state["gossip"] = {"steps": 1 + dist.get_rank()}
        return outcome(lambda: gossip.load_state_dict(state))
    return outcome(lambda: gossip.step() if dist.get_rank() else gossip.load_state_dict(state))


def test_states_of_different_steps_are_refused(pool: Pool, slack: float) -> None:
    for seconds, text in pool.run(other_states, "steps", world=2):
        assert seconds < 1.0 + slack
        assert "loads a state of" in text
        assert "steps, and rank" in text


def test_a_state_has_to_be_loaded_by_all(pool: Pool, slack: float) -> None:
    found = pool.run(other_states, "one", world=2)
    for seconds, _ in found:
        assert seconds < 1.0 + slack
    assert "rank 0 is in load_state_dict() after step 1" in found[1][1]


def interrupted() -> tuple[str, str]:
    """An error of one rank in the middle of a step."""
    module = model()
    gossip = Gossip(module, sgd(module))
    gossip.step()
    if dist.get_rank() == 1:
        first = next(module.parameters())
        first.data = first.detach().t().contiguous().t()
    kind = ""
    try:
        gossip.step()
    except GossipError as error:
        kind = f"{error}"
    return kind, ""


def test_an_error_in_a_step_reaches_all(pool: Pool) -> None:
    for text, _ in pool.run(interrupted, world=3):
        assert text.startswith("Gossip: rank 1, in step 2: RuntimeError: Gossip: tensor 0 of the")


def last_step(count: int) -> int:
    """Ranks end at once after the last step, without finish()."""
    module = nn.Linear(30, 30)
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1), topology="full")
    for _ in range(count):
        gossip.step()
    return gossip.steps


def test_ranks_may_end_right_after_their_last_step(pool: Pool) -> None:
    for count in range(1, 9):
        assert pool.run(last_step, count, world=3) == [count] * 3
