"""What gpu/test_hooks.py runs: DistributedDataParallel and its hooks on the tests' accelerator.

Runs in its own process, because the accelerator is registered with torch's autograd for good. Ranks
are threads, each with a device. pack() and unpack() have no kernels there: the CPU's replace them,
called by the streams in their order, on the same memory.
"""

from __future__ import annotations

import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.testing._internal.distributed import multi_threaded_pg

import dreamcomm
from ddp.reference import STEPS, Crossed, Wire, pieces, train_reference
from dreamcomm import _C, info
from dreamcomm.buckets import ops
from dreamcomm.ddp import backward_pass, hooks
from helpers.devices import device_module, make_options, no_inner, on_device, on_host
from training.models import loss_of, sgd

NAME = "privateuseone"
REGISTERED = 1 << 20  # bytes
SIXTEEN_BITS = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "bf16_feedback": (torch.bfloat16, True),
    "fp16_feedback": (torch.float16, True),
}
Body = Callable[[int], None]


class _Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc, name-defined]
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


_settings: dict[str, Any] = {"registered": 0, "cuda": "dreamcomm"}
_kept: list[Any] = []
_seeding = threading.Lock()  # torch's generator of random numbers is every thread's


def install() -> None:
    """Once in a process."""
    _kept.append(_Hooks())
    torch._C._acc.register_python_privateuseone_hook(_kept[0])  # type: ignore[attr-defined]
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module._lazy_init = module.manual_seed_all = lambda *_: None  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]
    dist.Backend.register_backend("on_devices", _create, extended_api=True, devices=[NAME])


def _create(given: Any, _: object) -> Any:
    options = make_options(30, _settings["registered"], turn=1e-15)
    options.cuda = _settings["cuda"]
    return _C.DreamBackend(given.store, given.group_rank, given.group_size, options, no_inner)


def run_ranks(world: int, body: Body, **settings: Any) -> None:
    """Calls ``body(rank)`` in every rank of a group; raises what failed."""
    _settings.update(registered=0, cuda="dreamcomm")
    _settings.update(settings)
    store = dist.HashStore()
    failures: dict[int, str] = {}

    def run_rank(rank: int) -> None:
        try:
            device_module().use_device(rank)
            # Ranks are threads: none may do another's part of a backward pass.
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group(
                    "on_devices",
                    store=store,
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=30),
                )
                body(rank)
                dist.destroy_process_group()
        except BaseException:  # also what pytest fails with
            failures[rank] = traceback.format_exc()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())


@contextmanager
def replaced(**members: Any) -> Iterator[None]:
    """Members of dreamcomm.hooks, and of what it unpacks buckets with."""
    places = [
        (module, name)
        for module in (hooks, backward_pass)
        for name in members
        if hasattr(module, name)
    ]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, members[name])
    try:
        yield
    finally:
        for (module, name), member in zip(places, before, strict=True):
            setattr(module, name, member)


def with_kernels(**members: Any) -> Any:
    return replaced(pack=pack, unpack=unpack, _DEVICES=("cpu", NAME), **members)


def pack(
    tensors: list[Tensor], out: Tensor, *, scale: float = 1.0, residual: Tensor | None = None
) -> ops.Transfer:
    device = device_module()
    sources, to = [device.on_host(tensor) for tensor in tensors], device.on_host(out)
    rest = None if residual is None else device.on_host(residual)
    device.put(lambda: ops.pack(sources, to, scale=scale, residual=rest))
    return ops.Transfer(0, 0)


def unpack(
    buffer: Tensor, tensors: list[Tensor], *, divisor: int = 1, inspect: bool = False
) -> ops.Transfer:
    device = device_module()
    source, targets = device.on_host(buffer), [device.on_host(tensor) for tensor in tensors]
    squares = torch.empty((), dtype=torch.float64, device=buffer.device)
    finite = torch.empty((), dtype=torch.bool, device=buffer.device)
    found = [device.on_host(squares), device.on_host(finite)]

    def later() -> None:
        done = ops.unpack(source, targets, divisor=divisor, inspect=inspect)
        if inspect:
            found[0].fill_(done.squared_norm)
            found[1].fill_(done.finite)

    device.put(later)
    return ops.Transfer(0, 0, squares, finite) if inspect else ops.Transfer(0, 0)


