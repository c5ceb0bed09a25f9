"""One object for all calls between ranks on arrays of any framework."""

from __future__ import annotations

import copy
import secrets
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import DTypeLike, NDArray
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_process_group_store

from dreamcomm._torch.groups import backend_of, given_group
from dreamcomm._torch.timeouts import bounded
from dreamcomm.arrays.calls import Call, Carrier
from dreamcomm.arrays.joining import join
from dreamcomm.arrays.objects import Objects
from dreamcomm.arrays.operations import Kind
from dreamcomm.arrays.views import view_of
from dreamcomm.memory import empty

if TYPE_CHECKING:
    from typing_extensions import Self

    from dreamcomm._C import Options

__all__ = ["Communicator"]


class Communicator(Objects):
    """The ranks of a job, or of a part of it.

    ``Communicator()`` joins the job that a launcher describes in the environment: torchrun,
    :func:`dreamcomm.spawn`, Open MPI, MPICH and Intel MPI, Slurm. Without any there is one rank. If
    torch's default group exists, it is that group, and shares its order of calls.

    Collective calls are in :class:`Collectives`, messages in :class:`Messages`, objects in
    :class:`Objects`. A communicator is for one thread at a time, and a context manager.

    Args:
        timeout: seconds that one call may take, or a timedelta; None is torch's default. Not used
            if the group exists.
        options: of the group; None is the default. Not used if the group exists.

    Raises:
        ValueError: the variables do not describe a job; the text has those that were found. Or
            torch's default group is not of the backend dreamcomm.
        DistBackendError, DistStoreError: a rank did not join in time.
    """

    def __init__(
        self, *, timeout: float | timedelta | None = None, options: Options | None = None
    ) -> None:
        limit = bounded(dist.default_pg_timeout if timeout is None else timeout)
        self._launcher = "a torch group"
        owns = not dist.is_initialized()
        if owns:
            self._launcher = join(limit, options).launcher
        self._use(dist.group.WORLD, owns)

    @classmethod
    def from_group(cls, group: dist.ProcessGroup | None = None) -> Self:
        """The communicator of a torch group: calls of both are in one order, and counted together.

        Args:
            group: of the backend dreamcomm; None is the default group.

        Raises:
            ValueError: it is of another backend, or this rank is not in it.
        """
        made = cls.__new__(cls)
        made._launcher = "a torch group"
        made._use(group, False)
        return made

    def _use(self, group: dist.ProcessGroup | None, owns: bool) -> None:
        group = given_group(group)
        self._group: dist.ProcessGroup | None = group
        self._owns = owns
        super().__init__(Carrier(backend_of(group), group))
        self._store = _get_process_group_store(group)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Makes a communicator of the ranks that give the same color. Collective.

        Args:
            color: any number; None: this rank is in no part, and gets None.
            key: ranks of a part are ordered by it, and by their ranks here where it is equal.

        Raises:
            TypeError: color or key is no integer; on all ranks.
        """
        token = secrets.randbits(48)
        self._require_open()
        mine = self._pickled("split", lambda: _row(color, key, token))
        rows = np.empty((self.size, 4), np.int64)
        sizes = [mine.nbytes] * self.size
        tensors = torch.from_numpy(mine), torch.from_numpy(rows)
        self._move("split", Call(Kind.ALL_GATHER, *tensors, out_sizes=sizes))
        if color is None:
            return None
        members = [
            (int(rows[rank, 2]), rank)
            for rank in range(self.size)
            if rows[rank, 0] and rows[rank, 1] == int(color)
        ]
        ranks = [rank for _, rank in sorted(members)]
        name = f"{rows[ranks[0], 3]:x}"
        store = PrefixStore(f"dreamcomm/split/{name}", self._store)
        backend: Any = self._carrier.backend
        options = copy.copy(backend.options)
        options.group_name = f"split {name}"
        made = Communicator.__new__(Communicator)
        made._launcher, made._group, made._owns = self._launcher, None, True
        made._store = store
        part = Carrier(backend._split(store, ranks, options), None)
        super(Communicator, made).__init__(part, self._pending)
        return made

    def empty(
        self, shape: int | tuple[int, ...] = (), dtype: DTypeLike = np.float64
    ) -> NDArray[Any]:
        """Makes a NumPy array in the memory that the ranks of this host share.

        Collectives work on it without copies in between. Its memory is freed with the last view of
        it. If the heap is full, it is in other memory.

        Args:
            shape, dtype: as of :func:`numpy.empty`.

        Raises:
            TypeError: no collective has elements of such a type.
        """
        self._require_open(False)
        given = view_of(np.empty(0, np.dtype(dtype)), "dtype")
        size = (shape.__index__(),) if hasattr(shape, "__index__") else tuple(shape)
        made: NDArray[Any] = given.like(empty(size, dtype=given.tensor.dtype))
        return made

    def report(self) -> str:
        """Says in words what this rank is a part of, and what it has done."""
        backend = self._carrier.backend
        lines = [
            f"rank {self.rank} of {self.size}, started by {self._launcher}; {backend.transport}"
        ]
        for verb, counts in backend.stats().items():
            if counts.get("calls"):
                told = ", ".join(f"{name} {count:,}" for name, count in counts.items())
                lines.append(f"  {verb}: {told}")
        if self._pending and (count := self._pending.count(self._carrier)):
            lines.append(f"  {count} pending calls")
        if backend.failure:
            lines.append(f"  failed: {backend.failure}")
        return "\n".join(lines)

    def close(self) -> None:
        """Waits for this rank's pending calls, and leaves. Later calls raise ValueError.

        A group that existed before stays, as of :meth:`from_group`.
        """
        if self._closed:
            return
        self._pending.wait(self._carrier)
        self._closed, self._quick = True, None
        if not self._owns:
            return
        if self._group is None:
            shut: Any = self._carrier.backend
            shut.shutdown()
        elif dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}>"


def _row(color: int | None, key: int, token: int) -> NDArray[np.int64]:
    """What a rank tells the others when a communicator is split."""
    for name, value in (("color", 0 if color is None else color), ("key", key)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
        if not -(2**63) <= value.__index__() < 2**63:
            raise ValueError(f"{name}: expected a number of 64 bits, got {value}")
    return np.array([[color is not None, color or 0, key, token]], np.int64)
