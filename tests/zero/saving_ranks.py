"""Saves checkpoints in ranks, and kills them in the middle."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, as the first DTensor of each fork would import it for seconds
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dreamcomm.zero import checkpoint

ROWS = 5000
TENSORS = 4
PR_SET_PDEATHSIG = 1


def content(number: int) -> dict[str, Any]:
    """Every element is the checkpoint's number."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    rows = torch.full((ROWS // dist.get_world_size(), 20), float(number))
    part = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    sharded = {f"part {k}": part for k in range(TENSORS)}
    return {**sharded, "number": number, "plain": torch.full((100,), float(number))}


def without_exchange(*_: Any) -> bool:
    """As of a file system that cannot exchange folders."""
    return False


def save_on_and_on(rank: int, folder: str, first: int, exchanges: bool) -> None:
    """Saves further checkpoints until it is killed. ``FOLDER.done`` has the last one's number."""
    store = dist.FileStore(f"{folder}.store-{first}", 2)
    dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=2)
    if not exchanges:
        checkpoint._exchange = without_exchange
    done = Path(folder + ".done")
    for number in itertools.count(first):
        checkpoint.save(content(number), folder)
        if rank == 0:
            new = done.with_suffix(".new")
            new.write_text(str(number))
            new.rename(done)


def last_done(folder: str) -> int:
    done = Path(folder + ".done")
    return int(done.read_text()) if done.exists() else -1


def kill_in_a_save(folder: str, exchanges: bool, chosen: random.Random) -> int:
    """Kills both ranks at a random moment; returns the number of the checkpoint that is found."""
    before = last_done(folder)
    ranks = [fork(rank, folder, before + 1, exchanges) for rank in range(2)]
    deadline = time.monotonic() + 30
    while last_done(folder) == before and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(chosen.uniform(0, 0.1))
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert ended == [-signal.SIGKILL] * 2
    finished = last_done(folder)
    assert finished > before
    state = empty()
    checkpoint.load(state, folder)
    found = check_whole(state)
    assert found in (finished, finished + 1)
    return found


def fork(rank: int, *args: Any) -> int:
    """A rank in a child process, which ends with this one."""
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            save_on_and_on(rank, *args)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def kill_often(_rank: int, folder: str, exchanges: bool, times: int) -> None:
    """In a process that has started no threads: ranks are its forks, as imports take seconds."""
    chosen = random.Random(5)
    found = [kill_in_a_save(folder, exchanges, chosen) for _ in range(times)]
    assert found == sorted(found)
    checkpoint.save(empty(), folder)  # removes what the killed saves left


def empty() -> dict[str, Any]:
    """What to load, in one process without a group."""
    parts = {f"part {k}": torch.full((ROWS, 20), -1.0) for k in range(TENSORS)}
    return {**parts, "number": -1, "plain": torch.full((100,), -1.0)}


def check_whole(state: dict[str, Any]) -> int:
    """The number of the checkpoint, which all of it has."""
    number = int(state["number"])
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.all(value == number), (key, number, value.unique())
    return number
