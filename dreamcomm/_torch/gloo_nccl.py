"""torch's own groups, for calls that shared memory cannot serve, and for data between hosts."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

    from dreamcomm._C import DeadlineStore, Options

__all__ = ["make_inner"]


def make_inner(store: Store, rank: int, size: int, options: Options, device_type: str) -> Backend:
    """Makes torch's own backend, for calls that shared memory cannot serve.

    ``device_type`` is "cpu" (Gloo), "cuda" (NCCL) or "hosts", for data between hosts (Gloo).
    Raises RuntimeError if torch was built without that backend.
    """
    if device_type == "cuda":
        return _make_nccl(store, rank, size, options)
    return _make_gloo(store, rank, size, options, lazy=device_type == "cpu")


_TRIES = 5  # Gloo waits this many times its timeout for a rank to connect


def _make_gloo(store: Store, rank: int, size: int, options: Options, lazy: bool) -> Backend:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from dreamcomm._C import DeadlineStore

    if not dist.is_gloo_available():
        raise RuntimeError(
            f"rank {rank}: this call needs torch's Gloo group, which this torch was built without"
        )
    gloo: Any = dist.ProcessGroupGloo  # the stubs do not know the options class
    settings = gloo._Options()
    # A lazy group connects at first use: two ranks that exchange messages do not wait for others.
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    with _in_batch():
        if names:
            settings._devices = [_make_device(name, rank, lazy) for name in names.split(",")]
        else:
            settings._devices = [gloo.create_default_device(lazy_init=lazy)]
    _copy_settings(settings, options)
    prefixed = PrefixStore("dreamcomm/gloo", store)
    inner: Backend
    if isinstance(store, DeadlineStore):
        settings._timeout = max(store.timeout / _TRIES, timedelta(milliseconds=1))
        inner = _connect(store, lambda: gloo(prefixed, rank, size, settings))
    else:
        inner = gloo(prefixed, rank, size, settings)
    inner._set_default_timeout(options.timeout)
    inner._set_sequence_number_for_group()
    return inner


@contextmanager
def _in_batch() -> Iterator[None]:
    """Starts threads that do not preempt others when they wake (SCHED_BATCH), if the system can.

    A thread of Gloo wakes when another thread of its process has just sent data. Otherwise it would
    preempt that thread, find a connection's lock held by it, and spin until its time slice ends:
    milliseconds, if ranks share processors.
    """
    is_taken = (
        hasattr(os, "SCHED_BATCH")
        and os.sched_getscheduler(0) == os.SCHED_OTHER
        and _is_scheduled(os.SCHED_BATCH)
    )
    try:
        yield
    finally:
        if is_taken:
            _is_scheduled(os.SCHED_OTHER)


def _is_scheduled(policy: int) -> bool:
    """Sets this thread's policy; returns False in sandboxes that know only the usual one."""
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True


def _make_device(name: str, rank: int, lazy: bool) -> Any:
    import torch.distributed as dist

    try:
        gloo: Any = dist.ProcessGroupGloo
        return gloo.create_device(interface=name, lazy_init=lazy)
    except RuntimeError as error:
        there = ", ".join(there for _, there in socket.if_nameindex())
        raise RuntimeError(
            f"rank {rank}: torch's Gloo, which this call needs, has no address at the network "
            f"device {name!r} of GLOO_SOCKET_IFNAME; the devices here are {there}: {error}"
        ) from error


_LOOK = 0.2  # seconds between checks for trouble
_MORE = 0.3  # seconds that Gloo may take beyond its timeout, since its error says more


def _connect(store: DeadlineStore, connect: Callable[[], Backend]) -> Backend:
    """Calls ``connect``, which ignores signals, in a thread, and waits for it.

    Ctrl-C, trouble and the timeout end the wait. The thread then continues as a daemon. It ends
    soon, unless it is connecting to a rank or waits for a store that does not answer.
    """
    done: Future[Backend] = Future()

    def run() -> None:
        try:
            done.set_result(connect())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="dreamcomm connects", daemon=True).start()
    end = time.monotonic() + store.timeout.total_seconds() + _MORE
    try:
        while not wait([done], _LOOK).done:
            if trouble := store.trouble():
                raise RuntimeError(trouble)
            if time.monotonic() > end:
                raise RuntimeError(
                    f"Gloo has not connected within {store.timeout.total_seconds()} s"
                )
        return done.result()
    except BaseException:
        store.leave()
        wait([done], _LOOK)  # usually it ends at once
        raise


def _make_nccl(store: Store, rank: int, size: int, options: Options) -> Backend:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if not dist.is_nccl_available():
        raise RuntimeError(
            f"rank {rank}: dreamcomm hands tensors on cuda to torch's NCCL group, which torch "
            f"{torch.__version__} was built without; move the tensors to cpu or install a torch "
            "with CUDA"
        )
    nccl: Any = dist.ProcessGroupNCCL
    settings = nccl.Options()
    _copy_settings(settings, options)
    inner: Backend = nccl(PrefixStore("dreamcomm/nccl", store), rank, size, settings)
    inner._set_sequence_number_for_group()
    return inner


def _copy_settings(settings: Any, options: Options) -> None:
    timeout: timedelta = options.timeout
    settings._timeout = timeout
    settings.global_ranks_in_group = options.global_ranks_in_group
    settings.group_name = options.group_name