class _Through(torch.autograd.Function):
    """The host's model, with gradients that the device brings late."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, x: Tensor, *on_devices: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.parameters, ctx.out = list(model.parameters()), model(x)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = torch.autograd.grad(ctx.out, ctx.parameters, gradients)
        return None, None, *(made_late(gradient) for gradient in found)


def made_late(tensor: Tensor) -> Tensor:
    made = on_device(torch.full(tensor.shape, torch.nan))
    device_module().delay(0.001)
    made.copy_(tensor)
    return made


class OnDevice(nn.Module):
    """Crossed, with its parameters on the current device; the host computes."""

    def __init__(self) -> None:
        super().__init__()
        with _seeding:
            self.on_host = [Crossed()]  # in a list: DDP shall not find it
        self.weights = nn.ParameterList(nn.Parameter(on_device(p.detach())) for p in self.host())

    def host(self) -> list[nn.Parameter]:
        return list(self.on_host[0].parameters())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Through.apply(self.on_host[0], x, *self.weights)  # type: ignore[no-untyped-call]
        return out


def wrapped(name: str, state: hooks.State) -> tuple[OnDevice, DistributedDataParallel]:
    model = OnDevice()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, init_sync=False)
    ddp.register_comm_hook(state, getattr(hooks, name))
    return model, ddp


def backward(ddp: DistributedDataParallel, step: int) -> None:
    ddp.zero_grad()
    ((x, y),) = pieces(step, dist.get_rank(), dist.get_world_size(), 1)
    loss_of(ddp(x), y).backward()


def train(
    model: OnDevice, ddp: DistributedDataParallel, steps: Any = range(STEPS), see: Any = None
) -> list[Tensor]:
    """The weights after the steps. ``see`` is called after each backward pass."""
    optimizer = sgd(model.host())
    for step in steps:
        backward(ddp, step)
        if see is not None:
            see()
        for on_devices, parameter in zip(model.weights, model.host(), strict=True):
            assert on_devices.grad is not None
            parameter.grad = on_host(on_devices.grad)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.host()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def as_the_reference(name: str, world: int, registered: bool) -> None:
    """Weights and residuals bit for bit, buffers where they belong."""
    dtype, feedback = SIXTEEN_BITS[name]
    wire = Wire(dtype, feedback, world)
    expected = train_reference(Crossed(), wire)
    lies: list[bool] = []

    def spy(tensors: list[Tensor], out: Tensor, **more: Any) -> ops.Transfer:
        lies.append(dreamcomm.memory.is_shared(out))
        return pack(tensors, out, **more)

    def body(rank: int) -> None:
        state = hooks.State()
        model, ddp = wrapped(name, state)
        assert equal(train(model, ddp), expected)
        for place, parameter in enumerate(model.weights):
            residual = state.residual(parameter)
            if wire.residuals is None:
                assert residual is None
            else:
                assert residual is not None
                assert residual.device == torch.device(NAME, rank)
                assert torch.equal(on_host(residual), wire.residuals[rank][place])

    with with_kernels():
        hooks.pack = spy
        run_ranks(world, body, registered=REGISTERED if registered else 0)
    assert set(lies) == {registered}


def average(world: int) -> None:
    expected = train_reference(Crossed(), Wire(torch.float32, False, world))

    def body(rank: int) -> None:
        state = hooks.State()
        model, ddp = wrapped("average", state)

        def see() -> None:
            gradients = [on_host(p.grad).double() for p in model.weights if p.grad is not None]
            wanted = get_total_norm(gradients)
            assert abs(state.norm().item() / wanted.item() - 1) < 1e-7
            assert state.finite()

        assert equal(train(model, ddp, see=see), expected)

    with with_kernels():
        run_ranks(world, body)


def a_nan_is_noticed(name: str) -> None:
    def body(rank: int) -> None:
        state = hooks.State(norm=True)
        model, ddp = wrapped(name, state)
        for step in range(3):
            if step == 1 and rank == 1:
                with torch.no_grad():
                    model.host()[0][0, 0] = torch.nan
            backward(ddp, step)
            assert state.finite() == (step == 0)
            assert bool(state.norm().isfinite()) == (step == 0)

    with with_kernels():
        run_ranks(2, body)


class Divided(Wire):
    """Each rank divides before it rounds, and the sum is rounded once."""

    def average(self, place: int, gradients: list[Tensor]) -> Tensor:
        total = torch.zeros_like(gradients[0])
        for rank, gradient in enumerate(gradients):
            total = total + self.sent(rank, place, gradient * (1 / self.world))
        return total.to(self.dtype).float()


def divided_first(name: str, world: int) -> None:
    """Where another engine carries the group's tensors on the device."""
    dtype, feedback = SIXTEEN_BITS[name]
    expected = train_reference(Crossed(), Divided(dtype, feedback, world))

    def body(rank: int) -> None:
        assert equal(train(*wrapped(name, hooks.State())), expected)

    with with_kernels(averages=lambda tensor, group: False):
        run_ranks(world, body, registered=REGISTERED)  # which is not asked for


