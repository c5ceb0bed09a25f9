"""The table of docs/loose_coupling.md is what short runs count, and what its formulas give."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from dreamcomm.gossip import Gossip
from dreamcomm.local_sgd import DiLoCo, LocalSGD
from dreamcomm.server import ParameterServer, Worker
from dreamcomm.server.layout import PIECE_BYTES
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("counts what only dreamcomm counts")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "loose_coupling.md").read_text()
TABLE = PAGE[PAGE.index("| way | sent a step |") :].split("\n\n")[0]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 960  # 2, 3 and 4 divide the elements, and a model is many pieces of a server's messages
ROUND, FRAGMENTS = 4, 2
# Shares of the parameters' bytes. Small tensors are read whole by all ranks, int8 has scales.
BYTES_NEAR, MEMORY_NEAR = 0.01, 0.001
# What the page's seconds are of.
EXAMPLE = {"N": 4, "H": 100, "F": 4, "S": 100e6}
LINK = 1e9 / 8  # bytes a second
SLOW = (1, 1, 1, 4)  # times of a gradient


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


SIZE = sum(p.nbytes for p in make_model().parameters())
FIRST, SECOND = [0, 1], [2, 3]  # the fragments' parameters


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def ddp(hook: Any = None) -> tuple[nn.Module, Any]:
    model = dreamcomm.DistributedDataParallel(make_model())
    if hook is not None:
        model.register_comm_hook(dreamcomm.hooks.State(), hook)
    return model, adam(model)


def local_sgd() -> tuple[nn.Module, Any]:
    model = make_model()
    return model, LocalSGD(model, adam(model), every=ROUND)


def diloco() -> tuple[nn.Module, Any]:
    model = make_model()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return model, DiLoCo(model, adam(model), outer, every=ROUND, fragments=FRAGMENTS)


def gossip(topology: str) -> tuple[nn.Module, Any]:
    model = make_model()
    return model, Gossip(model, adam(model), topology=topology)


MADE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "DistributedDataParallel": ddp,
    "the same with `hooks.int8_feedback`": lambda: ddp(dreamcomm.hooks.int8_feedback),
    "local SGD": local_sgd,
    "DiLoCo": diloco,
    'gossip, `topology="ring"`': lambda: gossip("ring"),
    'gossip, `topology="shift_one"`': lambda: gossip("shift_one"),
}
# The rows of a server and its workers.
SERVED = {
    0: ("a synchronous server", "a worker of it"),
    None: ("an asynchronous server", "a worker of this one"),
}


# What runs in ranks.


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """A function that counts the bytes of all tensors that are made inside and are still there."""
    gc.collect()
    gc.freeze()  # what is there is no longer listed
    try:
        yield bytes_of_tensors
    finally:
        gc.unfreeze()


def bytes_of_tensors() -> int:
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            memory = one.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def sent_by(optimizer: Any) -> int:
    """Bytes that this rank has sent so far."""
    if isinstance(optimizer, Gossip):
        return optimizer.report().sent_bytes
    return sum(counts["sent"] for counts in dreamcomm.stats().values())


def bits(model: nn.Module) -> list[str]:
    """A digest of each parameter."""
    digests = [hashlib.sha256(p.detach().numpy()) for p in model.parameters()]
    return [one.hexdigest()[:16] for one in digests]


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    inputs = torch.full((2, WIDTH), 1.0 + dist.get_rank() + number)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def run(way: str) -> dict[str, Any]:
    """What a rank sees.

    Returns:
        ``sent``: bytes in each step; ``bits``: after each; ``kept``: bytes of tensors after the
        last step but one, in which nothing is exchanged if it can be so.
    """
    seen: dict[str, Any] = {"sent": [], "bits": []}
    with counted() as kept:
        model, optimizer = MADE[way]()
        for number in range(2 * ROUND):
            already = sent_by(optimizer)
            step(model, optimizer, number)
            seen["sent"].append(sent_by(optimizer) - already)
            seen["bits"].append(bits(model))
            if number == 2 * ROUND - 2:
                seen["kept"] = kept()
    return seen


def serve(staleness: int | None) -> dict[str, Any]:
    """What a worker sees, as above, or a server: sent bytes of an update, the most that it kept."""
    most = [0]
    others = dist.new_group(list(range(1, dist.get_world_size())))
    with counted() as kept:
        model = make_model()
        if dist.get_rank() > 0:
            seen: dict[str, Any] = {"bits": []}
            with Worker(model.parameters()) as worker:
                dist.barrier(others)
                for number in range(ROUND):
                    step(model, worker, number)
                    seen["bits"].append(bits(model))
                return {**seen, "kept": kept(), "sent": worker.report().pushed_bytes / ROUND}

        def look(_: ParameterServer) -> None:
            most[0] = max(most[0], kept())

        server = ParameterServer(model.parameters(), torch.optim.AdamW, staleness=staleness)
        report = server.serve(on_update=look)
    workers = report.workers.values()
    first = len(workers) * SIZE  # each begins with weights
    sent = sum(one.pulled_bytes for one in workers) - first
    return {"kept": most[0], "sent": sent / ROUND}


# What the page says.


def row(way: str) -> list[str]:
    """The cells beside a way's name."""
    (found,) = re.findall(rf"^\| {re.escape(way)} \|(.*)\|$", TABLE, re.M)
    return [cell.strip() for cell in found.split("|")]


