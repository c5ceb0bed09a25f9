"""Objects that can be pickled, between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dreamcomm.arrays.calls import Call
from dreamcomm.arrays.collectives import Collectives
from dreamcomm.arrays.messages import Messages, checked_tag
from dreamcomm.arrays.operations import Kind
from dreamcomm.arrays.pickles import BLOCK, Pickled, Reader, pickled
from dreamcomm.arrays.views import pieces
from dreamcomm.ranks.tags import OBJECTS, UNIT, USERS

__all__ = ["Objects"]

T = TypeVar("T")
OF_COLLECTIVES = OBJECTS.first + UNIT * USERS  # the tag of what follows their blocks


class Objects(Collectives, Messages):
    """Sends and collectives of objects, by pickle.

    Large arrays inside an object go from and to memory without a copy into the pickle (protocol 5,
    PEP 574). A pickle runs code that its sender chooses: ranks trust each other, see SECURITY.md.

    Each raises:
        what pickle raises: the object cannot be pickled. Collectives then fail on all ranks.
        DistBackendError: as of :class:`Collectives` and :class:`Messages`.
    """

    def send_object(self, thing: object, dst: int, tag: int = 0) -> None:
        """Sends an object to rank ``dst``. Returns when it may be changed.

        Tags of objects are apart from those of arrays.
        """
        self._require_open(False)
        peer, first = self._other("dst", dst), _first_tag(tag)
        sent = pickled(thing)
        self._send([(sent.block, first), *((one, first + 1) for one in sent.rest)], peer)

    def recv_object(self, src: int | None = None, tag: int = 0) -> Any:
        """Receives an object from rank ``src``; None: from any rank."""
        self._require_open(False)
        first = _first_tag(tag)
        peer = None if src is None else self._other("src", src)
        block = _memory(BLOCK)
        backend: Any = self._carrier.backend
        if peer is None:
            work = backend.recv_anysource([block], first)
            work.wait()
            peer = work._source_rank()
        else:
            backend.recv([block], peer, first).wait()
        return self._received(Reader(block), peer, first + 1)

    def broadcast_object(self, thing: T | None, src: int = 0) -> T:
        """Gives the object of rank ``src`` to all ranks; other ranks may pass None.

        Rank ``src`` gets its own object back.
        """
        root = self._root("broadcast_object", "src", src)
        if self.rank == root:
            sent = self._pickled("broadcast_object", lambda: pickled(thing))
            self._broadcast(sent.block, root)
            for one in sent.rest:
                self._broadcast(one, root)
            return cast(T, thing)
        reader = Reader(self._broadcast(_memory(BLOCK), root))
        if reader.directory is not None:
            self._broadcast(reader.directory, root)
        for one in reader.open():
            self._broadcast(one, root)
        value: T = reader.value()
        return value

    def all_gather_object(self, thing: T) -> list[T]:
        """Gives the objects of all ranks to every rank, in the order of the ranks."""
        self._require_open()
        sent = self._pickled("all_gather_object", lambda: pickled(thing))
        blocks = _memory(BLOCK * self.size)
        sizes = [BLOCK] * self.size
        self._move("all_gather_object", Call(Kind.ALL_GATHER, sent.block, blocks, out_sizes=sizes))
        readers = [Reader(one) for one in pieces(blocks, [BLOCK] * self.size)]
        sizes = [one.follows for one in readers]
        own = torch.cat(sent.rest) if sent.rest else _memory(0)
        rest = _memory(sum(sizes))
        if sum(sizes):
            self._move(
                "all_gather_object",
                Call(Kind.ALL_TO_ALL, own, rest, out_sizes=sizes, copies=self.size),
            )
        for reader, part in zip(readers, pieces(rest, sizes), strict=True):
            reader.take(part)
        return [one.value() for one in readers]

    def gather_object(self, thing: T, dst: int = 0) -> list[T] | None:
        """Gives the objects of all ranks to rank ``dst``; the others get None."""
        root = self._root("gather_object", "dst", dst)
        sent = self._pickled("gather_object", lambda: pickled(thing))
        tag = OF_COLLECTIVES
        if self.rank != root:
            self._move("gather_object", Call(Kind.GATHER, sent.block, root=root))
            self._send([(one, tag) for one in sent.rest], root)
            return None
        blocks = _memory(BLOCK * self.size)
        sizes = [BLOCK] * self.size
        self._move(
            "gather_object", Call(Kind.GATHER, sent.block, blocks, root=root, out_sizes=sizes)
        )
        readers = [Reader(one) for one in pieces(blocks, [BLOCK] * self.size)]
        for rank, reader in enumerate(readers):  # all is received before an object may raise
            if rank != root:
                self._fill(reader, rank, tag)
        readers[root] = _filled(sent)
        return [one.value() for one in readers]

    def scatter_object(self, things: Sequence[T] | None, src: int = 0) -> T:
        """Gives each rank its own of the objects of rank ``src``.

        Args:
            things: on ``src`` one for each rank; other ranks may pass None.
            src: the rank that sends.
        """
        root = self._root("scatter_object", "src", src)
        tag = OF_COLLECTIVES
        if self.rank != root:
            block = _memory(BLOCK)
            self._move("scatter_object", Call(Kind.SCATTER, None, block, root=root))
            value: T = self._received(Reader(block), root, tag)
            return value
        sent = self._pickled("scatter_object", lambda: self._pickled_each(things))
        blocks = torch.cat([one.block for one in sent])
        sizes = [BLOCK] * self.size
        self._move(
            "scatter_object", Call(Kind.SCATTER, blocks, _memory(BLOCK), root=root, in_sizes=sizes)
        )
        for rank, one in enumerate(sent):
            if rank != root:
                self._send([(part, tag) for part in one.rest], rank)
        own: T = _filled(sent[root]).value()
        return own

    def _pickled_each(self, things: Sequence[object] | None) -> list[Pickled]:
        count = None if things is None else len(things)
        if things is None or count != self.size:
            raise ValueError(f"things: expected {self.size}, one for each rank, got {count}")
        return [pickled(one) for one in things]

    def _pickled(self, verb: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returns; its error is told to all ranks."""
        try:
            return make()
        except Exception as error:
            self._refuse(verb, error)

    def _root(self, verb: str, name: str, rank: int) -> int:
        self._require_open()
        found: int = self._pickled(verb, lambda: self._peer(name, rank))
        return found

    def _move(self, verb: str, call: Call) -> None:
        """Makes a call that meets the same verb alone."""
        self._carrier.issue(call._replace(digest=zlib.crc32(verb.encode())), False)

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        given = tensor if self.rank == root else None
        self._move("broadcast_object", Call(Kind.BROADCAST, given, tensor, root=root))
        return tensor

    def _send(self, parts: Sequence[tuple[Tensor, int]], peer: int) -> None:
        backend: Any = self._carrier.backend
        for work in [backend.send([tensor], peer, tag) for tensor, tag in parts]:
            work.wait()

    def _received(self, reader: Reader, peer: int, tag: int) -> Any:
        """The object whose block is here; receives the rest."""
        self._fill(reader, peer, tag)
        return reader.value()

    def _fill(self, reader: Reader, peer: int, tag: int) -> None:
        backend: Any = self._carrier.backend
        if reader.directory is not None:
            backend.recv([reader.directory], peer, tag).wait()
        for work in [backend.recv([one], peer, tag) for one in reader.open()]:
            work.wait()


def _filled(sent: Pickled) -> Reader:
    """What another rank would get."""
    reader = Reader(sent.block)
    reader.take(torch.cat(sent.rest) if sent.rest else _memory(0))
    return reader


def _first_tag(tag: int) -> int:
    return OBJECTS.first + UNIT * checked_tag(tag)


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")
