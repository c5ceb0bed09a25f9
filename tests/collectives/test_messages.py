"""Messages between two ranks: order, tags, any source, batches, and objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh, Pool


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def tags_out_of_order() -> list[float]:
    tags = [5, 1, 3]
    if dist.get_rank() == 0:
        works = [dist.isend(one(tag), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
        return []
    found = []
    for tag in sorted(tags):
        data = one(-1)
        dist.recv(data, 0, tag=tag)
        found.append(data.item())
    return found


def test_a_tag_picks_its_message(pool: Pool) -> None:
    assert pool.run(tags_out_of_order)[1] == [1.0, 3.0, 5.0]


def same_tag() -> list[float]:
    count = 200
    if dist.get_rank() == 0:
        for work in [dist.isend(one(i), 1) for i in range(count)]:
            work.wait()
        return []
    data = [one(-1) for _ in range(count)]
    for work in [dist.irecv(x, 0) for x in data]:
        work.wait()
    return [x.item() for x in data]


def test_messages_of_one_tag_keep_their_order(pool: Pool) -> None:
    assert pool.run(same_tag)[1] == [float(i) for i in range(200)]


def any_source() -> list[tuple[int, float]]:
    rank = dist.get_rank()
    if rank:
        dist.send(one(rank), 0, tag=rank)
        return []
    found = []
    for tag in (2, 3, 1):
        data = one(-1)
        source = dist.recv(data, None, tag=tag)
        found.append((source, data.item()))
    return found


def test_a_receive_from_any_source_names_it(pool: Pool) -> None:
    assert pool.run(any_source, world=4)[0] == [(2, 2.0), (3, 3.0), (1, 1.0)]


def batch(data: torch.Tensor) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, data, 0)]):
        work.wait()


def later(data: torch.Tensor) -> None:
    work = dist.irecv(data, 0)
    assert work is not None
    work.wait()


RECEIVE: dict[str, Callable[[torch.Tensor], Any]] = {
    "recv": lambda data: dist.recv(data, 0),
    "irecv": later,
    "any source": lambda data: dist.recv(data),
    "batch": batch,
    "strided": lambda data: dist.recv(data[::2], 0),
}


def receive_into_a_lazy_clone(how: str) -> list[Any]:
    """The clone and what it was made of, which share memory until one of them is written."""
    data = torch.full((5,), 9.0 if dist.get_rank() == 0 else 2.0)
    clone = torch._lazy_clone(data)
    if dist.get_rank() == 0:
        dist.send(clone[::2] if how == "strided" else clone, 1)
        return [torch._C._is_cow_tensor(clone)]
    RECEIVE[how](clone)
    return [data.tolist(), clone.tolist()]


@pytest.mark.beyond_gloo("gloo knows no hosts")
@pytest.mark.parametrize("how", RECEIVE)
@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_a_receive_into_a_lazy_clone_leaves_the_original(pool: Pool, how: str, hosts: str) -> None:
    still_shares, found = pool.run(receive_into_a_lazy_clone, how, options={"hosts": hosts})
    received = [9.0, 2.0, 9.0, 2.0, 9.0] if how == "strided" else [9.0] * 5
    assert still_shares == [True]
    assert found == [[2.0] * 5, received]


def crossing(count: int) -> float:
    """Both send before they receive: large messages may not need a partner to start."""
    other = 1 - dist.get_rank()
    out = torch.zeros(count)
    sent = dist.isend(torch.full((count,), float(dist.get_rank())), other)
    dist.recv(out, other)
    sent.wait()
    assert out.eq(float(other)).all()
    return out[-1].item()


@pytest.mark.parametrize("count", [1, 1000, 1_000_000])
def test_crossing_messages(pool: Pool, count: int) -> None:
    assert pool.run(crossing, count) == [1.0, 0.0]


def beside_collectives() -> tuple[float, float]:
    """A message stays under way while collectives run."""
    rank = dist.get_rank()
    data = one(rank)
    if rank == 1:
        work = dist.irecv(data, 0)
    total = one(1)
    for _ in range(10):
        dist.all_reduce(total)
    if rank == 0:
        dist.send(one(42), 1)
    else:
        work.wait()
    dist.barrier()
    return total.item(), data.item()


def test_messages_beside_collectives(pool: Pool) -> None:
    assert pool.run(beside_collectives) == [(1024.0, 0.0), (1024.0, 42.0)]


def batch() -> list[float]:
    """Everyone to everyone, in one batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [r for r in range(world) if r != rank]
    out = {r: one(-1) for r in others}
    ops = [dist.P2POp(dist.irecv, out[r], r) for r in others]
    ops += [dist.P2POp(dist.isend, one(10 * rank + r), r) for r in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out[r].item() for r in others]


