"""The messages of gossip: pieces of parameters by their rounds, and calls of all ranks.

INVARIANT (matching): messages of one peer arrive in the order in which it sent them. So the next
piece of a peer is known: any other one means that the ranks have stepped differently.

INVARIANT (no deadlock): a rank sends a piece of a round before it waits for that piece of others,
and never waits for a later one. So what the rank that is furthest behind waits for has been sent.

INVARIANT (one cause): a rank that raises has told all others the first failure that it knows of.
Messages keep their order, so a rank that sees another one leave the group has that word already. If
more headers than the transport holds were before it, it may be lost with its sender.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.gossip.arrivals import Arrivals
from dreamcomm.gossip.messages import Gathering, GossipError, Halt, Kind
from dreamcomm.gossip.topology import Topology
from dreamcomm.gossip.watch import PeerWatch
from dreamcomm.messages.messenger import LOOK_MS, Arriving, Messenger
from dreamcomm.ranks.errors import RankLost

__all__ = ["GossipChannel"]


class GossipChannel:
    """One rank's end of the messages.

    Args:
        group: of all ranks.
        tag: the first of three that it uses, equal on all ranks and no other's.
        topology: who sends to whom.
        pieces: of each round.
        device: of the model.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        topology: Topology,
        pieces: int,
        device: torch.device,
    ) -> None:
        self._messenger = Messenger.over(group, tag)
        self.rank, self._group = self._messenger.rank, group
        backend = self._messenger.backend
        self._watch = None if backend is None else PeerWatch(backend, tag + 2)
        self._device = device
        self._arrivals = Arrivals(topology, self.rank, pieces)
        self.waited = 0.0  # seconds
        self._failed, self._where, self._step = "", "", 0
        self._awaited: tuple[int, int] | None = None  # see _wait()
        self._gathering: Halt | None = None
        self._halts: dict[int, Halt] = {}

    @property
    def sent_bytes(self) -> int:
        return self._messenger.sent_bytes

    @property
    def polls(self) -> bool:
        """Whether a rank can see, without waiting, what has arrived."""
        return self._messenger.backend is not None

    # Calls.

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step's messages.

        Raises:
            GossipError: a rank has ended or failed, or ranks have stepped differently.
        """
        with self._guarded(f"in step {number}"):
            self._step = number
            for source in self._halts:
                self._check_halt(source)
            yield
            self._messenger.forget_sent()
            if self.polls:
                self._messenger.close()

    @contextmanager
    def gathered(self, call: Gathering, loaded: int = 0) -> Iterator[None]:
        """Around the messages of a call of all ranks, which ends when all are in it. Collective.

        Raises:
            GossipError: ranks are at different steps or in different calls.
        """
        with self._guarded(f"in {call} after step {self._step}"):
            self._gathering = Halt(call, self._step, loaded)
            for peer in self._others():
                self._messenger.send(peer, (Kind.GATHER, self._step, call, loaded), None)
            for source in self._halts:
                self._check_halt(source)
            for step, source in self._arrivals:
                self._check_ahead(source, step)
            yield
            self._wait(self._not_gathered)
            self._messenger.close()
            # No rank may end before all have accepted its messages.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            self._gathering = None
            self._halts.clear()
            if call is Gathering.LOAD_STATE_DICT:
                for one in self._arrivals.left():
                    self._let_go(one)
                self._step = loaded
                self._arrivals.restart(loaded)

    @contextmanager
    def _guarded(self, where: str) -> Iterator[None]:
        """Around a call. Its error is reported to all peers, and ends all later calls."""
        if self._failed:
            raise GossipError(f"{self._failed}; make a new Gossip")
        self._where = where
        try:
            yield
        except RankLost as lost:
            raise self._failure(f"the process of rank {lost.rank} has ended") from None
        except GossipError:
            raise
        except BaseException as error:
            failure = self._failure(f"{type(error).__name__}: {error}")
            if isinstance(error, RuntimeError):
                raise failure from error
            raise

    def _failure(self, why: str) -> GossipError:
        """The error to raise, after it was sent to all peers."""
        text = f"Gossip: rank {self.rank}, {self._where}: {why}"
        if self._awaited is not None:
            peer, step = self._awaited
            text += f"; it waits for rank {peer}"
            text += f" and its parameters of step {step}" if step else ", which has not called it"
        return self._told(text)

    def _told(self, text: str) -> GossipError:
        """The error of a failure, of this rank or another, after it was sent to all peers."""
        self._failed = text
        for peer in self._others():
            with suppress(RuntimeError, RankLost):  # a peer that has left hears nothing
                self._messenger.tell(peer, (Kind.FAILED, 0, 0, 0), text)
        with suppress(RuntimeError, RankLost):
            self._messenger.close(sends_end=False)
        return GossipError(text)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._messenger.size) if peer != self.rank]

    # Pieces.

    def send(self, peer: int, step: int, piece: int, data: Tensor) -> None:
        """Sends a piece of a round. It must not change before :meth:`drain`."""
        self._messenger.send(peer, (Kind.PIECE, step, piece, 0), data)

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change."""
        begin = time.monotonic()
        self._messenger.drain()
        self.waited += time.monotonic() - begin

    def poll(self) -> None:
        """Accepts what has arrived, where that can be seen.

        The end of a peer is no error here: it may have sent before all that is waited for.
        """
        try:
            while self._accept(0):
                pass
        except GossipError:
            raise
        except (RankLost, RuntimeError):
            pass

    def is_here(self, step: int) -> bool:
        """Whether all of a round has arrived, from all peers."""
        found = self._arrivals.of(step)
        if found is None:
            return False
        return not self.polls or all(work.is_completed() for one in found for work in one.works)

    def take(self, step: int, source: int, piece: int) -> Tensor:
        """A piece of a round, when it is here. Each can be taken once."""
        self._wait(lambda: self._arrivals.missing(step, source, piece))
        begin = time.monotonic()
        data: Tensor = self._messenger.value(self._arrivals.take(step, source, piece))
        self.waited += time.monotonic() - begin
        return data

    def settle(self, step: int) -> None:
        """Where arrivals cannot be seen: waits for all rounds up to this one, and for its sends.

        All ranks call it in the same steps. Else what Gloo has sent would be kept for ever.
        """
        self._wait(lambda: self._arrivals.missing_until(step))
        self._messenger.close()

    # Arrivals.

    def _wait(self, missing: Callable[[], tuple[int, int] | None]) -> None:
        """Accepts messages until none is missing.

        Args:
            missing: a peer, and the round that it has to send; 0: it has to gather.
        """
        begin = time.monotonic()
        while (awaited := missing()) is not None:
            self._awaited = awaited
            if not self._accept(LOOK_MS):
                self._check_waited(begin)
        self._awaited = None
        self.waited += time.monotonic() - begin

    def _not_gathered(self) -> tuple[int, int] | None:
        return next(((peer, 0) for peer in self._others() if peer not in self._halts), None)

    def _check_waited(self, begin: float) -> None:
        """Raises if the awaited peer has left the group, or the group's timeout is over."""
        backend = self._messenger.backend
        assert backend is not None  # Gloo notices both itself
        assert self._awaited is not None
        assert self._watch is not None
        departure = self._watch.departure(self._awaited[0])
        if departure and not self._accept(0):  # what it has sent before would be here
            raise self._failure(departure)
        waited = time.monotonic() - begin
        if waited > backend.options.timeout.total_seconds():
            raise self._failure(f"it has waited {waited:.1f} s, the group's timeout")

    def _accept(self, milliseconds: int) -> bool:
        """Takes the next message, if its header is here within this time."""
        arriving = self._messenger.accept(milliseconds)
        if arriving is None:
            return False
        source, (kind, step, third, fourth) = arriving.source, arriving.key
        if kind == Kind.PIECE:
            self._accept_piece(arriving, step, third)
        elif kind == Kind.GATHER:
            self._halts[source] = Halt(Gathering(third), step, fourth)
            self._check_halt(source)
        else:
            raise self._told(str(self._messenger.value(arriving)))
        return True

    def _accept_piece(self, arriving: Arriving, step: int, piece: int) -> None:
        source = arriving.source
        if self._gathering is not None and self._gathering.call is Gathering.LOAD_STATE_DICT:
            self._let_go(arriving)  # from before the state that is loaded
            return
        self._check_ahead(source, step)
        if not self._arrivals.add(arriving, step, piece):
            raise self._apart(f"rank {source} has sent piece {piece} of step {step}")

    def _let_go(self, arriving: Arriving) -> None:
        """Drops a message. Gloo receives nothing more after a receive that is dropped undone."""
        if not self.polls:
            self._messenger.value(arriving)

    def _check_ahead(self, source: int, step: int) -> None:
        """Raises if a peer steps while this rank waits for it in a call of all ranks."""
        mine = self._gathering
        loads = mine is not None and mine.call is Gathering.LOAD_STATE_DICT
        if mine is not None and not loads and step > mine.step:
            raise self._apart(f"rank {source} is in step {step}")

    def _check_halt(self, source: int) -> None:
        """Raises if a peer waits for this rank where this one will not be."""
        theirs, mine = self._halts[source], self._gathering
        if mine is None:
            fits = theirs.step >= self._step  # this rank may get there
        elif mine.call is Gathering.LOAD_STATE_DICT and mine.call is theirs.call:
            if theirs.loaded != mine.loaded:
                raise self._failure(
                    f"it loads a state of {mine.loaded} steps, and rank {source} one of "
                    f"{theirs.loaded}"
                )
            return
        else:
            fits = (theirs.call, theirs.step) == (mine.call, mine.step)
        if not fits:
            raise self._apart(f"rank {source} is in {theirs.call} after step {theirs.step}")

    def _apart(self, why: str) -> GossipError:
        return self._failure(
            f"{why}; all ranks have to call step() equally often, and finish(), average_now(), "
            "state_dict() and load_state_dict() after the same step"
        )
