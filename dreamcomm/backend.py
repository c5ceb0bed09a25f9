"""Registers the name "dreamcomm" with torch.distributed and makes its groups.

Every setting of :class:`Options` can be overridden for all groups of a process by an
environment variable, equal on all ranks:

===========================  ==========================================================
``DREAMCOMM_ALGORITHM``      ``auto``, ``direct``, ``one_shot``, ``ring``, ``master``, ``heap``
``DREAMCOMM_FIXED_ORDER``    ``1`` or ``0``
``DREAMCOMM_PAGE_BYTES``     bytes of a staging page
``DREAMCOMM_MESSAGE_BYTES``  bytes of a message buffer
``DREAMCOMM_HEAP_BYTES``     bytes of the heap, ``0`` for none
``DREAMCOMM_COSTS``          ``auto``, ``fixed`` or the path of a file of measured costs
``DREAMCOMM_CUDA``           ``nccl`` or ``dreamcomm``: the carrier of tensors on GPUs
``DREAMCOMM_CUDA_HEAP_BYTES``
                             bytes of each GPU's registered memory, ``0`` for none
``DREAMCOMM_LOG``            ``1`` or ``0``, also on some ranks only; with it
                             ``DREAMCOMM_FLIGHT_RECORD`` is the prefix of the files that
                             failed groups leave, see :mod:`dreamcomm.observe.comm_log`
``DREAMCOMM_HOSTS``          the host of each rank of the job: ``a,a,b,b`` for two of two
``DREAMCOMM_HALVES_BETWEEN_HOSTS``
                             ``float32`` or ``16bit``
``DREAMCOMM_SHARED_MEMORY``  ``1``, or ``0``: everything goes to torch's Gloo or NCCL
===========================  ==========================================================

This module is imported at the end of ``import torch``: it must stay light.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import _DistributedBackendOptions

    from dreamcomm._C import DreamBackend, Options
    from dreamcomm.info import explain, monitored_barrier, stats, transport

__all__ = ["Options", "autoload", "create", "explain", "monitored_barrier", "stats", "transport"]

NAME = "dreamcomm"


def autoload() -> None:
    """Makes the backend known to torch; called at the end of ``import torch``. Never raises."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
            dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
            dist.Backend.backend_capability[NAME] = _Devices()
            from dreamcomm._torch.coalescing import mend_batches
            from dreamcomm._torch.group_timeout import mend_timeout

            mend_batches()
            mend_timeout()
    except Exception:
        logging.getLogger(NAME).warning(
            "the backend %r could not be registered", NAME, exc_info=True
        )


class _Devices(list[str]):
    """The devices of a group that is made by the backend's name alone: those of this machine.

    torch moves tensors of its own (``ShardedTensor.gather``) to the first device that is not the
    CPU, and fails if it finds no GPU. Devices are counted at each use, because a program may hide
    some after ``import torch``, and because counting at import would be slow.
    """

    @staticmethod
    def _there() -> list[str]:
        import torch

        return ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def __contains__(self, device: object) -> bool:
        return device in self._there()

    def __getitem__(self, index: Any) -> Any:
        return self._there()[index]

    def __repr__(self) -> str:
        return repr(self._there())


