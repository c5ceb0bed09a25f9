"""How many bytes a rank needs for training at each ZeRO stage, from shapes and dtypes alone.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
figure 1: with P parameters of 2 bytes, gradients of 2 bytes, K bytes of optimizer state and master
parameters an element (12 for Adam) and N ranks, a rank has

=====  ====================================  ==========================
stage  bytes                                 sharded
=====  ====================================  ==========================
0      ``(2 + 2 + K) * P``                   nothing
1      ``(2 + 2) * P + K * P / N``           optimizer state, masters
2      ``2 * P + (2 + K) * P / N``           and gradients
3      ``(2 + 2 + K) * P / N``               and parameters
=====  ====================================  ==========================

At stage 3 the ranks of a host map one copy of the parameters, of which each rank counts its share:
its rows, where there is one host. Where ranks gather parameters, each has its rows, and units in
use. Rows are sharded as :mod:`dreamcomm.buckets.layout` does, so uneven ones are exact. Not counted
are activations, buffers and what an allocator loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamcomm.buckets.layout import shard_layout
from dreamcomm.buckets.plan import ParameterInfo, plan_buckets
from dreamcomm.zero.state_bytes import state_of
from dreamcomm.zero.unit_sizes import bytes_in_use, dtype_of, units_of

__all__ = ["Estimate", "estimate"]

MIB = 1 << 20
# In files: a step's pieces of 2^21 elements are read, stepped and written, while 32 MiB are behind.
STEPPED_ELEMENTS = 3 << 21
STEPPED_BEHIND = 32 * MIB
KEPT_BUCKETS = 2  # one is reduced while a backward pass makes the next


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank needs, by what they hold. ``str(estimate)`` is a table.

    Attributes:
        world_size: number of ranks.
        stage: 0 (plain data parallelism) to 3.
        parameters: that the module computes with, kept between steps.
        gradients: after they are reduced.
        optimizer_state: with step counters.
        master_parameters: copies in another dtype, which the optimizer steps.
        transient: for a part of a step only.
        in_files: on the disk, and not in memory.
    """

    world_size: int
    stage: int
    parameters: int
    gradients: int
    optimizer_state: int
    master_parameters: int
    transient: int
    in_files: int = 0

    @property
    def total(self) -> int:
        """Bytes, without the transient ones."""
        return self.parameters + self.gradients + self.optimizer_state + self.master_parameters

    @property
    def peak(self) -> int:
        """Bytes, with the transient ones."""
        return self.total + self.transient

    def __str__(self) -> str:
        sizes = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "master parameters": self.master_parameters,
            "total": self.total,
            "transient": self.transient,
            "peak": self.peak,
            **({"in files": self.in_files} if self.in_files else {}),
        }
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size:,d} ranks"
        return "\n".join(
            [
                f"ZeRO stage {self.stage}, {ranks}, on each:",
                *(f"  {name:17s}  {_readable(size)}" for name, size in sizes.items()),
            ]
        )


