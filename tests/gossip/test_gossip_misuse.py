"""What gossip refuses, and ranks that end, stop or step differently: no rank is left waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.gossip import Gossip, GossipError
from dreamcomm.gossip.messages import Kind
from gossip.gossiping import PARTLY, UNEQUAL
from helpers.pool import Fresh, Pool
from helpers.processes import replies
from local_sgd.simulated import model, sgd

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
        ({"bound": 1}, {"bound": 2}, "Gossip: bound is 2 on rank 1, and 1 on rank 0; give all"),
        ({}, {"seed": None}, "seed is None on rank 1, and 0 on rank 0"),
        ({}, {"topology": "full"}, "topology is 'full' on rank 1, and 'ring' on rank 0"),
        ({}, {"weights": PARTLY}, "topology is made of weights on rank 1, and 'ring' on rank 0"),
        ({"weights": PARTLY}, {"weights": [PARTLY] * 2}, "len(weights) is 2 on rank 1"),
        ({"weights": PARTLY}, {"weights": OTHER}, "weights[0][0] is [0.5, 0.5, 0.0, 0.0] on rank"),
        ({}, {"buffers": "local"}, "buffer"),
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
    table = torch.zeros(2, 2)
    module.register_buffer("table", table.t() if kind == "layout" and rank == 1 else table)
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
        ("buffer", "buffer '1.running_mean' is of shape (5,), torch.float32 on rank 1"),
        ("layout", "stride of buffer 'table' is (1, 2) on rank 1, and (2, 1) on rank 0"),
        ("part", "parameter '1.weight' is not stepped on rank 1, and in the optimizer on rank 0"),
        ("foreign", "the optimizer has 1 parameters, and only 0 of them are the model's"),
    ],
    ids=["shape", "buffer", "layout", "part", "foreign"],
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


# Later. Gloo may notice the end of another rank's connection before its message.

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


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


def one_is_slow_to_tell(folder: str) -> str:
    """Rank 2 has failed and has told rank 0, which leaves the group, but not yet rank 3."""
    told, heard = Path(folder, "told"), Path(folder, "heard")
    module = nn.Linear(100, 100)
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1))
    gossip.step()
    gossip.finish()
    rank = dist.get_rank()
    if rank == 1:
        return ""
    messenger = gossip._channel.messenger
    tell = messenger.tell

    def slowly(peer: int, key: tuple[int, ...], text: str) -> None:
        if peer == 3:
            told.touch()
            wait_for(heard)
        tell(peer, key, text)

    if rank == 2:
        messenger.tell = slowly  # type: ignore[method-assign]
    elif rank == 0:
        wait_for(told)
    found = outcome(lambda: [gossip.step() for _ in range(10)])[1]
    if rank == 3:
        heard.touch()
    return found


@pytest.mark.beyond_gloo("names the cause")
def test_each_rank_that_knows_of_a_failure_tells_it(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(one_is_slow_to_tell, str(tmp_path), world=4)
    for rank in (0, 2, 3):
        assert found[rank].startswith("Gossip: rank 2, in step 2: recv from rank 1 with tag")


def one_fails_with_a_long_text(path: str, ahead: int) -> str:
    """Rank 1 fails and leaves before others accept anything, with so many sends under way."""
    module = nn.Linear(3, 3)
    gossip = Gossip(module, torch.optim.SGD(module.parameters(), 0.1))
    gossip.step()
    gossip.finish()
    if dist.get_rank() != 1:
        wait_for(Path(path))
        return outcome(gossip.step)[1]

    def fails() -> None:
        messenger = gossip._channel.messenger
        data, _, simple = messenger._codec.encode("")
        with gossip._channel.step(2):
            for number in range(ahead):
                messenger.endpoint.send_header(2, (Kind.PIECE, 2, number, 0, int(simple)), data, ())
            raise RuntimeError("too long: " + "é" * 5000)

    text = outcome(fails)[1]
    dist.destroy_process_group()
    Path(path).touch()
    return text


@pytest.mark.beyond_gloo("names the cause")
@pytest.mark.parametrize("ahead", [0, 100])
def test_a_long_text_is_cut_and_waits_for_nobody(pool: Pool, tmp_path: Path, ahead: int) -> None:
    found = pool.run(one_fails_with_a_long_text, str(tmp_path / "left"), ahead, world=3)
    assert found[1].endswith("é" * 5000)
    begin = "Gossip: rank 1, in step 2: RuntimeError: too long: éé"
    assert found[0].startswith(begin)
    assert found[0].endswith("éé ... (cut)")
    assert found[2] == found[0] or ahead  # it accepts only what was sent before rank 1 has left


@pytest.mark.beyond_gloo("names the cause")
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
    dist.barrier()
    return outcome(gossip.finish if dist.get_rank() else gossip.average_now)


@pytest.mark.beyond_gloo("names the cause")
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
    if dist.get_rank():
        return outcome(lambda: [gossip.step() for _ in range(9)])
    return outcome(lambda: gossip.load_state_dict(state))


@pytest.mark.beyond_gloo("names the cause")
def test_states_of_different_steps_are_refused(pool: Pool, slack: float) -> None:
    for seconds, text in pool.run(other_states, "steps", world=2):
        assert seconds < 1.0 + slack
        assert "loads a state of" in text
        assert "steps, and rank" in text


@pytest.mark.beyond_gloo("names the cause")
def test_a_state_has_to_be_loaded_by_all(pool: Pool, slack: float) -> None:
    found = pool.run(other_states, "one", world=2)
    for seconds, _ in found:
        assert seconds < 1.0 + slack
    assert "rank 0 is in load_state_dict() after step 1" in found[1][1]


def failing() -> str:
    """One rank's error in its second step; others may get it in their first."""
    module = model()
    gossip = Gossip(module, sgd(module))

    def steps() -> None:
        gossip.step()
        if dist.get_rank() == 1:
            first = next(module.parameters())
            first.data = first.detach().t().contiguous().t()
        gossip.step()

    return outcome(steps)[1]


@pytest.mark.beyond_gloo("names the cause")
def test_an_error_in_a_step_reaches_all(pool: Pool) -> None:
    for text in pool.run(failing, world=3):
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


def left_alone(path: str) -> int:
    """Rank 1 leaves after its last step; rank 0 makes its own with what has been sent before."""
    module = nn.Linear(30, 30)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    gossip = Gossip(module, optimizer, bound=1, seed=None)
    gossip.step()
    gossip.step()
    if dist.get_rank() == 1:
        gossip.step()
        dist.destroy_process_group()
        Path(path).touch()
        return gossip.steps
    while not (Path(path).exists() and gossip._channel.messenger.departure(1)):
        time.sleep(0.01)
    for _ in range(20):
        gossip._channel.poll()
        time.sleep(0.005)
    gossip.step()
    return gossip.steps


@pytest.mark.beyond_gloo("has what a rank sent before it left")
def test_what_a_rank_sent_before_it_left_counts(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(left_alone, str(tmp_path / "left"), world=2) == [3, 3]
