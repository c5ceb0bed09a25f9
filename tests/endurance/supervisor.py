"""Episode after episode: processes are started, disturbed, judged and led on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from endurance.draw import draw_episode, draw_order, draw_size
from endurance.judge import Heard, judge
from endurance.leftovers import left_by
from endurance.orders import (
    FROM_OUTSIDE,
    RESTARTED,
    SMALLER,
    Episode,
    Exposed,
    Order,
    Told,
)
from endurance.report import Figures
from endurance.team import Member, Starter, hear_all
from helpers.census import shared_memory_files

# Seconds after which an episode, or its end after a fault, counts as hung.
BOUND = 90.0
FEWEST = 2  # ranks in a group that goes on


# After so many problems there is nothing more to learn.
MOST_PROBLEMS = 10


class Supervisor:
    """Runs a soak. What it finds is in `figures`."""

    def __init__(
        self, seed: int, folder: Path, figures: Figures, spanning: float = 0.0, slack: float = 0.0
    ) -> None:
        self.seed = seed
        self.spanning = spanning  # of the episodes, so many are on several hosts
        self.slack = slack  # seconds, as the judge has it
        self.folder = folder
        self.figures = figures
        self.starter = Starter(folder)
        self.team: list[Member] = []
        self.number = 0
        self.files = shared_memory_files()

    def run(self, seconds: float, show: Callable[[], None] = lambda: None) -> None:
        """Episodes until the time is over, or too much is wrong."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and len(self.figures.problems) < MOST_PROBLEMS:
                self.play()
                show()
        finally:
            self.disband(self.team)

    def play(self) -> None:
        episode = draw_episode(self.seed, self.number, len(self.team) or None, self.spanning)
        while len(self.team) < episode.world:
            self.team.append(self.starter.start())
        self.figures.begun_anew += sum(member.has_lost for member in self.team)
        store = str(self.folder / f"store-{self.number}")
        for rank, member in enumerate(self.team):
            member.order(Order(episode, rank, store))
        heard = self.watch(episode)
        Path(store).unlink(missing_ok=True)
        self.figures.add(episode, heard, judge(episode, heard, self.slack))
        self.lead_on(episode)
        self.number += 1

    def watch(self, episode: Episode) -> Heard:
        """Listens to the ranks, and makes the fault if it is one from outside."""
        heard = Heard()
        late = not hear_all(self.team, time.monotonic() + BOUND, (Told, Exposed))
        if not late and episode.fault.kind in FROM_OUTSIDE:
            hear_all(self.team, time.monotonic() + episode.fault.delay, (Told,))
            heard.struck = self.strike(episode)
        if late or not hear_all(self.team, time.monotonic() + BOUND, (Told,)):
            heard.hung = self.stacks()
        for rank, member in enumerate(self.team):
            member.give_account(rank, heard)
        return heard

    def strike(self, episode: Episode) -> float:
        """Returns when it was made."""
        victims = [self.team[rank] for rank in episode.fault.victims]
        struck = time.monotonic()
        if episode.fault.is_fatal:
            for victim in victims:
                victim.signal(signal.SIGKILL)
            return struck
        for victim in victims:
            victim.signal(signal.SIGSTOP)
        try:
            others = [member for member in self.team if member not in victims]
            hear_all(others + victims, struck + episode.fault.pause, (Told,))
        finally:
            for victim in victims:
                victim.signal(signal.SIGCONT)
        return struck

    def stacks(self) -> str:
        """The stacks of the ranks that reported nothing, which end by this."""
        parts = []
        for rank, member in enumerate(self.team):
            if member.last(Told) is None and not member.gone:
                parts.append(f"--- rank {rank}, process {member.pid} ---\n{member.stacks()}")
        return "\n".join(parts)

    def lead_on(self, episode: Episode) -> None:
        """The team of the next episode."""
        dead = [member for member in self.team if member.gone]
        left = [member for member in self.team if not member.gone]
        for member in left:
            member.has_lost = episode.fault.is_fatal
        if episode.then == RESTARTED or len(left) < FEWEST:
            self.disband(self.team)
            return
        self.bury(dead)
        if episode.then != SMALLER:
            size = draw_size(self.seed, self.number, len(left))
            while len(left) < size:
                left.append(self.starter.start())
        order = draw_order(self.seed, self.number, len(left))
        self.team = [left[place] for place in order]

    def disband(self, team: Sequence[Member]) -> None:
        """Ends all processes, which have to do so by themselves and in order."""
        alive = [member for member in team if not member.gone]
        for member in alive:
            code = member.finish()
            if code != 0:
                text = f"a process that was to end has exit status {code}:\n{member.output()}"
                self.figures.problems.append(text)
        self.bury(team)
        self.team = []

    def bury(self, ended: Sequence[Member]) -> None:
        for member in ended:
            member.connection.close()
            member.process.join()
        pids = [member.pid for member in ended]
        for member in ended:
            self.figures.note_life(member.private)
        self.figures.leaks += left_by(pids, os.getpid(), self.files)
        for member in ended:
            member.process.close()
