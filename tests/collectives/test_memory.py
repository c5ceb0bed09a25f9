"""Tensors in the shared heap: the same results, in place, and nothing left of them."""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from helpers.pool import Fresh, Pool

pytestmark = pytest.mark.beyond_gloo("gloo has no heap")

# Around the size from which calls ask for heaps, and beyond a page.
COUNTS = (1, 2047, 2048, 300_001)


def both_ways(count: int, dtype: torch.dtype) -> list[bool]:
    """Whether each collective gives equal bits on heap tensors and on others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data = torch.randn(count * world).to(dtype)
    heap = dreamcomm.empty_like(data).copy_(data)
    assert dreamcomm.is_shared(heap)
    assert not dreamcomm.is_shared(data)
    equal = []

    def compare(call: Any) -> None:
        results = []
        for source in (data, heap):
            made = dreamcomm.empty if source is heap else torch.empty
            results.append(call(source, lambda n, made=made: made(n, dtype=dtype)))
        equal.append(torch.equal(*results))

    def all_reduce(source: Any, room: Any) -> Any:
        out = room(source.numel()).copy_(source)
        dist.all_reduce(out)
        return out

    def reduce(source: Any, room: Any) -> Any:
        out = room(source.numel()).copy_(source)
        dist.reduce(out, world - 1)
        return out if rank == world - 1 else source[:0]

    def broadcast(source: Any, room: Any) -> Any:
        out = room(source.numel()).copy_(source)
        dist.broadcast(out, 1)
        return out

    def all_gather(source: Any, room: Any) -> Any:
        out = room(source.numel())
        dist.all_gather_into_tensor(out, source[:count])
        return out

    def gather_in_place(source: Any, room: Any) -> Any:
        out = room(source.numel()).copy_(source)
        dist.all_gather_into_tensor(out, out[rank * count : (rank + 1) * count])
        return out

    def reduce_scatter(source: Any, room: Any) -> Any:
        out = room(count)
        dist.reduce_scatter_tensor(out, source)
        return out

    for call in (all_reduce, reduce, broadcast, all_gather, gather_in_place, reduce_scatter):
        compare(call)
    return equal


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", COUNTS)
def test_heap_tensors_give_the_same_bits(
    pool: Pool, count: int, dtype: torch.dtype, world: int
) -> None:
    assert pool.run(both_ways, count, dtype, world=world) == [[True] * 6] * world


def time_out_alone() -> bool:
    """Whether a new tensor gets the memory of one whose call failed (rank 0) or was not made."""
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    data = dreamcomm.zeros(20_000)
    begin, end = data.data_ptr(), data.data_ptr() + 4 * data.numel()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(data, group=group)
    del data
    again = dreamcomm.zeros(20_000)
    dist.barrier()
    return again.data_ptr() < end and begin < again.data_ptr() + 4 * again.numel()


def test_memory_that_a_late_peer_may_write_is_not_used_again(fresh: Fresh) -> None:
    assert fresh.run(time_out_alone) == [False, True]


def counted() -> tuple[int, int]:
    for data in (dreamcomm.zeros(10_000), torch.zeros(10_000), dreamcomm.zeros(10)):
        dist.all_reduce(data)
    found = dreamcomm.stats()["all_reduce"]
    return found["calls"], found["in_place"]


def test_stats_tell_which_calls_were_in_place(pool: Pool) -> None:
    assert pool.run(counted) == [(3, 1), (3, 1)]
    by_name = pool.run(counted, options={"algorithm": "heap"})
    assert by_name == [(3, 2), (3, 2)]  # the small one too, not the private one


def mixed() -> float:
    """One rank's tensor lies in its heap, the other's does not."""
    make = (dreamcomm.zeros, torch.zeros)[dist.get_rank()]
    data = make(10_000).add_(1.0)
    dist.all_reduce(data)
    return data.sum().item()


def test_ranks_may_differ_in_where_their_tensors_lie(pool: Pool) -> None:
    assert pool.run(mixed) == [20_000.0, 20_000.0]


def peer_memory() -> list[float]:
    """Different tensors of different sizes before: offsets differ between the ranks."""
    rank = dist.get_rank()
    held = [dreamcomm.zeros(1000 * (rank + 1)) for _ in range(rank + 1)]
    data = dreamcomm.zeros(5000)
    data += rank + 1
    dist.all_reduce(data)
    return [data.min().item(), data.max().item(), sum(x.sum().item() for x in held)]


def test_offsets_need_not_be_equal(pool: Pool) -> None:
    assert pool.run(peer_memory, world=3) == [[6.0, 6.0, 0.0]] * 3


def subgroups() -> list[float]:
    """One tensor in a group and in a part of it."""
    data = dreamcomm.zeros(4096).add_(1.0)
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for ranks, group in zip(([0, 1], [1, 2]), pairs, strict=True):
        if dist.get_rank() in ranks:
            dist.all_reduce(data, group=group)
    dist.all_reduce(data)
    return [data.min().item(), data.max().item()]


def test_one_heap_serves_all_groups(pool: Pool) -> None:
    assert pool.run(subgroups, world=3) == [[8.0, 8.0]] * 3


def small_heap() -> tuple[list[bool], str, float]:
    tensors = [dreamcomm.zeros(100_000).add_(1.0) for _ in range(4)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    where = [dreamcomm.is_shared(tensor) for tensor in tensors]
    said = dreamcomm.explain("all_reduce", 400_000, shared=True)
    return where, said, sum(tensor.sum().item() for tensor in tensors)


def test_a_full_heap_gives_other_memory_and_says_so(fresh: Fresh) -> None:
    for where, said, total in fresh.run(small_heap, options={"heap_bytes": 1 << 20}):
        assert where == [True, True, False, False]
        assert "2 requests found it full" in said
        assert "* heap" in said
        assert total == 800_000.0


def sum_without_a_heap() -> tuple[str, float]:
    data = torch.ones(10_000)
    dist.all_reduce(data)
    return dreamcomm.explain("all_reduce", 40_000, shared=True), data.sum().item()


def without_a_heap() -> bool:
    data = dreamcomm.zeros(1000) + dist.get_rank() + 1
    dist.all_reduce(data)
    assert data.unique().tolist() == [3.0]
    return dreamcomm.is_shared(dreamcomm.empty(4))


def test_no_heap_gives_other_memory(fresh: Fresh) -> None:
    assert fresh.run(without_a_heap, env={"DREAMCOMM_HEAP_BYTES": "0"}) == [False, False]


def test_a_heap_that_cannot_be_reserved_is_done_without(fresh: Fresh) -> None:
    for said, total in fresh.run(sum_without_a_heap, options={"heap_bytes": 1 << 60}):
        assert "heap of this rank: none" in said
        assert "* heap" not in said
        assert total == 20_000.0


def explain_without() -> str:
    return dreamcomm.explain("all_reduce", 1 << 20)


def test_explain_tells_why_not_the_heap(pool: Pool) -> None:
    text = pool.run(explain_without)[0]
    assert "heap" in text
    assert "not all ranks' tensors lie in heaps" in text
    assert "MiB in use" in text


def share_a_module() -> bool:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    model[0].weight.grad = torch.ones(300, 300)
    before = [p.detach().clone() for p in model.parameters()]
    objects = list(model.parameters())
    assert dreamcomm.share_(model) is model
    for parameter, same, value in zip(model.parameters(), objects, before, strict=True):
        assert parameter is same
        assert parameter.grad is not None
        assert torch.equal(parameter, value)
        assert dreamcomm.is_shared(parameter)
        assert dreamcomm.is_shared(parameter.grad)
        dist.all_reduce(parameter.grad)
    assert all(dreamcomm.is_shared(b) for b in model.buffers())
    return bool((objects[0].grad == 2.0).all())


def test_a_shared_module_keeps_its_values(pool: Pool) -> None:
    assert pool.run(share_a_module) == [True, True]


class TiedByData(nn.Module):
    """Weights, gradients and a buffer that have one memory without being one object."""

    def __init__(self, overlaps: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.other.weight.data = self.one.weight.data[:2] if overlaps else self.one.weight.data
        self.one.weight.grad = torch.ones(3, 3)
        if not overlaps:
            self.other.weight.grad = self.one.weight.grad.view(3, 3)
        self.register_buffer("seen", self.one.weight.detach())


def share_tied() -> bool:
    module = TiedByData()
    one, other = module.one.weight, module.other.weight
    value = one.detach().clone()
    dreamcomm.share_(module)
    assert one is not other
    for first, second in ((one, other), (one, module.seen), (one.grad, other.grad)):
        assert first.data_ptr() == second.data_ptr()
        assert dreamcomm.is_shared(second)
    with torch.no_grad():
        one.add_(1)
    return torch.equal(other, value + 1) and torch.equal(module.seen, value + 1)


def test_weights_that_are_tied_by_data_stay_so(pool: Pool) -> None:
    assert pool.run(share_tied) == [True, True]


def test_weights_that_overlap_in_part_are_not_shared() -> None:
    module = TiedByData(overlaps=True)
    with pytest.raises(ValueError, match=r"share_: 'TiedByData.one.weight' and 'TiedByData.other"):
        dreamcomm.share_(module)
    assert not any(dreamcomm.is_shared(one) for one in module.parameters())


def fork_with_a_heap() -> int:
    """A child that makes a group of its own gets a heap of its own."""
    data = dreamcomm.zeros(100_000)
    child = os.fork()
    if child == 0:
        other = dreamcomm.zeros(10).add_(5.0)
        os._exit(0 if dreamcomm.is_shared(other) and not dreamcomm.is_shared(data) else 3)
    data += 1.0
    dist.all_reduce(data)
    _, status = os.waitpid(child, 0)
    assert data.sum().item() == 200_000.0
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_gets_its_own_heap(fresh: Fresh) -> None:
    assert fresh.run(fork_with_a_heap) == [0, 0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_shapes(shape: tuple[int, ...]) -> None:
    made = dreamcomm.zeros(*shape, dtype=torch.int16)
    assert made.shape == shape
    assert made.dtype == torch.int16
    assert not made.any()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        dreamcomm.empty(2, -1)


def test_sizes_that_wrap_around_are_refused() -> None:
    for size in ((1 << 62) + 4, 1 << 61):
        with pytest.raises(ValueError, match=r"less than 2\^64 bytes"):
            dreamcomm.empty(size, dtype=torch.float64)
    with pytest.raises(ValueError, match="not quantized"):
        dreamcomm.empty(2, dtype=torch.qint8)


def told_without_heaps() -> str:
    return dreamcomm.explain("all_reduce", 1 << 20)


def test_the_explanation_knows_that_there_are_no_heaps(pool: Pool) -> None:
    for text in pool.run(told_without_heaps, options={"heap_bytes": 0}):
        assert "not all ranks have heaps" in text
        assert "one wait finds out" not in text


def resize() -> list[Any]:
    grown = dreamcomm.empty(5).fill_(3.0)
    grown.resize_(5000)
    kept = grown[:5].tolist()
    out = dreamcomm.empty(0)
    torch.add(torch.ones(3000), torch.ones(3000), out=out)
    freed = dreamcomm.empty(4000)
    freed.untyped_storage().resize_(0)
    freed.untyped_storage().resize_(16000)
    found = []
    for tensor in (grown, out, freed):
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        found.append((dreamcomm.is_shared(tensor), tensor.unique().tolist()))
    return [kept, found]


def test_tensors_of_the_heap_can_be_resized(pool: Pool) -> None:
    for kept, found in pool.run(resize):
        assert kept == [3.0] * 5
        assert found == [(True, [2.0])] * 3


def resize_in_a_small_heap() -> list[Any]:
    tensor = dreamcomm.empty(5).fill_(3.0)
    tensor.resize_(1 << 20)
    was_shared = dreamcomm.is_shared(tensor)
    kept = tensor[:5].tolist()
    tensor.resize_(5).untyped_storage().resize_(20)
    return [was_shared, kept, dreamcomm.is_shared(tensor), tensor.tolist()]


def test_a_tensor_that_outgrows_the_heap_moves_to_other_memory(fresh: Fresh) -> None:
    threes = [3.0] * 5
    for found in fresh.run(resize_in_a_small_heap, options={"heap_bytes": 1 << 20}):
        assert found == [False, threes, True, threes]


class Odd(nn.Module):
    """A module with something that is no ordinary tensor behind what is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        if kind == "lazy":
            self.odd: nn.Module = nn.LazyLinear(2)
        if kind == "sparse":
            self.register_buffer("odd", torch.eye(2).to_sparse())
        if kind == "gradient":
            self.odd = nn.Embedding(4, 2, sparse=True)
            self.odd(torch.tensor([1])).sum().backward()
        if kind == "quantized":
            self.register_buffer("odd", torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8))


