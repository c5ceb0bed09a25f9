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
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.gossip.arrivals import Arrivals
from dreamcomm.gossip.messages import Gathering, GossipError, Halt, Kind
from dreamcomm.gossip.topology import Topology
from dreamcomm.messages.channel import KeyedChannel, WaitedTooLong, Wanted
from dreamcomm.messages.endpoint import Arriving
from dreamcomm.messages.over import messenger_over
from dreamcomm.ranks.errors import RankLeft, RankLost

__all__ = ["GossipChannel"]


class GossipChannel(KeyedChannel):
    """One rank's end of the messages.

    Args:
        group: of all ranks.
        tag: the first of a unit, equal on all ranks and no other's.
        topology: who sends to whom.
        pieces: of each round.
        device: of the model.

    Attributes:
        waited: seconds in which messages were awaited.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        topology: Topology,
        pieces: int,
        device: torch.device,
    ) -> None:
        super().__init__(messenger_over(group, tag))
        self._group, self._device = group, device
        self._arrivals = Arrivals(topology, self.rank, pieces)
        self.waited = 0.0
        self._failed, self._where, self._step = "", "", 0
        self._awaited: Wanted | None = None
        self._gathering: Halt | None = None
        self._halts: dict[int, Halt] = {}

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
            self.messenger.forget_sent()
            self.messenger.close(sends_end=False)

    @contextmanager
    def gathered(self, call: Gathering, loaded: int = 0) -> Iterator[None]:
        """Around the messages of a call of all ranks, which ends when all are in it. Collective.

        Raises:
            GossipError: ranks are at different steps or in different calls.
        """
        with self._guarded(f"in {call} after step {self._step}"):
            self._gathering = Halt(call, self._step, loaded)
            for peer in self.peers:
                self.messenger.send(peer, (Kind.GATHER, self._step, call, loaded), None)
            for source in self._halts:
                self._check_halt(source)
            for source, (_, step, *_) in self._arrived:
                self._check_ahead(source, step)
            yield
            with self._timed():
                begin = time.monotonic()
                while (wanted := self._not_gathered()) is not None:
                    self.wait_for(wanted, begin)
            self.messenger.close()
            # No rank may end before all have accepted its messages.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
            self._gathering = None
            self._halts.clear()
            if call is Gathering.LOAD_STATE_DICT:
                self._arrived.clear()
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
        except RankLeft as left:
            raise self._failure(left.why) from None
        except RankLost as lost:
            raise self._failure(f"the process of rank {lost.rank} has ended") from None
        except WaitedTooLong as late:
            why = f"it has waited {late.seconds:.1f} s, the group's timeout"
            raise self._failure(why) from None
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
            peer, key = self._awaited
            text += f"; it waits for rank {peer}{self.described(key)}"
        return self._told(text)

    def _told(self, text: str) -> GossipError:
        """The error of a failure, of this rank or another, after it was sent to all peers."""
        self._failed = text
        self.tell_peers(lambda peer: self.messenger.tell(peer, (Kind.FAILED, 0, 0, 0), text))
        with suppress(RuntimeError):  # of a group that has failed
            self.messenger.leave()
        return GossipError(text)

    # Pieces.

    def send(self, peer: int, step: int, piece: int, data: Tensor) -> None:
        """Sends a piece of a round. It must not change before :meth:`drain`."""
        self.messenger.send(peer, (Kind.PIECE, step, piece, 0), data)

    def drain(self) -> None:
        """Waits until the memory of all that was sent may change."""
        with self._timed():
            super().drain()

    def poll(self) -> None:
        """Takes what has arrived.

        The end of a peer is no error here: it may have sent before all that is waited for.
        """
        try:
            while self.take_next(0):
                pass
        except GossipError:
            raise
        except (RankLost, RuntimeError):
            pass

    def is_here(self, step: int) -> bool:
        """Whether all of a round, of which nothing was taken, has arrived from all peers."""
        found = [
            self._arrived.get((peer, (Kind.PIECE, step, piece, 0)))
            for peer, piece in self._arrivals.of(step)
        ]
        return all(one and all(work.is_completed() for work in one.works) for one in found)

    def take(self, step: int, source: int, piece: int) -> Tensor:
        """A piece of a round, when it is here. Each can be taken once."""
        with self._timed():
            return self.receive(source, (Kind.PIECE, step, piece, 0))  # type: ignore[no-any-return]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.waited += time.monotonic() - begin

    # Arrivals.

    def wait_for(self, wanted: Wanted, begin: float) -> None:
        self._awaited = wanted
        super().wait_for(wanted, begin)
        self._awaited = None

    def described(self, key: tuple[int, ...]) -> str:
        kind, step, *_ = key
        return (
            f" and its parameters of step {step}"
            if kind == Kind.PIECE
            else ", which has not called it"
        )

    def _not_gathered(self) -> Wanted | None:
        missing = ((one, (Kind.GATHER, 0, 0, 0)) for one in self.peers if one not in self._halts)
        return next(missing, None)

    def keeps(self, arriving: Arriving) -> bool:
        source, (kind, step, third, fourth) = arriving.source, arriving.key
        if kind == Kind.PIECE:
            return self._keeps_piece(source, step, third)
        if kind == Kind.FAILED:
            raise self._told(str(self.messenger.value(arriving)))
        self._halts[source] = Halt(Gathering(third), step, fourth)
        self._check_halt(source)
        return False

    def _keeps_piece(self, source: int, step: int, piece: int) -> bool:
        if self._gathering is not None and self._gathering.call is Gathering.LOAD_STATE_DICT:
            return False  # from before the state that is loaded
        self._check_ahead(source, step)
        if not self._arrivals.add(source, step, piece):
            raise self._apart(f"rank {source} has sent piece {piece} of step {step}")
        return True

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
