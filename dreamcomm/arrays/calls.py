"""One collective on tensors: through the compiled core, or by torch's methods of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from dreamcomm.arrays.operations import NO_OPERATION, Kind

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend

__all__ = ["Call", "Carrier", "Issued"]

# torch's backends have methods, and options for each.
TORCH_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Call(NamedTuple):
    """A collective. Input and output may be one tensor, for a call in place.

    Attributes:
        in_sizes, out_sizes: bytes of the blocks; (): one block of all.
        copies: how often the input's one block is sent: to all ranks, by an all_to_all.
        digest: of what else has to be equal on all ranks; where the core carries the call.
    """

    kind: Kind
    input: Tensor | None = None
    output: Tensor | None = None
    operation: int = NO_OPERATION
    root: int = 0
    in_sizes: Sequence[int] = ()
    out_sizes: Sequence[int] = ()
    copies: int = 1
    digest: int = 0

    @property
    def some(self) -> Tensor:
        """One of its tensors."""
        found = self.output if self.input is None else self.input
        assert found is not None
        return found


class Issued(NamedTuple):
    """A call that has begun.

    Attributes:
        wait: waits for its end; raises its error.
        is_completed: whether it has ended.
        after: called once after a successful end; None: there is nothing to do.
    """

    wait: Callable[[], object]
    is_completed: Callable[[], bool]
    after: Callable[[], None] | None = None


class Carrier:
    """Issues a group's calls.

    Args:
        backend: dreamcomm's, of the group's CPU tensors.
        group: that has it, with backends for other devices; None: the backend serves them.
    """

    def __init__(self, backend: DreamBackend, group: dist.ProcessGroup | None) -> None:
        from dreamcomm import _C

        self.backend, self.group = backend, group
        self.door = _C.ArrayCalls(backend)
        self._in_core = backend.shares_memory

    def in_core(self, tensor: Tensor) -> bool:
        """Whether the compiled core carries such a tensor, and compares the ranks' calls."""
        return self._in_core and tensor.is_cpu

    def backend_for(self, tensor: Tensor) -> Any:
        """The backend of a tensor's device. Raises RuntimeError if the group has none."""
        if tensor.is_cpu or self.group is None:
            return self.backend
        return self.group._get_backend(tensor.device)

    def issue(self, call: Call, asynchronous: bool) -> Issued:
        """Begins a call; without ``asynchronous`` it has ended then.

        Raises:
            TypeError, ValueError: it cannot be made; nothing was sent.
            DistBackendError: it failed.
        """
        if self.in_core(call.some):
            work: Any = self.door.run_tensors(
                call.kind, call.operation, call.root,
                call.input, call.in_sizes, call.copies, call.output, call.out_sizes, call.digest,
                asynchronous,
            )  # fmt: skip
            return Issued(work.wait, work.is_completed)
        issued = _by_torch(self.backend_for(call.some), call, asynchronous)
        if not asynchronous:
            issued.wait()
            if issued.after is not None:
                issued.after()
        return issued

    def issue_barrier(self, asynchronous: bool) -> Issued:
        """Begins a barrier; without ``asynchronous`` it has ended then."""
        options = dist.BarrierOptions()
        options.asyncOp = asynchronous
        backend: Any = self.backend
        work = backend.barrier(options)
        if not asynchronous:
            work.wait()
        return Issued(work.wait, work.is_completed)


def _by_torch(backend: Any, call: Call, asynchronous: bool) -> Issued:
    """Issues a call by the method that torch has for it, on contiguous tensors."""
    given = None if call.input is None else call.input.contiguous()
    out = call.output
    memory = None if out is None else out.contiguous()
    if given is not None and memory is not None and _meet(given, memory, call.kind):
        given = given.clone()
    work = METHODS[call.kind](backend, call, given, memory, asynchronous)

    def copy_back() -> None:
        assert out is not None
        assert memory is not None
        out.copy_(memory)

    strided = out is not None and memory is not out
    return Issued(work.wait, work.is_completed, copy_back if strided else None)


def _meet(given: Tensor, out: Tensor, kind: Kind) -> bool:
    """Whether contiguous tensors share memory, in another way than torch's method takes."""
    begin, first = given.data_ptr(), out.data_ptr()
    if begin == first and kind in (Kind.BROADCAST, Kind.ALL_REDUCE, Kind.REDUCE):
        return False
    return begin < first + out.nbytes and first < begin + given.nbytes


def _reduced(call: Call, made: Any, asynchronous: bool) -> Any:
    """torch's options of a reduction."""
    made.reduceOp = getattr(dist.ReduceOp, TORCH_OPERATIONS[call.operation])
    made.asyncOp = asynchronous
    return made


def _rooted(call: Call, made: Any, asynchronous: bool) -> Any:
    """torch's options of a call with a root."""
    made.rootRank = call.root
    made.asyncOp = asynchronous
    return made


def _broadcast(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    if given is not None and given.data_ptr() != out.data_ptr():
        out.copy_(given)
    return backend.broadcast([out], _rooted(call, dist.BroadcastOptions(), asynchronous))


def _all_reduce(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    if given.data_ptr() != out.data_ptr():
        out.copy_(given)
    return backend.allreduce([out], _reduced(call, dist.AllreduceOptions(), asynchronous))


def _reduce(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    # Gloo writes intermediate sums on other ranks, too.
    memory = given.clone() if out is None else out
    if out is not None and given.data_ptr() != out.data_ptr():
        out.copy_(given)
    options = _rooted(call, dist.ReduceOptions(), asynchronous)
    return backend.reduce([memory], _reduced(call, options, asynchronous))


def _all_gather(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    options = AllgatherOptions()
    options.asyncOp = asynchronous
    return backend._allgather_base(out.view(-1), given.view(-1), options)


def _gather(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    parts = [] if out is None else [list(out.view(-1).chunk(len(call.out_sizes)))]
    options = _rooted(call, dist.GatherOptions(), asynchronous)
    return backend.gather(parts, [given.view(-1)], options)


def _scatter(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    parts = [] if given is None else [list(given.view(-1).chunk(len(call.in_sizes)))]
    options = _rooted(call, dist.ScatterOptions(), asynchronous)
    return backend.scatter([out.view(-1)], parts, options)


def _reduce_scatter(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    options = _reduced(call, dist.ReduceScatterOptions(), asynchronous)
    return backend._reduce_scatter_base(out.view(-1), given.view(-1), options)


def _all_to_all(backend: Any, call: Call, given: Any, out: Any, asynchronous: bool) -> Any:
    sizes = call.in_sizes if call.copies == 1 else [given.nbytes] * call.copies
    sent = given.view(1, -1).expand(call.copies, -1).contiguous().view(-1)
    options = dist.AllToAllOptions()
    options.asyncOp = asynchronous
    item = given.element_size()
    splits = [[size // item for size in some] for some in (call.out_sizes, sizes)]
    return backend.alltoall_base(out.view(-1), sent, *splits, options)


METHODS: dict[Kind, Callable[[Any, Call, Any, Any, bool], Any]] = {
    Kind.BROADCAST: _broadcast,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.ALL_GATHER: _all_gather,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_TO_ALL: _all_to_all,
}
