"""One model, and the ways to train it: alone, wrapped over kinds of communication, and sharded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dreamcomm
from dreamcomm import zero
from dreamcomm.tools.bench.busy import busy_processes
from dreamcomm.zero import ZeroOptimizer
from models import Task

PLAIN, NO_COMMUNICATION, GLOO, DREAMCOMM = "plain", "no communication", "gloo", "dreamcomm"
OWN = "dreamcomm's own wrapper"  # not torch's
COLLECTIVES = "collectives alone"  # of the gradients' sizes, in shared memory, without training
ZERO_1, ZERO_2 = "ZeRO stage 1", "ZeRO stage 2"  # dreamcomm's, on a bare module
ZERO_1_FUSED = "ZeRO stage 1, fused"  # square roots in the same pass
ZERO_1_DDP = "ZeRO stage 1 on own wrapper"
ZERO_3 = "ZeRO stage 3"  # dreamcomm's fully_shard, with ZeroOptimizer
ZERO_3_TORCH = "ZeRO stage 3, torch's optimizer"
GATHERED = "ZeRO stage 3, gathered"  # by units, where parameters could lie once on the host
GATHERED_GLOO = "ZeRO stage 3, gathered over gloo"
REDUNDANCY = "torch's ZeRO"  # ZeroRedundancyOptimizer under torch's wrapper, over dreamcomm
SUMS = "own wrapper, sums"
TOKENS = "own wrapper, means over tokens"
INVARIANT = "own wrapper, one invariant shard a rank"
VARIANTS = {
    "ddp": (PLAIN, NO_COMMUNICATION, GLOO, DREAMCOMM, OWN, COLLECTIVES),
    "fsdp2": (PLAIN, NO_COMMUNICATION, GLOO, DREAMCOMM),
    # With AdamW, fused where torch steps.
    "zero": (PLAIN, GLOO, DREAMCOMM, OWN, REDUNDANCY, ZERO_1, ZERO_1_FUSED, ZERO_1_DDP, ZERO_2),
    # gloo and dreamcomm are torch's FSDP2 over these. AdamW is fused in all.
    "zero3": (PLAIN, GLOO, DREAMCOMM, OWN, ZERO_2, ZERO_3, ZERO_3_TORCH),
    "zero3-adamw": (PLAIN, GLOO, DREAMCOMM, OWN, ZERO_2, ZERO_3, ZERO_3_TORCH),
    # Forward and backward alone: no gradient is reduced, and nothing is stepped.
    "zero3-passes": (PLAIN, GLOO, DREAMCOMM, ZERO_3),
    "zero3-gathered": (PLAIN, GLOO, DREAMCOMM, ZERO_3, GATHERED, GATHERED_GLOO),
    "averages": (PLAIN, GLOO, DREAMCOMM, OWN, SUMS, TOKENS, INVARIANT),
}
WRAPPERS = tuple(VARIANTS)
LEARNING_RATE = 1e-3
ADAM_RATE = 1e-5  # small, so that rounding does not grow within the verification

R = TypeVar("R")
Groups = dict[str, dist.ProcessGroup]


class HeapMemory:
    """Memory as FSDP2 takes it from dreamcomm's allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return dreamcomm.empty(math.prod(int(length) for length in size), dtype=dtype)


class NoAllGather(HeapMemory, AllGather):
    """Leaves the peers' shards as they were."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        return None


class NoReduceScatter(HeapMemory, ReduceScatter):
    """Leaves the sum as it was."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        return None


# Without annotations: DDP compares them with classes, and here they are text.
def no_all_reduce(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that returns the rank's own gradients as the sum."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def under_ddp(task: Task, group: dist.ProcessGroup, communicate: bool) -> nn.Module:
    # Buckets that are the gradients: without, one more copy in all variants.
    model = DistributedDataParallel(task.model, process_group=group, gradient_as_bucket_view=True)
    if not communicate:
        model.register_comm_hook(None, no_all_reduce)
    return model


def under_own_ddp(task: Task, group: dist.ProcessGroup, variant: str = OWN) -> nn.Module:
    options: dict[str, dict[str, Any]] = {
        SUMS: {"reduce": "sum"},
        TOKENS: {"reduce": "tokens"},
        INVARIANT: {"invariant_shards": dist.get_world_size(group)},
    }
    given = options.get(variant, {})
    return dreamcomm.DistributedDataParallel(task.model, process_group=group, **given)


def under_fsdp2(task: Task, group: dist.ProcessGroup, communicate: bool) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in [*task.parts, task.model]:
        fully_shard(part, mesh=mesh)
    for module in task.model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if communicate:
            module.set_allocate_memory_from_process_group_for_comm(True)  # gloo has none to give
        else:
            module.set_custom_all_gather(NoAllGather())
            module.set_custom_reduce_scatter(NoReduceScatter())
    return task.model


def under_zero3(task: Task, group: dist.ProcessGroup, gather: bool) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in [*task.parts, task.model]:
        zero.fully_shard(part, mesh=mesh, gather=gather)
    return task.model


def shared_like(model: nn.Module) -> list[Tensor]:
    """Tensors in shared memory with the gradients' bytes; small ones are one tensor."""
    weights = [*model.parameters()]
    large = [dreamcomm.zeros(*one.shape) for one in weights if one.nbytes >= 128 << 10]
    rest = sum(one.numel() for one in weights if one.nbytes < 128 << 10)
    return [*large, dreamcomm.zeros(rest)] if rest else large


def make_optimizer(
    model: nn.Module, wrapper: str, variant: str, group: dist.ProcessGroup
) -> torch.optim.Optimizer:
    """SGD; for what is compared with ZeRO AdamW, whose state is to be sharded."""
    if variant in (ZERO_3, GATHERED, GATHERED_GLOO) or (
        wrapper.startswith("zero3") and variant == ZERO_2
    ):
        return make_sharded(model, wrapper, variant, group)
    if variant == SUMS:
        rate = LEARNING_RATE / dist.get_world_size(group)
        return torch.optim.SGD(model.parameters(), lr=rate)
    if wrapper not in ("zero", "zero3-adamw"):
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if variant == REDUNDANCY:
        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, group, lr=ADAM_RATE, fused=True
        )
    if variant in (ZERO_1, ZERO_1_FUSED, ZERO_1_DDP, ZERO_2):
        return ZeroOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            group,
            stage=2 if variant == ZERO_2 else 1,
            lr=ADAM_RATE,
            fused=variant == ZERO_1_FUSED,
        )
    return torch.optim.AdamW(model.parameters(), lr=ADAM_RATE, fused=True)


