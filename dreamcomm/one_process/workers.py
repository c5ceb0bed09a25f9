"""Threads that run the replicas of a module, one each, for as long as the wrapper lives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Generator
from torch._utils import ExceptionWrapper

from dreamcomm._C import ThreadState, end_idle_threads
from dreamcomm.one_process.random_numbers import serving_threads

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
        self._starting = threading.Lock()
        self._idents: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has threads of its own
        return Workers, (self.count, self.cores)

    def run(
        self, where: str, calls: Sequence[Callable[[], T]], generators: Sequence[Generator]
    ) -> list[T]:
        """Runs call i in thread i, in the torch state of this thread, and waits for all.

        Args:
            where: what they do, for errors.
            calls: at most `count`.
            generators: one for each call at least: random CPU numbers come from it.

        Returns:
            The results, in order.

        Raises:
            RuntimeError: this thread is one of them, and would wait for itself.
            BaseException: that of the first call that failed, of its own type, with the replica and
                the traceback in its text. All calls have ended by then.
        """
        pools = self._started()
        state = ThreadState()
        each = max(1, torch.get_num_threads() // self.count)

        def run_one(index: int) -> T | ExceptionWrapper:
            threads = len(self.cores[index]) if self.cores else each
            try:
                return state.call(calls[index], generators[index], threads)
            except BaseException:
                name = f"in replica {index} of {self.count} of DataParallel, {where}"
                return ExceptionWrapper(where=name)  # type: ignore[no-untyped-call]

        running: list[Future[T | ExceptionWrapper]] = []
        end_idle_threads()
        with serving_threads():
            try:
                for index in range(len(calls)):
                    running.append(pools[index].submit(copy_context().run, run_one, index))
                wait(running)
            finally:  # an interrupt: nothing runs on behind the handler's back
                wait(running)
        torch.clear_autocast_cache()
        results: list[T] = []
        for one in running:
            result = one.result()
            if isinstance(result, ExceptionWrapper):
                result.reraise()  # type: ignore[no-untyped-call]
            else:
                results.append(result)
        return results

    def _started(self) -> list[ThreadPoolExecutor]:
        """The threads of this process: those of a process that forked it are not here."""
        with self._starting:
            if self._process != os.getpid():
                self._idents = set()
                self._pools = [self._start(index) for index in range(self.count)]
                self._process = os.getpid()
        if threading.get_ident() in self._idents:
            raise RuntimeError(
                "DataParallel: a replica calls its own wrapper, and would wait for itself"
            )
        return self._pools

    def _start(self, index: int) -> ThreadPoolExecutor:
        cores = self.cores[index] if self.cores else None
        return ThreadPoolExecutor(1, f"dreamcomm-replica-{index}", _begin, (self._idents, cores))


def _begin(idents: set[int], cores: Sequence[int] | None) -> None:
    """Runs first in a thread."""
    idents.add(threading.get_ident())
    if cores:  # threads that its operators start run on them, too
        os.sched_setaffinity(0, cores)
