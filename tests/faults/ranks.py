"""One cell of the matrix: ranks as processes, one of which has a fault, and what they tell."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faults.places import PLACES, VICTIM, Scene, twisted
from faults.strikes import ENDS, FAULTS, INSIDE, LATE_FAULTS, RETURNS, Stage
from helpers.census import Census, census
from helpers.memory import private_bytes

LATE = 1.0  # seconds: the timeout of the group where a rank is late
PATIENT = 120.0  # where none is: no death may be noticed by it


@dataclass(frozen=True)
class Cell:
    """``fault``: of FAULTS, or "other ..." for what the victim's call differs in."""

    fault: str
    place: str
    world: int

    @property
    def is_in_subgroup(self) -> bool:
        return self.place.startswith("subgroup")

    @property
    def members(self) -> list[int]:
        """The ranks of the group where it strikes: of four, one is missing in a subgroup."""
        everyone = list(range(self.world))
        return [r for r in everyone if r != 2] if self.is_in_subgroup else everyone

    @property
    def is_late(self) -> bool:
        return self.fault in LATE_FAULTS

    @property
    def seconds(self) -> float:
        return LATE if self.is_late else PATIENT


@dataclass
class Told:
    """What a rank says: the error of its call, and what came after."""

    error: str = ""
    kind: str = ""
    begun: float = 0.0  # of the clock that all processes share
    at: float = 0.0
    after: str = ""
    before_census: Census | None = None
    after_census: Census | None = None
    growth: int = 0  # bytes that malloc has given out and did not before the group
    problems: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """In the call."""
        return self.at - self.begun


def play(cell: Cell, rank: int, folder: str, struck: Any, released: Any, answer: Any) -> None:
    """A rank's part. `struck` holds the time at which the victim did not make its call."""
    torch.set_num_threads(1)
    os.environ["DREAMCOMM_COSTS"] = "fixed"
    told = Told()
    try:
        take_part(cell, rank, folder, struck, released, told)
    finally:
        answer.send(told)
        answer.close()


def take_part(cell: Cell, rank: int, folder: str, struck: Any, released: Any, told: Told) -> None:
    warm_up(cell, rank, f"{folder}/warm")
    told.before_census, before = census(), private_bytes()
    join(rank, cell.world, f"{folder}/group", cell.seconds)
    strike(cell, rank, folder, struck, released, told)
    dist.destroy_process_group()
    told.after_census, told.growth = census(), private_bytes() - before
    if cell.fault in FAULTS:
        start_anew(cell, rank, f"{folder}/anew", told)


def strike(cell: Cell, rank: int, folder: str, struck: Any, released: Any, told: Told) -> None:
    group = default_group()
    if cell.is_in_subgroup:  # torch does not hand the default group's timeout down
        group = dist.new_group(cell.members, timeout=timedelta(seconds=cell.seconds))
    elsewhere = None
    if cell.fault == "is in another group":
        # The victim is still there when the others have failed; its error says that they left.
        elsewhere = dist.new_group(cell.members, timeout=timedelta(seconds=PATIENT))
    if rank not in cell.members:
        return
    is_victim = rank == VICTIM
    twist = cell.fault.removeprefix("other ") if is_victim and cell.fault not in FAULTS else ""
    scene = Scene(rank, len(cell.members), group, twist)
    call = twisted(cell.place, scene) if twist else PLACES[cell.place](scene)
    dist.barrier(group)
    if is_victim and cell.fault in FAULTS:
        stage = Stage(struck, released, elsewhere, call, Path(folder))
        if cell.fault not in INSIDE:
            stage.note()
        told.error = FAULTS[cell.fault](stage)
        return
    while cell.fault in INSIDE and not struck.value:
        time.sleep(0.001)
    notice(call, told)
    if cell.fault in INSIDE and not told.error:
        # The victim had published its part of a small call: the next one has to tell.
        notice(lambda: dist.barrier(group), told)
    told.after = use(group, len(cell.members))


def notice(call: Any, told: Told) -> None:
    told.begun = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        told.error, told.kind = str(error), type(error).__name__
    told.at = time.monotonic()


def use(group: Any, world: int) -> str:
    """What a group is good for after the fault."""
    total = torch.ones(3)
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        return str(error)
    return "works" if total.tolist() == [float(world)] * 3 else f"wrong: {total.tolist()}"


def start_anew(cell: Cell, rank: int, store: str, told: Told) -> None:
    """Those who are left make a group of their own, in the same processes."""
    if rank == VICTIM:
        return
    ranks = [r for r in range(cell.world) if r != VICTIM]
    join(ranks.index(rank), len(ranks), store, PATIENT)
    said = use(default_group(), len(ranks))
    if said != "works":
        told.problems.append(f"a new group of those left: {said}")
    dist.destroy_process_group()


def warm_up(cell: Cell, rank: int, store: str) -> None:
    """What stays in a process after its first group; torch keeps the last model it wrapped."""
    join(rank, cell.world, store, PATIENT)
    if cell.place == "DDP backward":
        PLACES[cell.place](Scene(rank, cell.world, default_group(), ""))()
    said = use(default_group(), cell.world)
    assert said == "works", said
    dist.destroy_process_group()


def default_group() -> Any:
    return dist.group.WORLD


def join(rank: int, world: int, store: str, seconds: float) -> None:
    dist.init_process_group(
        "dreamcomm",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


@dataclass
class Outcome:
    """What all ranks told, and how they ended."""

    told: dict[int, Told]
    exits: dict[int, int | None]
    struck: float


def run_cell(cell: Cell, folder: str) -> Outcome:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dreamcomm", "torch._dynamo"])
    struck, released = context.Value("d", 0.0), context.Event()
    processes, ends = [], []
    for rank in range(cell.world):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (cell, rank, folder, struck, released, theirs)
        processes.append(context.Process(target=play, args=arguments))
        processes[-1].start()
        theirs.close()
        ends.append(mine)
    try:
        told = gather_told(cell, ends, released)
    finally:
        released.set()
        if cell.fault == "is stopped":
            processes[VICTIM].kill()
        for process in processes:
            process.join(ENDS)
            if process.is_alive():
                process.kill()
    exits = {rank: process.exitcode for rank, process in enumerate(processes)}
    return Outcome(told, exits, struck.value)


def gather_told(cell: Cell, ends: list[Any], released: Any) -> dict[int, Told]:
    """What the ranks told; the victim and those outside of the group wait for the others."""
    told = {}
    first = [rank for rank in cell.members if rank != VICTIM]
    for rank in first + [rank for rank in range(cell.world) if rank not in first]:
        if rank not in first:
            released.set()
        if rank == VICTIM and cell.fault in FAULTS and cell.fault not in RETURNS:
            continue
        if ends[rank].poll(ENDS):
            told[rank] = ends[rank].recv()
    return told