def _group_of(variant: str) -> str:
    return GLOO if variant == GATHERED_GLOO else DREAMCOMM


def make_sharded(
    model: nn.Module, wrapper: str, variant: str, group: dist.ProcessGroup
) -> ZeroOptimizer:
    stage = 2 if variant == ZERO_2 else 3
    if wrapper in ("zero3", "zero3-gathered"):
        kind: type[torch.optim.Optimizer] = torch.optim.SGD
        options: dict[str, Any] = {"lr": LEARNING_RATE}
    else:
        kind, options = torch.optim.AdamW, {"lr": ADAM_RATE, "fused": True}
    return ZeroOptimizer(model.parameters(), kind, group, stage=stage, **options)


class Trainer:
    """A task under a wrapper, and its optimizer, on this rank."""

    def __init__(
        self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.task, self.model = task, model
        self.optimizer = optimizer or torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        self.train_on(self.task.inputs, self.task.targets)

    def train_on(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """All parameters, whole; under FSDP2 a collective."""
        return [
            (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
            for weight in self.task.model.parameters()
        ]


class PassesAlone(Trainer):
    """Forward and backward passes, whose gradients stay each rank's own and are dropped."""

    def step(self) -> None:
        loss = self.task.loss(self.model(self.task.inputs), self.task.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()


class MeansOverTokens(Trainer):
    """Each rank's loss counts as one."""

    def step(self) -> None:
        model: Any = self.model
        model.count(1)
        super().step()


class InvariantShards(Trainer):
    """A rank's data are one shard."""

    def step(self) -> None:
        model: Any = self.model
        self.optimizer.zero_grad()
        for _ in model.shards():
            loss = self.task.loss(model(self.task.inputs), self.task.targets)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


class CollectivesAlone(Trainer):
    """All-reduces as many bytes as the gradients have, 25 MiB in a call as wrappers do."""

    def step(self) -> None:
        part: list[Tensor] = []
        works = []
        for number, tensor in enumerate(self.shared, 1):
            part.append(tensor)
            if sum(one.nbytes for one in part) >= 25 << 20 or number == len(self.shared):
                works.append(dist.all_reduce_coalesced(part, dist.ReduceOp.AVG, async_op=True))
                part = []
        for work in works:
            work.wait()

    @cached_property
    def shared(self) -> list[Tensor]:
        return shared_like(self.task.model)


def make_trainer(task: Task, wrapper: str, variant: str, groups: Groups) -> Trainer:
    """One variant of a task."""
    model = task.model
    if variant in (OWN, ZERO_1_DDP, SUMS, TOKENS, INVARIANT):
        model = under_own_ddp(task, groups[DREAMCOMM], variant)
    elif variant == REDUNDANCY:
        model = under_ddp(task, groups[DREAMCOMM], True)
    elif variant in (ZERO_3, ZERO_3_TORCH):
        model = under_zero3(task, groups[DREAMCOMM], gather=False)
    elif variant in (GATHERED, GATHERED_GLOO):
        model = under_zero3(task, groups[_group_of(variant)], gather=True)
    elif variant not in (PLAIN, COLLECTIVES, ZERO_1, ZERO_1_FUSED, ZERO_2):
        wrap = under_ddp if wrapper in ("ddp", "zero", "averages") else under_fsdp2
        model = wrap(task, groups[variant], variant != NO_COMMUNICATION)
    optimizer = make_optimizer(task.model, wrapper, variant, groups[_group_of(variant)])
    if wrapper == "zero3-passes":
        if isinstance(model, FSDPModule):  # of torch, or ours
            model.set_requires_gradient_sync(False)
        return PassesAlone(task, model, optimizer)
    kinds = {
        COLLECTIVES: CollectivesAlone,
        TOKENS: MeansOverTokens,
        INVARIANT: InvariantShards,
    }
    return kinds.get(variant, Trainer)(task, model, optimizer)


def make_groups() -> Groups:
    """The group of each variant that needs one."""
    world = dist.group.WORLD
    assert world is not None
    return {DREAMCOMM: world, NO_COMMUNICATION: world, GLOO: dist.new_group(backend="gloo")}


def spawn_training(
    run: Callable[..., R], world: int, args: tuple[Any, ...], beside: int = 0
) -> list[R]:
    """Runs it on every rank, beside busy processes."""
    # Read when DistributedDataParallel is made, in the ranks: buckets from the backend's memory.
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    with busy_processes(beside):
        return dreamcomm.spawn(run, world, args=args)
