"""Threads that run the replicas of a module, one each, for as long as the wrapper lives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Generator
from torch._utils import ExceptionWrapper

from dreamcomm._C import ThreadState, end_idle_threads

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """Threads 0 to `count` - 1, which start at their first use.

    Each runs its calls one after another, with its share of torch's threads, or with as many as it
    has cores.

    Args:
        count: how many.
        cores: those of each thread; None leaves the choice to the operating system.
    """

    def __init__(self, count: int, cores: Sequence[Sequence[int]] | None) -> None:
        self.count, self.cores = count, cores
        self._pools: list[ThreadPoolExecutor] = []
        self._process = 0

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has threads of its own
        return Workers, (self.count, self.cores)

    def run(
        self,
        where: str,
        calls: Sequence[Callable[[], T]],
        generators: Sequence[Generator],
    ) -> list[T]:
        """Runs call i in thread i, in the torch state of this thread, and waits for all.

        Args:
            where: what they do, for errors.
            calls: at most `count`.
            generators: one for each call at least: random CPU numbers come from it.

        Returns:
            The results, in order.

        Raises:
            Exception: that of the first call that failed, of its own type, with the replica and the
                traceback in its text.
        """
        state = ThreadState()
        each = max(1, torch.get_num_threads() // self.count)

        def run_one(index: int) -> T | ExceptionWrapper:
            threads = len(self.cores[index]) if self.cores else each
            try:
                return state.call(calls[index], generators[index], threads)
            except Exception:
                name = f"in replica {index} of {self.count} of DataParallel, {where}"
                return ExceptionWrapper(where=name)  # type: ignore[no-untyped-call]

        pools = self._started()
        end_idle_threads()
        running: list[Future[T | ExceptionWrapper]] = [
            pools[index].submit(run_one, index) for index in range(len(calls))
        ]
        results: list[T] = []
        failure: ExceptionWrapper | None = None
        for one in running:
            result = one.result()
            if isinstance(result, ExceptionWrapper):
                failure = failure or result
            else:
                results.append(result)
        if failure is not None:
            failure.reraise()  # type: ignore[no-untyped-call]
        return results

    def _started(self) -> list[ThreadPoolExecutor]:
        """The threads of this process: those of a process that forked it are not here."""
        if self._process != os.getpid():
            self._pools = [self._start(index) for index in range(self.count)]
            self._process = os.getpid()
        return self._pools

    def _start(self, index: int) -> ThreadPoolExecutor:
        name = f"dreamcomm-replica-{index}"
        if self.cores is None:
            return ThreadPoolExecutor(1, name)
        # Threads that an operator starts run on the cores of the thread that starts them.
        return ThreadPoolExecutor(1, name, os.sched_setaffinity, (0, self.cores[index]))
