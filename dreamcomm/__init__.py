"""A communication backend for PyTorch: shared memory, the same bits every time.

``torch.distributed.init_process_group("dreamcomm")`` needs no import of this package.
It adds to torch's own calls:

- :func:`spawn` starts ranks from a script or notebook; :class:`RankError` names the one
  that failed, and :class:`Error` is the base class of our errors,
- :class:`Options` are the backend's options, for ``pg_options``,
- :func:`stats` counts calls and bytes, :func:`explain` says which algorithm runs and why,
- :func:`empty`, :func:`zeros`, :func:`empty_like` and :func:`share_` put tensors and modules
  into memory that the ranks share, where collectives need no copies,
- :class:`Communicator` has collectives and messages for NumPy arrays, and those of any framework,
- :class:`DistributedDataParallel` trains copies of a module on all ranks, with gradients that are
  reduced where they are born; :func:`replicate` does the same in place,
- :class:`DataParallel` runs replicas of a module in threads of one process, or on its GPUs, and
  :func:`model_parallel` parts of one on different devices,
- :class:`ShardSampler` and :func:`seeded` give data to a loop over shards, whose results have the
  same bits at every number of ranks,
- :class:`SyncBatchNorm` and :func:`convert_sync_batchnorm` normalise over the rows of all ranks,
- :class:`GradScaler` scales losses for all ways of training: ranks skip the same steps,
- :mod:`hooks` has communication hooks for DistributedDataParallel (16 bits between the ranks,
  error feedback, the norm of all gradients), :mod:`ops` the two passes under them,
- :mod:`zero`, :mod:`pipeline`, :mod:`server`, :mod:`local_sgd` and :mod:`gossip` are other ways of
  training,
- :func:`monitored_barrier` is a barrier that names the missing ranks,
- :func:`trace` writes a timeline of all ranks, :func:`comm_log` sums up the time of each kind of
  operation, and :func:`dump_flight_record` saves the last operations for torch's own analyser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# torch is imported first: its import ends with a call of the entry point in dreamcomm.backend,
# which must be imported completely by then. If that call imports this package, torch is imported
# only in part, but usable.
import torch  # noqa: F401

from dreamcomm.backend import autoload

if TYPE_CHECKING:
    from dreamcomm import gossip, hooks, local_sgd, ops, pipeline, server, zero
    from dreamcomm.arrays.communicator import Communicator
    from dreamcomm.backend import Options, explain, monitored_barrier, stats, transport
    from dreamcomm.buckets.scaling import GradScaler
    from dreamcomm.ddp.distributed import DistributedDataParallel
    from dreamcomm.ddp.replicate import replicate
    from dreamcomm.invariant.sampler import ShardSampler, seeded
    from dreamcomm.launch import RankError, spawn
    from dreamcomm.memory import empty, empty_like, is_shared, share_, zeros
    from dreamcomm.observe.comm_log import CommLog, comm_log
    from dreamcomm.observe.flight_recorder import dump_flight_record
    from dreamcomm.observe.trace.files import merge_traces
    from dreamcomm.observe.trace.trace import trace
    from dreamcomm.one_process.data_parallel import DataParallel
    from dreamcomm.one_process.model_parallel import model_parallel
    from dreamcomm.ranks.errors import Error
    from dreamcomm.sync_batch_norm.convert import convert_sync_batchnorm, revert_sync_batchnorm
    from dreamcomm.sync_batch_norm.layer import SyncBatchNorm

_MODULES = ("gossip", "hooks", "local_sgd", "ops", "pipeline", "server", "zero")
_HOMES = {
    "arrays.communicator": ("Communicator",),
    "buckets.scaling": ("GradScaler",),
    "ddp.distributed": ("DistributedDataParallel",),
    "ddp.replicate": ("replicate",),
    "invariant.sampler": ("ShardSampler", "seeded"),
    "one_process.data_parallel": ("DataParallel",),
    "one_process.model_parallel": ("model_parallel",),
    "launch": ("RankError", "spawn"),
    "memory": ("empty", "empty_like", "is_shared", "share_", "zeros"),
    "observe.trace.trace": ("trace",),
    "observe.trace.files": ("merge_traces",),
    "observe.comm_log": ("CommLog", "comm_log"),
    "ranks.errors": ("Error",),
    "observe.flight_recorder": ("dump_flight_record",),
    "sync_batch_norm.convert": ("convert_sync_batchnorm", "revert_sync_batchnorm"),
    "sync_batch_norm.layer": ("SyncBatchNorm",),
    "backend": ("Options", "explain", "monitored_barrier", "stats", "transport"),
}
__all__ = [
    "CommLog",
    "Communicator",
    "DataParallel",
    "DistributedDataParallel",
    "Error",
    "GradScaler",
    "Options",
    "RankError",
    "ShardSampler",
    "SyncBatchNorm",
    "comm_log",
    "convert_sync_batchnorm",
    "dump_flight_record",
    "empty",
    "empty_like",
    "explain",
    "gossip",
    "hooks",
    "is_shared",
    "local_sgd",
    "merge_traces",
    "model_parallel",
    "monitored_barrier",
    "ops",
    "pipeline",
    "replicate",
    "revert_sync_batchnorm",
    "seeded",
    "server",
    "share_",
    "spawn",
    "stats",
    "trace",
    "transport",
    "zero",
    "zeros",
]

autoload()  # needed if TORCH_DEVICE_BACKEND_AUTOLOAD=0; otherwise it does nothing


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: `import torch` imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = next(module for module, names in _HOMES.items() if name in names)
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
