"""What the ranks run in gpu/test_cuda.py: processes that share one GPU, or have one each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dreamcomm

STEPS = 4


def use_gpu() -> None:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(10 + rank))
    return numbers.to(dtype)


def each(cases: dict[str, Callable[[], object]]) -> None:
    """One after another in the processes that run: to start others takes longer than most cases."""
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            raise AssertionError(f"rank {dist.get_rank()}, in the case {name}") from error


def transport() -> str:
    """What explain() says of tensors on GPUs, after a call on one."""
    use_gpu()
    dist.all_reduce(torch.ones(4, device="cuda"))
    return dreamcomm.explain("all_reduce", 16)


def all_collectives(dtypes: list[torch.dtype], sizes: list[int]) -> None:
    """Also of tensors in registered memory."""
    use_gpu()
    each(
        {
            f"{dtype}, {size} elements, {'registered' if registered else 'plain'}": (
                lambda case=(dtype, size, registered): collectives(*case)
            )
            for dtype in dtypes
            for size in sizes
            for registered in (False, True)
        }
    )


def order() -> None:
    """Messages, streams and graphs."""
    use_gpu()
    each({function.__name__: function for function in (messages, streams, graph)})


def training() -> None:
    """What DDP, its hooks and FSDP2 make of the collectives."""
    use_gpu()
    each({function.__name__: function for function in (ddp, hooks_bits, hooks_training, fsdp)})


def collectives(dtype: torch.dtype, size: int, registered: bool) -> None:
    """Every collective, compared with what the CPU's tensors say."""
    use_gpu()
    rank, world = dist.get_rank(), dist.get_world_size()

    def there(host: torch.Tensor) -> torch.Tensor:
        make = dreamcomm.empty if registered else torch.empty
        return make(host.shape, dtype=host.dtype, device="cuda").copy_(host)

    def same(tensor: torch.Tensor, host: torch.Tensor) -> None:
        assert torch.equal(tensor.cpu(), host), (tensor, host)

    mine = values(rank, size, dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        on_cpu, on_gpu = mine.clone(), there(mine)
        dist.all_reduce(on_cpu, op)
        dist.all_reduce(on_gpu, op)
        same(on_gpu, on_cpu)
    for call in (dist.broadcast, dist.reduce):
        on_cpu, on_gpu = mine.clone(), there(mine)
        call(on_cpu, world - 1)
        call(on_gpu, world - 1)
        same(on_gpu, on_cpu)
    whole = torch.empty(world * size, dtype=dtype)
    gathered = there(whole)
    dist.all_gather_into_tensor(whole, mine)
    dist.all_gather_into_tensor(gathered, there(mine))
    same(gathered, whole)
    shard, scattered = torch.empty_like(mine), there(mine)
    dist.reduce_scatter_tensor(shard, whole)
    dist.reduce_scatter_tensor(scattered, gathered)
    same(scattered, shard)
    exchanged, exchanged_there = torch.empty_like(whole), there(whole)
    dist.all_to_all_single(exchanged, whole + rank)
    dist.all_to_all_single(exchanged_there, gathered + rank)
    same(exchanged_there, exchanged)
    parts = [there(mine) for _ in range(world)]
    dist.all_gather(parts, there(mine))
    same(torch.cat(parts), whole)


def messages() -> None:
    """A ring in one batch, and one message after another."""
    use_gpu()
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    for size in (1, 1000, 1 << 20):
        sent = torch.full((size,), float(rank), device="cuda")
        received = torch.empty_like(sent)
        ops = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.all(received == before), received


def streams() -> None:
    """Slow work before a call, other streams after it, and calls that overlap it."""
    use_gpu()
    rank, world = dist.get_rank(), dist.get_world_size()
    total = world * (world + 1) / 2
    side = torch.cuda.Stream()
    for asynchronous in (False, True):
        for _ in range(10):
            tensor = torch.zeros(1 << 18, device="cuda")
            torch.cuda._sleep(20_000_000)
            tensor += rank + 1
            work = dist.all_reduce(tensor, async_op=asynchronous)
            with torch.cuda.stream(side):
                if work is not None:
                    work.wait()
                else:
                    side.wait_stream(torch.cuda.default_stream())
                copy = tensor * 1
            side.synchronize()
            assert torch.all(copy == total), copy


def graph() -> None:
    """A captured call, replayed on other numbers."""
    use_gpu()
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)  # the group is bootstrapped before the capture
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        dist.all_reduce(tensor)
    for turn in range(5):
        tensor.fill_(rank + turn)
        captured.replay()
        torch.cuda.synchronize()
        assert torch.all(tensor == world * (world - 1) / 2 + world * turn), tensor
    dist.barrier()


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)]
    return nn.Sequential(*layers)


def batches(world: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(8 * world, 64) for _ in range(STEPS)]


def train_alone(world: int) -> list[torch.Tensor]:
    """What the ranks' weights should be: one process on the whole batch."""
    alone = model().cuda()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches(world):
        optimizer.zero_grad()
        alone(batch.cuda()).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in alone.parameters()]


def train(wrapped: nn.Module) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for batch in batches(world):
        optimizer.zero_grad()
        wrapped(batch.chunk(world)[rank].cuda()).square().mean().backward()
        optimizer.step()


