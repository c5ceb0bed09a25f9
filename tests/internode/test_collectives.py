"""Groups whose ranks are on several hosts: bits, bytes, training, faults."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import replies
from internode.hosts import TWO_OF_TWO, Hosts, Placement, size_of
from internode.network import Network, NoNetwork
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

PLACEMENTS: list[Placement] = [
    TWO_OF_TWO,
    [[0, 2], [1, 3]],
    [[0], [1], [2], [3, 4]],
    [[0], [1], [2], [3]],
    [[0, 1, 2], [3]],
]
SHORT = [TWO_OF_TWO, [[0], [1], [2], [3, 4]]]

SUM, AVG, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
SOME = [torch.float32, torch.bfloat16, torch.int64]
COUNTS = [1, 7, 5001, 300_001]


def data_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def fold(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    """From left to right."""
    steps: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        SUM: torch.add,
        AVG: torch.add,
        PRODUCT: torch.mul,
        MIN: torch.minimum,
        MAX: torch.maximum,
    }
    result = parts[0].clone()
    for part in parts[1:]:
        result = steps[op](result, part)
    return result


def reduced(placement: Placement, count: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    """The documented order: the ranks of each host, then the hosts; halves in float32."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    sums = [fold([data_of(r, count, dtype).to(wide) for r in ranks], op) for ranks in placement]
    total = fold(sums, op)
    return (total / size_of(placement) if op == AVG else total).to(dtype)