def estimate(
    module_or_parameters: nn.Module | Iterable[Tensor],
    world_size: int,
    stage: int,
    *,
    optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer | float = torch.optim.AdamW,
    optimizer_kwargs: Mapping[str, object] | None = None,
    param_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
    bucket_bytes: int = 4 * MIB,
    rank: int = 0,
    gathered: bool = False,
    hosts: int = 1,
    replicas: int = 1,
    accumulates: bool = False,
    offloaded: bool = False,
) -> Estimate:
    """Bytes per rank for training at a ZeRO stage. Reads shapes and dtypes only: meta will do.

    A parameter that occurs twice counts once. A frozen one (``requires_grad`` is False) has no
    gradient, no state and no master.

    ``transient`` is 0 at stages 0 and 1. At stages 2 and 3 it is twice the largest bucket of whole
    gradients, as backward makes them: one is reduced while the next is made. They have the
    parameters' dtype; at stage 3 with masters, theirs. With ``gathered`` come the whole parameters
    of the root and of the two largest units: one computes while the next is gathered. A unit is a
    child module; the module's own parameters, and those of several units, are the root's. A
    ModuleList, ModuleDict or Sequential is no unit: its members are. A child that has such a
    container inside is none either: its children are. Without a module, each parameter is one.

    Args:
        module_or_parameters: a module, on any device, or its parameters.
        world_size: number of ranks.
        stage: 0 is plain data parallelism; 1 shards the optimizer's state and masters; 2 gradients,
            too; 3 parameters, too.
        optimizer: a class, or an instance, which stands for its class and defaults, or the bytes of
            state an element, masters not included. A class is tried on a parameter of 6 elements.
        optimizer_kwargs: for the class, such as ``{"momentum": 0.9}``; over an instance's defaults.
        param_dtype: of floating-point parameters; None keeps each parameter's own.
        grad_dtype: of kept gradients; None is the parameter's dtype, or ``master_dtype`` if that is
            given and gradients are sharded (stages 2 and 3).
        master_dtype: of the optimizer's copies and its state. A parameter that has this dtype
            already needs no copy. None is no copies, and state in the parameter's dtype.
        bucket_bytes: a bucket of gradients is closed when it has so many bytes; ZeroOptimizer's
            own have 4 MiB.
        rank: whose bytes; rank 0 has the most.
        gathered: at stage 3, ranks gather parameters by units, as where they share no memory.
        hosts: at stage 3 without ``gathered``, how many have a copy of the parameters each.
        replicas: at stage 3, how many groups of ranks have all parameters each; ``hosts`` are
            those of one group. Sums of gradients are there twice, before they are summed over the
            replicas, and after.
        offloaded: at stage 3 on one host, parameters, masters and the state lie in files, and units
            in use in memory: ``offload_folder`` of ``fully_shard``.
        accumulates: passes under ``no_sync()`` leave whole gradients on each rank.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument is out of its range, or the class's state is not so many tensors
            of the parameter's shape; give the bytes an element instead.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"estimate: expected stage to be 0, 1, 2 or 3, got {stage!r}")
    if world_size < 1:
        raise ValueError(f"estimate: expected world_size of at least 1, got {world_size}")
    if bucket_bytes < 1:
        raise ValueError(f"estimate: expected bucket_bytes of at least 1, got {bucket_bytes}")
    for name, dtype in [("param", param_dtype), ("grad", grad_dtype), ("master", master_dtype)]:
        _check_dtype(f"{name}_dtype", dtype)
    if offloaded and (stage < 3 or gathered or hosts * replicas > 1):
        raise ValueError("estimate: expected offloaded=True at stage 3, in one copy on one host")
    world_size, ranks = _shards_of(world_size, stage, hosts, replicas, gathered), world_size
    if not 0 <= rank < ranks:
        raise ValueError(f"estimate: expected rank from 0 to {ranks - 1}, got {rank}")
    rank %= world_size
    state = state_of(optimizer, dict(optimizer_kwargs or {}))
    units = units_of(module_or_parameters)
    members = list({id(one): one for unit in units for one in unit}.values())
    pieces = shard_layout([one.shape for one in members], world_size, rank)

    parameters = gradients = masters = counters = 0
    states = 0.0
    for one, piece in zip(members, pieces, strict=True):
        whole, shard = one.numel(), piece.numel
        dtype = dtype_of(one, param_dtype)
        here = min(whole, shard * hosts)
        parameters += (here if stage >= 3 else whole) * dtype.itemsize
        if not one.requires_grad:
            continue
        step_dtype = master_dtype or dtype
        kept = grad_dtype or (step_dtype if stage >= 2 else dtype)
        gradients += (shard if stage >= 2 else whole) * kept.itemsize * (2 if replicas > 1 else 1)
        gradients += whole * kept.itemsize if accumulates and stage >= 2 else 0
        stepped = shard if stage >= 1 else whole
        masters += stepped * step_dtype.itemsize if step_dtype != dtype else 0
        states += stepped * (state.tensors * step_dtype.itemsize + state.fixed)
        counters += state.counters
    transient = 0
    made_dtype = master_dtype if stage == 3 and master_dtype else param_dtype
    if stage >= 2:
        transient = KEPT_BUCKETS * _largest_bucket(members, made_dtype, bucket_bytes)
    if stage == 3 and gathered:
        transient += bytes_in_use(units, param_dtype)
    kept_states = math.ceil(states)
    if not offloaded:
        return Estimate(
            ranks, stage, parameters, gradients, kept_states + counters, masters, transient
        )
    widest = max((dtype_of(one, master_dtype).itemsize for one in members), default=0)
    transient += -(-bytes_in_use(units, param_dtype) // world_size) + STEPPED_BEHIND
    transient += STEPPED_ELEMENTS * widest * (1 + state.tensors)
    in_files = parameters + kept_states + masters
    return Estimate(ranks, stage, 0, gradients, counters, 0, transient, in_files)


def _shards_of(world: int, stage: int, hosts: int, replicas: int, gathered: bool) -> int:
    """Over how many ranks one copy of everything is sharded."""
    for name, count in (("hosts", hosts), ("replicas", replicas)):
        if count < 1 or (count > 1 and stage < 3):
            raise ValueError(
                f"estimate: expected {name} of at least 1, and 1 below stage 3, got {count}"
            )
    if world % (hosts * replicas) or (hosts > 1 and gathered):
        raise ValueError(
            f"estimate: expected world_size to be a multiple of {replicas} replicas on {hosts} "
            f"hosts each, and one host with gathered=True, got {world} and gathered={gathered}"
        )
    return world // replicas


def _largest_bucket(
    parameters: Iterable[Tensor], param_dtype: torch.dtype | None, bucket_bytes: int
) -> int:
    """Bytes of the largest bucket."""
    infos = [
        ParameterInfo("", one.numel(), dtype_of(one, param_dtype), one.device)
        for one in parameters
        if one.requires_grad
    ]
    plan = plan_buckets(infos, cap_bytes=bucket_bytes, first_bytes=min(MIB, bucket_bytes))
    return max((bucket.nbytes for bucket in plan.buckets), default=0)


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"estimate: expected {name} to be a torch.dtype or None, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"estimate: expected {name} to be of floating point, got {dtype}")


def _readable(size: int) -> str:
    """In MB or GB, 10^6 or 10^9 bytes."""
    return f"{size / 1e9:10,.2f} GB" if size >= 10**9 else f"{size / 1e6:10,.2f} MB"
