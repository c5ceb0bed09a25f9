"""Where the system gives ranks no memory to share, groups are Gloo's and say why."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

import dreamcomm
from helpers import seccomp
from helpers.pool import Fresh

pytestmark = pytest.mark.beyond_gloo("gloo shares no memory")

SMALL = 1 << 20  # of a file; a rank's window is larger


def limit(how: str, bytes_of_a_file: int = SMALL) -> None:
    if how == "files":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, which programs may undo
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_a_file, resource.RLIM_INFINITY))
    else:
        seccomp.refuse("memfd_create", getattr(errno, how))


def begin(rank: int, folder: str, options: dreamcomm.Options | None = None) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=2, pg_options=options)


def total() -> list[float]:
    shared = dreamcomm.empty(1000).fill_(1.0)
    dist.all_reduce(shared)
    return shared.unique().tolist()


def limited(rank: int, folder: str, how: str, ranks: list[int]) -> tuple[list[float], str, str]:
    if rank in ranks:
        limit(how)
    begin(rank, folder)
    found = total(), dreamcomm.transport(), dreamcomm.explain("all_reduce", 4000)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("EPERM", "Operation not permitted (allow the system call memfd_create"),
        ("ENOSYS", "Function not implemented (allow the system call memfd_create"),
        ("files", "File too large (raise the limit: ulimit -f)"),
    ],
)
def test_a_rank_without_memory_takes_the_group_to_gloo(
    fresh: Fresh, tmp_path: Path, how: str, why: str, ranks: list[int]
) -> None:
    first, second = fresh.run(limited, str(tmp_path), how, ranks, group=False)
    assert first == second
    values, transport, said = first
    assert values == [2.0]
    assert transport.startswith("gloo, as no memory is shared: ")
    assert f"rank {ranks[0]} has no memory to share: " in transport
    assert why in transport
    assert why in said


def without_room_for_a_heap(rank: int, folder: str) -> tuple[list[float], str, str]:
    if rank == 1:
        limit("files", 64 << 20)
    begin(rank, folder, dreamcomm.Options(heap_bytes=1 << 30))
    found = total(), dreamcomm.transport(), dreamcomm.explain("all_reduce", 4000)
    dist.destroy_process_group()
    return found


def test_a_heap_that_one_rank_cannot_make_is_done_without(fresh: Fresh, tmp_path: Path) -> None:
    for values, transport, said in fresh.run(without_room_for_a_heap, str(tmp_path), group=False):
        assert values == [2.0]
        assert transport.startswith("shm: 2 ranks")
        assert "heap of this rank: none: rank 1: sizing of 1073741824 bytes of shared mem" in said
        assert "ulimit -f" in said


def descriptors(rank: int, folder: str) -> list[str]:
    begin(rank, folder, dreamcomm.Options(shared_memory=False))
    assert total() == [2.0]
    paths = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    dist.destroy_process_group()
    return [path for path in paths if "memfd:" in path]


def test_with_shared_memory_off_none_is_made(fresh: Fresh, tmp_path: Path) -> None:
    env = {"DREAMCOMM_SHARED_MEMORY": "0"}
    assert fresh.run(descriptors, str(tmp_path), group=False, env=env) == [[], []]
