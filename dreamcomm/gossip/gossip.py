"""Gossip: ranks average with a few others in every step, without a server."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dreamcomm._torch.groups import given_group
from dreamcomm.averaging.agreement import check_saved
from dreamcomm.averaging.loads import Loads
from dreamcomm.averaging.mean import average_
from dreamcomm.averaging.model import LocalModel
from dreamcomm.averaging.wrapper import WrappedOptimizer
from dreamcomm.gossip.agreement import Asked, common_tag
from dreamcomm.gossip.channel import GossipChannel
from dreamcomm.gossip.messages import Gathering, GossipError
from dreamcomm.gossip.pieces import Pieces
from dreamcomm.gossip.report import GossipReport
from dreamcomm.gossip.rounds import Rounds

__all__ = ["Gossip", "GossipError", "GossipReport"]


class Gossip(WrappedOptimizer):
    """Averages parameters with those of a few other ranks in every step. ::

        model = Model()                       # not wrapped: gradients stay each rank's own
        optimizer = Gossip(model, torch.optim.SGD(model.parameters(), 0.1), topology="ring")

    There is no server, and no call of all ranks (Lian et al. 2017, D-PSGD). After its local step k
    rank i sends its parameters x_i to the ranks that take them, and then

        x_i = sum_j W[i][j] x_j

    in the order of ranks, in float32 (float64 for float64). Rows and columns of W sum to 1, so the
    mean over all ranks is kept. It is an optimizer around the given one: schedulers work on it. The
    state of the given optimizer, such as momentum, stays each rank's own.

    **With a bound b** a round may be applied up to b steps after it was sent, so a pause of one
    rank stops the others only when it is longer than b of their steps (Lian et al. 2018, AD-PSGD).
    Rank i then adds, for the parameters that were sent in step k,

        gamma * sum_j W[i][j] (x_j - x_i),    gamma = min(1, 1 / (m (b + 1)))

    where m, at most 2, depends on W (:attr:`Topology.stretch`). Both ends of an average use the
    same two snapshots, so the mean over ranks is kept once all have applied a round, and gamma
    keeps the delayed iteration stable; the reason is in delays.py.

    - ``seed=None`` applies a round as soon as all its messages are here: the quickest.
    - With a seed the delay of each round is drawn from 0 to b, and a rank waits for its messages,
      so a run has the same bits again. That waits more often, and is for replays and tests.

    Memory beside the model: what has been received and is not applied, and with a bound up to b + 1
    copies of the parameters for this rank's own rounds. Messages are copied for their receivers in
    up to 64 MiB of the heap, and those of a GPU's parameters travel through the host's memory.

    All ranks have to call :meth:`step` equally often. A rank that ends, or is in another call, is
    an error on all ranks.

    Args:
        model: the same on all ranks; they start with rank 0's parameters and buffers.
        optimizer: over its parameters.
        topology: "ring": both neighbours, 1/3 each; "shift_one": pairs that change in each step
            (Bagua); "exponential": the rank at distance 1, 2, 4, ... before, in turn (Assran et al.
            2019); "full": all ranks.
        weights: instead of it, a matrix W with a row and a column for each rank, or a sequence of
            them that are used in turn.
        bound: the largest number of steps b that a round may be late.
        seed: of the delays; None: as they are.
        group: of the ranks; None is the default group.
        buffers: "average": floating buffers, such as the statistics of a batch norm, take part;
            with a bound they become means of the current value and those received, so that a
            variance stays positive. "local": they do not.

    Raises:
        ValueError: the ranks' models or settings differ, a number is out of range, or the weights
            do not sum to 1, are negative or leave ranks apart. All ranks raise if one does.
        TypeError: an argument is of the wrong kind.
    """

    OWN_KEY = "gossip"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        topology: str = "ring",
        weights: Any = None,
        bound: int = 0,
        seed: int | None = 0,
        group: dist.ProcessGroup | None = None,
        buffers: str = "average",
    ) -> None:
        group = given_group(group)
        asked = Asked(model, topology, weights, bound, seed, buffers, group)

        def settings() -> dict[str, Any]:
            self.topology = asked.check()
            return asked.described(self.topology)

        self._model = LocalModel(model, optimizer, group, buffers, "Gossip", settings)
        super().__init__(optimizer)
        parameters = self._model.parameters
        pieces = self._pieces = Pieces(parameters, self._model.buffers())
        device = parameters[0].device
        tag = common_tag(group, device)
        self._channel = GossipChannel(group, tag, self.topology, len(pieces), device)
        self._rounds = Rounds(self._channel, pieces, self.topology, bound, seed)
        self._loads = Loads(model, self._model.averaged.names, parameters)
        self._bound = bound
        self.steps = self._settled = 0  # the latest one after which no round was outstanding

    def _begin(self) -> None:
        """Raises for weights that were loaded while rounds of the weights before are to come.

        A rank that has applied all of its own raises too, so that all are in the same call.
        """
        late = self._bound > 0 and self._settled != self.steps
        if late and (name := self._loads.changed()):
            raise RuntimeError(
                f"Gossip.step: rank {dist.get_rank(self._model.group)}: parameter {name!r} was "
                f"changed by load_state_dict after step {self.steps}, and rounds of the weights "
                "before, which are outstanding, would be added to it; call finish() on all ranks, "
                "and load the weights after that"
            )
        self._model.check("step")

    def _stepped(self) -> None:
        self.steps += 1
        self._loads.forget()
        with self._channel.step(self.steps):
            self._pieces.follow(self._model.buffers())
            self._rounds.step(self.steps)

    # Calls of all ranks.

    @torch.no_grad()
    def finish(self) -> None:
        """Applies all outstanding rounds. Collective. Training may go on.

        Raises:
            GossipError: a rank has ended, or has made another number of steps.
        """
        self._gather(Gathering.FINISH)

    @torch.no_grad()
    def average_now(self) -> None:
        """Applies all outstanding rounds, and averages over all ranks. Collective.

        For evaluation, and at the end of training: then all ranks have the same parameters and
        floating buffers (without ``buffers="local"``).

        Raises:
            GossipError: as of :meth:`finish`.
        """
        self._gather(Gathering.AVERAGE_NOW)
        average_([*self._model.parameters, *self._model.buffers()], self._model.group)

    def report(self) -> GossipReport:
        """What this rank has done so far."""
        channel, rounds = self._channel, self._rounds
        return GossipReport(
            steps=self.steps,
            rounds=rounds.applied,
            outstanding=rounds.outstanding,
            waited=channel.waited,
            delays=dict(sorted(rounds.delays.items())),
            sent_bytes=channel.sent_bytes,
            damping=rounds.damping,
        )

    def _gather(self, call: Gathering) -> None:
        self._model.check(call.name.lower())
        with self._channel.gathered(call):
            self._pieces.follow(self._model.buffers())
            self._rounds.finish()
        self._settled = self.steps

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and the number of steps. Collective, as :meth:`finish`.

        Outstanding rounds are applied first, which changes the parameters: so take the model's
        state afterwards. A rank saves its own model and state, as ranks differ. A run that loads
        them goes on with the bits of the run that has saved them, if there is a seed.

        Raises:
            GossipError: as of :meth:`finish`.
        """
        with torch.no_grad():
            self._gather(Gathering.STATE_DICT)
        return super().state_dict()

    def _own_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave; outstanding rounds are dropped. Collective.

        Raises:
            ValueError: it is another optimizer's.
            GossipError: ranks load states of different steps, or a rank has ended.
        """
        super().load_state_dict(state_dict)

    def _check_own(self, state: dict[str, Any]) -> None:
        check_saved("Gossip", state, ["steps"])

    def _load_own(self, state: dict[str, Any]) -> None:
        with self._channel.gathered(Gathering.LOAD_STATE_DICT, state["steps"]):
            self._rounds.drop()
        self._loads.expect()
        self.steps = self._settled = state["steps"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_complete:
            raise RuntimeError(
                "Gossip.add_param_group: the messages are fixed; make Gossip after the last group"
            )
        super().add_param_group(param_group)