def who_averages() -> None:
    def asks(cuda: str) -> Body:
        def body(rank: int) -> None:
            tensor = on_device(torch.ones(3))  # the group's first, which bootstraps it
            assert info.averages(tensor, None) == (cuda == "dreamcomm")
            assert info.averages(tensor, dist.group.WORLD) == (cuda == "dreamcomm")
            assert not info.averages(torch.ones(3), None), "the group has nothing for the CPU"

        return body

    for cuda in ("dreamcomm", "nccl"):
        run_ranks(2, asks(cuda), cuda=cuda)


def the_host_waits_for_nothing(name: str) -> None:
    """A backward pass returns while the device has not begun with it."""

    def body(rank: int) -> None:
        state = hooks.State(norm=True)
        model, ddp = wrapped(name, state)
        train(model, ddp, range(2))  # buckets are made anew after the first pass
        ddp.zero_grad()
        ((x, y),) = pieces(2, rank, 2, 1)
        loss = loss_of(ddp(x), y)
        held = device_module().Gate()
        loss.backward()
        held.open()  # raises if it was waited for
        assert state.finite()
        assert state.norm() > 0

    with with_kernels():
        run_ranks(2, body)


def buffers_are_taken_again() -> None:
    """One for each bucket, from the second pass with these buckets on."""
    made: list[int] = []

    def spy(*size: int, **more: Any) -> Tensor:
        made.append(size[0])
        return dreamcomm.empty(*size, **more)

    def body(rank: int) -> None:
        model, ddp = wrapped("bf16", hooks.State())
        train(model, ddp, range(2))
        before = len(made)
        train(model, ddp, range(2, STEPS))
        assert before > 1
        assert len(made) == before

    with with_kernels(empty=spy):
        run_ranks(1, body)


def a_pass_that_failed() -> None:
    """The next one gives the reference's bits all the same."""
    expected = train_reference(Crossed(), Wire(torch.bfloat16, False, 2))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("in the middle")

    def body(rank: int) -> None:
        state = hooks.State()
        model, ddp = wrapped("bf16", state)
        train(model, ddp, range(2))  # buckets are made anew after the first pass
        # The weights of the first layer, which is last in the backward pass.
        model.weights[2].register_hook(fail)
        with pytest.raises(ArithmeticError):
            backward(ddp, 2)
        assert state._buffers._given_back, "a bucket was under way"
        assert equal(train(*wrapped("bf16", state)), expected)

    with with_kernels():
        run_ranks(2, body, registered=REGISTERED)


def a_call_that_failed(name: str) -> None:
    """The passes before had a norm; that one has none, and says why."""
    under_way = threading.Barrier(2)

    def body(rank: int) -> None:
        state = hooks.State(norm=True)
        _, ddp = wrapped(name, state)
        for step in range(2):  # buckets are made anew after the first
            backward(ddp, step)
            assert state.norm() > 0
        if rank == 0:
            backward(ddp, 2)
        under_way.wait()
        if rank == 1:
            dist.distributed_c10d._get_default_group()._get_backend(torch.device(NAME)).abort()
            return
        for ask in (state.norm, state.finite):
            with pytest.raises(dist.DistBackendError, match="rank 1 has aborted the group"):
                ask()

    with with_kernels():
        run_ranks(2, body)


