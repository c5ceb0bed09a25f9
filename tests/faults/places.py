"""Where a fault can strike: every collective, messages, and what is built on them.

A place prepares on all ranks and returns the call in which the fault strikes. ``twist`` names
what one rank does otherwise than the others, and is empty on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dreamcomm

VICTIM = 1
LARGE = 300_000  # elements of a message that waits for its receiver


@dataclass(frozen=True)
class Scene:
    """A rank in the group where the fault strikes."""

    rank: int  # in the default group, as all ranks here
    world: int  # ranks in the group
    group: Any
    twist: str

    def tensor(self, count: int = 1000) -> torch.Tensor:
        dtype = torch.float64 if self.twist == "dtype" else torch.float32
        return torch.ones(count + (self.twist == "size"), dtype=dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor() for _ in range(self.world)]

    @property
    def op(self) -> Any:
        return dist.ReduceOp.MAX if self.twist == "op" else dist.ReduceOp.SUM

    @property
    def root(self) -> int:
        return 1 if self.twist == "root" else 0

    @property
    def is_victim(self) -> bool:
        return self.rank == VICTIM


Call = Callable[[], Any]


def all_reduce(s: Scene) -> Call:
    return lambda: dist.all_reduce(s.tensor(), s.op, group=s.group)


def reduce(s: Scene) -> Call:
    return lambda: dist.reduce(s.tensor(), s.root, s.op, group=s.group)


def broadcast(s: Scene) -> Call:
    return lambda: dist.broadcast(s.tensor(), s.root, group=s.group)


def all_gather(s: Scene) -> Call:
    return lambda: dist.all_gather(s.tensors(), s.tensor(), group=s.group)


def gather(s: Scene) -> Call:
    into = s.tensors() if s.rank == s.root else None
    return lambda: dist.gather(s.tensor(), into, s.root, group=s.group)


def scatter(s: Scene) -> Call:
    parts = s.tensors() if s.rank == s.root else None
    return lambda: dist.scatter(s.tensor(), parts, s.root, group=s.group)


def reduce_scatter(s: Scene) -> Call:
    return lambda: dist.reduce_scatter(s.tensor(), s.tensors(), s.op, group=s.group)


def all_to_all(s: Scene) -> Call:
    whole = torch.ones(100 * s.world, dtype=s.tensor().dtype)
    splits = [100] * s.world
    if s.twist == "split":
        splits[0], splits[1] = 99, 101
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole, splits, splits, group=s.group)


def barrier(s: Scene) -> Call:
    return lambda: dist.barrier(s.group)


def monitored_barrier(s: Scene) -> Call:
    return lambda: dreamcomm.monitored_barrier(s.group)


def send(s: Scene) -> Call:
    """All send to the victim, which receives from all."""
    if not s.is_victim:
        return lambda: dist.send(s.tensor(LARGE), VICTIM, s.group)
    return lambda: exchange([dist.irecv(s.tensor(LARGE), r, s.group) for r in others(s)])


def recv(s: Scene) -> Call:
    """All receive from the victim, which sends to all."""
    if not s.is_victim:
        return lambda: dist.recv(s.tensor(LARGE), VICTIM, s.group)
    return lambda: exchange([dist.isend(s.tensor(LARGE), r, s.group) for r in others(s)])


def others(s: Scene) -> list[int]:
    return [rank for rank in dist.get_process_group_ranks(s.group) if rank != s.rank]


def exchange(works: list[Any]) -> None:
    for work in works:
        work.wait()


def asynchronous(s: Scene) -> Call:
    return lambda: wait_for(dist.all_reduce(s.tensor(), s.op, group=s.group, async_op=True))


def async_broadcast(s: Scene) -> Call:
    return lambda: wait_for(dist.broadcast(s.tensor(), s.root, group=s.group, async_op=True))


def async_reduce_scatter(s: Scene) -> Call:
    def call() -> None:
        wait_for(dist.reduce_scatter(s.tensor(), s.tensors(), s.op, group=s.group, async_op=True))

    return call


def wait_for(work: Any) -> None:
    work.wait()


def sum_otherwise(twist: str) -> Callable[[Any, Any], Any]:
    """A hook that makes one call for a bucket, as torch's own do, but another one."""

    def hook(group, bucket):  # type: ignore[no-untyped-def] # torch compares annotations
        data, op = bucket.buffer(), dist.ReduceOp.SUM
        if twist == "size":
            data = torch.cat([data, data[:1]])
        if twist == "op":
            op = dist.ReduceOp.MAX
        if twist == "kind":
            work = dist.broadcast(data, 0, group=group, async_op=True)
        else:
            work = dist.all_reduce(data, op, group=group, async_op=True)
        assert work is not None
        # value() has the error of a call that failed.
        return work.get_future().then(lambda done: done.value()[0][: bucket.buffer().numel()])

    return hook


def ddp(s: Scene) -> Call:
    """The backward pass of a wrapped model; one rank may have a hook that others lack."""
    model = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(4)])
    wrapped = DistributedDataParallel(model, process_group=s.group)
    if s.twist == "dtype":
        wrapped.register_comm_hook(s.group, fp16_compress_hook)
    elif s.twist:
        wrapped.register_comm_hook(s.group, sum_otherwise(s.twist))
    loss = wrapped(torch.ones(2, 60)).sum()

    def backward() -> None:
        loss.backward()
        assert wrapped.module is model  # the wrapper lives until here

    return backward


PLACES: dict[str, Callable[[Scene], Call]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
    "send": send,
    "recv": recv,
    "async all_reduce": asynchronous,
    "async broadcast": async_broadcast,
    "async reduce_scatter": async_reduce_scatter,
    "DDP backward": ddp,
    "subgroup all_reduce": all_reduce,
    "subgroup reduce": reduce,
    "subgroup all_to_all": all_to_all,
    "subgroup recv": recv,
}

# What ranks may disagree on, by place. "kind": the victim makes another call.
TWISTS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("kind", "dtype", "size", "op"),
    "reduce": ("kind", "dtype", "size", "op", "root"),
    "broadcast": ("kind", "dtype", "size", "root"),
    "all_gather": ("kind", "dtype", "size"),
    "gather": ("kind", "dtype", "size", "root"),
    "scatter": ("kind", "dtype", "size", "root"),
    "reduce_scatter": ("kind", "dtype", "size", "op"),
    "all_to_all": ("kind", "dtype", "split"),
    # A monitored barrier is not compared with collectives: a rank that calls one is late.
    "barrier": ("kind",),
    "send": ("size",),
    "recv": ("size",),
    "async all_reduce": ("kind", "dtype", "size", "op"),
    "async broadcast": ("kind", "dtype", "size", "root"),
    "async reduce_scatter": ("kind", "dtype", "size", "op"),
    "DDP backward": ("kind", "dtype", "size", "op"),
    "subgroup all_reduce": ("kind", "dtype", "size", "op"),
    "subgroup reduce": ("kind", "dtype", "size", "op", "root"),
    "subgroup all_to_all": ("kind", "dtype", "split"),
    "subgroup recv": ("size",),
}
MESSAGES = ("send", "recv", "subgroup recv")


def twisted(place: str, scene: Scene) -> Call:
    """The victim's call where it differs in ``scene.twist``."""
    if scene.twist != "kind" or place == "DDP backward":
        return PLACES[place](scene)
    return all_reduce(scene) if place == "barrier" else barrier(scene)
