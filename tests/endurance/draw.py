"""Draws everything random in a soak from its seed."""

from __future__ import annotations

from random import Random
from typing import Any

from collectives import bits
from collectives.plan import KINDS, LAYOUTS, REDUCING, Plan, Step
from endurance.orders import (
    FROM_INSIDE,
    FROM_OUTSIDE,
    NOTHING,
    REPLACED,
    RESTARTED,
    SMALLER,
    Episode,
    Fault,
)

WORLDS = (2, 3, 4)
COUNTS = (0, 1, 2, 3, 7, 64, 1000, 4097, 16_384, 70_001)
LARGE_COUNTS = (262_144, 500_003)  # of bytes up to several MiB
# A receive from any source waits for nobody in particular: where its sender has died, it
# rightly goes on waiting for the others.
EXPOSED_KINDS = tuple(kind for kind in KINDS if kind != "send_any")

Groups = tuple[tuple[int, ...], ...]


def draw_episode(seed: int, number: int, world: int | None, spanning: float = 0.0) -> Episode:
    """``world``: of the processes that are there already; ``spanning``: of the episodes so many
    are on several hosts."""
    rng = Random(f"{seed} {number}")
    world = rng.choice(WORLDS) if world is None else world
    return Episode(
        seed=seed,
        number=number,
        world=world,
        options=draw_options(rng) | draw_hosts(seed, number, world, spanning),
        sheltered=rng.randint(0, 2),
        exposed=rng.randint(1, 3),
        fault=draw_fault(rng, world),
        then=rng.choice((RESTARTED, SMALLER, REPLACED, REPLACED)),
    )


def draw_options(rng: Random) -> dict[str, Any]:
    return {
        "costs": "fixed",
        "algorithm": rng.choice(("auto", "auto", "direct", "ring", "master", "one_shot", "heap")),
        "page_bytes": rng.choice((1 << 12, 1 << 16, 1 << 19, 1 << 19)),
        "message_bytes": rng.choice((1 << 12, 1 << 16, 1 << 16)),
    }


def draw_hosts(seed: int, number: int, world: int, spanning: float) -> dict[str, Any]:
    """A host for each rank: so results have the bits of one host."""
    if Random(f"{seed} {number} hosts").random() >= spanning:
        return {}
    return {"hosts": ",".join("abcd"[:world])}


def draw_fault(rng: Random, world: int) -> Fault:
    weights = {"kill -9": 6, "kill -9 of several": 2, "pause": 3, "os._exit": 2, "exception": 3}
    assert set(weights) == {*FROM_OUTSIDE, *FROM_INSIDE}
    weights[NOTHING] = 2
    kind = rng.choices(list(weights), list(weights.values()))[0]
    several = rng.randint(2, world) if kind == "kill -9 of several" else 1
    return Fault(
        kind=kind,
        victims=tuple(sorted(rng.sample(range(world), several))),
        delay=rng.choice((rng.uniform(0, 0.05), rng.uniform(0, 1.5))),
        pause=rng.uniform(0.05, 1.0),
        turn=rng.randint(0, 2),
        step=rng.randint(0, 19),
    )


def draw_order(seed: int, number: int, size: int) -> list[int]:
    """In which order the processes get the ranks of the next episode."""
    return Random(f"{seed} {number} order").sample(range(size), size)


def draw_size(seed: int, number: int, least: int) -> int:
    """How many ranks there are after newcomers have joined those left."""
    return Random(f"{seed} {number} size").choice([size for size in WORLDS if size >= least])


def draw_groups(rng: Random, world: int) -> Groups:
    everyone = tuple(range(world))
    parts = [sorted(rng.sample(everyone, rng.randint(1, world))) for _ in range(rng.randint(0, 2))]
    return (everyone, *map(tuple, parts))


def draw_plan(rng: Random, groups: Groups, kinds: tuple[str, ...]) -> Plan:
    steps = tuple(draw_step(rng, groups, kinds) for _ in range(rng.randint(20, 40)))
    return Plan(len(groups[0]), groups, steps)


def draw_step(rng: Random, groups: Groups, kinds: tuple[str, ...]) -> Step:
    kind, dtype = rng.choice(kinds), rng.choice(bits.DTYPES)
    group = rng.randrange(len(groups))
    size = len(groups[group])
    return Step(
        kind=kind,
        dtype=dtype,
        op=rng.choice(bits.ops_of(dtype)) if kind in REDUCING else "SUM",
        factor=rng.choice((0.5, 3.0)),
        count=rng.choice(LARGE_COUNTS if rng.random() < 0.03 else COUNTS),
        group=group,
        root=rng.randrange(size),
        peer=rng.randrange(size),
        tag=rng.randint(0, 3),
        layouts=tuple(rng.choices(LAYOUTS, k=rng.randint(1, 4))),
        in_place=rng.random() < 0.5,
        asynchronous=rng.random() < 0.5,
        drain=rng.random() < 1 / 8,
        seed=rng.randrange(2**31),
    )