@pytest.mark.parametrize("kind", ["lazy", "sparse", "gradient", "quantized"])
def test_a_module_that_cannot_be_shared_stays_as_it_is(kind: str) -> None:
    module = Odd(kind)
    with pytest.raises(ValueError, match=r"share_: .*Odd\.odd.* Nothing was moved"):
        dreamcomm.share_(module)
    assert not any(dreamcomm.is_shared(p) for p in module.first.parameters())


def test_what_is_no_module_or_tensor_is_told() -> None:
    with pytest.raises(TypeError, match=r"share_: expected a module .*, got Tensor; .*empty_like"):
        dreamcomm.share_(torch.ones(2))  # type: ignore[type-var]
    with pytest.raises(TypeError, match="is_shared: expected a tensor, got int"):
        dreamcomm.is_shared(3)  # type: ignore[arg-type]


def share_with_little_room(rank: int, folder: str) -> list[Any]:
    """Own heaps fit into the address space, those of the peers do not."""
    heap = 8 << 30
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmSize:")[2].split()[0]) << 10
    room = used + heap + heap // 2
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    dist.init_process_group(
        "dreamcomm",
        store=dist.FileStore(f"{folder}/store", 2),
        rank=rank,
        world_size=2,
        pg_options=dreamcomm.Options(heap_bytes=heap),
    )
    total = dreamcomm.empty(1000).fill_(1.0)
    dist.all_reduce(total)
    found = [total.unique().tolist(), dreamcomm.explain("all_reduce", 4000)]
    dist.destroy_process_group()
    return found


def test_without_room_for_a_peers_heap_there_are_none(fresh: Fresh, tmp_path: Path) -> None:
    for values, text in fresh.run(share_with_little_room, str(tmp_path), group=False):
        assert values == [2.0]
        assert "heap of this rank: none: rank 1 has no room for that of rank 0" in text
        assert "ulimit -v" in text
