"""A group is shrunk: the ranks that stay go on without the others, be they alive or dead."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT, SHRINK_DEFAULT

from helpers.census import Census, census, shared_memory_files
from helpers.pool import Fresh, Pool
from helpers.processes import replies, value_of
from lifecycle.groups import error_of, group_of, use_everything

pytestmark = pytest.mark.beyond_gloo("gloo cannot shrink")


def use(group: Any, world: int) -> None:
    """Collectives whose results tell who took part."""
    rank = group.rank()
    assert group.size() == world
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total, group=group)
    assert total.eq(world * (world + 1) / 2).all()
    parts = [torch.empty(3) for _ in range(world)]
    dist.all_gather(parts, torch.full((3,), float(rank)), group=group)
    assert torch.stack(parts)[:, 0].tolist() == list(range(world))
    dist.barrier(group)


def use_world(world: int) -> None:
    default: Any = dist.group.WORLD
    assert dist.get_world_size() == world
    use(default, world)
    use(dist.new_group(), world)
    if world > 1:
        use_everything()


def own_backend(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def shrink_in_health(excluded: list[int], flags: int) -> int | None:
    """The new rank; calls that are under way end well where they are not to be aborted."""
    use_everything()
    world = dist.get_world_size()
    data = [torch.ones(300_000) for _ in range(3)]
    works: list[Any] = [dist.all_reduce(x, async_op=True) for x in data]
    if flags == SHRINK_ABORT or dist.get_rank() in excluded:
        for work in works:
            work.wait()
        dist.barrier()
    else:
        barrier: Any = dist.barrier(async_op=True)
        works.append(barrier)
    if dist.get_rank() in excluded:
        return None
    group = dist.shrink_group(excluded, shrink_flags=flags)
    assert all(work.is_completed() for work in works)
    assert all(bool(x.eq(world).all()) for x in data)
    assert group is dist.group.WORLD
    use_world(world - len(excluded))
    return dist.get_rank()


@pytest.mark.parametrize("flags", [SHRINK_DEFAULT, SHRINK_ABORT])
@pytest.mark.parametrize(
    ("world", "excluded", "ranks"),
    [
        (4, [3], [0, 1, 2, None]),
        (4, [2, 0], [None, 0, None, 1]),
        (3, [0, 2], [None, 0, None]),
    ],
)
def test_a_healthy_group(
    pool: Pool, world: int, excluded: list[int], ranks: list[int | None], flags: int
) -> None:
    assert pool.run(shrink_in_health, excluded, flags, world=world) == ranks


def shrink_under_way() -> None:
    """A call whose last rank is late, and then excluded."""
    data = torch.ones(10)
    if dist.get_rank() == 2:
        time.sleep(0.3)  # the others are about to shrink the group, which has to wait
        dist.all_reduce(data)
        return
    work: Any = dist.all_reduce(data, async_op=True)
    small = own_backend().shrink([2], SHRINK_DEFAULT)
    assert work.is_completed()
    assert data.eq(3).all()
    assert small.size() == 2
    small.shutdown()


def test_calls_under_way_end_first(pool: Pool) -> None:
    pool.run(shrink_under_way, world=3)


def shrink_a_second_group(flags: int) -> int | None:
    """The default group stays whole."""
    group: Any = dist.new_group([0, 1, 2])
    default: Any = dist.group.WORLD
    place = None
    if dist.get_rank() in (0, 2):
        use_before = torch.ones(1)
        work: Any = dist.all_reduce(use_before, async_op=True)
        small: Any = dist.shrink_group([1], group, flags)
        use(small, 2)
        work.wait()
        use(small, 2)
        place = dist.get_rank(small)
        dist.destroy_process_group(small)
    else:
        dist.all_reduce(torch.ones(1))
    use(default, 4)
    return place


@pytest.mark.parametrize("flags", [SHRINK_DEFAULT, SHRINK_ABORT])
def test_a_group_beside_the_default_one(pool: Pool, flags: int) -> None:
    assert pool.run(shrink_a_second_group, flags, world=4) == [0, None, 1, None]


def reuse_names() -> None:
    """torch hands out the names of groups from the beginning, to groups of other sizes."""
    dist.new_group([0, 1])
    if dist.get_rank() == 3:
        return
    dist.shrink_group([3])
    for _ in range(3):
        use(dist.new_group(), 3)


def test_names_of_groups_come_again(pool: Pool) -> None:
    pool.run(reuse_names, world=4, group_timeout=10)


def give_options() -> list[Any]:
    """Those of the first smaller group, and of the second, made without."""
    import dreamcomm

    if dist.get_rank() == 2:
        return []
    gloo: Any = dist.ProcessGroupGloo
    with pytest.raises(ValueError, match=r"to be dreamcomm\.Options"):
        dist.shrink_group([2], pg_options=gloo._Options())
    dist.shrink_group([2], pg_options=dreamcomm.Options(algorithm="ring"))
    found = [own_backend().options]
    use_world(2)
    if dist.get_rank() == 0:
        dist.shrink_group([1])
        found.append(own_backend().options)
    return [(options.algorithm, options.timeout.total_seconds()) for options in found]


def test_options_are_given_or_kept(pool: Pool) -> None:
    found = pool.run(give_options, world=3, group_timeout=40)
    assert found == [[("ring", 40.0)] * 2, [("ring", 40.0)], []]


def abort_waiters(folder: str) -> str:
    """A thread waits for the rank that is excluded, which calls only later."""
    done = [Path(folder, f"done-{rank}") for rank in range(2)]
    if dist.get_rank() == 2:
        while not all(path.exists() for path in done):
            time.sleep(0.01)
        return error_of(lambda: dist.all_reduce(torch.ones(1)))
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    told: list[str] = []
    waiter = threading.Thread(target=lambda: told.append(error_of(work.wait)))
    waiter.start()
    dist.shrink_group([2], shrink_flags=SHRINK_ABORT)
    waiter.join()
    use_world(2)
    done[dist.get_rank()].touch()
    return told[0]


def test_aborting_releases_those_who_wait(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(abort_waiters, str(tmp_path), world=3, group_timeout=300):
        assert text.startswith("DistBackendError")
        assert "shrink_group() was called with SHRINK_ABORT" in text


WRONG: dict[str, tuple[Callable[[int], list[int]], int, str]] = {
    "none": (lambda _: [], 0, "expected 'ranks_to_exclude' to have a rank at least, got none"),
    "out of range": (lambda _: [0, 2], 0, "'ranks_to_exclude'"),
    "negative": (lambda _: [-1], 0, "'ranks_to_exclude'"),
    "itself": (lambda rank: [rank], 0, "this rank is among the ones to exclude"),
    "all": (lambda _: [1, 0], 0, "this rank is among the ones to exclude, [0, 1]"),
    "flags": (lambda rank: [1 - rank], 2, "SHRINK_DEFAULT (0) or SHRINK_ABORT (1), got 2"),
}


def be_wrong(name: str) -> tuple[str, str]:
    """What the backend says, and torch before it."""
    make, flags, _ = WRONG[name]
    told = []
    for call in (own_backend().shrink, lambda x, y: dist.shrink_group(x, shrink_flags=y)):
        try:
            call(make(dist.get_rank()), flags)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    use_world(2)
    backends, torchs = told
    return backends, torchs


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_leave_the_group_as_it_was(pool: Pool, name: str) -> None:
    for rank, (text, _) in enumerate(pool.run(be_wrong, name)):
        assert text.startswith(f"rank {rank} of 2: shrink_group: ")
        assert WRONG[name][2] in text


def differ() -> str:
    """Two of four ranks continue, and agree only at the second attempt."""
    rank = dist.get_rank()
    if rank > 1:
        return ""
    text = error_of(lambda: dist.shrink_group([3 - rank]))
    dist.shrink_group([2, 3])
    use_world(2)
    return text


def test_ranks_that_exclude_others_than_their_peers(pool: Pool) -> None:
    texts = pool.run(differ, world=4, group_timeout=300)
    for rank, other in ((0, 1), (1, 0)):
        assert texts[rank].startswith(f"DistBackendError: rank {rank} of 4: shrink_group: ")
        # By then the other may be at its second attempt.
        assert f"rank {rank} excludes [{3 - rank}], rank {other} excludes [" in texts[rank]


def wait_in_vain() -> str:
    return error_of(lambda: dist.shrink_group([2])) if dist.get_rank() == 0 else ""


def test_a_rank_that_stays_but_does_not_call(pool: Pool) -> None:
    text = pool.run(wait_in_vain, world=3, group_timeout=1)[0]
    assert "of the ranks that stay, [1] did not call it within the timeout of 10000 ms" in text


def keep_one_that_has_died() -> str:
    if dist.get_rank() == 1:
        os._exit(0)
    if dist.get_rank() == 2:
        return "excluded"
    return error_of(lambda: dist.shrink_group([2]))


def test_a_rank_that_stays_but_has_died(fresh: Fresh) -> None:
    """At once, whatever the timeout: it will not call."""
    ranks = fresh.start(keep_one_that_has_died, world=3, group_timeout=600)
    text = value_of(replies(ranks, 60.0), 0)
    assert (
        "of the ranks that stay, [1] cannot call it, as they have ended or destroyed the group"
        in text
    )


def be_interrupted_once() -> str:
    """Rank 0 while it waits for rank 1 to call; by then rank 2 has seen it calling."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    told = ""
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            dist.shrink_group([3])
        except KeyboardInterrupt:
            told = "interrupted"
        store.set("was interrupted", "")
    elif rank == 1:
        store.wait(["was interrupted"])
    if rank < 3:
        dist.shrink_group([3])
        use_world(3)
    return told