def create(dist_opts: _DistributedBackendOptions, backend_options: object = None) -> DreamBackend:
    """Makes the backend of one group; torch calls it on every member.

    Args:
        dist_opts: store, rank, size, timeout and name of the group, from torch.
        backend_options: the caller's ``pg_options``, an :class:`Options` or None.

    Raises:
        ImportError: the package was built for another torch, or not at all.
        TypeError: ``backend_options`` are those of another backend.
        ValueError: the value of an option or of an environment variable is invalid.
        DistBackendError: the members' options differ, or one did not join in time.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm import _C
    from dreamcomm._torch.ddp_memory import offer_memory
    from dreamcomm._torch.gloo_nccl import make_inner

    options = _options_for(dist_opts, backend_options)
    apply_environment(options)
    offer_memory()
    return _C.DreamBackend(
        dist_opts.store, dist_opts.group_rank, dist_opts.group_size, options, make_inner
    )


def _options_for(dist_opts: _DistributedBackendOptions, backend_options: object) -> Options:
    from dreamcomm import _C

    if backend_options is not None and not isinstance(backend_options, _C.Options):
        raise TypeError(
            f"rank {dist_opts.group_rank}: expected pg_options to be dreamcomm.Options, "
            f"got {type(backend_options).__name__}"
        )
    options = _C.Options() if backend_options is None else copy.deepcopy(backend_options)
    if options.timeout == _C.Options().timeout:
        options.timeout = dist_opts.timeout
    members = list(dist_opts.global_ranks_in_group)
    options.global_ranks_in_group = members
    untyped: Any = options  # the name's type differs from one torch to another
    untyped.group_name = dist_opts.group_id if members else "default"
    return options


def heap_bytes() -> int:
    """The size of a heap that is made before the first group; 0: none."""
    from dreamcomm import _C

    if not _flag("DREAMCOMM_SHARED_MEMORY", True):
        return 0
    return _size("DREAMCOMM_HEAP_BYTES", _C.Options().heap_bytes, least=0)


# Names of all variables that are read, here and elsewhere, without DREAMCOMM_; for the doctor.
VARIABLES = (
    "ALGORITHM", "COSTS", "CUDA", "CUDA_HEAP_BYTES", "FIXED_ORDER", "FLIGHT_RECORD",
    "HALVES_BETWEEN_HOSTS", "HEAP_BYTES", "HOSTS", "INTERNODE_DTYPE", "LOG", "MESSAGE_BYTES",
    "PAGE_BYTES", "PROTECT_PARAMETERS", "SHARED_MEMORY",
)  # fmt: skip


def apply_environment(options: Options) -> None:
    """Sets options from the environment.

    Raises:
        ValueError: a variable is no flag, or no number of bytes; the text names it.
    """
    options.algorithm = _text("DREAMCOMM_ALGORITHM") or options.algorithm
    options.costs = _text("DREAMCOMM_COSTS") or options.costs
    options.cuda = _text("DREAMCOMM_CUDA") or options.cuda
    options.fixed_order = _flag("DREAMCOMM_FIXED_ORDER", options.fixed_order)
    options.shared_memory = _flag("DREAMCOMM_SHARED_MEMORY", options.shared_memory)
    options.log = _flag("DREAMCOMM_LOG", options.log)
    options.hosts = _text("DREAMCOMM_HOSTS") or options.hosts
    wire = _text("DREAMCOMM_INTERNODE_DTYPE") or _text("DREAMCOMM_HALVES_BETWEEN_HOSTS")
    options.internode_dtype = wire or options.internode_dtype
    options.page_bytes = _size("DREAMCOMM_PAGE_BYTES", options.page_bytes)
    options.message_bytes = _size("DREAMCOMM_MESSAGE_BYTES", options.message_bytes)
    options.cuda_heap_bytes = _size("DREAMCOMM_CUDA_HEAP_BYTES", options.cuda_heap_bytes, least=0)
    options.heap_bytes = _size("DREAMCOMM_HEAP_BYTES", options.heap_bytes, least=0)


def _text(variable: str) -> str | None:
    """The variable's value, or None if it is unset or empty, as in most shell scripts."""
    return os.environ.get(variable) or None


def _flag(variable: str, default: bool) -> bool:
    text = _text(variable)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise ValueError(f"expected the environment variable {variable} to be 0 or 1, got {text!r}")
    return text == "1"


_MOST_BYTES = 2**60  # as dreamcomm.Options


def _size(variable: str, default: int, least: int = 1) -> int:
    text = _text(variable)
    if text is None:
        return default
    if not text.isdecimal() or not least <= int(text) <= _MOST_BYTES:
        raise ValueError(
            f"expected the environment variable {variable} to be a number of bytes from {least} "
            f"to {_MOST_BYTES}, got {text!r}"
        )
    return int(text)


def __getattr__(name: str) -> Any:
    """The public names that need the compiled module, imported at first use."""
    if name == "Options":
        from dreamcomm._torch.build_check import check_build

        check_build()
        from dreamcomm._C import Options

        return Options
    if name in ("explain", "monitored_barrier", "stats", "transport"):
        from dreamcomm import info

        return getattr(info, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
