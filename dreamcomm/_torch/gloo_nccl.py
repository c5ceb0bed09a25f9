"""torch's own groups: for what shared memory cannot serve, and for what goes between hosts."""

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

    from dreamcomm._C import Options, PatientStore

__all__ = ["make_inner"]


def make_inner(store: Store, rank: int, size: int, options: Options, device_type: str) -> Backend:
    """Makes torch's own backend, for what shared memory cannot serve.

    ``device_type`` is "cpu" (Gloo), "cuda" (NCCL) or "hosts", for what goes between hosts (Gloo).
    Raises RuntimeError if torch has none.
    """
    if device_type == "cuda":
        return _make_nccl(store, rank, size, options)
    return _make_gloo(store, rank, size, options, lazy=device_type == "cpu")


_TRIES = 5  # for so many times its timeout Gloo waits for a rank to connect


def _make_gloo(store: Store, rank: int, size: int, options: Options, lazy: bool) -> Backend:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from dreamcomm._C import PatientStore

    if not dist.is_gloo_available():
        raise RuntimeError(
            f"rank {rank}: this call needs torch's Gloo group, which this torch was built without"
        )
    gloo: Any = dist.ProcessGroupGloo  # the stubs do not know the options class
    settings = gloo._Options()
    # Lazy is connected at first use: two ranks that exchange messages do not wait for the others.
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    with _in_batch():
        if names:
            settings._devices = [_make_device(name, rank, lazy) for name in names.split(",")]
        else:
            settings._devices = [gloo.create_default_device(lazy_init=lazy)]
    _copy_settings(settings, options)
    prefixed = PrefixStore("dreamcomm/gloo", store)
    inner: Backend
    if isinstance(store, PatientStore):
        settings._timeout = max(store.timeout / _TRIES, timedelta(milliseconds=1))
        inner = _connect(store, lambda: gloo(prefixed, rank, size, settings))
    else:
        inner = gloo(prefixed, rank, size, settings)
    inner._set_default_timeout(options.timeout)
    inner._set_sequence_number_for_group()
    return inner


@contextmanager
def _in_batch() -> Iterator[None]:
    """Threads begun here wait until who runs on a processor leaves it, where the system has that.

    A thread of Gloo that is woken by what another one of its process has just sent would take the
    processor from it, find a connection's lock held by it, and look again and again until its time
    is up: milliseconds, where ranks share processors.
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
    """Whether this thread is, from now on: some sandboxes know no other policy than the usual."""
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


_LOOK = 0.2  # seconds between looks for trouble
_MORE = 0.3  # seconds that Gloo may take beyond its time: it says more of why it has failed


def _connect(store: PatientStore, connect: Callable[[], Backend]) -> Backend:
    """Calls `connect`, which hears no signals; Ctrl-C, trouble and its time end the wait for it.

    It goes on then in a thread that no process waits for: not for long, unless it is in the midst
    of reaching a rank, or in a store that does not answer.
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
        wait([done], _LOOK)  # mostly it ends at once
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