def test_who_was_interrupted_calls_again(pool: Pool) -> None:
    assert pool.run(be_interrupted_once, world=4)[0] == "interrupted"


def be_ahead_of_others(folder: str) -> str:
    """Rank 0 comes when the others have waited in vain; then all try again."""
    rank, told = dist.get_rank(), ""
    if rank == 3:
        return told
    marks = [Path(folder, f"told-{other}") for other in (1, 2)]
    if rank > 0:
        told = error_of(lambda: dist.shrink_group([3]))
        marks[rank - 1].touch()
    while not all(mark.exists() for mark in marks):
        time.sleep(0.01)
    dist.shrink_group([3])
    use_world(3)
    return told


def test_ranks_may_have_tried_unequally_often(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(be_ahead_of_others, str(tmp_path), world=4, group_timeout=1)
    assert told[0] == told[3] == ""
    for text in told[1:3]:
        assert "of the ranks that stay, [0] did not call it" in text


def lose_in_turn(victims: list[int]) -> tuple[list[str], list[int]]:
    """Each victim by its rank at the time; what the others learn, and their last rank."""
    import dreamcomm

    shared = dreamcomm.zeros(100_000)
    told = []
    for victim in victims:
        world = dist.get_world_size()
        dist.all_reduce(shared.fill_(1.0))
        assert shared.eq(world).all()
        use_everything()
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        told.append(error_of(lambda: dist.all_reduce(torch.ones(1000))))
        dist.shrink_group([victim], shrink_flags=SHRINK_ABORT)
        use_world(world - 1)
    last: Any = dist.group.WORLD
    dist.all_reduce(shared.fill_(1.0))
    dist.all_reduce(more := dreamcomm.zeros(100_000).fill_(1.0))
    assert shared.eq(last.size()).all()
    assert more.eq(last.size()).all()
    place = (last.rank(), last.size())
    del last, shared, more
    dist.destroy_process_group()
    assert not census().shared_mappings
    return told, list(place)


@pytest.mark.parametrize(
    ("world", "victims", "places", "shared_memory"),
    [
        (3, [0], {1: [0, 2], 2: [1, 2]}, True),
        (4, [1, 1], {0: [0, 2], 3: [1, 2]}, True),
        (3, [2, 0], {1: [0, 1]}, True),
        (3, [1], {0: [0, 2], 2: [1, 2]}, False),
        # Gloo tells the victim's neighbours, and their closed connections the fourth rank. On a
        # loaded machine a rank has waited in Gloo's next call for ever, once: the long form looks.
        pytest.param(*(4, [1], {0: [0, 3], 2: [1, 3], 3: [2, 3]}, False), marks=pytest.mark.long),
    ],
)
def test_after_a_rank_was_killed(
    fresh: Fresh,
    world: int,
    victims: list[int],
    places: dict[int, list[int]],
    shared_memory: bool,
) -> None:
    files = shared_memory_files()
    ranks = fresh.start(
        lose_in_turn,
        victims,
        world=world,
        group_timeout=300,
        options={"shared_memory": shared_memory},
    )
    found = replies(ranks, timeout=60)
    for rank in range(world):
        if rank not in places:
            assert "process ended with -9" in str(found[rank].error)
            continue
        assert found[rank].error is None, found[rank].error
        told, place = found[rank].value
        assert place == places[rank]
        assert "no error" not in told
    assert shared_memory_files() <= files


def be_interrupted_beside_a_call(folder: str) -> bool:
    """Rank 0 has a call that Gloo cannot abort. The others stay until rank 0 has been told."""
    told = Path(folder, "told")
    dist.all_reduce(torch.ones(10))  # makes the connections whose end then ends the call
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(10), async_op=True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.shrink_group([2], shrink_flags=SHRINK_ABORT)
        told.touch()
    until = time.monotonic() + 20
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return told.exists()


def test_an_interrupt_waits_for_no_call_of_gloo(fresh: Fresh, tmp_path: Path) -> None:
    ranks = fresh.start(
        be_interrupted_beside_a_call,
        str(tmp_path),
        world=3,
        group_timeout=300,
        options={"shared_memory": False},
    )
    assert [reply.value for reply in replies(ranks, timeout=60)] == [True] * 3


def count_what_is_left(
    rank: int, backend: str, folder: str, world: int, dies: bool
) -> list[Census]:
    """The last rank leaves in turn, until one remains."""
    found: list[Census] = []
    for size in range(world, 1, -1):
        if rank == size:
            break
        with group_of(backend, f"{folder}/{size}", rank, size, seconds=60):
            use_everything()
            if dies and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if dies:
                assert error_of(lambda: dist.all_reduce(torch.ones(5))) != "no error"
            if rank < size - 1:
                dist.shrink_group([size - 1], shrink_flags=int(dies))
                use_world(size - 1)
        found.append(census())
    return found


@pytest.mark.parametrize("dies", [False, True])
def test_nothing_is_left_in_the_process(
    fresh: Fresh, backend: str, tmp_path: Path, dies: bool
) -> None:
    files = shared_memory_files()
    world = 4
    ranks = fresh.start(
        count_what_is_left, backend, str(tmp_path), world, dies, world=world, group=False
    )
    for rank, reply in enumerate(replies(ranks, timeout=60)):
        if dies and rank > 0:
            assert "process ended with -9" in str(reply.error)
            continue
        assert reply.error is None, reply.error
        first, *others = reply.value
        assert all(later == first for later in others)
        assert first.children == 0
        assert not first.shared_mappings
    assert shared_memory_files() <= files


def lose_the_store(rank: int, port: int) -> tuple[str, float]:
    """The store is rank 0's, and goes with it."""
    dist.init_process_group(
        "dreamcomm", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3
    )
    use_everything()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    assert error_of(lambda: dist.all_reduce(torch.ones(1000))) != "no error"
    begin = time.monotonic()
    text = error_of(lambda: dist.shrink_group([0], shrink_flags=SHRINK_ABORT))
    seconds = time.monotonic() - begin
    dist.destroy_process_group()
    return text, seconds


def test_a_store_that_is_lost(fresh: Fresh) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = replies(fresh.start(lose_the_store, port, world=3, group=False), timeout=60)
    for rank in (1, 2):
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        assert text.startswith(f"DistBackendError: rank {rank} of 3: shrink_group: ")
        assert "cannot meet, as the store of their group does not answer" in text
        assert "End all ranks and start anew" in text
        assert seconds < 30


class Deadly(dist.Store):
    """A file that kills a rank that publishes its rank info there, once it is armed."""

    def __init__(self, path: str, world: int) -> None:
        super().__init__()
        self.file = dist.FileStore(path, world)
        self.armed = False

    def set(self, key: str, value: Any) -> None:
        if self.armed and "card/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        self.file.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self.file.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self.file.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.file.check(keys))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        if timeout is None:
            self.file.wait(keys)
        else:
            self.file.wait(keys, timeout)

    def set_timeout(self, timeout: Any) -> None:
        self.file.set_timeout(timeout)


def die_once_agreed(rank: int, path: str) -> tuple[str, float]:
    deadly = Deadly(path, 4)
    store = deadly if rank == 2 else dist.FileStore(path, 4)
    dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=4)
    use_everything()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    deadly.armed = True
    error_of(lambda: dist.all_reduce(torch.ones(3)))
    begin = time.monotonic()
    text = error_of(lambda: dist.shrink_group([3], shrink_flags=SHRINK_ABORT))
    seconds = time.monotonic() - begin
    dist.shrink_group([2, 3], shrink_flags=SHRINK_ABORT)
    use_world(2)
    dist.destroy_process_group()
    return text, seconds


def test_a_rank_that_dies_once_it_has_agreed(fresh: Fresh, tmp_path: Path, slack: float) -> None:
    """The others wait for it in the smaller group that they make, and hear of it there."""
    path = str(tmp_path / "store")
    found = replies(fresh.start(die_once_agreed, path, world=4, group=False), timeout=60)
    assert "process ended with -9" in str(found[2].error)
    for rank in (0, 1):
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        assert "the process of rank 2 of the group that shrinks has ended, where it last" in text
        assert seconds < 1 + slack