def all_collectives(placement: Placement, dtypes: list[torch.dtype]) -> int:
    """Every collective against what torch computes here; how many."""
    rank, size = dist.get_rank(), dist.get_world_size()
    done = 0

    def same(got: torch.Tensor, want: torch.Tensor, *what: Any) -> None:
        nonlocal done
        done += 1
        assert torch.equal(got, want), (what, got, want)

    for dtype in dtypes:
        own = {count: data_of(rank, count, dtype) for count in COUNTS}
        everyones = {c: [data_of(r, c, dtype) for r in range(size)] for c in COUNTS}
        for count in COUNTS:
            mine, all_of = own[count], everyones[count]
            for op in [SUM, MIN, MAX, PRODUCT, *([AVG] if dtype in FLOATS else [])]:
                got = mine.clone()
                dist.all_reduce(got, op)
                want = reduced(placement, count, dtype, op)
                same(got, want, "all_reduce", dtype, op, count)
                got = mine.clone()
                dist.reduce(got, size - 1, op)
                if rank == size - 1:
                    same(got, want, "reduce", dtype, op, count)
                scattered = torch.empty_like(mine)
                dist.reduce_scatter(scattered, [mine.clone() for _ in range(size)], op)
                same(scattered, want, "reduce_scatter", dtype, op, count)
            for root in (0, size - 1):
                got = mine.clone()
                dist.broadcast(got, root)
                same(got, all_of[root], "broadcast", dtype, root, count)
                parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
                dist.gather(mine, parts, root)
                for other, part in enumerate(parts or []):
                    same(part, all_of[other], "gather", dtype, root, count)
                got = torch.empty_like(mine)
                dist.scatter(got, all_of if rank == root else None, root)
                same(got, all_of[rank], "scatter", dtype, root, count)
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            for other, part in enumerate(parts):
                same(part, all_of[other], "all_gather", dtype, count)
            sizes = [[(a + 2 * b + 1) % 4 * count // 4 for b in range(size)] for a in range(size)]
            given = [mine[: sizes[rank][other]].clone() for other in range(size)]
            taken = [mine.new_empty(sizes[other][rank]) for other in range(size)]
            dist.all_to_all(taken, given)
            for other, part in enumerate(taken):
                same(part, all_of[other][: sizes[other][rank]], "all_to_all", dtype, count)
    dist.barrier()
    return done


@pytest.mark.parametrize(
    "placement",
    [pytest.param(one, marks=[] if one in SHORT else [pytest.mark.long]) for one in PLACEMENTS],
    ids=str,
)
def test_every_collective_has_the_documented_bits(
    hosts: Hosts, placement: Placement, soak: bool
) -> None:
    if hosts.network and placement != TWO_OF_TWO and not soak:
        pytest.skip("only with --soak; virtual hosts have them all")
    whole = soak or placement == TWO_OF_TWO  # for the others three types are enough each time
    dtypes = FLOATS + INTEGERS if whole else SOME
    found = hosts.run(placement, all_collectives, placement, dtypes, timeout=300)
    assert all(done > 60 * len(dtypes) for done in found)


def messages() -> list[float]:
    """To every other rank and back, on all ways at once, and from any source."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rooms = [torch.zeros(1000) for _ in range(size)]
    works = [dist.irecv(rooms[r], r, tag=r) for r in range(size) if r != rank]
    works += [
        dist.isend(torch.full((1000,), rank + 10.0 * r), r, tag=rank)
        for r in range(size)
        if r != rank
    ]
    for work in works:
        assert work is not None
        work.wait()
    if rank == 0:
        for _ in range(size - 1):
            room = torch.zeros(3)
            source = dist.recv(room)
            assert room.tolist() == [float(source)] * 3
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    return [room[-1].item() for room in rooms]


def test_messages_within_and_between_hosts(hosts: Hosts) -> None:
    found = hosts.run(TWO_OF_TWO, messages)
    for rank, got in enumerate(found):
        assert got == [0.0 if r == rank else r + 10.0 * rank for r in range(4)]


def mix_calls() -> bool:
    """Calls of one thread that wait at once, later, or together, small and large in turn."""
    size = dist.get_world_size()
    for number in range(8):
        tensors = [torch.full((count,), float(dist.get_rank())) for count in (3, 50_000, 1, 9_000)]
        later = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        at_once = torch.full((20_000,), float(number))
        dist.all_reduce(at_once)
        for work in reversed(later):
            assert work is not None
            work.wait()
        together = [torch.ones(5), torch.ones(30_000)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would have another name used
            dist.all_reduce_coalesced(together)
        total = size * (size - 1) / 2
        same = [bool((tensor == total).all()) for tensor in tensors]
        same += [bool((tensor == size).all()) for tensor in together]
        if not all(same) or at_once[-1].item() != size * number:
            return False
    return True


def test_calls_that_wait_at_once_later_and_together(hosts: Hosts) -> None:
    assert hosts.run(TWO_OF_TWO, mix_calls) == [True] * 4


def count_bytes(elements: int) -> list[tuple[int, int]]:
    """Bytes sent and received by the handshake, and by the whole call."""
    from dreamcomm import stats

    for _ in range(3):
        dist.barrier()
    dist.all_reduce(torch.ones(elements))
    keys = ("sent_between_hosts", "received_between_hosts")
    return [(stats()["barrier"][key] // 3, stats()["all_reduce"][key]) for key in keys]


@pytest.mark.parametrize("placement", [TWO_OF_TWO, [[0], [1], [2], [3]]], ids=str)
def test_every_carrier_sends_its_share(hosts: Hosts, placement: Placement) -> None:
    """2(H-1)/H x S/L of the tensor, and what opens the call."""
    elements = 1_200_000
    carriers = min(len(ranks) for ranks in placement)
    share = 2 * (len(placement) - 1) * elements * 4 // (len(placement) * carriers)
    for both_ways in hosts.run(placement, count_bytes, elements):
        for opening, moved in both_ways:
            assert moved == opening + share
            assert opening < 200


def stats_of_a_new_group(costs: str) -> dict[str, dict[str, int]]:
    from dreamcomm import stats

    os.environ["DREAMCOMM_COSTS"] = costs
    return stats(dist.new_group())


@pytest.mark.parametrize("costs", ["auto", pytest.param("fixed", marks=pytest.mark.long)])
def test_what_a_group_measures_is_no_traffic(hosts: Hosts, costs: str) -> None:
    for stats in hosts.run(TWO_OF_TWO, stats_of_a_new_group, costs):
        assert not any(number for row in stats.values() for number in row.values()), stats


def describe() -> tuple[str, str]:
    from dreamcomm.info import explain, transport

    return transport(), explain("all_reduce", 1 << 20)


def test_the_topology_is_told(hosts: Hosts) -> None:
    for transport, explained in hosts.run([[0, 2], [1, 3]], describe):
        for text in (transport, explained):
            assert re.search(r"2 hosts: host \S+ \(ranks 0, 2\), host \S+ \(ranks 1, 3\)", text)
        assert "2 ranks of each host carry a share" in explained


def make_groups() -> list[float]:
    rank = dist.get_rank()
    found = []
    for members in ([0, 1], [1, 2], [0, 2, 3], [3]):
        group = dist.new_group(members)
        if rank in members:
            data = torch.full((5,), float(rank))
            dist.all_reduce(data, group=group)
            found.append(data[0].item())
    return found


def test_groups_of_some_ranks(hosts: Hosts) -> None:
    found = hosts.run(TWO_OF_TWO, make_groups)
    assert found == [[1.0, 5.0], [1.0, 3.0], [3.0, 5.0], [5.0, 3.0]]


def mismatch() -> list[str]:
    rank = dist.get_rank()
    texts = []
    for count in (3, 100_000):
        odd = torch.ones(count + (rank == 3))
        texts.append(error_of(lambda odd=odd: dist.all_reduce(odd)))
        assert odd[0].item() == 1
    inputs = list(torch.ones(4, 2 + (rank == 3)))
    texts.append(error_of(lambda: dist.all_to_all([torch.zeros(2) for _ in range(4)], inputs)))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 4
    return texts


def test_a_mismatch_is_told_to_all_and_harms_nobody(hosts: Hosts) -> None:
    found = hosts.run(TWO_OF_TWO, mismatch)
    assert all(texts == found[0] for texts in found)
    for texts in found:
        here = re.escape(__file__) + r":\d+ in "
        for call, (text, count) in enumerate(zip(texts, (3, 100_000), strict=False), 1):
            assert text.startswith("DistBackendError: the ranks made different calls: rank 0 ")
            for rank, odd in ((0, 0), (3, 1)):
                said = rf"rank {rank} called all_reduce\(SUM, {count + odd} x float32\)"
                assert re.search(rf"{said} as call {call} at {here}", text), text
            assert not re.search("rank [12] called", text), text  # two say it
        split = "in all_to_all as call 3 rank 3 gives rank 0 12 bytes, and rank 0 expects 8"
        assert split in texts[2], texts[2]


def mismatch_in_a_new_group() -> str:
    """One that has measured, by calls that nobody counts."""
    import dreamcomm

    rank = dist.get_rank()
    group = dist.new_group([0, 2, 3], pg_options=dreamcomm.Options(costs="auto"))
    return error_of(lambda: dist.all_reduce(torch.ones(5 + (rank == 3)), group=group))


def test_a_mismatch_names_the_group(hosts: Hosts) -> None:
    found = hosts.run(TWO_OF_TWO, mismatch_in_a_new_group)
    for rank in (0, 2, 3):
        text = found[rank]
        assert re.search(r"the ranks of group '\S+' \(ranks 0, 2, 3 of the job\) made", text), text
        assert "rank 2 called all_reduce(SUM, 6 x float32) as call 1 at" in text, text


def make_a_group_with_the_dead(members: list[int], folder: str) -> tuple[str, float]:
    dist.barrier()
    rank = dist.get_rank()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3 and rank not in members:  # it is told, and tells the others
        error_of(dist.barrier)
    text, begin = "", time.monotonic()
    if rank in members:
        text = error_of(lambda: dist.new_group(members, use_local_synchronization=True))
    seconds = time.monotonic() - begin
    Path(folder, f"over-{rank}").touch()
    while rank == 0 and not all(Path(folder, f"over-{other}").exists() for other in (1, 3)):
        time.sleep(0.02)  # it may be the one who keeps the store
    return text, seconds


@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2, 3], [0, 2]], ids=str)
def test_a_new_group_does_not_wait_for_the_dead(
    hosts: Hosts, members: list[int], store: str, tmp_path: Path, slack: float
) -> None:
    arguments = (make_a_group_with_the_dead, members, str(tmp_path))
    ranks = hosts.start(TWO_OF_TWO, *arguments, seconds=60, store=store)
    found = replies([ranks[rank] for rank in (0, 1, 3)], timeout=50)
    failed = [(rank, one.error) for rank, one in zip((0, 1, 3), found, strict=True) if one.error]
    assert not failed, "\n".join(f"rank {rank}: {error}" for rank, error in failed)
    for rank, reply in zip((0, 1, 3), found, strict=True):
        text, seconds = reply.value
        if rank in members:
            assert f"the process of rank {members.index(2)} has ended" in text, text
            assert seconds < 3.0 + slack


SECONDS = 4.0


def lose_rank_3(how: str) -> tuple[str, float]:
    for count in (10, 100_000):
        dist.all_reduce(torch.ones(count))
    if dist.get_rank() == 3:
        if how == "is late":
            time.sleep(2 * SECONDS)
        else:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() < 2 and how == "is long dead":
        time.sleep(2.5)
    begin = time.monotonic()
    return error_of(lambda: dist.all_reduce(torch.ones(100_000))), time.monotonic() - begin


@pytest.mark.parametrize("how", ["is killed", "is long dead", "is late"])
def test_a_lost_rank_is_named_on_all_hosts(hosts: Hosts, how: str, slack: float) -> None:
    ranks = hosts.start(TWO_OF_TWO, lose_rank_3, how, seconds=SECONDS)
    found = replies(ranks, timeout=60)
    for rank in (0, 1, 2):
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        assert text.startswith("DistBackendError: all_reduce(SUM, 100000 x float32)")
        if how != "is late":
            assert "the process of rank 3 has ended" in text
            assert seconds < 0.5 + 1 + slack
        else:
            assert re.search(r"\d\.\d s of waiting for rank 3, which", text), text
            assert SECONDS <= seconds < 1.1 * SECONDS + 0.1 + slack


def die_while_a_mate_is_late(told: str) -> tuple[str, float]:
    """Rank 3 dies in a call of the other host's that its rank 1 has not made yet."""
    dist.barrier()
    rank = dist.get_rank()
    if rank == 3:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 1:
        end = time.monotonic() + 20
        while not Path(told).exists() and time.monotonic() < end:
            time.sleep(0.02)
    begin = time.monotonic()
    text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    seconds = time.monotonic() - begin
    if rank == 0:
        Path(told).touch()
    return text, seconds


def test_a_death_elsewhere_is_told_while_a_mate_is_late(
    hosts: Hosts, tmp_path: Path, slack: float
) -> None:
    told = str(tmp_path / "told")
    found = replies(hosts.start(TWO_OF_TWO, die_while_a_mate_is_late, told, seconds=300), 60)
    for rank in (0, 1, 2):
        assert found[rank].error is None, found[rank].error
        text, seconds = found[rank].value
        assert "the process of rank 3 has ended" in text, text
        assert seconds < 0.3 + 1 + slack, text
    assert "all_reduce(SUM, 3 x float32) on rank 0 of 4" in found[0].value[0]


def outlive_the_others_error(folder: str) -> tuple[str, float]:
    """Rank 3 dies; rank 2 learns of it, and keeps the group until rank 0 has learned of it, too."""
    dist.barrier()
    rank = dist.get_rank()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    seconds = time.monotonic() - begin
    Path(folder, f"told-{rank}").touch()
    end = time.monotonic() + 20
    while not all(Path(folder, f"told-{r}").exists() for r in range(3)) and time.monotonic() < end:
        time.sleep(0.02)
    return text, seconds


def test_who_gives_the_group_up_and_keeps_it_is_not_waited_for(
    hosts: Hosts, tmp_path: Path, slack: float
) -> None:
    ranks = hosts.start(TWO_OF_TWO, outlive_the_others_error, str(tmp_path), seconds=300)
    for found in replies(ranks, 60)[:3]:
        assert found.error is None, found.error
        text, seconds = found.value
        assert "the process of rank 3 has ended" in text, text
        assert seconds < 1.2 + slack, text


def come_late_to_the_late(told: str) -> tuple[str, float]:
    """Rank 1 never calls; rank 0 calls so late that the other host's timeout comes first."""
    dist.barrier()
    rank = dist.get_rank()
    if rank == 1:
        end = time.monotonic() + 20
        while not Path(told).exists() and time.monotonic() < end:
            time.sleep(0.02)
        return "", 0.0
    if rank == 0:
        time.sleep(SECONDS / 2)
    begin = time.monotonic()
    text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    if rank == 0:
        Path(told).touch()
    return text, time.monotonic() - begin


def test_the_late_rank_is_named_though_others_gave_up_before(hosts: Hosts, tmp_path: Path) -> None:
    found = hosts.run(TWO_OF_TWO, come_late_to_the_late, str(tmp_path / "told"), seconds=SECONDS)
    text = found[0][0]
    assert re.search(r"wait(s|ing) for rank 1, which last called barrier as call 1", text), text


def miss_rank_3(call: str) -> tuple[str, float]:
    """The very first call of the group: nobody has heard of anybody."""
    import dreamcomm

    begin = time.monotonic()
    if dist.get_rank() == 3:
        time.sleep(2 * SECONDS)
        return "", 0
    if call == "monitored_barrier":
        text = error_of(lambda: dreamcomm.monitored_barrier(None, SECONDS, wait_all_ranks=True))
    else:
        text = error_of(lambda: dist.all_reduce(torch.ones(10)))
    return text, time.monotonic() - begin


@pytest.mark.parametrize(
    "call", ["all_reduce", pytest.param("monitored_barrier", marks=pytest.mark.long)]
)
def test_a_rank_that_never_calls_is_named(hosts: Hosts, call: str, slack: float) -> None:
    found = hosts.run(TWO_OF_TWO, miss_rank_3, call, seconds=SECONDS)
    for rank in (0, 1, 2) if call == "all_reduce" else (0,):
        text, seconds = found[rank]
        assert re.search(r"waiting for rank 3, which|[Rr]anks? 3 failed to pass", text), text
        assert "of the job" not in text, text  # a host's part of it is no group of its own
        assert seconds < 1.1 * SECONDS + 0.5 + slack


def miss_a_leader() -> str:
    if dist.get_rank() == 0:
        time.sleep(2 * SECONDS)
        return ""
    return error_of(lambda: dist.all_reduce(torch.ones(10)))


def test_what_a_late_leader_does_is_known_to_other_hosts(hosts: Hosts) -> None:
    """They wait for it itself; the rank that knows what it does is another of its host."""
    for text in hosts.run(TWO_OF_TWO, miss_a_leader, seconds=SECONDS)[1:]:
        site = r"its main thread is at \S+test_collectives"
        # One whose timeout is later is told so by the first: "rank 1 waits for rank 0, which ...".
        assert re.search(r"wait(ing|s) for rank 0, which .*" + site, text), text


def send_between_two(pair: tuple[int, int]) -> float:
    """The others take no part, and must not be waited for."""
    room = torch.zeros(5)
    if dist.get_rank() == pair[0]:
        dist.send(torch.full((5,), 7.0), pair[1])
    elif dist.get_rank() == pair[1]:
        dist.recv(room, pair[0])
    else:
        time.sleep(1)
    return room.sum().item()


@pytest.mark.parametrize("pair", [(0, 1), (1, 2)], ids=str)
def test_a_message_between_two_ranks(hosts: Hosts, pair: tuple[int, int]) -> None:
    found = hosts.run(TWO_OF_TWO, send_between_two, pair)
    assert found == [35.0 if rank == pair[1] else 0.0 for rank in range(4)]


def gather_and_leave() -> float:
    """The ranks of the root's host have done their part long before the others' data comes."""
    size = dist.get_world_size()
    data = torch.full((500_000,), float(dist.get_rank()))
    parts = [torch.empty_like(data) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(data, parts, 0)
    return sum(part[-1].item() for part in parts or [])


def test_ranks_may_leave_while_others_wait_for_data(fresh: Fresh, tmp_path: Path) -> None:
    try:
        with Network(2, rate="50mbit") as slow:  # 0.6 s
            found = Hosts(fresh, tmp_path, slow).run(TWO_OF_TWO, gather_and_leave)
    except NoNetwork as why:
        pytest.skip(str(why))
    assert found == [6.0, 0.0, 0.0, 0.0]


def lose_a_host(gone: str) -> tuple[str, float]:
    for count in (10, 100_000):
        dist.all_reduce(torch.ones(count))
    if dist.get_rank() == 0:
        Path(gone).touch()
    while not Path(gone + "-cut").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    return error_of(lambda: dist.all_reduce(torch.ones(100_000))), time.monotonic() - begin


@pytest.mark.parametrize(
    ("store", "placement"),
    [
        ("tcp", TWO_OF_TWO),
        *(
            pytest.param(*rest, marks=pytest.mark.long)
            for rest in [("file", TWO_OF_TWO), ("file", [[0], [1]]), ("tcp", [[0], [1]])]
        ),
    ],
    ids=str,
)
def test_a_host_whose_link_is_down_is_named(
    hosts: Hosts, tmp_path: Path, store: str, placement: Placement, slack: float
) -> None:
    """One of them is cut off from the store, too, where the other keeps it."""
    assert hosts.network is not None
    gone = tmp_path / "gone"
    ranks = hosts.start(placement, lose_a_host, str(gone), seconds=SECONDS, store=store)
    while not gone.exists():
        time.sleep(0.05)
    hosts.network.cut(1)
    Path(f"{gone}-cut").touch()
    for rank, found in enumerate(replies(ranks, timeout=60)):
        assert found.error is None, found.error
        text, seconds = found.value
        other = placement[1 if rank in placement[0] else 0]
        words = f"{'rank' if len(other) == 1 else 'ranks'} {', '.join(map(str, other))}"
        assert re.search(rf"rank {other[0]} of host \S+ \({words}\)", text), text
        assert seconds < 1.1 * SECONDS + 0.5 + slack