def check_weights(found: list[torch.Tensor]) -> None:
    """Equal bits on all ranks, and near those of one process."""
    for mine, alone in zip(found, train_alone(dist.get_world_size()), strict=True):
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine)
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)


def ddp() -> None:
    use_gpu()
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"  # buckets in registered memory
    wrapped = DistributedDataParallel(model().cuda(), bucket_cap_mb=1)
    train(wrapped)
    check_weights([parameter.detach() for parameter in wrapped.parameters()])


HOOKS = ("average", "bf16", "bf16_feedback")


class Linear(nn.Module):
    """Its gradients are what it is given, to the last bit and on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(n) for n in (3, 70_001, 1, 300_000)])

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        products = [(w * x).sum() for w, x in zip(self.weights, given, strict=True)]
        return torch.stack(products).sum()


def hooked(module: nn.Module, name: str) -> tuple[DistributedDataParallel, dreamcomm.hooks.State]:
    wrapped = DistributedDataParallel(module, bucket_cap_mb=1, gradient_as_bucket_view=True)
    state = dreamcomm.hooks.State()
    wrapped.register_comm_hook(state, getattr(dreamcomm.hooks, name))
    return wrapped, state


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    return [gradient.cpu() for gradient in found if gradient is not None]


def hooks_bits() -> None:
    """Equal gradients on the GPU and on the CPU come out of the hooks equal."""
    torch.manual_seed(20 + dist.get_rank())
    for name in HOOKS:
        (there, state_there), (here, state_here) = (
            hooked(Linear().to(device), name) for device in ("cuda", "cpu")
        )
        for step in range(3):  # with feedback a step has what the one before left
            given = [torch.randn(weight.shape) for weight in here.module.weights]
            for wrapped, inputs in ((there, [x.cuda() for x in given]), (here, given)):
                wrapped.zero_grad()
                wrapped(inputs).backward()
            for mine, expected in zip(gradients(there), gradients(here), strict=True):
                assert torch.equal(mine, expected), (name, step, mine, expected)
        if name == "average":
            torch.testing.assert_close(state_there.norm(), state_here.norm())
            assert state_there.finite()


def hooks_training() -> None:
    """A model's gradients are near those of the CPU, and equal on all ranks."""
    batch = batches(dist.get_world_size())[0].chunk(dist.get_world_size())[dist.get_rank()]
    for name in HOOKS:
        module = model()
        for wrapped, inputs in (
            (hooked(there := deepcopy(module).cuda(), name)[0], batch.cuda()),
            (hooked(module, name)[0], batch),
        ):
            wrapped(inputs).square().mean().backward()
        rounding = 2**-7 if name != "average" else 1e-4
        for mine, expected in zip(gradients(there), gradients(module), strict=True):
            torch.testing.assert_close(mine, expected, rtol=rounding, atol=1e-5)
            first = mine.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, mine)


def fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    use_gpu()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    sharded: Any = model().cuda()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded.set_allocate_memory_from_process_group_for_comm(True)
    train(sharded)
    check_weights([parameter.full_tensor().detach() for parameter in sharded.parameters()])


def stuck(seconds: float) -> str:
    """Rank 1 makes no call: what rank 0 is told."""
    use_gpu()
    dist.all_reduce(torch.ones(4, device="cuda"))
    told = ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(4, device="cuda"))
            torch.cuda.synchronize()
            dist.all_reduce(torch.ones(4, device="cuda"))
        except dist.DistBackendError as error:
            told = str(error)
    time.sleep(seconds if dist.get_rank() == 1 else 0)
    return told


def beside_a_killed(rank: int, file: str, answer: Any, seconds: float) -> None:
    """Rank 1 dies in front of a call of the others, which put what they are told into a queue."""
    dist.init_process_group(
        "dreamcomm",
        init_method=f"file://{file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds),
        pg_options=dreamcomm.Options(cuda="dreamcomm", costs="fixed"),
    )
    use_gpu()
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = "nothing"
    try:
        work = dist.all_reduce(torch.ones(4, device="cuda"), async_op=True)
        work.wait(timedelta(seconds=2 * seconds))
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(4, device="cuda"))
    except RuntimeError as error:
        told = str(error)
    answer.put(told)
    answer.close()
    answer.join_thread()
    os._exit(0)  # a broken group might wait for the rank that is gone


def init_with_nccl(options: dreamcomm.Options) -> None:
    """NCCL must take each rank for a host of its own: they share GPUs."""
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    dist.init_process_group("dreamcomm", pg_options=options)
    use_gpu()


def between_hosts(hosts: str) -> str:
    """Every collective, compared with the CPU's; returns what explain() says."""
    init_with_nccl(dreamcomm.Options(cuda="dreamcomm", hosts=hosts, costs="fixed"))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for size in (1, 1000, 3 << 20):
            collectives(dtype, size, registered=False)
    text = dreamcomm.explain("all_reduce", 16)
    dist.destroy_process_group()
    return text


def over_nccl() -> list[float]:
    """Tensors on GPUs by torch's NCCL group."""
    init_with_nccl(dreamcomm.Options(cuda="nccl"))
    tensor = torch.full((4,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(tensor)
    on_cpu = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(on_cpu)
    assert torch.equal(tensor.cpu(), on_cpu)
    dist.destroy_process_group()
    return on_cpu.tolist()
