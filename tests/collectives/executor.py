"""Runs a plan in one rank and compares every result with NumPy, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collectives.bits import Array, random_array, reduce, to_bytes, to_tensor
from collectives.layouts import lay_out
from collectives.plan import Plan, Step


@dataclass
class Started:
    """A step under way: what to wait for, and what must then be true."""

    works: list[Any] = field(default_factory=list)
    results: list[tuple[torch.Tensor, Array]] = field(default_factory=list)


def run_plan(plan: Plan) -> int:
    """Runs the steps of this rank; returns how many. Raises at the first wrong bit."""
    executor = Executor(plan)
    for index, step in enumerate(plan.steps):
        executor.run(index, step)
    executor.drain()
    return executor.ran


class Executor:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.me = dist.get_rank()
        self.groups = [dist.group.WORLD]
        self.groups += [dist.new_group(list(ranks)) for ranks in plan.groups[1:]]
        self.pending: list[tuple[int, Step, Started]] = []
        self.ran = 0

    def run(self, index: int, step: Step) -> None:
        if step.drain:
            self.drain()
        ranks = self.plan.groups[step.group]
        if self.me not in ranks:
            return
        self.ran += 1
        call = Call(step, index, ranks, ranks.index(self.me), self.groups[step.group])
        started: Started = getattr(call, step.kind)()
        if step.asynchronous:
            self.pending.append((index, step, started))
        else:
            self.finish(index, step, started)

    def drain(self) -> None:
        for index, step, started in self.pending:
            self.finish(index, step, started)
        self.pending.clear()

    def finish(self, index: int, step: Step, started: Started) -> None:
        for work in started.works:
            if work is not None:
                work.wait()
        for number, (tensor, expected) in enumerate(started.results):
            if to_bytes(tensor) != expected.tobytes():
                raise AssertionError(_difference(index, step, number, tensor, expected))


def _difference(index: int, step: Step, number: int, tensor: torch.Tensor, expected: Array) -> str:
    wanted = to_tensor(expected, step.dtype)
    if tensor.numel() != wanted.numel():
        return f"step {index}, tensor {number}: {tensor.numel()} elements, not {wanted.numel()}"
    got = tensor.detach().reshape(-1)
    size = wanted.element_size()
    theirs, ours = to_bytes(got), expected.tobytes()
    wrong = [
        i
        for i in range(wanted.numel())
        if theirs[i * size : (i + 1) * size] != ours[i * size : (i + 1) * size]
    ]
    return (
        f"step {index}, tensor {number}: {len(wrong)} of {wanted.numel()} elements differ, "
        f"first [{wrong[0]}]: expected {wanted[wrong[0]].item()!r}, "
        f"got {got[wrong[0]].item()!r}\n{step}"
    )


class Call:
    """One step as one rank makes it. Every rank knows the inputs of all of them."""

    def __init__(
        self, step: Step, index: int, ranks: tuple[int, ...], rank: int, group: Any
    ) -> None:
        self.step = step
        self.index = index
        self.ranks = ranks
        self.rank = rank
        self.group = group
        self.size = len(ranks)
        self.root = ranks[step.root]
        self.layout = step.layouts[rank % len(step.layouts)]
        # Blocks cut from one tensor, or joined to one, have one dimension.
        self.flat_layout = "strided" if self.layout == "transposed" else self.layout
        self.asynchronous = step.asynchronous

    # Inputs and memory.

    def array(self, rank: int, block: int = 0, count: int | None = None) -> Array:
        rng = np.random.default_rng((self.step.seed, rank, block))
        return random_array(self.step.dtype, self.step.count if count is None else count, rng)

    def tensor(self, values: Array, flat: bool = False) -> torch.Tensor:
        layout = self.flat_layout if flat else self.layout
        return lay_out(to_tensor(values, self.step.dtype), layout)

    def room(self, count: int | None = None, flat: bool = False) -> torch.Tensor:
        """Memory for a result, filled with something else."""
        return self.tensor(self.array(self.rank + 1000, 0, count), flat)

    def joined(self, arrays: list[Array]) -> Array:
        return np.concatenate(arrays)

    # Reductions.

    def op(self) -> Any:
        if self.step.op == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(self.factor(self.rank))
        return getattr(dist.ReduceOp, self.step.op)

    def reduced(self, block: int = 0) -> Array:
        inputs = [self.array(rank, block) for rank in range(self.size)]
        factors = [self.factor(rank) for rank in range(self.size)]
        return reduce(self.step.op, self.step.dtype, inputs, factors)

    def factor(self, rank: int) -> float:
        """The factor of PREMUL_SUM; each rank has its own."""
        return self.step.factor * (1 + rank)

    def all_reduce(self) -> Started:
        data = self.tensor(self.array(self.rank))
        work = dist.all_reduce(data, self.op(), self.group, self.asynchronous)
        return Started([work], [(data, self.reduced())])

    def all_reduce_coalesced(self) -> Started:
        data = [self.tensor(self.array(self.rank, block)) for block in range(3)]
        with dist._coalescing_manager(self.group, async_ops=self.asynchronous) as manager:
            for tensor in data:
                dist.all_reduce(tensor, self.op(), self.group)
        results = [(tensor, self.reduced(block)) for block, tensor in enumerate(data)]
        return Started([manager] if self.asynchronous else [], results)

    def reduce(self) -> Started:
        data = self.tensor(self.array(self.rank))
        work = dist.reduce(data, self.root, self.op(), self.group, self.asynchronous)
        return Started([work], [(data, self.reduced())] if self.rank == self.step.root else [])

    def reduce_scatter(self) -> Started:
        arrays = [self.array(self.rank, block) for block in range(self.size)]
        inputs, out = [self.tensor(array) for array in arrays], self.room()
        work = dist.reduce_scatter(out, inputs, self.op(), self.group, self.asynchronous)
        kept = list(zip(inputs, arrays, strict=True))
        return Started([work], [(out, self.reduced(self.rank)), *kept])

    def reduce_scatter_flat(self) -> Started:
        array = self.joined([self.array(self.rank, block) for block in range(self.size)])
        data, out = self.tensor(array, flat=True), self.room(flat=True)
        work = dist.reduce_scatter_tensor(out, data, self.op(), self.group, self.asynchronous)
        return Started([work], [(out, self.reduced(self.rank)), (data, array)])

    # Movement.

    def broadcast(self) -> Started:
        is_root = self.rank == self.step.root
        data = self.tensor(self.array(self.step.root)) if is_root else self.room()
        work = dist.broadcast(data, self.root, self.group, self.asynchronous)
        return Started([work], [(data, self.array(self.step.root))])

    def all_gather(self) -> Started:
        data = self.tensor(self.array(self.rank))
        out = [self.room() for _ in range(self.size)]
        if self.step.in_place:
            out[self.rank] = data
        work = dist.all_gather(out, data, self.group, self.asynchronous)
        return Started([work], [(tensor, self.array(r)) for r, tensor in enumerate(out)])

    def all_gather_flat(self) -> Started:
        out = self.room(self.size * self.step.count, flat=True)
        data = self.tensor(self.array(self.rank), flat=True)
        if self.step.in_place:
            mine = out[self.rank * self.step.count :][: self.step.count]
            mine.copy_(data)
            data = mine
        work = dist.all_gather_into_tensor(out, data, self.group, self.asynchronous)
        expected = self.joined([self.array(r) for r in range(self.size)])
        return Started([work], [(out, expected)])

    def all_gather_coalesced(self) -> Started:
        data = [self.tensor(self.array(self.rank, block), flat=True) for block in range(3)]
        out = [self.room(self.size * self.step.count, flat=True) for _ in data]
        with dist._coalescing_manager(self.group, async_ops=self.asynchronous) as manager:
            for result, tensor in zip(out, data, strict=True):
                dist.all_gather_into_tensor(result, tensor, self.group)
        results = [
            (result, self.joined([self.array(r, block) for r in range(self.size)]))
            for block, result in enumerate(out)
        ]
        return Started([manager] if self.asynchronous else [], results)

    def gather(self) -> Started:
        array = self.array(self.rank)
        data = self.tensor(array)
        out = [self.room() for _ in range(self.size)] if self.rank == self.step.root else None
        work = dist.gather(data, out, self.root, self.group, self.asynchronous)
        results = [(tensor, self.array(r)) for r, tensor in enumerate(out or [])]
        return Started([work], [*results, (data, array)])

    def scatter(self) -> Started:
        source = None
        if self.rank == self.step.root:
            source = [self.tensor(self.array(self.rank, block)) for block in range(self.size)]
        out = self.room()
        work = dist.scatter(out, source, self.root, self.group, self.asynchronous)
        return Started([work], [(out, self.array(self.step.root, self.rank))])

    def block_count(self, source: int, target: int) -> int:
        """Elements from one rank to another in an uneven all_to_all."""
        return self.step.count * ((source + 2 * target + self.step.seed) % 3)

    def all_to_all(self) -> Started:
        ranks = range(self.size)
        sent = [self.array(self.rank, r, self.block_count(self.rank, r)) for r in ranks]
        expected = [self.array(r, self.rank, self.block_count(r, self.rank)) for r in ranks]
        out = [self.room(len(array)) for array in expected]
        data = [self.tensor(array) for array in sent]
        work = dist.all_to_all(out, data, self.group, self.asynchronous)
        results = [*zip(out, expected, strict=True), *zip(data, sent, strict=True)]
        return Started([work], results)

    def all_to_all_flat(self) -> Started:
        ranks = range(self.size)
        sent = [self.array(self.rank, r, self.block_count(self.rank, r)) for r in ranks]
        expected = [self.array(r, self.rank, self.block_count(r, self.rank)) for r in ranks]
        data = self.tensor(self.joined(sent), flat=True)
        out = self.room(sum(map(len, expected)), flat=True)
        splits = [len(array) for array in expected], [len(array) for array in sent]
        work = dist.all_to_all_single(out, data, *splits, self.group, self.asynchronous)
        return Started([work], [(out, self.joined(expected)), (data, self.joined(sent))])

    # Messages.

    def send(self) -> Started:
        return self._message(any_source=False, tag=self.step.tag)

    def send_any(self) -> Started:
        return self._message(any_source=True, tag=100 + self.index)

    def _message(self, any_source: bool, tag: int) -> Started:
        array = self.array(self.step.root)
        peer = self.ranks[self.step.peer]
        if self.step.root == self.step.peer:
            return Started()
        if self.rank == self.step.root:
            data = self.tensor(array)
            send: Callable[..., Any] = dist.isend if self.asynchronous else dist.send
            return Started([send(data, peer, self.group, tag)], [(data, array)])
        if self.rank == self.step.peer:
            out = self.room()
            source = None if any_source else self.root
            if self.asynchronous:
                return Started([dist.irecv(out, source, self.group, tag)], [(out, array)])
            assert dist.recv(out, source, self.group, tag) == self.root
            return Started([], [(out, array)])
        return Started()

    def shift(self) -> Started:
        """To the next rank, from the one before, in one batch."""
        if self.size == 1:
            return Started()  # torch refuses messages to oneself
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        data, out = self.tensor(self.array(self.rank)), self.room()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, data, self.ranks[after], self.group, self.step.tag),
                dist.P2POp(dist.irecv, out, self.ranks[before], self.group, self.step.tag),
            ]
        )
        return Started(works, [(out, self.array(before))])

    # Without tensors.

    def barrier(self) -> Started:
        return Started([dist.barrier(self.group, self.asynchronous)])

    def objects(self) -> Started:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, {"rank": self.rank, "index": self.index}, self.group)
        assert found == [{"rank": rank, "index": self.index} for rank in range(self.size)]
        return Started()
