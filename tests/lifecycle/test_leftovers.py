"""A destroyed group leaves nothing behind in its process, however it ended."""

from __future__ import annotations

import gc
import socket
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from helpers.census import Census, census, shared_memory_files
from helpers.pool import Fresh
from lifecycle.groups import error_of, group_of, use_everything


def succeed(rank: int, backend: str, folder: str, world: int) -> list[Census]:
    found = []
    for number in range(21):
        with group_of(backend, f"{folder}/{number}", rank, world):
            use_everything()
        if number in (0, 20):  # the first one also loads what stays
            found.append(census())
    return found


def raise_inside(rank: int, backend: str, folder: str, world: int) -> list[Census]:
    """The function raises with operations under way that no one waits for."""
    found = []
    for number in range(4):
        with pytest.raises(KeyError), group_of(backend, f"{folder}/{number}", rank, world):
            _start_and_raise()
        found.append(census())
    return [found[0], found[-1]]


def _start_and_raise() -> None:
    for _ in range(5):
        dist.all_reduce(torch.ones(1000), async_op=True)
    raise KeyError("from the test")


def time_out(rank: int, backend: str, folder: str, world: int) -> list[Census]:
    found = []
    for number in range(3):
        with group_of(backend, f"{folder}/{number}", rank, world, seconds=0.3):
            use_everything()
            if rank == 0:
                assert "no error" not in error_of(lambda: dist.all_reduce(torch.ones(5)))
        found.append(census())
    return [found[0], found[-1]]


def abort(rank: int, backend: str, folder: str, world: int) -> list[Census]:
    found = []
    for number in range(3):
        with group_of(backend, f"{folder}/{number}", rank, world):
            use_everything()
            cast(Any, dist.group.WORLD).abort()
            assert "no error" not in error_of(lambda: dist.all_reduce(torch.ones(5)))
        found.append(census())
    return [found[0], found[-1]]


def keep_results(rank: int, backend: str, folder: str, world: int) -> list[Census]:
    """Works that outlive their group hold nothing of it."""
    found, works = [], []
    for number in range(4):
        with group_of(backend, f"{folder}/{number}", rank, world):
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            assert work is not None
            work.wait()
            works.append(work)
        found.append(census())
    return [found[0], found[-1]]


ENDINGS = {x.__name__: x for x in (succeed, raise_inside, time_out, abort, keep_results)}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left_in_the_process(
    fresh: Fresh, backend: str, tmp_path: Path, name: str, world: int
) -> None:
    if backend == "gloo" and name not in ("succeed", "raise_inside"):
        pytest.skip("gloo cannot")
    files = shared_memory_files()
    ending = ENDINGS[name]
    for first, last in fresh.run(ending, backend, str(tmp_path), world, world=world, group=False):
        assert last == first
        assert last.children == 0
        assert not last.shared_mappings
    assert shared_memory_files() <= files


def use_a_server(rank: int, port: int) -> str:
    """What the group's own store says to a new client after the group is gone."""
    dist.init_process_group(
        "dreamcomm", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    use_everything()
    dist.destroy_process_group()
    gc.collect()
    if rank == 1:
        return "refused"
    with socket.socket() as client:
        return "refused" if client.connect_ex(("127.0.0.1", port)) else "accepted"


@pytest.mark.beyond_gloo("gloo's is gone, too")
def test_the_store_ends_with_its_group(fresh: Fresh) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert fresh.run(use_a_server, port, group=False) == ["refused"] * 2


def allocate_again_and_again(rank: int, backend: str, folder: str) -> list[Census]:
    found = []
    for number in range(3):
        with group_of(backend, f"{folder}/{number}", rank, 2):
            group: Any = dist.group.WORLD
            memory = group._get_backend(torch.device("cpu"))
            tensors = [
                memory.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
                for _ in range(5)
            ]
            dist.all_reduce(tensors[0].fill_(1.0))
            del tensors, memory, group
        found.append(census())
    return [found[0], found[-1]]


@pytest.mark.beyond_gloo("gloo allocates nothing")
def test_memory_of_a_group_goes_with_it(fresh: Fresh, backend: str, tmp_path: Path) -> None:
    for first, last in fresh.run(allocate_again_and_again, backend, str(tmp_path), group=False):
        assert last == first
        assert not last.shared_mappings


def collect_in_bare_code(rank: int, backend: str, folder: str) -> bool:
    """The garbage collector drops a group inside of code that has no builtins."""
    with group_of(backend, f"{folder}/store", rank, 2):
        group: Any = dist.new_group()
        cycle: list[Any] = [group._get_backend(torch.device("cpu"))]
        cycle.append(cycle)
        dist.barrier()
        dist.destroy_process_group(group)
        del group, cycle
        eval("collect()", {"__builtins__": {}, "collect": gc.collect})
        dist.barrier()
    return True


def test_the_garbage_collector_may_end_a_group(fresh: Fresh, backend: str, tmp_path: Path) -> None:
    assert fresh.run(collect_in_bare_code, backend, str(tmp_path), group=False) == [True, True]