def value_of(formula: str, **values: float) -> float:
    """What a cell's formula is, in which 2N and 2(N-1) are products."""
    text = re.sub(r"(?<=[\dNHFS)])\s*(?=[NHFS(])", "*", formula.removeprefix("at most "))
    return float(eval(text, {}, {"S": 1.0, "H": ROUND, "F": FRAGMENTS, **values}))


ALL = {**MADE, **{way: None for ways in SERVED.values() for way in ways}}


def test_the_table_has_these_ways() -> None:
    rows = TABLE.splitlines()[2:]
    assert sorted(one.split("|")[1].strip() for one in rows) == sorted(ALL)


@pytest.mark.parametrize("way", ALL)
def test_times_are_those_of_the_bytes_and_of_the_waits(way: str) -> None:
    a_step, _, seconds, one_slow, *_ = row(way)
    assert float(seconds) == pytest.approx(value_of(a_step, **EXAMPLE) / LINK, rel=0.01)
    waits_for_none = way in SERVED[None]
    gradients_a_second = sum(1 / length for length in SLOW)
    expected = len(SLOW) / gradients_a_second if waits_for_none else max(SLOW)
    assert float(one_slow) == round(expected, 1)


def equal_numbers(everyone: Sequence[list[str]]) -> list[int]:
    """The numbers of the parameters that all of these ranks have the same of."""
    columns = enumerate(zip(*everyone, strict=True))
    return [number for number, column in columns if len(set(column)) == 1]


def check_equality(said: str, ranks: list[dict[str, Any]]) -> None:
    after_steps = zip(*(seen["bits"] for seen in ranks), strict=True)
    found = [equal_numbers(everyone) for everyone in after_steps]
    everything = FIRST + SECOND
    if said == "in every step":
        assert found == [everything] * len(found)
    elif said == "after each round":
        assert found == 2 * [[], [], [], everything]
    elif said == "each fragment after its round":
        assert found == 2 * [[], FIRST, [], SECOND]
    else:
        assert said == "no"
        assert everything not in found


@pytest.mark.parametrize(
    "way",
    # Pairs need a fourth rank, whose start takes as long as all others' tests.
    [pytest.param(way, marks=pytest.mark.long) if "shift_one" in way else way for way in MADE],
)
def test_bytes_memory_and_equality_are_those_of_a_run(pool: Pool, way: str) -> None:
    world = 4 if "shift_one" in way else 3
    ranks = pool.run(run, way, world=world)
    a_step, largest, _, _, memory, equal = row(way)
    for seen in ranks:
        sent = [nbytes / SIZE for nbytes in seen["sent"]]
        expected = value_of(a_step, N=world), value_of(largest, N=world)
        assert (sum(sent) / len(sent), max(sent)) == pytest.approx(expected, rel=BYTES_NEAR)
        assert seen["kept"] / SIZE == pytest.approx(value_of(memory), rel=MEMORY_NEAR)
    check_equality(equal, ranks)


@pytest.mark.parametrize("staleness", SERVED)
def test_bytes_and_memory_of_a_server_and_its_workers(pool: Pool, staleness: int | None) -> None:
    workers = 2
    server, *others = pool.run(serve, staleness, world=1 + workers)
    of_server, of_worker = (row(way) for way in SERVED[staleness])
    assert server["sent"] / SIZE == value_of(of_server[0], N=workers)
    assert of_server[1] == of_server[0]
    pieces = workers * PIECE_BYTES / SIZE  # on their way
    most = value_of(of_server[4], N=workers) + pieces
    # No reader may be behind, and the current weights are copied when one asks.
    assert most - pieces - 2 <= server["kept"] / SIZE <= most * (1 + MEMORY_NEAR)
    for seen in others:
        assert seen["sent"] / SIZE == value_of(of_worker[0])
        assert of_worker[1] == of_worker[0]
        assert 2 <= seen["kept"] / SIZE <= value_of(of_worker[4]) + PIECE_BYTES / SIZE
    if staleness == 0:
        check_equality(of_worker[5], others)


def test_the_measured_seconds_are_those_of_the_file() -> None:
    kept = json.loads((RESULTS / "cpu-2-cores-async-digits.json").read_text())
    for one in kept["accuracies"]:
        name = one["strategy"]
        reached = [seen["p50"] for seen in kept["reached"] if seen["strategy"] == name]
        cells = [f"{seconds:.1f} s" for seconds in reached] + [f"{100 * one['accuracy']:.1f} %"]
        assert f"| `{name}` | {' | '.join(cells)} |" in PAGE
    ratios = [one["ratio"] for one in kept["async_over_server"]]
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} of the synchronous one's time" in PAGE


@pytest.mark.long
@pytest.mark.parametrize("way", MADE)
def test_all_runs_have_the_same_bits(pool: Pool, way: str) -> None:
    first, second = (pool.run(run, way, world=4) for _ in range(2))
    assert [seen["bits"] for seen in first] == [seen["bits"] for seen in second]
