"""Communication hooks for torch's DistributedDataParallel, each registered with one line. ::

    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    model.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.bf16)

=================  ==============================================================================
``bf16``           bfloat16 between the ranks: half the bytes; sums in float32, rounded once
``fp16``           the same in float16: finer, but overflows beyond 65504
``bf16_feedback``  as ``bf16``; what rounding took away is sent with the next gradient
``fp16_feedback``  as ``fp16``, the same
``average``        float32 between the ranks; divides and takes the norm in one pass
=================  ==============================================================================

Parameters and gradients keep their dtype (float32, float64, bfloat16 or float16), on the CPU or
on CUDA devices. The hooks run on a dreamcomm group whose ranks share memory, for gradients on GPUs
one whose option ``cuda`` is "dreamcomm", and on any other group as well: then each rank divides
before it casts, as torch's own hooks do, and sums are the other backend's.

The norm of all gradients comes for a fraction of another pass over them. To clip::

    loss.backward()
    norm = state.norm()  # equal on all ranks
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    if state.finite():
        optimizer.step()

On GPUs a hook puts its work on streams and waits for nothing. There every bucket has a buffer of
its own, kept for the next pass: 2 bytes per element, in the group's registered memory where there
is some. ``state.norm()`` and ``state.finite()`` wait for the device, and raise if a call of the
pass has failed there; without them, the next pass does.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dreamcomm.buckets.ops import pack, unpack
from dreamcomm.ddp.backward_pass import Pass
from dreamcomm.ddp.error_feedback import Residuals
from dreamcomm.info import averages
from dreamcomm.memory import empty

__all__ = ["State", "average", "bf16", "bf16_feedback", "fp16", "fp16_feedback"]


class State:
    """What the hooks keep between backward passes; one for each model.

    Args:
        group: the group that DistributedDataParallel was given; None is the default group.
        norm: collect :meth:`norm` and :meth:`finite` also with the hooks of 16 bits, which then
            read each bucket's result again from the cache. ``average`` always does.

    With a hook of error feedback a checkpoint must hold :meth:`state_dict` of every rank, beside
    model and optimizer: each rank has residuals of its own. The other hooks keep nothing that
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

        It is that of the averages over all ranks, float32, of no dimension, on the CPU, and equal
        on all ranks. A parameter that no rank used counts as zero, with error feedback as what was
        sent of its residuals. Of gradients on a GPU it waits for the current stream.

        Raises:
            RuntimeError: there was no such pass, it did not end, or nothing was collected in it.
            DistBackendError: a call of that pass has failed on the GPU, and the gradients are not
                averages.
        """
        squares = sum(self._numbers("squared_norm"))
        return torch.tensor(squares, dtype=torch.float64, device="cpu").sqrt().float()

    def finite(self) -> bool:
        """Whether every gradient was finite after the latest backward pass that communicated.

        Raises:
            RuntimeError, DistBackendError: as :meth:`norm`.
        """
        return all(self._numbers("finite"))

    def residual(self, parameter: Tensor) -> Tensor | None:
        """What this rank has not sent yet of a parameter's gradient: a copy in float32.

        It is on the gradient's device. None if no hook of error feedback has seen the parameter.
        Where dreamcomm does not add up the gradients it is what was not sent of the gradient
        divided by the number of ranks.
        """
        return self._residuals.of(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank: ``{"residuals": [float32 tensors]}``.

        They are copies on the gradients' devices, in the order in which the first backward pass
        met their parameters, which is the same whenever the same model is wrapped with the same
        settings.
        """
        return {"residuals": self._residuals.copies()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes residuals that :meth:`state_dict` gave, on this rank and in a like group.

        They may be on another device than the gradients.

        Raises:
            ValueError: they do not fit the parameters. If no backward pass has met those yet,
                the first one raises.
        """
        if not isinstance(state, dict) or not isinstance(state.get("residuals"), list):
            raise ValueError(
                "expected what state_dict() of a dreamcomm.hooks.State gave, a dict with a list "
                f"of 'residuals'; got {type(state).__name__}"
                + (f" with the keys {sorted(map(str, state))}" if isinstance(state, dict) else "")
            )
        self._residuals.load(state["residuals"])

    def _numbers(self, name: str) -> list[float]:
        """What passes over buckets have found, on the host; from a device in one copy."""
        found: list[Any] = [getattr(one, name) for one in self._pass.found()]
        if not isinstance(found[0], Tensor):
            numbers = [float(one or 0.0) for one in found]
        else:
            numbers = torch.stack([one.to(found[0].device) for one in found]).tolist()
        # The device is done with the call by now; what befell its kernel is told by waiting.
        if self._pass.work is not None:
            self._pass.work.wait()
        return numbers

    def _enter(self, bucket: GradBucket) -> None:
        if self._pass.enter(bucket):
            if dist.get_rank(self.group) < 0:
                raise ValueError(
                    "dreamcomm.hooks: this rank is not in the group that State was given; give the "
                    "one that DistributedDataParallel has"
                )
            self._buffers.begin_pass(bucket.buffer().device)

    def _divides(self, gradient: Tensor) -> bool:
        """Whether the group adds in float32 and divides by itself; of all ranks at first."""
        known = self._averages.get(gradient.device)
        if known is None:
            known = self._averages[gradient.device] = averages(gradient, self.group)
        return known

    def _buffer(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Of as many elements, beside the gradient, for the current stream to write to."""
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
    element beside the all_reduce.

    Raises:
        ValueError: the bucket is sparse, or neither on the CPU nor on a CUDA device.
    """
    return _compressed(state, bucket, torch.bfloat16, feedback=False)


def fp16(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in float16, as :func:`bf16`. What exceeds 65504 becomes infinite."""
    return _compressed(state, bucket, torch.float16, feedback=False)


def bf16_feedback(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in bfloat16, with error feedback.

    What rounding takes away on a rank is kept there in float32 and added to its next gradient,
    so that in the sum over the steps nothing is lost, but for a parameter that no rank used in a
    step: DDP drops what was sent of its residuals (Seide et al. 2014, "1-bit stochastic
    gradient descent"; Karimireddy et al. 2019, "Error feedback fixes SignSGD"). Residuals belong
    to parameters and survive that DDP rebuilds its buckets. A checkpoint must hold them: see
    :class:`State`. 20 bytes of memory traffic per float32 element beside the all_reduce.

    Raises:
        ValueError: as :func:`bf16`, or loaded residuals do not fit the model.
    """
    return _compressed(state, bucket, torch.bfloat16, feedback=True)


def fp16_feedback(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in float16, with error feedback as :func:`bf16_feedback`."""
    return _compressed(state, bucket, torch.float16, feedback=True)


def average(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Averages gradients in their own dtype, and finds their norm in the pass that divides.

    Those of 16 bits are divided before they are rounded, so that their sum cannot overflow.

    The bucket is reduced where it lies: without a copy if that is the shared heap, as by default
    without GPUs, or with ``DDP_DISABLE_COMM_MEM=0`` in the environment the group's memory on a GPU.

    Raises:
        ValueError: as :func:`bf16`.
    """
    buffer = _entered(state, bucket)
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

    def receive(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises what the collective raised
        results[number] = unpack(buffer, [buffer], divisor=divisor, inspect=True)
        return buffer

    return _all_reduce(buffer, op, state, receive)


def _compressed(
    state: State, bucket: GradBucket, dtype: torch.dtype, *, feedback: bool
) -> Future[Tensor]:
    gradient = _entered(state, bucket)
    divides = state._divides(gradient)
    scale = 1.0 if divides else 1.0 / dist.get_world_size(state.group)
    residual = state._residuals.row(bucket) if feedback else None
    buffers, buffer = state._buffers, state._buffer(gradient, dtype)
    pack([gradient], buffer, scale=scale, residual=residual)
    results, number, norm = state._pass.results, state._pass.latest, state.norm_wanted

    def receive(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises what the collective raised
        result = unpack(buffer, [gradient], inspect=norm)
        buffers.give_back(buffer)
        if norm:
            results[number] = result
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

    That must not hold the group, not even by way of a State: that thread may drop it last, after
    the backward pass, and Gloo's group cannot be destroyed on a thread of its own.

    On a device it is called while the result is still to come, most often before this returns:
    its current stream, one of torch's, is behind the all_reduce, and whoever waits for the future
    that is returned is behind that stream.
    """
    work = dist.all_reduce(tensor, op, group=state.group, async_op=True)
    assert work is not None  # as it is asynchronous
    if tensor.device.type != "cpu" and not _captures(tensor.device):
        state._pass.work = work
    future: Future[Tensor] = work.get_future().then(receive)
    return future


_DEVICES = ("cpu", "cuda")  # that pack and unpack have kernels for


def _entered(state: State, bucket: GradBucket) -> Tensor:
    """The bucket's gradients, dense and flat."""
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


def _captures(device: torch.device) -> bool:
    """Whether what the current stream is given goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_Kind: TypeAlias = tuple[torch.device, int, torch.dtype]  # of a buffer, with its elements


class _Buffers:
    """Buffers of 16 bits, to be taken again. Those on the CPU are free as soon as unpack returns.

    On a device unpack returns before it has read the buffer, on another stream than the next pack
    is for. So a buffer is given back as a future that torch marks done behind unpack, on its
    stream; and to wait for the future, which stops no host, orders the stream behind unpack that
    is current then: that of the next pack, or that in whose order the memory is let go. Buffers
    are taken again from the next pass on, as within one the gradients of the next bucket would
    wait for the exchange of the last.

    In a graph nothing is kept, as its buffers are its replays', and events do not cross its edge.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[Tensor | Future[Tensor]]] = {}
        self._given_back: list[tuple[_Kind, Future[Tensor]]] = []  # of devices, in this pass
        self._wanted: set[_Kind] = set()

    def begin_pass(self, device: torch.device) -> None:
        """Drops buffers of kinds that the last pass did not want. ``device``: of the gradients."""
        if _captures(device):
            return
        for kind, done in self._given_back:
            self._free.setdefault(kind, []).append(done)
        self._given_back = []
        for kind in self._free.keys() - self._wanted:
            for dropped in self._free.pop(kind):
                _now(dropped)
        self._wanted = set()

    def take(self, kind: _Kind) -> Tensor | None:
        """One that the current stream may write to, or None if there is none."""
        if _captures(kind[0]):
            return None
        self._wanted.add(kind)
        free = self._free.get(kind)
        return _now(free.pop()) if free else None

    def give_back(self, buffer: Tensor) -> None:
        """Any thread, and the stream on which unpack runs."""
        kind = buffer.device, buffer.numel(), buffer.dtype
        if buffer.device.type == "cpu":
            self._free.setdefault(kind, []).append(buffer)
        elif not _captures(buffer.device):
            done: Future[Tensor] = Future(devices=[buffer.device])
            done.set_result(buffer)
            self._given_back.append((kind, done))


def _now(buffer: Tensor | Future[Tensor]) -> Tensor:
    """The buffer, with the current stream behind what still reads it."""
    return buffer if isinstance(buffer, Tensor) else buffer.wait()