def test_a_batch_of_messages(pool: Pool) -> None:
    found = pool.run(batch, world=4)
    assert found == [[10.0 * r + rank for r in range(4) if r != rank] for rank in range(4)]


def go_on_after_a_refused_batch() -> tuple[str, float, float]:
    other = 1 - dist.get_rank()
    got, data = torch.zeros(1), one(dist.get_rank() + 1.0)
    before = dist.P2POp(dist.irecv, torch.zeros(1), other, tag=2)
    refused = dist.P2POp(dist.irecv, torch.zeros(1).expand(4), other)
    behind = dist.P2POp(dist.isend, one(7.0), other, tag=2)
    text = ""
    try:
        dist.batch_isend_irecv([before, refused, behind])
    except ValueError as error:
        text = str(error)
    dist.all_reduce(data)
    ops = [
        dist.P2POp(dist.isend, one(8.0), other, tag=2),
        dist.P2POp(dist.irecv, got, other, tag=2),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return text, data.item(), got.item()


@pytest.mark.beyond_gloo("gloo makes no batches")
def test_calls_after_a_refused_batch_are_no_part_of_it(fresh: Fresh) -> None:
    """torch keeps a batch that an exception leaves, and would add the group's later calls to it."""
    for text, summed, got in fresh.run(go_on_after_a_refused_batch):
        assert "expected 'tensor' to have memory of its own" in text, text
        assert (summed, got) == (3.0, 8.0)


def batch_with_a_sparse_tensor(other: int) -> None:
    sparse = dist.P2POp(dist.isend, torch.eye(3).to_sparse(), other)
    dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), other, tag=2), sparse])


def interrupted_batch(other: int) -> None:
    with dist._coalescing_manager(None, torch.device("cpu"), async_ops=True):  # type: ignore[attr-defined]
        dist.irecv(torch.zeros(1), other, tag=2)
        raise KeyboardInterrupt


def interrupted_block(other: int) -> None:
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(1))
        raise KeyboardInterrupt


def go_on_after(fails: Callable[[int], None]) -> tuple[str, float, float]:
    other = 1 - dist.get_rank()
    got, data = torch.zeros(1), one(dist.get_rank() + 1.0)
    found = "no error"
    try:
        fails(other)
    except BaseException as error:
        found = type(error).__name__
    dist.all_reduce(data)
    ops = [
        dist.P2POp(dist.isend, one(8.0), other, tag=2),
        dist.P2POp(dist.irecv, got, other, tag=2),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found, data.item(), got.item()


@pytest.mark.beyond_gloo("gloo makes no batches")
@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (batch_with_a_sparse_tensor, "NotImplementedError"),
        (interrupted_batch, "KeyboardInterrupt"),
        (interrupted_block, "KeyboardInterrupt"),
    ],
)
def test_an_exception_ends_a_batch(fresh: Fresh, fails: Callable[[int], None], error: str) -> None:
    assert fresh.run(go_on_after, fails) == [(error, 3.0, 8.0)] * 2


def to_a_group_rank() -> float:
    group = dist.new_group([1, 2])
    data = one(dist.get_rank())
    if dist.get_rank() == 1:
        dist.send(one(7), group=group, group_dst=1)
    elif dist.get_rank() == 2:
        dist.recv(data, group=group, group_src=0)
    return data.item()


def test_group_ranks(pool: Pool) -> None:
    assert pool.run(to_a_group_rank, world=3) == [0.0, 1.0, 7.0]


def objects() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "long": "x" * 1000 * rank})
    at_root: list[Any] = [None] * world
    dist.gather_object(("from", rank), at_root if rank == 1 else None, dst=1)
    shared = [rank, torch.tensor([rank])] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [{"for": r} for r in range(world)], src=0)
    sent = ["hello", {1, 2}] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(sent, dst=1)
    elif rank == 1:
        dist.recv_object_list(sent, src=0)
    return {
        "gathered": [(x["rank"], len(x["long"])) for x in gathered],
        "at_root": at_root,
        "shared": [shared[0], shared[1].item()],
        "scattered": scattered[0],
        "sent": sent if rank < 2 else None,
    }


def test_objects(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(objects, world=3)):
        assert found["gathered"] == [(r, 1000 * r) for r in range(3)]
        wanted = [("from", r) for r in range(3)] if rank == 1 else [None] * 3
        assert found["at_root"] == wanted
        assert found["shared"] == [0, 0]
        assert found["scattered"] == {"for": rank}
        assert found["sent"] == (["hello", {1, 2}] if rank < 2 else None)
