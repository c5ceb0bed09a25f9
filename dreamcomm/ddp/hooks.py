"""Communication hooks for torch's DistributedDataParallel, each registered with one line. ::

    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    model.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.bf16)

=================  ==============================================================================
``bf16``           bfloat16 between the ranks: half the bytes; sums in float32, rounded once
``fp16``           the same in float16: finer, but overflows beyond 65504
``bf16_feedback``  as ``bf16``; the rounding error is sent with the next gradient
``fp16_feedback``  as ``fp16``; the rounding error is sent with the next gradient
``int8_feedback``  int8 and a scale for 2,048 elements: a quarter of the bytes, for slow links
``average``        float32 between the ranks; takes the norm of each bucket as it arrives
=================  ==============================================================================

Parameters and gradients keep their dtype (float32, float64, bfloat16 or float16), on the CPU or
on CUDA devices. The hooks run on a dreamcomm group whose ranks share memory; for gradients on GPUs
its option ``cuda`` must be "dreamcomm". They run on any other group as well. Then each rank divides
before it casts, as torch's own hooks do, and the other backend computes the sums.

The norm of all gradients costs a fraction of another pass over them. To clip::

    loss.backward()
    norm = state.norm()  # equal on all ranks
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    if state.finite():
        optimizer.step()

On GPUs a hook puts its work on streams and does not wait. There every bucket has its own buffer,
which is kept for the next pass: 2 bytes per element, in the group's registered memory if it has
any. ``state.norm()`` and ``state.finite()`` wait for the device, and raise if a call of the pass
has failed there. Without them, the next pass raises.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dreamcomm.buckets.norm import total
from dreamcomm.buckets.ops import pack, unpack
from dreamcomm.ddp.backward_pass import Pass, unpack_inspected
from dreamcomm.ddp.error_feedback import Residuals
from dreamcomm.info import averages
from dreamcomm.memory import empty

__all__ = ["State", "average", "bf16", "bf16_feedback", "fp16", "fp16_feedback"]


class State:
    """The state of the hooks between backward passes; each model needs its own.

    Args:
        group: DistributedDataParallel's group; None is the default group.
        norm: collect :meth:`norm` and :meth:`finite` also with the hooks of 16 bits, which then
            read each bucket's result again from the cache. ``average`` always collects them.

    With a hook of error feedback a checkpoint must hold :meth:`state_dict` of every rank, besides
    model and optimizer, because each rank has its own residuals. The other hooks keep nothing that
    a checkpoint needs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, norm: bool = False) -> None:
        self.group = group
        self.norm_wanted = norm
        self._buffers = _Buffers()
        self._residuals = Residuals()
        self._pass = Pass()
        self._averages: dict[torch.device, bool] = {}

    def norm(self) -> Tensor:
        """The 2-norm of all gradients after the latest backward pass that communicated.

        It is the norm of the averages over all ranks: a float32 tensor of no dimension on the CPU,
        equal on all ranks. On the CPU it has the bits of every ``clip_grad_norm_`` here. A
        parameter that no rank used counts as zero; with error feedback it counts as the part of its
        residuals that was sent. For gradients on a GPU this waits for the current stream.

        Raises:
            RuntimeError: there was no such pass, it did not end, or nothing was collected in it.
            DistBackendError: a call of that pass has failed on the GPU, and the gradients are not
                averages.
        """
        squares = [one.squares for one in self._pass.found()]
        on_cpu = squares[0].device.type == "cpu"
        found = torch.cat(squares) if on_cpu else self._from_device(squares)
        return torch.tensor(total(found, 2.0), dtype=torch.float32, device="cpu")

    def finite(self) -> bool:
        """Whether every gradient was finite after the latest backward pass that communicated.

        Raises:
            RuntimeError, DistBackendError: as :meth:`norm`.
        """
        found: list[Any] = [one.finite for one in self._pass.found()]
        return all(self._from_device(found) if isinstance(found[0], Tensor) else found)

    def residual(self, parameter: Tensor) -> Tensor | None:
        """The part of a parameter's gradient that this rank has not sent yet: a copy in float32.

        It has the parameter's shape and is on the gradient's device. It is None if no hook of error
        feedback has seen the parameter. If dreamcomm does not add up the gradients, it is the part
        of the gradient divided by the number of ranks that was not sent.
        """
        return self._residuals.of(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank: ``{"residuals": [float32 tensors]}``.

        They are copies on the gradients' devices, in the order in which the first backward pass
        reached their parameters. The order is the same whenever the same model is wrapped with the
        same settings.
        """
        return {"residuals": self._residuals.copies()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads residuals from :meth:`state_dict` of the same rank in a group of the same size.

        They may be on another device than the gradients.

        Raises:
            ValueError: they do not fit the parameters. If no backward pass has run yet, the first
                one raises.
        """
        if not isinstance(state, dict) or not isinstance(state.get("residuals"), list):
            raise ValueError(
                "expected what state_dict() of a dreamcomm.hooks.State gave, a dict with a list "
                f"of 'residuals'; got {type(state).__name__}"
                + (f" with the keys {sorted(map(str, state))}" if isinstance(state, dict) else "")
            )
        self._residuals.load(state["residuals"])

    def _from_device(self, numbers: list[Tensor]) -> Tensor:
        """One result of each bucket's pass, in one copy."""
        found = torch.stack([one.to(numbers[0].device) for one in numbers]).cpu()
        # The device has finished the call by now; wait() raises if its kernel has failed.
        if self._pass.work is not None:
            self._pass.work.wait()
        return found

    def _enter(self, bucket: GradBucket) -> None:
        if self._pass.enter(bucket):
            if dist.get_rank(self.group) < 0:
                raise ValueError(
                    "dreamcomm.hooks: this rank is not in the group that State was given; give the "
                    "one that DistributedDataParallel has"
                )
            self._buffers.begin_pass(bucket.buffer().device)

    def _divides(self, gradient: Tensor) -> bool:
        """Whether the group itself adds in float32 and divides; collective at first."""
        known = self._averages.get(gradient.device)
        if known is None:
            known = self._averages[gradient.device] = averages(gradient, self.group)
        return known

    def _buffer(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer with the gradient's size and device, which the current stream may write to."""
        device, numel = gradient.device, gradient.numel()
        free = self._buffers.take((device, numel, dtype))
        if free is not None:
            return free
        if device.type == "cpu":
            return empty(numel, dtype=dtype)
        if self._divides(gradient):
            return empty(numel, dtype=dtype, device=device, group=self.group)
        return torch.empty(numel, dtype=dtype, device=device)


def bf16(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in bfloat16.

    Each rank rounds its gradient to bfloat16, to nearest even, into a buffer in the shared heap or
    in the group's memory on the GPU; dreamcomm adds the ranks' values in float32 in rank order,
    divides, and rounds once; the result is cast back. 12 bytes of memory traffic per float32
    element besides the all_reduce.

    Raises:
        ValueError: the bucket is sparse, or neither on the CPU nor on a CUDA device.
    """
    return _compressed(state, bucket, torch.bfloat16, feedback=False)


def fp16(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in float16, as :func:`bf16`. Values beyond 65504 become infinite."""
    return _compressed(state, bucket, torch.float16, feedback=False)


def bf16_feedback(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in bfloat16, with error feedback.

    Each rank keeps its rounding error in float32 and adds it to its next gradient (Seide et al.
    2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, "Error feedback fixes
    SignSGD"). So nothing is lost in the sum over the steps, with one exception: for a parameter
    that no rank used in a step, DDP drops the part of its residuals that was sent. Residuals belong
    to parameters, and are kept when DDP rebuilds its buckets. A checkpoint must hold them: see
    :class:`State`. 20 bytes of memory traffic per float32 element besides the all_reduce.

    Raises:
        ValueError: as :func:`bf16`, or loaded residuals do not fit the model.
    """
    return _compressed(state, bucket, torch.bfloat16, feedback=True)


def fp16_feedback(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in float16, with error feedback as :func:`bf16_feedback`."""
    return _compressed(state, bucket, torch.float16, feedback=True)


def average(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in their own dtype, and finds their norm while a bucket is in the cache.

    Gradients of 16 bits are divided before they are rounded, so that their sum cannot overflow.

    The bucket is reduced in place. No copy is needed if it is in the shared heap (the default
    without GPUs), or in the group's memory on a GPU (with ``DDP_DISABLE_COMM_MEM=0`` in the
    environment).

    Raises:
        ValueError: as :func:`bf16`.
    """
    buffer = entered(state, bucket)
    divisor = dist.get_world_size(state.group)
    op = dist.ReduceOp.SUM
    # A sum of 16 bits may overflow, and is rounded once more when it is divided.
    if buffer.dtype.itemsize == 2:
        if state._divides(buffer):
            op = dist.ReduceOp.AVG
        else:
            buffer.div_(divisor)
        divisor = 1
    results, number = state._pass.results, state._pass.latest
    lengths = [one.numel() for one in bucket.gradients()]

    def receive(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises what the collective raised
        results[number] = unpack_inspected(buffer, buffer, lengths, divisor=divisor)
        return buffer

    return _all_reduce(buffer, op, state, receive)


def _compressed(
    state: State, bucket: GradBucket, dtype: torch.dtype, *, feedback: bool
) -> Future[Tensor]:
    gradient = entered(state, bucket)
    divides = state._divides(gradient)
    scale = 1.0 if divides else 1.0 / dist.get_world_size(state.group)
    residual = state._residuals.row(bucket) if feedback else None
    buffers, buffer = state._buffers, state._buffer(gradient, dtype)
    pack([gradient], buffer, scale=scale, residual=residual)
    results, number = state._pass.results, state._pass.latest
    lengths = inspected_lengths(state, bucket)

    def receive(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises what the collective raised
        if lengths:
            results[number] = unpack_inspected(buffer, gradient, lengths)
        else:
            unpack(buffer, [gradient])
        buffers.give_back(buffer)
        return gradient

    op = dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM
    return _all_reduce(buffer, op, state, receive)


def _all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType,
    state: State,
    receive: Callable[[Future[list[Tensor]]], Tensor],
) -> Future[Tensor]:
    """Calls ``receive`` with the result, on a thread of the backend.

    ``receive`` must not hold the group, not even through a State. That thread may drop it last,
    after the backward pass, and Gloo's group cannot be destroyed on a thread of its own.

    On a device ``receive`` is called before the result is complete, usually before this function
    returns. Its current stream, one of torch's, runs after the all_reduce. A wait for the returned
    future orders the waiting stream after that one.
    """
    work = dist.all_reduce(tensor, op, group=state.group, async_op=True)
    assert work is not None  # as it is asynchronous
    if tensor.device.type != "cpu" and not captures(tensor.device):
        state._pass.work = work
    future: Future[Tensor] = work.get_future().then(receive)
    return future


_DEVICES = ("cpu", "cuda")  # that pack and unpack have kernels for


def entered(state: State, bucket: GradBucket) -> Tensor:
    """The bucket's gradients, dense and flat, at the begin of every hook.

    Raises:
        TypeError: ``state`` is no State.
        ValueError: the bucket is sparse, or on a device without kernels.
    """
    if not isinstance(state, State):
        raise TypeError(
            "dreamcomm.hooks: expected a dreamcomm.hooks.State as the hook's state, got "
            f"{type(state).__name__}; call register_comm_hook(dreamcomm.hooks.State(group), hook)"
        )
    state._enter(bucket)
    gradient = bucket.buffer()
    if gradient.layout != torch.strided or gradient.device.type not in _DEVICES:
        raise ValueError(
            "dreamcomm.hooks: expected dense gradients on cpu or cuda, got a bucket of layout "
            f"{gradient.layout} on {gradient.device}; register no hook for this model"
        )
    return gradient


def inspected_lengths(state: State, bucket: GradBucket) -> list[int]:
    """The lengths of the bucket's gradients, if their norm is to be found; else none."""
    return [one.numel() for one in bucket.gradients()] if state.norm_wanted else []


def captures(device: torch.device) -> bool:
    """Whether the current stream captures its work into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_Kind: TypeAlias = tuple[torch.device, int, torch.dtype]  # of a buffer, with its elements


class _Buffers:
    """Buffers of 16 bits for reuse. Those on the CPU are free as soon as unpack returns.

    On a device unpack returns before it has read the buffer, and the next pack uses another stream.
    So a buffer is given back as a future, which torch marks as done after unpack on unpack's
    stream. A wait for the future does not block the host; it orders the current stream after
    unpack. That is the stream of the next pack, or the one in whose order the memory is freed.
    Buffers are reused only in the next pass, because within one pass the gradients of the next
    bucket would wait for the exchange of the last one.

    In a graph nothing is kept, because its buffers belong to its replays, and events are not valid
    across its edge.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[Tensor | Future[Tensor]]] = {}
        self._given_back: list[tuple[_Kind, Future[Tensor]]] = []  # of devices, in this pass
        self._wanted: set[_Kind] = set()

    def begin_pass(self, device: torch.device) -> None:
        """Drops buffers of kinds that the last pass did not want. ``device``: of the gradients."""
        if captures(device):
            return
        for kind, done in self._given_back:
            self._free.setdefault(kind, []).append(done)
        self._given_back = []
        for kind in self._free.keys() - self._wanted:
            for dropped in self._free.pop(kind):
                _now(dropped)
        self._wanted = set()

    def take(self, kind: _Kind) -> Tensor | None:
        """A buffer that the current stream may write to, or None if none is free."""
        if captures(kind[0]):
            return None
        self._wanted.add(kind)
        free = self._free.get(kind)
        return _now(free.pop()) if free else None

    def give_back(self, buffer: Tensor) -> None:
        """Returns a buffer, on any thread, with the stream of unpack as the current one."""
        kind = buffer.device, buffer.numel(), buffer.dtype
        if buffer.device.type == "cpu":
            self._free.setdefault(kind, []).append(buffer)
        elif not captures(buffer.device):
            done: Future[Tensor] = Future(devices=[buffer.device])
            done.set_result(buffer)
            self._given_back.append((kind, done))


def _now(buffer: Tensor | Future[Tensor]) -> Tensor:
    """The buffer, with the current stream ordered after the work that still reads it."""
    return buffer if isinstance(buffer, Tensor) else buffer.wait()