def a_checkpoint_between_devices() -> None:
    """Residuals saved on the host, loaded before the first pass or after it; and moved along."""

    def body(rank: int) -> None:
        state = hooks.State()
        model, ddp = wrapped("bf16_feedback", state)
        train(model, ddp, range(2))
        saved = state.state_dict()
        residuals = [on_host(residual) for residual in saved["residuals"]]
        assert all(residual.device.type == NAME for residual in saved["residuals"])
        assert any(bool(residual.any()) for residual in residuals)
        weights = [parameter.detach().clone() for parameter in model.host()]
        straight = train(model, ddp, range(2, STEPS))

        def again(late: bool, given: list[Tensor]) -> list[Tensor]:
            state = hooks.State()
            model, ddp = wrapped("bf16_feedback", state)
            if late:
                train(model, ddp, range(2))
            state.load_state_dict({"residuals": given})
            with torch.no_grad():
                for parameter, weight in zip(model.host(), weights, strict=True):
                    parameter.copy_(weight)
            return train(model, ddp, range(2, STEPS))

        for late in (False, True):
            assert equal(again(late, residuals), straight)
            assert equal(again(late, saved["residuals"]), straight)
            assert not equal(again(late, [torch.zeros_like(r) for r in residuals]), straight)

    with with_kernels():
        run_ranks(2, body)


def refused() -> None:
    """Without kernels for the device."""

    def body(rank: int) -> None:
        _, ddp = wrapped("bf16", hooks.State())
        message = f"expected dense gradients on cpu or cuda, .* on {NAME}:{rank}"
        with pytest.raises(ValueError, match=message):
            backward(ddp, 0)

    run_ranks(2, body)


def buffer_order() -> None:
    """A buffer that is given back is written and let go behind what reads it on its stream."""
    device = device_module()
    device.use_device(0)
    where = torch.device(NAME, 0)
    kind = where, 1000, torch.bfloat16
    for drops in (False, True):
        buffers = hooks._Buffers()
        assert buffers.take(kind) is None
        buffer = on_device(torch.full((1000,), 1.0, dtype=torch.bfloat16))
        place = buffer.data_ptr()
        on_host(buffer)
        before = device.use_stream(device.new_stream())
        seen = on_device(torch.zeros(1000))
        device.delay(0.1)
        seen.copy_(buffer)
        buffers.give_back(buffer)
        del buffer
        reader = device.use_stream(before)
        assert buffers.take(kind) is None, "within the pass"
        buffers.begin_pass(kind[0])
        if drops:
            buffers.begin_pass(kind[0])  # of a pass that did not want it
            assert buffers.take(kind) is None
        else:
            again = buffers.take(kind)
            assert again is not None
            assert again.data_ptr() == place
            again.fill_(2.0)
            assert torch.equal(on_host(again), torch.full((1000,), 2.0, dtype=torch.bfloat16))
        device.use_stream(reader)
        assert torch.equal(on_host(seen), torch.ones(1000))
        device.use_stream(before)


def captured() -> None:
    """In a graph no buffer is kept, nor one taken that was; those of other passes stay."""
    expected = train_reference(Crossed(), Wire(torch.bfloat16, False, 1))
    made: list[int] = []
    passes: list[int] = []

    def spy(*size: int, **more: Any) -> Tensor:
        made.append(len(passes))
        return dreamcomm.empty(*size, **more)

    def body(rank: int) -> None:
        model, ddp = wrapped("bf16", hooks.State())
        weights = train(model, ddp, see=lambda: passes.append(0))
        assert equal(weights, expected)

    with with_kernels(empty=spy, captures=lambda device: len(passes) == 2):
        run_ranks(1, body)
    of_a_pass = made.count(1)
    assert of_a_pass > 1
    assert made[1:] == [1] * of_a_pass + [2] * of_a_pass
