"""What one process of a soak does: episodes, one after another, as the supervisor orders them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from random import Random

import torch
import torch.distributed as dist

import dreamcomm
from collectives.plan import KINDS
from endurance.draw import EXPOSED_KINDS, draw_groups, draw_plan
from endurance.orders import (
    ERROR,
    NOTHING,
    RAISED,
    RESTARTED,
    UNEXPECTED,
    WRONG,
    Episode,
    Exposed,
    Fault,
    Order,
    Told,
)
from endurance.walker import OwnFault, Walker
from helpers.census import Census, census
from helpers.memory import private_bytes

PR_SET_PDEATHSIG = 1
HEAP = "memfd:dreamcomm-heap"
# Longer than any episode may take: no fault may be noticed by it.
PATIENT = timedelta(seconds=600)


def serve(connection: Connection, log: str) -> None:
    """The process's whole life."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()  # SIGABRT prints the stacks of all threads
    torch.set_num_threads(1)
    warm_up(f"{log}-warm-up")
    before = census()
    while True:
        try:
            order = connection.recv()
        except EOFError:  # the supervisor has nothing more to do
            return
        told = Told()
        play(order, connection, told)
        told.leaks = differences(before, census())
        told.private_bytes = private_bytes()
        connection.send(told)


def warm_up(store: str) -> None:
    """What stays in a process after its first group, which no soak has to count."""
    episode = Episode(0, 0, 1, {"costs": "fixed"}, 0, 0, Fault(NOTHING, ()), RESTARTED)
    with group_of(Order(episode, 0, store)):
        dist.all_reduce(dreamcomm.empty(1000))
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        work.wait()
        found = [None]
        dist.all_gather_object(found, 0)


def play(order: Order, connection: Connection, told: Told) -> None:
    """One episode; what came of it is in `told`."""
    walker = Walker(order, connection, told)
    try:
        with group_of(order), noting_the_time(told):
            walk(order.episode, walker, connection)
    except OwnFault:
        told.end = RAISED
    except AssertionError as error:
        told.end, told.text = WRONG, str(error)
    except dist.DistBackendError as error:
        told.end, told.text = ERROR, str(error)
    except Exception:
        told.end, told.text = UNEXPECTED, traceback.format_exc()


@contextmanager
def group_of(order: Order) -> Iterator[None]:
    episode = order.episode
    dist.init_process_group(
        "dreamcomm",
        store=dist.FileStore(order.store, episode.world),
        rank=order.rank,
        world_size=episode.world,
        timeout=PATIENT,
        pg_options=dreamcomm.Options(**episode.options),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def noting_the_time(told: Told) -> Iterator[None]:
    """Notes the time of an error before the group is destroyed, which takes time, too."""
    try:
        yield
    finally:
        told.at = time.monotonic()


def walk(episode: Episode, walker: Walker, connection: Connection) -> None:
    """All plans of an episode. Groups are made and destroyed in the sheltered ones only: who makes
    a group with a rank that dies meanwhile, learns of it at the timeout."""
    rng = Random(f"{episode.seed} {episode.number} plans")
    for _ in range(episode.sheltered):
        groups = draw_groups(rng, episode.world)
        with walker.in_groups(groups):
            walker.run_plan(draw_plan(rng, groups, KINDS))
    groups = draw_groups(rng, episode.world)
    with walker.in_groups(groups):
        dist.barrier()  # all ranks have made their groups
        connection.send(Exposed())
        turn = 0
        while episode.fault.is_fatal or turn < episode.exposed:
            walker.run_plan(draw_plan(rng, groups, EXPOSED_KINDS), turn)
            turn += 1


def differences(before: Census, after: Census) -> list[str]:
    """What a process holds that it did not before its first episode."""
    return [
        f"{name}: {getattr(before, name)} expected, {getattr(after, name)} found"
        for name in ("descriptors", "threads", "children", "shared_mappings")
        if getattr(before, name) != getattr(after, name)
    ]
