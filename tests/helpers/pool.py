"""Rank processes, kept for many tests or made for one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.calls import Group
from helpers.nursery import Nursery
from helpers.processes import RankProcess, RanksFailed, ask_all, replies, values


class Pool:
    """Runs functions in the first `world` of its processes, each in a new process group."""

    def __init__(self, backend: str, folder: Path, nursery: Nursery) -> None:
        self.backend = backend
        self.folder = folder
        self.nursery = nursery
        self._ranks: list[RankProcess] = []
        self._numbers = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        timeout: float = 60.0,
        group_timeout: float = 30.0,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Returns what `function` returned in ranks 0 to world - 1.

        Raises RanksFailed if one raised, died or did not return within `timeout` seconds.
        """
        ranks = self._first(world)
        store = self.folder / f"store-{next(self._numbers)}"
        group = Group(self.backend, world, str(store), group_timeout, options)
        ask_all(ranks, function, args, kwargs, group, env)
        try:
            return values(replies(ranks, timeout))
        except RanksFailed:
            self.close()  # the next test gets new processes
            raise
        finally:
            store.unlink(missing_ok=True)

    def _first(self, world: int) -> list[RankProcess]:
        while len(self._ranks) < world:
            log = self.folder / f"pool-{next(self._numbers)}.log"
            self._ranks.append(RankProcess(self.nursery, log))
        return self._ranks[:world]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()


class Fresh:
    """Processes of one test, for tests that kill or end them."""

    def __init__(self, backend: str, folder: Path, nursery: Nursery) -> None:
        self.backend = backend
        self.folder = folder
        self.nursery = nursery
        self.ranks: list[RankProcess] = []
        self._numbers = itertools.count()

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        group: bool = True,
        group_timeout: float = 30.0,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[RankProcess]:
        """Starts `function` in `world` new processes.

        With `group` inside of a process group; else its first argument is the rank.
        """
        number = next(self._numbers)
        logs = [self.folder / f"fresh-{number}-{r}.log" for r in range(world)]
        ranks = [RankProcess(self.nursery, log) for log in logs]
        self.ranks += ranks
        store = str(self.folder / f"fresh-store-{number}")
        described = Group(self.backend, world, store, group_timeout, options)
        ask_all(ranks, function, args, kwargs, described if group else None, env)
        return ranks

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """As Pool.run."""
        return values(replies(self.start(function, *args, **kwargs), timeout))

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
